"""Runs whose entries are links to folders outside: nothing outside may change."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import meshdsl as md

TREE = {"w": 1.0}


def outside(folder: Path) -> Path:
    """A directory that must stay as it is."""
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "data").write_text("mine")
    (folder / "part-00000.bin").write_text("mine")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def saved(folder: Path, steps: int, **options: Any) -> list[str]:
    said: list[str] = []
    with md.Checkpoints(folder, report=said.append, **options) as checkpoints:
        first = max(checkpoints.steps(), default=0) + 1
        for step in range(first, first + steps):
            checkpoints.save(step, TREE)
    return said


def random_links(home: Path, draw: random.Random) -> None:
    """Move random entries of a run out and link them back, or link them to a folder of the user's; save and discard.

    Raises `AssertionError` if a file outside has changed.
    """
    run, bulk = home / "run", home / "bulk"
    bulk.mkdir(parents=True)
    saved(run, 3, keep=None)
    names = [*os.listdir(run), "lock", "step-00000007", "step-00000002.ab.removed", "newest.draft"]
    names += ["step-00000004.ab.unfinished", "lock.0123456789abcdef"]
    linked = draw.sample(names, draw.randrange(1, 5))
    for n, name in enumerate(linked):
        target = bulk / f"{n}"
        if (run / name).exists():
            (run / name).rename(target)
        else:
            outside(target)
        (run / name).symlink_to(target)
    before = content(bulk)
    for keep in (None, 1):
        checkpoints = md.Checkpoints(run, keep=keep, report=lambda line: None)
        with contextlib.suppress(md.SaveError):
            checkpoints.save(draw.choice([4, 5, 9]), TREE)
            checkpoints.close()
            checkpoints.discard(after=draw.choice([0, 2, 6]))
        checkpoints.close()
        assert content(bulk) == before, f"links: {linked}"
