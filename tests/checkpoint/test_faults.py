"""Damage is never silent; `python -m tests.checkpoint.fuzz` does many more of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> faults.Bench:
    return faults.Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", faults.FAULTS)
def test_damage_is_detected(bench: faults.Bench, name: str):
    results = faults.many(bench, name, 12, seed=0)
    assert results["detected"] == 12 or name in ("swap_chunks", "zero"), results


def test_an_untouched_copy_is_sound(bench: faults.Bench, tmp_path: Path):
    bench.fresh()
    assert bench.check("nothing") == "harmless"
