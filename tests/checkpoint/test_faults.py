"""Damage is never silent; `python -m tests.checkpoint.fuzz` does many more of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.checkpoint.read import open_step

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
    """`newest` is a hint, and `lock` names a writer that has ended: neither keeps a run from going on."""
    with md.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": 1.0})
        checkpoints.wait()
        honest = (tmp_path / name).read_bytes()
    for bit in range(0, 8 * len(honest), 1 if name == "newest" else 7):
        raw = bytearray(honest)
        raw[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(raw)
        assert md.Checkpoints(tmp_path, report=lambda line: None).restore().step == 2, bit
    for text in (b"", b"[]", b"3", b'{"step": "2"}', b'{"step": true}', b'{"step": 1e400}', b"\0" * 99):
        (tmp_path / name).write_bytes(text)
        assert md.Checkpoints(tmp_path, report=lambda line: None).restore().step == 2, text
