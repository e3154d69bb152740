"""Training data from Grain and from Hugging Face datasets. A resumed run reads exactly the batches that it would have.

Neither library is imported: the adapters call methods of the objects that they are given.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import meshdsl as md

from .data import SPLITS
from .iterators import Iterated
from .tokens import places

Batch = Mapping[str, np.ndarray]


def from_grain(train: Any, held_out: Any = None) -> Iterated:
    """Batches of a Grain `MapDataset`, `IterDataset` or `DataLoader` whose elements are whole batches (extra `grain`).

    >>> import grain, meshdsl.train
    >>> rows = grain.MapDataset.range(100).seed(0).shuffle().repeat().map(lambda n: {"x": np.float32(n)})
    >>> data = meshdsl.train.from_grain(rows.batch(4), held_out=rows[:8].batch(4))
    >>> data("train", 1)["x"].shape, data("held_out", 1)["x"].shape
    ((4,), (4,))

    The iterator's state is saved with every checkpoint. Evaluation takes the first batches of `held_out`, always the
    same ones. Let `train` repeat; every process iterates over the same global batches, so shard nothing.
    """
    items = iter(train.to_iter_dataset() if hasattr(train, "to_iter_dataset") else train)
    length = len(train) if hasattr(train, "to_iter_dataset") else None
    return Iterated(items, _held_out(held_out), lambda: {"kind": "grain", "batches": length})


def from_datasets(
    train: Any, held_out: Any = None, *, batch: int, seed: int = 0, columns: Sequence[str] | None = None
) -> Any:
    """Batches of a Hugging Face `Dataset`, or of a stream of one, an `IterableDataset` (extra `datasets`).

    >>> import datasets, meshdsl.train
    >>> rows = datasets.Dataset.from_dict({"tokens": [[n, n + 1] for n in range(6)]})
    >>> data = meshdsl.train.from_datasets(rows, rows, batch=4, seed=1)
    >>> sorted(data("train", 1)["tokens"][:, 0].tolist() + data("train", 2)["tokens"][:2, 0].tolist())
    [0, 1, 2, 3, 4, 5]

    Rows have columns of equal shapes; `columns` selects some. A `Dataset` is shuffled anew in every epoch, by seed and
    epoch, so that a batch depends on the step alone. A stream is read in its own order, once an epoch, and its state is
    saved with every checkpoint. Its first batches are read to try this: a stream that does not continue exactly from a
    saved position is refused, such as one with a shuffle buffer, whose content `datasets` does not save. Raises
    `MeshdslError` for data with fewer rows than a batch.
    """
    if not isinstance(batch, int) or batch < 1:
        raise md.MeshdslError(f"batch is a number of rows of at least 1, got {batch!r}")
    if not hasattr(train, "load_state_dict"):
        return _Rows(train, held_out, batch, seed, columns)
    kind = {"kind": "datasets, streamed", "batch": batch}
    _check_exact(train)
    first = None if held_out is None else _stream(held_out, batch, columns)
    return Iterated(_Streamed(_stream(train, batch, columns)), _held_out(first), lambda: kind)


def _held_out(batches: Any) -> Callable[[int], Batch]:
    """The function from an index to that batch of the held-out data; batches that were read are kept."""
    seen: list[Batch] = []
    items: list[Iterator[Batch]] = []

    def at(index: int) -> Batch:
        if batches is None:
            raise md.MeshdslError("there is no held-out data\n  give held_out=, or evaluate nothing: --eval-batches 0")
        items[:] = items or [iter(batches)]
        while len(seen) <= index:
            try:
                seen.append(next(items[0]))
            except StopIteration:
                raise md.MeshdslError(
                    f"the held-out data has {len(seen)} batches, and batch {index} was asked for\n"
                    f"  evaluate on fewer: --eval-batches {len(seen)}"
                ) from None
        return seen[index]

    return at


class _Rows:
    """Batches of a table of rows, shuffled anew in every epoch."""

    def __init__(self, train: Any, held_out: Any, batch: int, seed: int, columns: Sequence[str] | None):
        self.batch, self.seed = batch, seed
        self.splits = {
            split: table.with_format("numpy", columns=None if columns is None else [*columns])
            for split, table in zip(SPLITS, (train, held_out), strict=True)
            if table is not None
        }
        for split, table in self.splits.items():
            if len(table) < batch:
                raise md.MeshdslError(f"the {split} data has {len(table)} rows, fewer than a batch of {batch}")

    def describe(self) -> dict[str, Any]:
        """A description for checkpoints; a resumed run compares it."""
        return {
            "kind": "datasets",
            "batch": self.batch,
            **{split: {"rows": len(table), "sha256_of_ends": _ends(table)} for split, table in self.splits.items()},
        }

    def __call__(self, split: str, step: int) -> Batch:
        if split not in self.splits:
            raise md.MeshdslError(f"there is no {split} data; give held_out=, or evaluate nothing: --eval-batches 0")
        table = self.splits[split]
        return table[places(split, step, self.batch, len(table), self.seed)]


def _ends(table: Any) -> str:
    """The hash of the first and last row, in place of a table that may be too large to read at every start."""
    total = hashlib.sha256()
    for row in (table[0], table[len(table) - 1]):
        for name in sorted(row):
            total.update(f"{name} {np.asarray(row[name]).tolist()}\n".encode())
    return total.hexdigest()


def _stream(rows: Any, batch: int, columns: Sequence[str] | None) -> Any:
    chosen = rows if columns is None else rows.select_columns([*columns])
    return chosen.with_format("numpy").batch(batch, drop_last_batch=True)


def _stages(stage: Any) -> Iterator[tuple[Any, bool]]:
    """The parts of a stream that have a position, and whether they are datasets that it interleaves or concatenates."""
    for value in vars(stage).values() if hasattr(stage, "__dict__") else ():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if hasattr(inner, "load_state_dict") and hasattr(inner, "__iter__"):
                yield inner, inner is not value
                yield from _stages(inner)


def _equal(a: Any, b: Any) -> bool:
    """True for rows of equal values; NaN is equal to itself."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return repr(a) == repr(b)


def _rows_of(rows: Any) -> _Streamed:
    """A stream of single rows, beside the one that is given."""
    return _Streamed(copy.deepcopy(rows))


def _check_exact(rows: Any) -> None:
    """Raises `MeshdslError` unless a stream that goes to a saved position reads what the first one read from there.

    It is tried: which stages save their position exactly, no list of classes could tell. Datasets that are interleaved
    or concatenated are tried alone as well, because the whole stream may reach them only after many rows; and a buffer
    is exact until it was full once.
    """
    whole = getattr(rows, "_ex_iterable", None)
    stages = [stage for stage, _ in _stages(whole)]
    largest = max((getattr(stage, "buffer_size", 0) for stage in [whole, *stages]), default=0)
    for part in [rows, *(type(rows)(ex_iterable=stage) for stage, joined in _stages(whole) if joined)]:
        first = 0
        ahead = _rows_of(part)
        for position in (1, 12, 48, *([largest + 60] if largest > 1 else [])):
            for _ in range(position - first):
                next(ahead)
            first = position + 8
            behind, state = _rows_of(part), json.loads(json.dumps(ahead.get_state()))
            behind.set_state(state)
            for n in range(8):
                expected, found = next(ahead), next(behind)
                if not _equal(expected, found):
                    raise md.MeshdslError(
                        f"the stream does not continue where it was: row {position + n} differs after its position at "
                        f"row {position} is restored, so no run could resume exactly\n"
                        "  it has a shuffle buffer, whose content is not saved, perhaps in one of several datasets, or "
                        "a map that draws random numbers\n"
                        "  shuffle the files instead, or load the data without streaming=True"
                    )


class _Streamed:
    """A stream of batches that begins again after its end."""

    def __init__(self, batches: Any):
        self.batches, self.epoch = batches, 0
        self.items: Iterator[Batch] = iter(batches)

    def __next__(self) -> Batch:
        batch = next(self.items, None)
        if batch is None:
            self.epoch += 1
            self.batches.set_epoch(self.epoch)
            self.items = iter(self.batches)
            batch = next(self.items, None)
        if batch is None:
            raise md.MeshdslError("the stream has fewer rows than a batch")
        return batch

    def get_state(self) -> Any:
        return {"epoch": self.epoch, "stream": self.batches.state_dict()}

    def set_state(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self.batches.set_epoch(self.epoch)
        self.batches.load_state_dict(state["stream"])
        self.items = iter(self.batches)
