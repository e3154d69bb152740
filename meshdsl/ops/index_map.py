"""`IndexMap`: which elements an operation moves along one dim, as data.

Lowering reads it to exchange elements between devices, so slice, pad, roll, reverse and concat along a sharded dim need
no rules of their own. `ROWS` and `PLACE` are the local steps before and after such an exchange; only lowering creates
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Fuses, Labels, Linear, Op, Type, named


@dataclass(frozen=True)
class Piece:
    """Copy `count` elements, from `start, start + step, ...` of an operand to `to, to + to_step, ...` of the result."""

    operand: int
    start: int
    to: int
    count: int
    step: int = 1
    to_step: int = 1


@dataclass(frozen=True)
class IndexMap:
    """The source of every element of the result along one dim. Elements that no piece writes equal `fill`.

    `dims` has one dim per operand, `out` is the result's dim. No two pieces write the same element. Nothing reads the
    elements in the ranges `unread`, so these may have any value.
    """

    dims: tuple[Dim, ...]
    out: Dim
    pieces: tuple[Piece, ...]
    fill: Any = 0
    unread: tuple[tuple[int, int], ...] = ()  # first element, and the one after the last

    def sources(self) -> tuple[np.ndarray, np.ndarray]:
        """For each element of the result, its operand and its index in the operand; -1 in both for `fill`."""
        operand = np.full(self.out.size, -1, np.int64)
        index = np.full(self.out.size, -1, np.int64)
        for piece in self.pieces:
            t = np.arange(piece.count)
            operand[piece.to + t * piece.to_step] = piece.operand
            index[piece.to + t * piece.to_step] = piece.start + t * piece.step
        return operand, index


def replaced(shape: Shape, old: Dim, new: Dim) -> Shape:
    """The shape with the dim `old` replaced by `new`."""
    return tuple(new if d == old else d for d in shape)


def _rows_kernel(c: Local, x: Any, *, dim: Dim, rows: Dim, starts: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    axis, size = c.ins[0].position(dim), c.outs[0].size(rows)
    if len(set(starts)) == 1:
        return x[(slice(None),) * axis + (slice(starts[0], starts[0] + size),)]
    start = c.xp.asarray(np.array(starts, np.int32))[c.index(axes)]
    return c.xp.dynamic_slice(x, start, size, axis)


def one_label(olds: Sequence[Dim], ins: Sequence[Type], new: Dim, results: int = 1) -> Labels:
    """Labels that shard the dims `olds` of operands like `new`, which the results have; others keep their names."""
    names: list[dict[str, str | None]] = [
        {d.name: new.name if d == old else d.name for d in t.dims} for t, old in zip(ins, olds, strict=True)
    ]
    return Labels(tuple(names), (named(replaced(ins[0].dims, olds[0], new)),) * results)


ROWS = Op(
    "rows",
    type=lambda x, *, dim, rows, starts, axes: Type(replaced(x.dims, dim, rows), x.dtype),
    kernel=_rows_kernel,
    flops=lambda *_, **__: 0,
    linear=Linear.JOINT,
    rule=lambda x, *, dim, rows, starts, axes: one_label((dim,), (x,), rows),
    fuses=Fuses.PICK,
    inside_blocks=True,
)


@dataclass(frozen=True)
class PlaceTable:
    """For each device, the buffer row of each stored element of its block of the result; -1 means the fill value."""

    rows: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"table[{len(self.rows)},{len(self.rows[0])}]"


def _place_kernel(c: Local, *xs: Any, dims: Any, whole: Any, out: Dim, table: PlaceTable, fill: Any, axes: Any) -> Any:
    axis = c.ins[0].position(dims[0])
    parts: list[Any] = list(xs)
    buffer = c.xp.concatenate(parts, axis) if len(parts) > 1 else parts[0]
    if not buffer.shape[axis]:  # the buffer is empty, so all elements are fill
        return c.xp.full(c.outs[0].sizes, fill, buffer.dtype)
    rows = np.array(table.rows, np.int64)
    if not rows.shape[1]:
        return c.xp.zeros(c.outs[0].sizes, buffer.dtype)
    shift = shift_of(rows, buffer.shape[axis])
    if shift is None:
        return _picked(c, buffer, axis, rows, fill, axes)
    own = c.index(axes)
    if (shift.low, shift.high, shift.dilation) != (0, 0, 1):
        buffer = c.xp.window_slice(buffer, axis, 0, (1, 1, 1, shift.dilation, shift.low, shift.high), fill)
    length = (rows.shape[1] - 1) * shift.step + 1
    starts = shift.starts + shift.low
    if (starts == starts[0]).all():
        values = buffer[(slice(None),) * axis + (slice(int(starts[0]), int(starts[0]) + length, shift.step),)]
    else:
        values = c.xp.dynamic_slice(buffer, c.xp.asarray(starts.astype(np.int32))[own], length, axis)
        values = values[(slice(None),) * axis + (slice(None, None, shift.step),)]
    if shift.filled:
        return values
    first, last = (c.xp.asarray(ends.astype(np.int32))[own] for ends in _ends(rows))
    return c.xp.keep(values, axis, first, last, fill)


def _picked(c: Local, buffer: Any, axis: int, rows: np.ndarray, fill: Any, axes: tuple[str, ...]) -> Any:
    """Any row of the buffer for each element."""
    rows = rows.astype(np.int32)
    own_rows = c.xp.asarray(rows)[c.index(axes)]
    values = c.xp.take(buffer, c.xp.maximum(own_rows, 0), axis=axis)
    if (rows >= 0).all():
        return values
    valid = c.xp.asarray(rows >= 0)[c.index(axes)].reshape((-1,) + (1,) * (values.ndim - axis - 1))
    return c.xp.where(valid, values, c.xp.asarray(fill, values.dtype))


@dataclass(frozen=True)
class Shift:
    """The rows that a device reads, where they are evenly spaced in what it has: one slice, with this step.

    `lax.pad` first writes `dilation - 1` elements of the fill value between the rows, `low` before and `high` after.
    """

    starts: np.ndarray  # each device's first position; negative before the buffer
    step: int
    dilation: int
    low: int  # fills before the first row
    high: int
    filled: bool  # every element without a row is a fill already

    def rows(self, width: int, length: int) -> np.ndarray:
        """The row that each device reads for each element; -1 for a fill."""
        read = self.starts[:, None] + np.arange(width) * self.step
        real = (read >= 0) & (read < (length - 1) * self.dilation + 1) & (read % self.dilation == 0)
        return np.where(real, read // self.dilation, -1)


def shift_of(rows: np.ndarray, length: int, unread: np.ndarray | None = None) -> Shift | None:
    """The slices of a table of rows, -1 for fill; None if rows are not evenly spaced, equally on all devices.

    Elements that are `unread` may have any row.
    """
    width, at = rows.shape[1], np.arange(rows.shape[1])
    free = np.zeros(rows.shape, bool) if unread is None else unread
    valid = (rows >= 0) & ~free
    count, device = valid.sum(1), np.arange(len(rows))
    step = dilation = 1
    if count.max(initial=0) > 1:  # read the spacing off a device with several rows
        k = int(count.argmax())
        (row, place), spaces = (x[valid[k]][[0, -1]] for x in (rows[k], at)), int(count[k]) - 1
        step, dilation = (max(int(x[1] - x[0]) // spaces, 1) for x in (row, place))
        if 1 not in (step, dilation):
            return None
    offsets = rows * dilation - at * step
    starts = offsets[device, valid.argmax(1)]
    if (valid & (offsets != starts[:, None])).any():
        return None
    starts = np.where(count > 0, starts, starts[count > 0].min() if count.any() else 0)
    low = max(0, -int(starts.min()))
    high = max(0, int(starts.max()) + (width - 1) * step - (length - 1) * dilation)
    if low + high > width * step:
        return None
    shift = Shift(starts, step, dilation, low, high, False)
    other = (shift.rows(width, length) >= 0) & ~valid & ~free  # fill, though the slice has a row there
    first, last = _ends(np.where(valid, rows, -1))
    if (other & (at >= first[:, None]) & (at < last[:, None])).any():
        return None
    return replace(shift, filled=not other.any())


def _ends(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each device, the first element with a row, and the one after the last; 0 and 0 if there is none."""
    valid = rows >= 0
    some = valid.any(1)
    return np.where(some, valid.argmax(1), 0), np.where(some, rows.shape[1] - valid[:, ::-1].argmax(1), 0)


def _place_rule(xs: Sequence[Type], dims: Sequence[Dim], whole: Sequence[bool], out: Dim) -> Labels:
    labels = one_label(dims, xs, out)
    ins = [
        {d: None if all_here and d == dim.name else label for d, label in names.items()}
        for names, dim, all_here in zip(labels.ins, dims, whole, strict=True)
    ]
    return Labels(tuple(ins), labels.outs)


PLACE = Op(
    "place",
    type=lambda *xs, dims, whole, out, table, fill, axes: Type(replaced(xs[0].dims, dims[0], out), xs[0].dtype),
    kernel=_place_kernel,
    flops=lambda *_, **__: 0,
    linear=Linear.JOINT,
    rule=lambda *xs, dims, whole, out, table, fill, axes: _place_rule(xs, dims, whole, out),
    inside_blocks=True,
)
