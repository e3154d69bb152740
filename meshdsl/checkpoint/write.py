"""Saving one step: copies on the host, then files.

Every part of a tensor is written once, by one of the processes that hold it; which one follows from the sharding
alone, so nobody has to ask. Padding is cut off before it is copied. Each process writes its own file and says in a
note what lies where; process 0 waits for all notes, writes the manifest, and renames the directory. The processes
meet in the file system only, so all of this may run beside the program's own collectives.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import CheckpointError, SaveError
from ..ir import Type
from ..values import Tensor
from .files import opened, sync_directory, write_durably
from .grid import Box, Cuts, boundaries, cell, cell_count, cells_in, refine
from .manifest import MANIFEST, Chunk, Entry, Header, Manifest, dump, part_name
from .parse import load
from .read import open_step
from .strict import items, keys, parse, whole

__all__ = ["Plan", "Snapshot", "await_publication", "mark_failed", "plan", "publish", "snapshot", "write_part"]

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Plan:
    """How one tensor is stored, the same in every process: its grid, and who writes which part."""

    path: str
    type: Type
    cuts: Cuts
    owners: tuple[tuple[Box, int], ...]  # parts without padding, and the process that writes each


@dataclass(frozen=True)
class Snapshot:
    """This process's parts of one tensor, copied."""

    plan: Plan
    parts: tuple[tuple[Box, np.ndarray], ...]


def plan(tensors: Mapping[str, Tensor], chunk_bytes: int) -> list[Plan]:
    """How each tensor is stored, by path. Requires concrete tensors."""
    return [_plan(path, x, n, chunk_bytes) for n, (path, x) in enumerate(tensors.items())]


def _plan(path: str, x: Tensor, number: int, chunk_bytes: int) -> Plan:
    stored = x.stored
    own = stored.is_fully_addressable  # every process has one of its own, and they are equal: process 0 writes it
    holders: dict[Box, set[int]] = {}
    for device, index in stored.sharding.devices_indices_map(stored.shape).items():
        box = _real(index, x.shape)
        if box.elements:
            holders.setdefault(box, set()).add(0 if own else device.process_index)
    owners = tuple(
        (box, sorted(holders[box])[(number + n) % len(holders[box])]) for n, box in enumerate(sorted(holders))
    )
    return Plan(path, x.type, refine(boundaries(x.shape, holders), x.dtype.itemsize, chunk_bytes), owners)


def _real(index: Sequence[slice], sizes: Sequence[int]) -> Box:
    """A shard's index without padding; of size 0 when it is nothing else."""
    start = tuple(min(s.start or 0, size) for s, size in zip(index, sizes, strict=True))
    stop = (size if s.stop is None else min(s.stop, size) for s, size in zip(index, sizes, strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def snapshot(plans: Sequence[Plan], tensors: Mapping[str, Tensor]) -> list[Snapshot]:
    """Copies, on the host, of what this process writes. Afterwards the tensors may be donated."""
    mine = [_mine(p, tensors[p.path]) for p in plans]
    for shards in mine:
        for shard in shards.values():
            shard.copy_to_host_async()
    found = []
    for p, shards in zip(plans, mine, strict=True):
        parts = ((box, np.asarray(shard)[tuple(slice(0, n) for n in box.size)].copy()) for box, shard in shards.items())
        found.append(Snapshot(p, tuple(parts)))
    return found


def _mine(p: Plan, x: Tensor) -> dict[Box, jax.Array]:
    here = {_real(shard.index, x.shape): shard.data for shard in x.stored.addressable_shards}
    return {box: here[box] for box, owner in p.owners if owner == jax.process_index()}


def write_part(folder: Path, process: int, snapshots: Sequence[Snapshot]) -> None:
    """Write this process's chunks, then the note that says where they lie."""
    notes: list[tuple[int, int, int, str]] = []

    def fill(write: Any) -> None:
        offset = 0
        for number, taken in enumerate(snapshots):
            cuts = taken.plan.cuts
            for box, values in taken.parts:
                for n in cells_in(cuts, box):
                    part = np.ascontiguousarray(values[cell(cuts, n).slices(box.start)])
                    raw = part.reshape(-1).view(np.uint8).data
                    write(raw)
                    notes.append((number, n, offset, hashlib.sha256(raw).hexdigest()))
                    offset += len(raw)

    write_durably(folder / part_name(process), fill)
    draft = folder / f"{_note(process)}.draft"
    write_durably(draft, lambda write: write(json.dumps({"chunks": notes}).encode("ascii")))
    os.rename(draft, folder / _note(process))


def mark_failed(folder: Path, process: int) -> None:
    """Say that this process's part will never come."""
    (folder / f"failed-{process:05d}").mkdir(exist_ok=True)


def publish(
    folder: Path, final: Path, header: Mapping[str, Any], plans: Sequence[Plan], processes: int, seconds: float
) -> None:
    """Wait for the notes of all processes, write the manifest, and make the step visible under its name.

    Raises `SaveError` when a process failed, or its note does not come in time.
    """
    chunks: list[list[Chunk | None]] = [[None] * cell_count(p.cuts) for p in plans]
    deadline = time.monotonic() + seconds
    for process in range(processes):
        _wait_for(folder, process, deadline)
        for number, n, offset, digest in _read_note(folder, process):
            chunks[number][n] = Chunk(process, offset, digest)
        (folder / _note(process)).unlink()
    missing = [p.path for p, cells in zip(plans, chunks, strict=True) if None in cells]
    if missing:
        raise SaveError(f"no process wrote all of {missing[0]!r}")
    entries = {
        p.path: Entry(p.path, p.type, p.cuts, tuple(c for c in cells if c))
        for p, cells in zip(plans, chunks, strict=True)
    }
    files = tuple((folder / part_name(n)).stat().st_size for n in range(processes))
    manifest = Manifest(Header(**header, files=files), entries)

    def fill(write: Any) -> None:
        for line in dump(manifest):
            write(line)

    write_durably(folder / MANIFEST, fill)
    with opened(str(folder), directory=True) as fd:
        load(fd, manifest.header.step)  # what the reader would refuse is not published
    sync_directory(folder)
    os.rename(folder, final)
    sync_directory(final.parent)


def await_publication(folder: Path, directory: Path, step: int, save: str, seconds: float) -> None:
    """What every process but the first does: wait until process 0 has published the step, or given it up.

    Raises `SaveError` when it has given it up, or nothing happens in time.
    """
    deadline = time.monotonic() + seconds
    while folder.exists():
        if (folder / "failed-00000").exists():
            raise SaveError("process 0 could not write its part; it says why")
        if time.monotonic() > deadline:
            raise SaveError(f"process 0 did not publish the step in {seconds:g} seconds")
        time.sleep(_POLL_SECONDS)
    try:
        with open_step(directory, step) as reader:
            published = reader.manifest.header.save
    except CheckpointError as error:
        raise SaveError(f"process 0 gave it up: {error.args[0]}") from None
    if published != save:
        raise SaveError("process 0 gave it up; it says why")


def _wait_for(folder: Path, process: int, deadline: float) -> None:
    while not (folder / _note(process)).exists():
        failed = next(iter(sorted(folder.glob("failed-*"))), None)
        if failed is not None:
            raise SaveError(f"process {int(failed.name[-5:])} could not write its part")
        if time.monotonic() > deadline:
            raise SaveError(
                f"the part of process {process} did not come in time\n"
                f"  every process saves at the same steps, and all see one file system; {folder} is where it is awaited"
            )
        time.sleep(_POLL_SECONDS)


def _note(process: int) -> str:
    return f"note-{process:05d}.json"


def _read_note(folder: Path, process: int) -> Iterable[tuple[int, int, int, bytes]]:
    name = _note(process)
    said = keys(parse((folder / name).read_bytes(), name), ("chunks",), name)
    for record in items(said["chunks"], name):
        number, n, offset, digest = items(record, name, 4)
        yield whole(number, name), whole(n, name), whole(offset, name), bytes.fromhex(digest)
