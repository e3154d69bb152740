"""Reading one step: only the chunks that the asked parts touch, each at most once, each hashed before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from .files import opened, read_at
from .grid import Box, cell, cells_in, intersect
from .manifest import Entry, Manifest, part_name
from .parse import load

__all__ = ["Part", "StepReader", "open_step", "step_name"]


class Part(NamedTuple):
    """A part of a tensor that is wanted, and the array for it; the array may be larger, its rest is left alone."""

    box: Box  # in the stored order of dims
    into: np.ndarray  # dims in the stored order too; may be a transposed view


class StepReader:
    """An open step; see `open_step`. `bytes_read` counts what was read of tensors."""

    def __init__(self, folder: int, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0

    def read(self, entry: Entry, parts: Sequence[Part]) -> None:
        """Fill the arrays of these parts. Raises `CheckpointError` when a chunk is not what was written.

        Beside the arrays it needs the memory of one chunk.
        """
        numbers = sorted({n for part in parts for n in cells_in(entry.cuts, part.box)})
        for number in numbers:
            here = cell(entry.cuts, number)
            values = self._chunk(entry, number, here)
            for part in parts:
                shared = intersect(here, part.box)
                if shared.elements:
                    part.into[shared.slices(part.box.start)] = values[shared.slices(here.start)]

    def whole(self, entry: Entry) -> np.ndarray:
        """All of a tensor. Raises `CheckpointError` like `read`."""
        sizes = tuple(d.size for d in entry.type.shape)
        values = np.empty(sizes, entry.type.dtype)
        self.read(entry, [Part(Box((0,) * len(sizes), sizes), values)])
        return values

    def verify(self) -> None:
        """Read every chunk of every tensor. Raises `CheckpointError` for the first that is not what was written."""
        for entry in self.manifest.tensors.values():
            for number in range(len(entry.chunks)):
                self._chunk(entry, number, cell(entry.cuts, number))

    def _chunk(self, entry: Entry, number: int, box: Box) -> np.ndarray:
        chunk, name = entry.chunks[number], part_name(entry.chunks[number].file)
        raw = bytearray(box.elements * entry.type.dtype.itemsize)
        with opened(name, self.folder) as fd:
            read_at(fd, memoryview(raw), chunk.offset, name)
        self.bytes_read += len(raw)
        if hashlib.sha256(raw).digest() != chunk.sha256:
            raise CheckpointError(
                f"{name}: chunk {number} of {entry.path!a}, bytes {chunk.offset} to {chunk.offset + len(raw)}, "
                "is not what was written: its SHA-256 differs"
            )
        if entry.type.dtype == np.bool_ and raw.translate(None, b"\0\1"):
            raise CheckpointError(f"{name}: chunk {number} of {entry.path!a} has bytes that are no bool")
        return np.frombuffer(raw, entry.type.dtype).reshape(box.size)


def step_name(step: int) -> str:
    """The directory of a step.

    >>> step_name(12)
    'step-00000012'
    """
    return f"step-{step:08d}"


@contextlib.contextmanager
def open_step(directory: Path, step: int) -> Iterator[StepReader]:
    """The step, with its manifest checked. Raises `CheckpointError` that names the step, the file and the key."""
    name = step_name(step)
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # the user's own directory: it may be a link
    except OSError as error:
        raise CheckpointError(f"{directory}: the directory cannot be opened: {error.strerror}") from None
    try:
        with opened(name, root, directory=True) as folder:
            try:
                yield StepReader(folder, load(folder, step))
            except CheckpointError as error:
                raise CheckpointError(f"{name}/{error.args[0]}") from None
    finally:
        os.close(root)
