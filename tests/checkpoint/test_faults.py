"""Damage is never silent; `python -m tests.checkpoint.fuzz` does many more of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.train.checkpoint.read import open_step

from . import faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> faults.Bench:
    return faults.Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", faults.FAULTS)
def test_restore_detects_damage(bench: faults.Bench, name: str):
    results = faults.many(bench, name, 12, seed=0)
    assert results["detected"] == 12 or name in ("swap_chunks", "zero"), results


def test_restore_of_an_untouched_copy(bench: faults.Bench, tmp_path: Path):
    bench.fresh()
    assert bench.check("nothing") == "harmless"


def test_manifest_detects_every_changed_bit(bench: faults.Bench):
    """The manifest's own hash covers the manifest: one flipped bit in any of its bytes is found."""
    bench.fresh()
    file = bench.step / "manifest.json"
    honest = file.read_bytes()
    with open(file, "r+b", buffering=0) as raw:
        for n in range(0, len(honest), 3):
            raw.seek(n)
            raw.write(bytes([honest[n] ^ 1 << n % 8]))
            with pytest.raises(md.CheckpointError), open_step(bench.work, faults.DAMAGED):
                pass
            raw.seek(n)
            raw.write(honest[n : n + 1])
    assert bench.check("nothing") == "harmless"


@pytest.mark.parametrize("name", ["newest", "lock"])
def test_restore_with_any_changed_bit_of_a_hint(tmp_path: Path, name: str):
    """The long form flips every bit of both."""
    faults.hint(tmp_path, name, 1 if name == "newest" else 7)
