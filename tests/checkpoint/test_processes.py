"""Programs of several processes save and restore each other's checkpoints, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

from . import processes


def test_save_and_restore_in_two_processes_and_one(tmp_path: Path):
    """Eight devices of one process save, two processes of four restore and save, one restores.

    The two also meet what can go wrong: what one of them meets, both learn.
    """
    seeds, counts = [1, 2, 3], [8, 8, 8]
    processes.run("save", tmp_path, seeds, counts)
    processes.spawn("move,failures", tmp_path, seeds, counts, processes=2, each=4)
    processes.run("restore", tmp_path, seeds, counts)
    for seed in seeds:
        step = tmp_path / str(seed) / "b" / f"step-{seed:08d}"
        sizes = json.loads((step / "manifest.json").read_text())["header"]["files"]
        whole = (tmp_path / str(seed) / "a" / step.name / "part-00000.bin").stat().st_size
        assert len(sizes) == 2 and sum(sizes) == whole, "each part is written once, by one of the processes"
        assert all(sizes), "and both have something to write"
