"""Training data from files of token ids: read in windows, shuffled anew in every epoch.

A batch is a pure function of (split, step), so a resumed run reads exactly the batches that it would have read. In each
epoch, every window of the training files is in exactly one batch. The shuffle is a permutation that is computed for
one window at a time (a Feistel network with cycle walking: Black and Rogaway, 2002, "Ciphers with arbitrary finite
domains", section 4), so it needs no memory, whatever the number of windows.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import meshdsl as md

from .data import SPLITS

DTYPES = ("uint8", "uint16", "uint32", "int32")
_CHUNK = 1 << 24  # bytes of a file that are checked at once
_ROUNDS = 4
_FEW = 64  # tokens of a file too short to tell its dtype
_HIGH = 1000  # the upper halves of ids up to 4 million are below 65535 / 1000


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """The place of `position` in a permutation of `range(count)` that depends on seed and epoch.

    >>> sorted(shuffled(n, 5, seed=0, epoch=1) for n in range(5))
    [0, 1, 2, 3, 4]
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    while True:
        position = _feistel(position, half, seed, epoch)
        if position < count:
            return position


def places(split: str, step: int, batch: int, count: int, seed: int) -> list[int]:
    """The rows of a batch, of `count` rows: shuffled anew in every epoch, except for evaluation.

    >>> places("held_out", 1, 2, 3, seed=0)
    [2, 0]
    """
    training = split == SPLITS[0]
    first = (step - training) * batch  # training steps start at 1
    positions = [divmod(n, count) for n in range(first, first + batch)]
    return [shuffled(position, count, seed, epoch) if training else position for epoch, position in positions]


def _feistel(n: int, half: int, seed: int, epoch: int) -> int:
    """A permutation of the numbers of `2 * half` bits."""
    mask = (1 << half) - 1
    left, right = n >> half, n & mask
    for number in range(_ROUNDS):
        words = f"{seed} {epoch} {number} {right}".encode("ascii")
        left, right = right, left ^ (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") & mask)
    return left << half | right


@dataclass(frozen=True)
class _File:
    """One file of token ids. Every read opens it anew: a file that shrinks is an error, where a memory map dies."""

    path: Path
    dtype: np.dtype

    @cached_property
    def tokens(self) -> int:
        """The number of tokens when the file was first seen. Raises `MeshdslError` for less than two."""
        size, _ = self._seen
        if size % self.dtype.itemsize or size < 2 * self.dtype.itemsize:
            raise md.MeshdslError(f"{self.path} has {size} bytes, which are not two or more tokens of {self.dtype}")
        return size // self.dtype.itemsize

    def read(self, first: int, count: int) -> np.ndarray:
        """The ids of `count` tokens. Raises `MeshdslError` if the file has changed, or cannot be read."""
        with self._opened() as file:
            found = np.fromfile(file, self.dtype, count, offset=first * self.dtype.itemsize)
            size, _ = now = _size_and_time(file)
        if len(found) < count or now != self._seen:
            raise md.MeshdslError(
                f"the token file {self.path} was written to or replaced: it had {self._seen[0]} bytes when it was "
                f"first read, and has {size}\n  do not write to the files of a run; restore the file and resume"
            )
        return found

    @cached_property
    def _seen(self) -> tuple[int, int]:
        with self._opened() as file:
            return _size_and_time(file)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise md.MeshdslError(f"{self.path} is not a regular file")
                yield file
        except OSError as error:
            raise md.MeshdslError(f"the token file {self.path} cannot be read: {error.strerror}") from None

    @cached_property
    def content(self) -> tuple[str, int, int]:
        """The SHA-256 of the whole file, and its least and largest id; reads 1 to 2 GB a second.

        Raises `MeshdslError` for ids of a wider integer, whose upper halves are nearly all zero.
        """
        total, least, largest = hashlib.sha256(), [0, 0], [0, 0]  # of the tokens at even and at odd places
        step = _CHUNK // self.dtype.itemsize
        for first in range(0, self.tokens, step):
            ids = self.read(first, min(step, self.tokens - first))
            total.update(ids.data)
            for half in range(2):
                least[half] = min(least[half], int(ids[half::2].min(initial=0)))
                largest[half] = max(largest[half], int(ids[half::2].max(initial=0)))
        if self.dtype.itemsize < 4 and self.tokens >= _FEW and largest[1] * _HIGH < largest[0]:
            raise md.MeshdslError(
                f"{self.path} is read as {self.dtype}, and looks like a wider integer: every second token is at most "
                f"{largest[1]}, and the others are up to {largest[0]}\n  pass the dtype of the file, "
                "such as dtype='int32'"
            )
        return total.hexdigest(), min(least), max(largest)


def _size_and_time(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class _Windows:
    """The windows of `length + 1` tokens of some files, in the order of the files; consecutive ones share a token."""

    def __init__(self, paths: Sequence[str | Path], dtype: str, length: int):
        paths = [paths] if isinstance(paths, str | Path) else paths
        self.length = length
        self.files = [_File(Path(path), np.dtype(dtype).newbyteorder("<")) for path in paths]
        self.starts = [0, *itertools.accumulate((file.tokens - 1) // length for file in self.files)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, n: int) -> np.ndarray:
        number = bisect.bisect_right(self.starts, n) - 1
        return self.files[number].read((n - self.starts[number]) * self.length, self.length + 1)

    def describe(self) -> list[dict[str, Any]]:
        return [{"file": file.path.name, "tokens": file.tokens, "sha256": file.content[0]} for file in self.files]


class TokenFiles:
    """Batches of `tokens` and `targets` (the tokens that follow), int32 of shape [batch, length], from token files.

    A file is an array of token ids, without a header: uint8, uint16, uint32 or int32, little-endian. Use it as the data
    of a workload: `data=lambda c, seed: TokenFiles(["train.bin"], ["valid.bin"], seed=seed, batch=8, length=128)`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(41, dtype=np.uint16).tofile(f"{folder}/train.bin")
    ...     files = TokenFiles([f"{folder}/train.bin"], [f"{folder}/train.bin"], seed=0, batch=2, length=5)
    ...     files("train", 1)["tokens"].shape, files.windows, sorted(
    ...         int(row[0]) for step in range(1, 5) for row in files("train", step)["tokens"])
    ((2, 5), 8, [0, 5, 10, 15, 20, 25, 30, 35])

    With `processes`, the rows of a batch are those of one process only, `batch / processes` of them, for loops that
    build global arrays from local ones; `meshdsl train` passes whole batches. Evaluation reads the windows of the
    held-out files in order, from the first. Each file is read whole once, when a run starts, for its largest id and its
    hash: training refuses ids that the loss has no class for, and a resumed run reports a file that has changed.

    Raises `MeshdslError` for a file that is missing, too short, or written to after the start.
    """

    def __init__(
        self,
        train: Sequence[str | Path],
        held_out: Sequence[str | Path] = (),
        *,
        seed: int,
        batch: int,
        length: int,
        dtype: str = "uint16",
        process: int = 0,
        processes: int = 1,
    ):
        if dtype not in DTYPES:
            raise md.MeshdslError(f"the dtype of a token file is one of {', '.join(DTYPES)}, got {dtype!r}")
        if min(batch, length, processes) < 1 or not 0 <= process < processes or batch % processes:
            raise md.MeshdslError(
                f"batch {batch} and length {length} must be at least 1, and the batch a multiple of the {processes} "
                f"processes; process {process} must be from 0 to {processes - 1}"
            )
        self.seed, self.batch, self.length, self.dtype = seed, batch, length, dtype
        self.process, self.processes = process, processes
        self._splits = {
            SPLITS[0]: _Windows(train, dtype, length),
            SPLITS[1]: _Windows(held_out, dtype, length),
        }
        if not len(self._splits[SPLITS[0]]):
            raise md.MeshdslError(f"the training files have no window of {length + 1} tokens\n  reduce the length")

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return len(self._splits[SPLITS[0]])

    def describe(self) -> dict[str, Any]:
        """The description of the data that checkpoints store; it is compared when a run resumes."""
        return {
            "kind": "tokens",
            "dtype": self.dtype,
            "batch": self.batch,
            "length": self.length,
            **{split: windows.describe() for split, windows in self._splits.items()},
        }

    def check(self, classes: int) -> None:
        """Raises `MeshdslError` if a file has an id below 0 or from `classes`."""
        for windows in self._splits.values():
            for file in windows.files:
                _, least, largest = file.content
                if least < 0 or largest >= classes:
                    raise md.MeshdslError(
                        f"{file.path} has the token id {least if least < 0 else largest}, read as {self.dtype}, and "
                        f"the vocabulary has the ids 0 to {classes - 1}\n  pass the dtype of the file, or set the "
                        "vocabulary of its tokenizer"
                    )

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        if split not in self._splits:
            raise md.MeshdslError(f"the split must be one of {', '.join(SPLITS)}, got {split!r}")
        windows = self._splits[split]
        if not len(windows):
            raise md.MeshdslError(f"there are no {split} files with a window of {self.length + 1} tokens")
        share = self.batch // self.processes
        mine = slice(self.process * share, (self.process + 1) * share)
        rows = np.stack([windows[n] for n in places(split, step, self.batch, len(windows), self.seed)[mine]])
        return {"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)}
