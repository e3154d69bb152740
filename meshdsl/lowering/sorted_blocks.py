"""The local steps of a sort along a sharded dim. Only lowering creates them, around exchanges of full or half blocks.

Each operation takes and returns a run of elements as one value, or as two: the elements and their global indices. With
indices, runs are sorted by element (NaN last), then by index, so the sort is stable. Padding has the value that sorts
last and indices beyond all elements, so it also sorts after real elements of that value. Without indices, equal
elements are interchangeable: -0 with 0, any NaN with any other, and padding with real elements of its value.
"""

# pyright: standard
# (kernels work on arrays of NumPy or JAX, as those in ops do)

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backend import Local
from ..dims import Dim
from ..ir import Fuses, Labels, Op, Type
from ..ops.index_map import replaced

__all__ = ["BEGIN_SORT", "COLLECT", "DEAL", "JOIN_HALVES", "KEEP_PART", "last"]


def last(dtype: np.dtype) -> Any:
    """The value that sorts last in a dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(np.nan, np.nan)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    return True if dtype == np.dtype(bool) else jnp.iinfo(dtype).max


def _label(types: tuple[Type, ...], old: Dim, label: str) -> tuple[dict[str, str | None], ...]:
    return tuple({d.name: label if d == old else d.name for d in t.dims} for t in types)


def _begin(c: Local, x: Any, *, over: Dim, run: Dim, place: Any) -> Any:
    """Sort the block, with all padding last: the dim's padding, and padding up to the run's stored size."""
    axis = c.ins[0].position(over)
    position = c.positions(c.ins[0], over)
    fill = c.xp.asarray(last(x.dtype), x.dtype)
    x = c.xp.where(position < over.size, x, fill)
    more = c.outs[0].size(run) - x.shape[axis]
    pads = [(0, more if i == axis else 0) for i in range(x.ndim)]
    x = c.xp.pad(x, pads, constant_values=last(x.dtype)) if more else x
    if place is None:
        return (c.xp.sort_by((x,), axis)[0],)
    position = c.xp.broadcast_to(position.astype(place), c.ins[0].sizes)
    position = c.xp.pad(position, pads, constant_values=run.size - 1) if more else position
    return c.xp.sort_by((x, position), axis)


def _begin_type(x: Type, *, over: Dim, run: Dim, place: Any) -> tuple[Type, ...]:
    shape = replaced(x.dims, over, run)
    return (Type(shape, x.dtype),) if place is None else (Type(shape, x.dtype), Type(shape, place))


BEGIN_SORT = Op(
    "begin_sort",
    type=_begin_type,
    kernel=_begin,
    rule=lambda x, *, over, run, place: Labels(
        _label((x,), over, run.name), _label(_begin_type(x, over=over, run=run, place=place), run, run.name)
    ),
    inside_blocks=True,
)


def _keep(c: Local, *items: Any, run: Dim, part: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """Merge this device's run with its partner's; keep the lower half (part -1) or the upper half (1).

    A device without a partner (part 0) keeps its run.
    """
    n = len(items) // 2
    own, partner = items[:n], items[n:]
    axis = c.ins[0].position(run)
    size = own[0].shape[axis]
    sorted_items = c.xp.sort_by(tuple(c.xp.concatenate([a, b], axis) for a, b in zip(own, partner, strict=True)), axis)
    side = c.xp.asarray(np.array(part, np.int32))[c.index(axes)]
    lower, upper = ((slice(None),) * axis + (half,) for half in (slice(0, size), slice(size, None)))
    halves = (c.xp.where(side < 0, b[lower], b[upper]) for b in sorted_items)
    return tuple(c.xp.where(side == 0, a, b) if 0 in part else b for a, b in zip(own, halves, strict=True))


KEEP_PART = Op(
    "keep_part",
    type=lambda *items, run, part, axes: items[: len(items) // 2],
    kernel=_keep,
    fuses=Fuses.PICK,
    inside_blocks=True,
)


def _deal(c: Local, *items: Any, run: Dim, to: Dim, rest: Dim, cyclic: bool) -> Any:
    """Split the block into one equal part per device: every n-th element if `cyclic`, else contiguous elements."""
    axis = c.ins[0].position(run)
    parts = []
    for x in items:
        length = x.shape[axis] // to.size
        cut = (length, to.size) if cyclic else (to.size, length)
        x = c.xp.reshape(x, (*x.shape[:axis], *cut, *x.shape[axis + 1 :]))
        parts.append(c.xp.swapaxes(x, axis, axis + 1) if cyclic else x)
    return tuple(parts)


def _dealt(x: Type, run: Dim, to: Dim, rest: Dim) -> Type:
    axis = x.dims.index(run)
    return Type((*x.dims[:axis], to, rest, *x.dims[axis + 1 :]), x.dtype)


DEAL = Op(
    "deal",
    type=lambda *items, run, to, rest, cyclic: tuple(_dealt(x, run, to, rest) for x in items),
    kernel=_deal,
    flops=lambda *_, **__: 0,
    rule=lambda *items, run, to, rest, cyclic: Labels(
        _label(items, run, run.name),
        tuple(
            {d.name: None if d == to else run.name if d == rest else d.name for d in _dealt(x, run, to, rest).dims}
            for x in items
        ),
    ),
    inside_blocks=True,
)


def _collect(c: Local, *items: Any, run: Dim, to: Dim, rest: Dim) -> Any:
    """Sort the received parts into one block."""
    axis = c.ins[0].position(to)
    length = items[0].shape[axis] * items[0].shape[axis + 1]
    return c.xp.sort_by(tuple(x.reshape((*x.shape[:axis], length, *x.shape[axis + 2 :])) for x in items), axis)


def _collected(x: Type, run: Dim, to: Dim, rest: Dim) -> Type:
    return Type(tuple(run if d == to else d for d in x.dims if d != rest), x.dtype)


COLLECT = Op(
    "collect",
    type=lambda *items, run, to, rest: tuple(_collected(x, run, to, rest) for x in items),
    kernel=_collect,
    rule=lambda *items, run, to, rest: Labels(
        tuple({d.name: run.name if d == to else None if d == rest else d.name for d in x.dims} for x in items),
        _label(tuple(_collected(x, run, to, rest) for x in items), run, run.name),
    ),
    inside_blocks=True,
)


def _join(c: Local, *items: Any, run: Dim, half: Dim, axes: tuple[str, ...]) -> Any:
    """Merge each half of this device's block with the adjacent half of the neighbour's block; keep this device's part.

    The first half of the first block and the second half of the last have no neighbour and stay as they are.
    """
    n = len(items) // 3
    own, before, after = items[:n], items[n : 2 * n], items[2 * n :]
    axis, index, count = c.ins[0].position(run), c.index(axes), c.count(axes)
    size = before[0].shape[axis]

    def cut(x: Any, start: int, stop: int | None) -> Any:
        return x[(slice(None),) * axis + (slice(start, stop),)]

    def merged(xs: Any, ys: Any, upper: bool) -> Any:
        sorted_items = c.xp.sort_by(tuple(c.xp.concatenate([x, y], axis) for x, y in zip(xs, ys, strict=True)), axis)
        return [cut(x, size, None) if upper else cut(x, 0, size) for x in sorted_items]

    tops, bottoms = [cut(x, 0, size) for x in own], [cut(x, size, None) for x in own]
    halves = []
    for old, new, edge in ((tops, merged(before, tops, True), 0), (bottoms, merged(bottoms, after, False), count - 1)):
        halves.append([c.xp.where(index == edge, x, y) for x, y in zip(old, new, strict=True)])
    return tuple(c.xp.concatenate([x, y], axis) for x, y in zip(*halves, strict=True))


JOIN_HALVES = Op(
    "join_halves",
    type=lambda *items, run, half, axes: items[: len(items) // 3],
    kernel=_join,
    rule=lambda *items, run, half, axes: Labels(
        tuple({d.name: run.name if d in (run, half) else d.name for d in x.dims} for x in items),
        _label(items[: len(items) // 3], run, run.name),
    ),
    inside_blocks=True,
)
