"""Saves one step: copies shards to the host, then writes files.

Each part of a tensor is written once, by one of the processes that store it. The sharding determines which one, so no
communication is needed. Padding is not copied. Each process writes its own file and a note with the location of its
chunks; process 0 waits for all notes, writes the manifest, and renames the directory. The processes communicate only
through the file system, so saving can run during the program's own collectives.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import CheckpointError, SaveError
from ...ir import Type
from ...trace import Tensor
from .files import move, read_at, regular_size, sync, write_durably
from .grid import Box, Cuts, boundaries, cell, cell_count, cells_in, refine, unpadded
from .manifest import MANIFEST, Chunk, Header, Manifest, StoredTensor, dump, load, part_name
from .read import open_step

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class StoragePlan:
    """The storage of one tensor: its grid, and the process that writes each part. Equal in all processes."""

    path: str
    type: Type
    cuts: Cuts
    owners: tuple[tuple[Box, int], ...]  # each part, without padding, and the process that writes it


Copies = list[tuple[Box, np.ndarray]]  # this process's parts of one tensor, on the host


def plan(tensors: Mapping[str, Tensor], chunk_bytes: int) -> list[StoragePlan]:
    """The storage plan of each tensor. The tensors must be concrete."""
    return [_plan(path, x, n, chunk_bytes) for n, (path, x) in enumerate(tensors.items())]


def _plan(path: str, x: Tensor, number: int, chunk_bytes: int) -> StoragePlan:
    stored = x.stored
    addressable = stored.is_fully_addressable  # every process has an equal copy, and process 0 writes it
    holders: dict[Box, set[int]] = {}
    for device, index in stored.sharding.devices_indices_map(stored.shape).items():
        box = unpadded(index, x.shape)
        if box.elements:
            holders.setdefault(box, set()).add(0 if addressable else device.process_index)
    owners = tuple(
        (box, sorted(holders[box])[(number + n) % len(holders[box])]) for n, box in enumerate(sorted(holders))
    )
    return StoragePlan(path, x.type, refine(boundaries(x.shape, holders), x.dtype.itemsize, chunk_bytes), owners)


def snapshot(plans: Sequence[StoragePlan], tensors: Mapping[str, Tensor]) -> list[Copies]:
    """Copies the parts that this process writes to the host, by plan. Afterwards the tensors may be donated."""
    own_shards = [_own_shards(p, tensors[p.path]) for p in plans]
    for shards in own_shards:
        for shard in shards.values():
            shard.copy_to_host_async()
    return [
        [(box, np.asarray(shard)[tuple(slice(0, n) for n in box.size)].copy()) for box, shard in shards.items()]
        for shards in own_shards
    ]


def _own_shards(p: StoragePlan, x: Tensor) -> dict[Box, jax.Array]:
    shards_by_box = {unpadded(shard.index, x.shape): shard.data for shard in x.stored.addressable_shards}
    return {box: shards_by_box[box] for box, owner in p.owners if owner == jax.process_index()}


@dataclass(frozen=True)
class Save:
    """One save of a step, in which each process writes its part."""

    folder: Path  # renamed to `final` once it is complete
    final: Path
    fields: Mapping[str, Any]  # of the header
    plans: Sequence[StoragePlan]
    seconds: float  # that a process waits for the others

    def write_part(self, copied: Sequence[Copies]) -> None:
        """Write this process's chunks, then a note with their locations."""
        notes: list[tuple[int, int, int, str]] = []

        def chunks() -> Iterator[memoryview]:
            offset = 0
            for number, (p, copies) in enumerate(zip(self.plans, copied, strict=True)):
                for box, values in copies:
                    for n in cells_in(p.cuts, box):
                        part = np.ascontiguousarray(values[cell(p.cuts, n).slices(box.start)])
                        raw = part.reshape(-1).view(np.uint8).data
                        yield raw
                        notes.append((number, n, offset, hashlib.sha256(raw).hexdigest()))
                        offset += len(raw)

        write_durably(self.folder / part_name(jax.process_index()), chunks())
        note = self._note(jax.process_index())
        draft = note.with_name(f"{note.name}.draft")
        write_durably(draft, [json.dumps({"chunks": notes}).encode("ascii")])
        draft.rename(note)

    def mark_failed(self) -> None:
        """Mark this process's part as failed, for the other processes."""
        (self.folder / f"failed-{jax.process_index():05d}").mkdir(exist_ok=True)

    def publish(self, check: Callable[[], None]) -> None:
        """Wait for the notes of all processes, write the manifest, and rename the directory to the step's name.

        `check()` runs before the rename and may raise. Raises `SaveError` if a process failed, or if its note does not
        appear in time.
        """
        manifest = self._gathered()
        write_durably(self.folder / MANIFEST, dump(manifest))
        load(self.folder, manifest.header.step)  # check that the reader accepts it before publishing
        sync(self.folder)
        check()
        move(self.folder, self.final)

    def _gathered(self) -> Manifest:
        """The manifest, from the notes of all processes, which are removed."""
        chunks: list[list[Chunk | None]] = [[None] * cell_count(p.cuts) for p in self.plans]
        deadline, numbers = time.monotonic() + self.seconds, range(jax.process_count())
        for process in numbers:
            note = self._note(process)
            self._wait_for(note, process, deadline)
            for number, n, offset, digest in json.loads(read_at(note))["chunks"]:
                chunks[number][n] = Chunk(process, offset, bytes.fromhex(digest))
            note.unlink()
        missing = [p.path for p, cells in zip(self.plans, chunks, strict=True) if None in cells]
        if missing:
            raise SaveError(f"no process wrote all of {missing[0]!r}")
        entries = {
            p.path: StoredTensor(p.path, p.type, p.cuts, tuple(c for c in cells if c))
            for p, cells in zip(self.plans, chunks, strict=True)
        }
        files = tuple(regular_size(self.folder / part_name(n)) for n in numbers)
        return Manifest(Header(**self.fields, files=files), entries)

    def _wait_for(self, note: Path, process: int, deadline: float) -> None:
        while not note.exists():
            failed = next(iter(sorted(self.folder.glob("failed-*"))), None)
            if failed is not None:
                raise SaveError(f"process {int(failed.name[-5:])} could not write its part")
            if time.monotonic() > deadline:
                raise SaveError(
                    f"the part of process {process} did not appear in {self.folder} in time\n"
                    "  every process must save at the same steps, and all must share one file system"
                )
            time.sleep(_POLL_SECONDS)

    def await_publication(self) -> None:
        """Wait until process 0 has published the step; called by the other processes.

        Raises `SaveError` if process 0 failed, or if the step is not published in time.
        """
        deadline = time.monotonic() + self.seconds
        while self.folder.exists():
            if (self.folder / "failed-00000").exists():
                raise SaveError("process 0 could not write its part; see its error")
            if time.monotonic() > deadline:
                raise SaveError(f"process 0 did not publish the step in {self.seconds:g} seconds")
            time.sleep(_POLL_SECONDS)
        try:
            with open_step(self.final.parent, self.fields["step"]) as reader:
                published = reader.manifest.header.save
        except CheckpointError as error:
            raise SaveError(f"process 0 did not publish the step: {error.args[0]}") from None
        if published != self.fields["save"]:
            raise SaveError("process 0 did not publish the step; see its error")

    def _note(self, process: int) -> Path:
        return self.folder / f"note-{process:05d}.json"
