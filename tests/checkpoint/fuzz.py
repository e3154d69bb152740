"""Long runs of everything that can happen to a checkpoint: `python -m tests.checkpoint.fuzz [WHAT ...] [--seed N]`.

WHAT is any of `faults` (1,000 flips, 200 of each other damage), `hints` (every bit of `newest` and `lock`), `links`
(200 runs with links to the outside), `disk` (a real file system that is full or read-only, where this machine lets us
mount one), `namespaces` (20 writers in another one, where this machine lets us make one), `crash` (60 kills), `pairs`
(50 pairs of layouts and process counts); all of them by default. Every line is JSON, and says that all of its cases
held; the first that does not ends the program with what happened and how to make it again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshdsl as md
from tests.together import ROOT

from . import faults, holders, links, processes

PROCESSES = [(1, 8, 2, 4, 1, 8), (2, 4, 1, 8, 1, 1), (1, 1, 2, 4, 2, 3), (2, 3, 4, 2, 1, 8), (4, 2, 1, 6, 2, 4)]
PAIRS_EACH = 5  # of each line above, twice: from the first to the second program, and on to the third


def say(what: str, began: float, **record: Any) -> None:
    """One line of the result."""
    print(json.dumps({"what": what, **record, "seconds_in_all": round(time.perf_counter() - began, 1)}), flush=True)


def run_faults(folder: Path, seed: int, scale: float) -> None:
    bench = faults.Bench(folder, seed)
    for name in faults.FAULTS:
        began = time.perf_counter()
        count = max(1, round((1000 if name == "flip" else 200) * scale))
        say(name, began, cases=count, **faults.many(bench, name, count, seed))


def run_hints(folder: Path, seed: int, scale: float) -> None:
    began = time.perf_counter()
    say("hints", began, **{name: faults.hint(folder / name, name, 1) for name in ("newest", "lock")})


def run_links(folder: Path, seed: int, scale: float) -> None:
    draw, began, count = random.Random(seed), time.perf_counter(), max(1, round(200 * scale))
    for case in range(count):
        links.random_links(folder / str(case), draw)
    say("links", began, cases=count)


def run_namespaces(folder: Path, seed: int, scale: float) -> None:
    began, count = time.perf_counter(), max(1, round(20 * scale))
    if not holders.has_namespaces():
        say("namespaces", began, skipped="this machine lets us make no namespaces")
        return
    for case in range(count):
        (folder / str(case)).mkdir()
        holders.held_in_another_namespace(folder / str(case))
    say("namespaces", began, cases=count)


def run_disk(folder: Path, seed: int, scale: float) -> None:
    """Save until the disk is full; make room and go on; then make it read-only."""
    draw, began, full, refused = random.Random(seed), time.perf_counter(), 0, 0
    with _mounted(folder) as disk:
        if disk is None:
            say("disk", began, skipped="this machine lets us mount nothing")
            return
        for n in range(max(1, round(20 * scale))):
            run = disk / str(n)
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(draw.randrange(1 << 18, 1 << 20)))
            checkpoints, saved, step = md.Checkpoints(run, keep=draw.choice([1, 3, None])), 0, 0
            while True:
                step += 1
                tree = {"w": md.tensor(np.full(draw.randrange(1, 60_000), step, np.int32), "io")}
                try:
                    checkpoints.save(step, tree)
                    checkpoints.wait()
                    saved = step
                except md.SaveError as error:
                    assert "No space left" in str(error) and f"step-{step:08d}" in str(error), error
                    saved = step if "was saved, but" in str(error) else saved
                    break
                if step == 40:  # what is kept fits
                    break
            full += saved != step
            found = checkpoints.restore()
            assert found.step == saved and (found.tree["w"].numpy() == saved).all()
            ballast.unlink()
            checkpoints.save(step + 1, {"w": 1})
            checkpoints.close()
            assert md.Checkpoints(run).restore().step == step + 1
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            try:
                md.Checkpoints(run).save(step + 2, {"w": 2})
                raise AssertionError("it was saved on a read-only disk")
            except md.SaveError as error:
                assert "Read-only file system" in str(error), error
                refused += 1
            assert md.Checkpoints(run).restore().step == step + 1
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            subprocess.run(["rm", "-r", str(run)], check=True)
    say("disk", began, filled=full, read_only_refused=refused)


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[Path | None]:
    """A file system of 2 MiB in memory, or None."""
    disk = folder / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    try:
        yield disk if made.returncode == 0 else None
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def run_crash(folder: Path, seed: int, scale: float) -> None:
    began, kills = time.perf_counter(), max(1, round(60 * scale))
    run = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crash", str(kills), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    say("crash", began, **json.loads(run.stdout.splitlines()[-1]))


def run_pairs(folder: Path, seed: int, scale: float) -> None:
    numbers = itertools.count(seed * 1000)
    for a, a_each, b, b_each, c, c_each in PROCESSES:
        began, counts = time.perf_counter(), [a * a_each, b * b_each, c * c_each]
        seeds = [next(numbers) for _ in range(max(1, round(PAIRS_EACH * scale)))]
        processes.spawn("save", folder, seeds, counts, a, a_each)
        processes.spawn("move", folder, seeds, counts, b, b_each)
        processes.spawn("restore", folder, seeds, counts, c, c_each)
        shape = f"{a}x{a_each} -> {b}x{b_each} -> {c}x{c_each}"
        say("pairs", began, processes_x_devices=shape, pairs=2 * len(seeds))


RUNS = {
    "faults": run_faults, "hints": run_hints, "links": run_links, "disk": run_disk,
    "namespaces": run_namespaces, "crash": run_crash, "pairs": run_pairs,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.checkpoint.fuzz", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"any of {', '.join(RUNS)}")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--scale", type=float, default=1.0, help="how many cases, times the usual number")
    asked = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of the programs that this one starts
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    if unknown := set(asked.what) - set(RUNS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(RUNS)}")
    print(json.dumps({"seed": asked.seed, "scale": asked.scale}), flush=True)
    for name in asked.what or RUNS:
        with tempfile.TemporaryDirectory(prefix=f"checkpoint-{name}-") as folder:
            RUNS[name](Path(folder), asked.seed, asked.scale)


if __name__ == "__main__":
    main()
