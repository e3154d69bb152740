"""Fixtures of the tests of targets."""

from __future__ import annotations

import dataclasses

import pytest

from meshdsl import targets


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on a TPU is that of the program as it is, without the passes of its target."""
    tpu = dataclasses.replace(targets.TPU, passes=())
    monkeypatch.setattr(targets, "TARGETS", (tpu, targets.GPU, targets.CPU))
