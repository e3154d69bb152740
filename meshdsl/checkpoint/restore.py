"""Restoring: one step, or the newest that every process can read its parts of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..layouts import Layout, Mesh
from ..lowering import Program
from ..ops.random import WORD
from ..trace import tree
from ..values import Tensor, spec_of, tensor
from . import processes
from .directory import lost, step_numbers, unfinished
from .place import place, targets
from .read import StepReader, open_step, step_name
from .trees import check_fit, flat

__all__ = ["Restored", "Wanted", "restore_newest", "restore_step"]


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found.

    `tree` has the structure of what was asked for, its tensors placed; `config`, `data` and `key` are what `save` was
    given beside it; `bytes_read` counts the bytes of tensors that this process read.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     tree = {"w": md.tensor([1.0, 2.0], "io"), "v": md.tensor([3.0], "hidden")}
    ...     _ = checkpoints.save(7, tree, config={"lr": 0.1})
    ...     found = checkpoints.restore(like={"w": md.spec("io:2")})
    >>> found.step, found.tree, found.config, found.data, found.key, found.bytes_read
    (7, {'w': tensor(float32[io=2], [1. 2.])}, {'lr': 0.1}, None, None, 8)
    """

    step: int
    tree: Any
    config: Any
    data: Any
    key: Tensor | None
    bytes_read: int


class Wanted(NamedTuple):
    """What is to be restored, and how it is to lie; see `Checkpoints.restore`."""

    like: Any
    mesh: Mesh | None
    layout: Layout | None
    program: Program | None


def restore_newest(directory: Path, wanted: Wanted, report: Callable[[str], object]) -> Restored:
    """The newest step that is sound. A line goes to `report` for what is lost, unfinished or passed over.

    Raises `CheckpointError`, with the reason for each step, when there is none.
    """
    if gone := lost(directory):
        report(f"{gone} was saved in {directory}, and is gone")
    for name in unfinished(directory):
        report(f"{name} in {directory} is a save that was not finished")
    refused: dict[int, str] = {}
    while True:
        # Listed again each time: a run that still goes on may have removed what was there, and have saved a newer one.
        newest = max((s for s in step_numbers(directory) if s not in refused), default=-1)
        step = int(processes.from_first(str(newest).encode("ascii"), 20))
        if step < 0:
            raise CheckpointError("\n  ".join([f"there is no sound checkpoint in {directory}", *refused.values()]))
        try:
            return restore_step(directory, step, wanted)
        except CheckpointError as error:
            refused[step] = str(error.args[0])
            report(f"{step_name(step)} in {directory} is passed over: {error.args[0]}")


def restore_step(directory: Path, step: int, wanted: Wanted) -> Restored:
    """The step, if all processes can read their parts of it; else `CheckpointError` in all of them."""
    found: Restored | None = None
    problem = CheckpointError(f"{step_name(step)}: another process cannot read its part; it says why")
    try:
        with open_step(directory, step) as reader:
            found = _read(reader, wanted)
    except CheckpointError as error:
        problem = error
    if not processes.everywhere(found is not None) or found is None:
        raise problem
    return found


def _read(reader: StepReader, wanted: Wanted) -> Restored:
    stored, header = reader.manifest, reader.manifest.header
    like = {path: entry.type for path, entry in stored.tensors.items()} if wanted.like is None else wanted.like
    leaves = flat(like)
    check_fit(stored, {path: spec_of(x) for path, x in leaves.items()}, header.step)
    places = targets(leaves, wanted.mesh, wanted.layout, wanted.program)
    found = [place(reader, stored.tensors[path], target) for path, target in places.items()]
    key = None if header.key is None else tensor(np.array(header.key, np.uint32), (WORD,))
    made = tree.tree_unflatten(tree.tree_structure(like), found)
    return Restored(header.step, made, header.config, header.data, key, reader.bytes_read)
