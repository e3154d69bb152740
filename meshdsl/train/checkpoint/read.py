"""Reads one step: only the chunks that overlap the requested parts, each at most once, with its hash verified."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import CheckpointError
from .files import opened, read_at
from .grid import Box, cell, cells_in, intersect
from .manifest import Manifest, StoredTensor, load, part_name


class ReadRequest(NamedTuple):
    """A part of a tensor to read, and the array to fill; elements of the array outside the part are not changed."""

    box: Box  # in the stored order of dims
    into: np.ndarray  # in the stored order of dims; may be a transposed view


class StepReader:
    """An open step; see `open_step`. `bytes_read` is the number of tensor bytes read so far."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0

    def read(self, entry: StoredTensor, requests: Sequence[ReadRequest]) -> None:
        """Fill the arrays of these requests. Raises `CheckpointError` if a chunk is corrupt.

        Needs the memory of one chunk in addition to the arrays.
        """
        numbers = sorted({n for part in requests for n in cells_in(entry.cuts, part.box)})
        for number in numbers:
            chunk_box = cell(entry.cuts, number)
            values = self._chunk(entry, number, chunk_box)
            for part in requests:
                shared = intersect(chunk_box, part.box)
                if shared.elements:
                    part.into[shared.slices(part.box.start)] = values[shared.slices(chunk_box.start)]

    def whole(self, entry: StoredTensor) -> np.ndarray:
        """The whole tensor. Raises `CheckpointError` like `read`."""
        sizes = tuple(d.size for d in entry.type.dims)
        values = np.empty(sizes, entry.type.dtype)
        self.read(entry, [ReadRequest(Box((0,) * len(sizes), sizes), values)])
        return values

    def verify(self) -> None:
        """Read every chunk of every tensor. Raises `CheckpointError` for the first corrupt chunk."""
        for entry in self.manifest.tensors.values():
            for number in range(len(entry.chunks)):
                self._chunk(entry, number, cell(entry.cuts, number))

    def _chunk(self, entry: StoredTensor, number: int, box: Box) -> np.ndarray:
        chunk, name = entry.chunks[number], part_name(entry.chunks[number].file)
        size = box.elements * entry.type.dtype.itemsize
        raw = read_at(self.folder / name, chunk.offset, size)
        self.bytes_read += size
        if hashlib.sha256(raw).digest() != chunk.sha256:
            raise CheckpointError(
                f"{name}: chunk {number} of {entry.path!a}, bytes {chunk.offset} to {chunk.offset + size}, "
                "is corrupt: its SHA-256 differs"
            )
        return np.frombuffer(raw, entry.type.dtype).reshape(box.size)


STEP = re.compile(r"step-(\d{8,16})")  # the directory name of a step


def step_name(step: int) -> str:
    """The directory name of a step.

    >>> step_name(12)
    'step-00000012'
    """
    return f"step-{step:08d}"


@contextlib.contextmanager
def open_step(directory: Path, step: int) -> Iterator[StepReader]:
    """Opens a step and checks its manifest. Raises `CheckpointError` naming the step, the file and the key."""
    folder = directory / step_name(step)
    try:
        directory.stat()
    except OSError as error:
        raise CheckpointError(f"{directory}: the directory cannot be opened: {error.strerror}") from None
    with opened(folder, directory=True):
        try:
            yield StepReader(folder, load(folder, step))
        except CheckpointError as error:
            raise CheckpointError(f"{folder.name}/{error.args[0]}") from None
