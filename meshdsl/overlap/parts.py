"""Operations of a program in parts: cut a part from each device's block, join the parts or add them, count slots.

Each part of the tokens fills consecutive slots of an expert. The operation `USED` counts the slots that this part and
the earlier ones fill, and `PLACED` gives the tokens of this part the slots that follow those of the earlier ones.

A reshape that merges or splits dims keeps a cut along the outer one. If a device stores a single element of the outer
dim, its block is cut along the next dim: along the sequences, where a device has one group of several.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Eqn, Fuses, Linear, Op, Type, Var, no_flops
from ..layouts import Mesh
from ..ops.reshape import RESHAPE, groups


@dataclass(frozen=True)
class Cut:
    """The cut of a value into parts: its name of the dim, and the number of chunks that each have parts."""

    dim: str
    chunks: int


def resized(shape: Shape, dim: str, factor: float) -> Shape:
    """The shape with one dim `factor` times as large."""
    return tuple(Dim(d.name, round(d.size * factor)) if d.name == dim else d for d in shape)


def _part(c: Local, x: Any, *, dim: str, index: int, parts: int, chunks: int) -> Any:
    axis = c.ins[0].position(dim)
    sizes = x.shape
    each = sizes[axis] // (parts * chunks)
    x = c.xp.reshape(x, (*sizes[:axis], chunks, parts, each, *sizes[axis + 1 :]))
    x = x[(slice(None),) * (axis + 1) + (index,)]
    return c.xp.reshape(x, (*sizes[:axis], chunks * each, *sizes[axis + 1 :]))


def _join(c: Local, *xs: Any, dim: str, chunks: int) -> Any:
    axis = c.ins[0].position(dim)
    sizes = xs[0].shape
    each = sizes[axis] // chunks
    rows = [c.xp.reshape(x, (*sizes[:axis], chunks, 1, each, *sizes[axis + 1 :])) for x in xs]
    return c.xp.reshape(c.xp.concatenate(rows, axis + 1), (*sizes[:axis], len(xs) * sizes[axis], *sizes[axis + 1 :]))


PART = Op(
    "part",
    type=lambda x, *, dim, index, parts, chunks: Type(resized(x.dims, dim, 1 / parts), x.dtype),
    kernel=_part,
    flops=no_flops,
    linear=Linear.JOINT,
    fuses=Fuses.PICK,
)
JOIN_PARTS = Op(
    "join_parts",
    type=lambda *xs, dim, chunks: Type(resized(xs[0].dims, dim, len(xs)), xs[0].dtype),
    kernel=_join,
    flops=no_flops,
    linear=Linear.JOINT,
    fuses=Fuses.MAP,
)
SUM_PARTS = Op(
    "sum_parts",
    type=lambda *xs: xs[0],
    kernel=lambda c, *xs: reduce(lambda a, b: a + b, xs),
    linear=Linear.JOINT,
    fuses=Fuses.MAP,
)
FILLED_PART = Op(  # of the first x slots of a block: how many are among the `size` slots from `start`
    "filled_part",
    type=lambda x, *, start, size: x,
    kernel=lambda c, x, *, start, size: c.xp.clip(x - start, 0, size).astype(x.dtype),
    flops=no_flops,
    fuses=Fuses.MAP,
)


def _carried(c: Local, x: Any, before: Any, *, dim: Dim) -> Any:
    axis = c.ins[0].position(dim)
    last = before[(slice(None),) * axis + (slice(before.shape[axis] - 1, None),)]
    return c.xp.cumsum(x, axis).astype(x.dtype) + last


CARRIED = Op(  # the running sum of a part, given that of the part before it
    "carried_cumsum", type=lambda x, before, *, dim: x, kernel=_carried, blocked=lambda x, before, *, dim: (dim.name,)
)


def _chosen_cells(c: Local, i: Any, axis: int, into: Shape) -> Any:
    """One along a last axis at the cell (all dims of `into` but the last) of each index; zeros for one out of range."""
    cells, slots = math.prod(d.size for d in into[:-1]), into[-1].size
    cell = c.xp.where((i >= 0) & (i < cells * slots), i // slots, cells)
    return (c.xp.expand_dims(cell, -1) == np.arange(cells, dtype=np.int32)).astype(np.int32)


def _counted(c: Local, xs: Sequence[Any], over: Dim, into: Shape) -> tuple[list[Any], Any, int]:
    """Per tensor of indices the ones of `_chosen_cells`; the slots used before, and the axis of `over` in both."""
    axis = c.ins[0].position(over)
    indices = [x for x, block in zip(xs, c.ins, strict=True) if over in block.dims]
    ones = [_chosen_cells(c, i, axis, into) for i in indices]
    sizes = (*ones[0].shape[:axis], 1, *ones[0].shape[axis + 1 :])
    before = c.xp.zeros(sizes, np.int32) if len(indices) == len(xs) else xs[-1].reshape(sizes)
    return ones, before, axis


def _plus(c: Local, ones: Sequence[Any], before: Any, axis: int) -> Any:
    """The counts before plus those of the ones."""
    return reduce(lambda total, one: total + c.xp.expand_dims(c.xp.sum(one, axis=axis), axis), ones, before)


def _used(c: Local, *xs: Any, over: Dim, into: Shape) -> Any:
    ones, before, axis = _counted(c, xs, over, into)
    total = _plus(c, ones, before, axis)
    return total.astype(np.int32).reshape(c.outs[0].sizes)


def _placed(c: Local, *xs: Any, over: Dim, into: Shape, which: int) -> Any:
    ones, before, axis = _counted(c, xs, over, into)
    start = _plus(c, ones[:which], before, axis)
    place = c.xp.sum(c.xp.where(ones[which] > 0, start + c.xp.cumsum(ones[which], axis) - 1, 0), axis=-1)
    i, slots, total = xs[which], into[-1].size, math.prod(d.size for d in into)
    return c.xp.where((i >= 0) & (i < total), i // slots * slots + place, i).astype(np.int32)


def _used_type(*xs: Type, over: Dim, into: Shape) -> Type:
    return Type((*(d for d in xs[0].dims if d != over), *into[:-1]), np.dtype(np.int32))


USED = Op("used_slots", type=_used_type, kernel=_used, blocked=lambda *xs, over, into: (over.name, *_names(into)))
PLACED = Op(
    "placed_slots",
    type=lambda *xs, over, into, which: xs[which],
    kernel=_placed,
    blocked=lambda *xs, over, into, which: (over.name, *_names(into)),
)


def _run(c: Local, *used: Any, run: Dim) -> Any:
    *before, now = used
    first = before[0] if before else c.xp.zeros(now.shape, now.dtype)
    return c.xp.stack([first, now - first], -1)


RUN = Op(  # the first slot that a part fills and how many it fills, from the used slots before it and after it
    "run_of_slots",
    type=lambda *used, run: Type((*used[-1].dims, run), used[-1].dtype),
    kernel=_run,
    flops=no_flops,
    fuses=Fuses.MAP,
)


def _names(shape: Shape) -> tuple[str, ...]:
    return tuple(d.name for d in shape)


def inner_cut(eqn: Eqn, dim: str, mesh: Mesh) -> str | None:
    """The dim of a reshape's result along which a device's block is cut if that of the operand is cut along `dim`.

    Only for reshapes whose outer dim, before or after, has one element per device; None for another equation.
    """
    if eqn.op is not RESHAPE or not all(d.size for d in eqn.ins[0].dims):
        return None
    x, y = eqn.ins[0], eqn.outs[0]

    def local(v: Var, of: Shape) -> list[Dim]:
        """The dims of which a device has more than one element."""
        return [d for d in of if d.size > mesh.count(v.sharding.axes(d))]

    for left, right in groups(x.dims, y.dims):
        if dim not in [d.name for d in left] or left == right:
            continue
        inner = local(x, left), local(y, right)
        if not all(inner) or inner[0][0].name != dim:
            return None
        outer_moved = inner[0][0] != left[0] or inner[1][0] != right[0]
        return inner[1][0].name if outer_moved else None
    return None
