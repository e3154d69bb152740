"""Fixtures of the laws of lowering."""

from __future__ import annotations

import dataclasses

import pytest

from meshdsl import targets


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices get what TPUs get: kernels of every size leave out dims of local size 1, as large ones do there."""
    monkeypatch.setattr("meshdsl.targets.tpu.emission.WIDE", 0)
    emission = dataclasses.replace(targets.TPU.emission, late_stacks=0, ragged=False)
    monkeypatch.setattr(
        targets, "TARGETS", (targets.TPU, targets.GPU, dataclasses.replace(targets.CPU, emission=emission))
    )
