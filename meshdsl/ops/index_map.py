"""`IndexMap`: which elements an operation moves along one dim, as data.

Lowering reads it to exchange elements between devices, so slice, pad, roll, reverse and concat along a sharded dim need
no rules of their own. `ROWS` and `PLACE` are the local steps before and after such an exchange; only lowering creates
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Fuses, Labels, Linear, Op, Type

__all__ = ["PLACE", "ROWS", "IndexMap", "Piece", "PlaceTable", "one_label", "replaced"]


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

    `dims` has one dim per operand, `out` is the result's dim. No two pieces write the same element.
    """

    dims: tuple[Dim, ...]
    out: Dim
    pieces: tuple[Piece, ...]
    fill: Any = 0

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


def one_label(olds: Sequence[Dim], ins: Sequence[Type], new: Dim, out: Shape) -> Labels:
    """Labels that shard the dims `olds` and `new` alike; other dims keep their names as labels."""
    names: list[dict[str, str | None]] = [
        {d.name: new.name if d == old else d.name for d in t.shape} for t, old in zip(ins, olds, strict=True)
    ]
    return Labels(tuple(names), ({d.name: d.name for d in out},))


ROWS = Op(
    "rows",
    type=lambda x, *, dim, rows, starts, axes: Type(replaced(x.shape, dim, rows), x.dtype),
    kernel=_rows_kernel,
    flops=lambda *_, **__: 0,
    linear=Linear.JOINT,
    rule=lambda x, *, dim, rows, starts, axes: one_label((dim,), (x,), rows, replaced(x.shape, dim, rows)),
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
    rows = np.array(table.rows, np.int32)
    span = _span(rows, buffer.shape[axis])
    if span is not None:  # all devices read the same evenly spaced rows
        values = buffer[(slice(None),) * axis + (span,)]
    else:
        own_rows = c.xp.asarray(rows)[c.index(axes)]
        values = c.xp.take(buffer, c.xp.maximum(own_rows, 0), axis=axis)
    if (rows >= 0).all():
        return values
    valid = c.xp.asarray(rows >= 0)[c.index(axes)].reshape((-1,) + (1,) * (values.ndim - axis - 1))
    return c.xp.where(valid, values, c.xp.asarray(fill, values.dtype))


def _span(rows: np.ndarray, length: int) -> slice | None:
    """The rows as one slice, if all devices read each element from the same row and the rows are evenly spaced."""
    width = rows.shape[1]
    if width == 0:
        return slice(0, 0)
    common = rows.max(axis=0)
    if ((rows != common) & (rows >= 0)).any():
        return None
    valid = np.flatnonzero(common >= 0)
    if not len(valid):
        return slice(0, width) if width <= length else None
    step = 1
    if len(valid) > 1:
        step = int((common[valid[-1]] - common[valid[0]]) // (valid[-1] - valid[0]))
    first = int(common[valid[0]] - valid[0] * step)
    if step < 1 or first < 0 or first + (width - 1) * step >= length or (common[valid] != first + valid * step).any():
        return None
    return slice(first, first + (width - 1) * step + 1, step)


def _place_rule(xs: Sequence[Type], dims: Sequence[Dim], whole: Sequence[bool], out: Dim) -> Labels:
    labels = one_label(dims, xs, out, replaced(xs[0].shape, dims[0], out))
    ins = [
        {d: None if all_here and d == dim.name else label for d, label in names.items()}
        for names, dim, all_here in zip(labels.ins, dims, whole, strict=True)
    ]
    return Labels(tuple(ins), labels.outs)


PLACE = Op(
    "place",
    type=lambda *xs, dims, whole, out, table, fill, axes: Type(replaced(xs[0].shape, dims[0], out), xs[0].dtype),
    kernel=_place_kernel,
    flops=lambda *_, **__: 0,
    linear=Linear.JOINT,
    rule=lambda *xs, dims, whole, out, table, fill, axes: _place_rule(xs, dims, whole, out),
    inside_blocks=True,
)
