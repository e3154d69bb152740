"""A table with a row for each layout, and columns in which rows share few values.

A row is a choice of axes for each dim that has been needed so far. When a dim is needed, every row becomes one row for
each of its options; rows of illegal layouts are dropped. A column made earlier follows when it is next looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ..layouts.sharding import Axes
from .space import Space

__all__ = ["Column", "Table"]

T = TypeVar("T")
U = TypeVar("U")
DENSE = 4_000_000  # combinations that are numbered through a table instead of by sorting


class Column(Generic[T]):
    """`values[ids[i]]` for row i."""

    def __init__(self, table: Table, values: Sequence[T], ids: np.ndarray):
        self.table, self.values, self.epoch = table, values, len(table.changes)
        self._ids = ids

    @property
    def ids(self) -> np.ndarray:
        """The number of each row's value."""
        for change in self.table.changes[self.epoch :]:
            self._ids = self._ids[change]
        self.epoch = len(self.table.changes)
        return self._ids

    def to(self, f: Callable[[T], U]) -> Column[U]:
        """Another value for each; `f` is called once for each of the values."""
        values, numbers = _distinct([f(value) for value in self.values])
        return Column(self.table, values, numbers[self.ids])

    def array(self, f: Callable[[T], float], dtype: Any = np.float64) -> np.ndarray:
        """A number for each row."""
        return np.array([f(value) for value in self.values], dtype)[self.ids]

    def merged(self, rows: np.ndarray, other: Column[U]) -> Column[T | U]:
        """This column, with the rows given replaced by those of a column of a subset."""
        values, numbers = _distinct([*self.values, *other.values])
        ids = numbers[self.ids]
        ids[rows] = numbers[other.ids + len(self.values)]
        return Column(self.table, values, ids)


class Table:
    """The rows, as far as dims have been needed."""

    def __init__(self, space: Space):
        self.space = space
        self.dims: list[str] = []
        self.rows = np.zeros((1, 0), np.int16)
        self.changes: list[np.ndarray] = []  # for each change of the rows: where each came from
        self.bad = np.zeros(1, bool)  # illegal, and dropped before the next class is formed
        self.frozen = False
        self._cuts: dict[tuple[str, ...], Column[tuple[Axes, ...]]] = {}

    @property
    def size(self) -> int:
        """The number of rows, those about to be dropped included."""
        return len(self.rows)

    def constant(self, value: T) -> Column[T]:
        """The same value in every row."""
        return Column(self, [value], np.zeros(self.size, np.int32))

    def subset(self, rows: np.ndarray) -> Table:
        """Some of the rows, as a table whose rows stay as they are."""
        part = Table(self.space)
        part.dims, part.rows, part.bad, part.frozen = self.dims, self.rows[rows], self.bad[rows], True
        return part

    def take(self, column: Column[T], rows: np.ndarray) -> Column[T]:
        """The column of a larger table for these of its rows, which are all of this table's."""
        return Column(self, column.values, column.ids[rows])

    def need(self, names: Iterable[str]) -> None:
        """Have a column for every one of these dims that the space chooses for."""
        for d in (d for d in self.space.dims if d in set(names) and d not in self.dims):
            assert not self.frozen, f"a loop met {d} only when it was built again"
            self.sweep()
            at, option = self.space.extended(self.rows, self.dims, d)
            self.dims.append(d)
            self._change(at, np.concatenate([self.rows[at], option[:, None].astype(np.int16)], axis=1))
        self.sweep()

    def drop(self, column: Column[T], gone: Callable[[T], bool]) -> None:
        """Drop the rows of some values, before the next class is formed."""
        bad = np.array([gone(value) for value in column.values], bool)
        if bad.any():
            self.bad |= bad[column.ids]

    def sweep(self) -> None:
        """Drop what is to be dropped."""
        if not self.frozen and self.bad.any():
            kept = np.flatnonzero(~self.bad)
            self._change(kept, self.rows[kept])

    def _change(self, came_from: np.ndarray, rows: np.ndarray) -> None:
        self.changes.append(came_from)
        self.rows, self.bad = rows, np.zeros(len(rows), bool)

    def cuts(self, dims: tuple[str, ...]) -> Column[tuple[Axes, ...]]:
        """The axes of these dims."""
        if dims not in self._cuts:
            ids, count = np.zeros(self.size, np.int64), 1
            values: list[tuple[Axes, ...]] = [()]
            for d in dims:
                options = self.space.options[self.space.dims.index(d)]
                ids = ids * len(options) + self.rows[:, self.dims.index(d)]
                values = [(*value, cut) for value in values for cut in options]
                count *= len(options)
            self._cuts[dims] = Column(self, values, ids)
        return self._cuts[dims]

    def map(self, f: Callable[..., U], *columns: Column[Any]) -> Column[U]:
        """`f` of the values of a row, called once for each combination that there is."""
        ids, first = self.group(list(columns))
        picks = [[c.values[i] for i in c.ids[first]] for c in columns]
        values, numbers = _distinct([f(*given) for given in zip(*picks, strict=True)])
        return Column(self, values, numbers[ids])

    def group(self, columns: Sequence[Column[Any]]) -> tuple[np.ndarray, np.ndarray]:
        """The number of each row's combination of values, and a row for each combination."""
        ids, count = np.zeros(self.size, np.int64), 1
        for column in columns:
            n = len(column.values)
            if n > 1:
                ids, count = ids * n + column.ids, count * n
                if count > DENSE:
                    ids, count = _numbered(ids, count)
        ids, count = _numbered(ids, count)
        first = np.zeros(count, np.int64)
        first[ids[::-1]] = np.arange(self.size - 1, -1, -1)
        return ids, first

    def all_equal(self, left: Sequence[Column[Any]], right: Sequence[Column[Any]]) -> np.ndarray:
        """The rows in which two lists of columns hold the same, as a mask."""
        same = np.ones(self.size, bool)
        for a, b in zip(left, right, strict=True):
            same &= self.map(lambda x, y: x == y, a, b).array(bool, bool)
        return same

    def where(self, columns: Sequence[Column[Any]], holds: Callable[[Any], bool]) -> np.ndarray:
        """The rows in which something holds of any of the columns."""
        found = np.zeros(self.size, bool)
        for column in columns:
            found |= column.array(holds, bool)
        return np.flatnonzero(found)


def _distinct(values: Sequence[T]) -> tuple[list[T], np.ndarray]:
    """The values, each once, and the number of each of those given."""
    number: dict[T, int] = {}
    numbers = [number.setdefault(value, len(number)) for value in values]
    return list(number), np.array(numbers, np.int32)


def _numbered(ids: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """The same classes with numbers in a row from 0."""
    if count > DENSE:
        there, ids = np.unique(ids, return_inverse=True)
        return ids.astype(np.int64), len(there)
    used = np.zeros(count, bool)
    used[ids] = True
    numbers = np.cumsum(used) - 1
    return numbers[ids], int(numbers[-1]) + 1
