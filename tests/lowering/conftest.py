"""Fixtures of the lowering's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of every size leave out dims of local size 1, as large ones do."""
    monkeypatch.setattr("meshdsl.lowering.emit.WIDE", 0)
