"""Restores one step, or the newest that every process can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError
from ...ir import Type
from ...layouts import Layout, Mesh
from ...lowering import Program
from ...trace import KEY_WORD, Tensor, spec_of, tensor, tree
from . import processes
from .device_put import targets
from .object_store import OrbaxReader, OrbaxStore
from .read import StepReader, step_name
from .store import DirectoryStore
from .trees import check_fit, flat


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpoints.restore`.

    `tree` has the structure of `like`, with its tensors on devices. `config`, `data` and `key` are those given to
    `save`. `bytes_read` is the number of tensor bytes that this process read. `stored` has the types of all tensors of
    the step, by path, also of those that are not in `like`.

    >>> import tempfile
    >>> import meshdsl as md
    >>> with tempfile.TemporaryDirectory() as folder, md.Checkpoints(folder) as checkpoints:
    ...     tree = {"w": md.tensor([1.0, 2.0], "io"), "v": md.tensor([3.0], "hidden")}
    ...     _ = checkpoints.save(7, tree, config={"lr": 0.1})
    ...     restored = checkpoints.restore(like={"w": md.spec("io:2")})
    >>> restored.step, restored.tree, restored.config, restored.data, restored.key, restored.bytes_read
    (7, {'w': tensor(float32[io=2], [1. 2.])}, {'lr': 0.1}, None, None, 8)
    """

    step: int
    tree: Any
    config: Any
    data: Any
    key: Tensor | None
    bytes_read: int
    stored: Mapping[str, Type]


Store = DirectoryStore | OrbaxStore
OpenStep = StepReader | OrbaxReader


class RestoreRequest(NamedTuple):
    """The arguments of `Checkpoints.restore` that select tensors and their shardings."""

    like: Any
    mesh: Mesh | None
    layout: Layout | None
    program: Program | None


def restore_newest(store: Store, request: RestoreRequest, report: Callable[[str], object]) -> Restored:
    """Restores the newest valid step. Calls `report` with a line for each lost, unfinished or skipped step.

    Raises `CheckpointError`, with the reason for each step, if there is no valid step.
    """
    for line in store.problems():
        report(line)
    invalid: dict[int, str] = {}
    while True:
        # Listed again each time, because a running writer may have removed a step and saved a newer one.
        newest = max((s for s in store.steps() if s not in invalid), default=-1)
        step = int(processes.gathered(str(newest).encode("ascii"))[0])
        if step < 0:
            raise CheckpointError(
                "\n  ".join([f"there is no valid checkpoint in {store.directory}", *invalid.values()])
            )
        try:
            return restore_step(store, step, request)
        except CheckpointError as error:
            invalid[step] = str(error.args[0])
            report(f"skipped {step_name(step)} in {store.directory}: {error.args[0]}")


def restore_step(store: Store, step: int, request: RestoreRequest) -> Restored:
    """Restores a step; raises `CheckpointError` in all processes if one of them cannot read its part."""
    restored: Restored | None = None
    problem = CheckpointError(f"{step_name(step)}: another process cannot read its part; see its error")
    try:
        with store.open(step) as reader:
            restored = _read(store, reader, request)
    except CheckpointError as error:
        problem = error
    if not processes.all_processes(restored is not None) or restored is None:
        raise problem
    return restored


def _read(store: Store, reader: OpenStep, request: RestoreRequest) -> Restored:
    stored, header = reader.manifest, reader.manifest.header
    types = {path: entry.type for path, entry in stored.tensors.items()}
    like = types if request.like is None else request.like
    leaves = flat(like)
    check_fit(stored, {path: spec_of(x) for path, x in leaves.items()}, header.step)
    restored = store.place(reader, targets(leaves, request.mesh, request.layout, request.program))
    key = None if header.key is None else tensor(np.array(header.key, np.uint32), (KEY_WORD,))
    restored_tree = tree.tree_unflatten(tree.tree_structure(like), restored)
    return Restored(header.step, restored_tree, header.config, header.data, key, reader.bytes_read, types)
