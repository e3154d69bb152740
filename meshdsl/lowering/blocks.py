"""The local steps of operations along a sharded dim. Only lowering creates them, before and after an exchange.

Each step works on one device's block. A dim named `X__parts` has one element per block of the dim X.
"""

# pyright: standard
# (kernels work on arrays of NumPy or JAX, as those in ops do)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Eqn, Fuses, Labels, Linear, Op, Type, named
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..ops.index_map import one_label, replaced
from ..ops.ordering import block_edges, ranked, running
from ..trace import number

BLOCK_CUMSUM = Op(
    "block_cumsum",
    type=lambda x, *, dim, reverse: x,
    kernel=lambda c, x, *, dim, reverse: running(c, x, c.ins[0].position(dim), reverse),
    linear=Linear.JOINT,
    inside_blocks=True,
)
BLOCK_TOTAL = Op(
    "block_total",
    type=lambda x, *, dim, parts, reverse: Type(replaced(x.dims, dim, parts), x.dtype),
    kernel=lambda c, x, *, dim, parts, reverse: block_edges(c, [x], dim, reverse)[0],
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    rule=lambda x, *, dim, parts, reverse: one_label((dim,), (x,), parts),
    fuses=Fuses.REDUCE,
    inside_blocks=True,
)


def _block_prod_shape(x: Type, over: Shape, parts: tuple[tuple[Dim, Dim], ...]) -> Shape:
    out_dims = dict(parts)
    return tuple(out_dims.get(d, d) for d in x.dims if d in out_dims or d not in over)


def _block_prod(c: Local, x: Any, *, over: Shape, parts: Any) -> Any:
    axis = tuple(c.ins[0].position(d) for d in over)
    return c.xp.prod(x, axis=axis).astype(x.dtype).reshape(c.outs[0].sizes)


BLOCK_PROD = Op(
    "block_prod",
    type=lambda x, *, over, parts: Type(_block_prod_shape(x, over, parts), x.dtype),
    kernel=_block_prod,
    flops=lambda ins, outs, **_: float(math.prod(ins[0])),
    rule=lambda x, *, over, parts: Labels(
        ({d.name: dict(parts)[d].name if d in dict(parts) else None if d in over else d.name for d in x.dims},),
        (named(_block_prod_shape(x, over, parts)),),
    ),
    fuses=Fuses.REDUCE,
    inside_blocks=True,
)


def _add_parts(c: Local, x: Any, totals: Any, *, dim: Dim, parts: Dim, reverse: bool, axes: tuple[str, ...]) -> Any:
    axis, me = c.ins[0].position(dim), c.index(axes)
    order = np.arange(parts.size, dtype=np.int32)
    before = (order > me) if reverse else (order < me)
    before = c.xp.asarray(before).reshape((-1,) + (1,) * (totals.ndim - axis - 1))
    earlier = c.xp.sum(c.xp.where(before, totals, c.xp.zeros((), x.dtype)), axis=axis).astype(x.dtype)
    return x + c.xp.expand_dims(earlier, axis)


ADD_PARTS = Op(
    "add_parts",
    type=lambda x, totals, *, dim, parts, reverse, axes: x,
    kernel=_add_parts,
    linear=Linear.JOINT,
    blocked=lambda x, totals, *, dim, parts, reverse, axes: (parts.name,),
    fuses=Fuses.MAP,
    inside_blocks=True,
)


def _block_top_k(c: Local, x: Any, *, over: Dim, parts: Dim) -> Any:
    axis = c.ins[0].position(over)
    size = c.outs[0].size(parts)
    values, index = c.xp.top_k(c.xp.moveaxis(x, axis, -1), size)
    index = index + c.xp.asarray(c.start(c.ins[0], over), np.int32)
    return c.xp.moveaxis(values, -1, axis), c.xp.moveaxis(index, -1, axis)


BLOCK_TOP_K = Op(
    "block_top_k",
    type=lambda x, *, over, parts: ranked(x, over, parts),
    kernel=_block_top_k,
    rule=lambda x, *, over, parts: one_label((over,), (x,), parts, results=2),
    inside_blocks=True,
)


def _merge_top_k(c: Local, values: Any, *, parts: Dim, k: Dim) -> Any:
    axis = c.ins[0].position(parts)
    return tuple(c.xp.moveaxis(y, -1, axis) for y in c.xp.top_k(c.xp.moveaxis(values, axis, -1), k.size))


MERGE_TOP_K = Op(
    "merge_top_k",
    type=lambda values, *, parts, k: ranked(values, parts, k),
    kernel=_merge_top_k,
    blocked=lambda values, *, parts, k: (parts.name, k.name),
    inside_blocks=True,
)

PICK = Op(  # separate from `merge_top_k`, so that unused indices are not sent
    "pick",
    type=lambda index, place, *, parts, k: Type(place.dims, index.dtype),
    kernel=lambda c, index, place, *, parts, k: c.xp.take_along_axis(index, place, axis=c.ins[0].position(parts)),
    blocked=lambda index, place, *, parts, k: (parts.name, k.name),
    fuses=Fuses.PICK,
    inside_blocks=True,
)


RELABEL = Op(  # a row-major reshape of one device's block, which is a block of the result as its sharding says
    "relabel",
    type=lambda x, *, shape: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape: c.xp.reshape(x, c.outs[0].sizes),
    linear=Linear.JOINT,
    shardings=lambda eqn: [
        Sharding.of(dict(eqn.outs[0].sharding.split), eqn.ins[0].sharding.partial, eqn.ins[0].sharding.kind)
    ],
    fuses=Fuses.VIEW,
    inside_blocks=True,
)


def _filled(c: Local, counts: Any, *, dim: Dim, parts: Dim, size: int, axes: tuple[str, ...]) -> Any:
    block, start = c.ins[0], c.index(axes) * size if axes else 0
    local_counts = c.xp.clip(counts.astype(np.int32) - start, 0, size).astype(np.int32)
    for d, n, cut in zip(block.dims, block.sizes, block.axes, strict=True):
        if n * c.count(cut) != d.size:  # padding has arbitrary values
            local_counts = c.xp.where(c.positions(block, d) < d.size, local_counts, 0)
    return c.xp.expand_dims(local_counts, -1)


FILLED = Op(  # per block of `size` slots along a dim: how many of its slots are among the first `counts`
    "filled",
    type=lambda counts, *, dim, parts, size, axes: Type((*counts.dims, parts), np.dtype(np.int32)),
    kernel=_filled,
    rule=lambda counts, *, dim, parts, size, axes: Labels((named(counts.dims),), (named((*counts.dims, parts)),)),
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
    inside_blocks=True,
)


def _on_first_kernel(c: Local, x: Any, *, axes: Axes) -> Any:
    return c.xp.where(c.index(axes) == 0, x, number(-0.0, x.dtype))  # -0.0 + y is y; 0.0 + -0.0 is 0.0


def _on_first_sharding(eqn: Eqn) -> list[Sharding]:
    before = eqn.ins[0].sharding
    return [Sharding.of(dict(before.split), (*before.partial, *eqn.params["axes"]))]


# A complete value as a partial sum: the value on the first device along the axes, and zeros on the others.
ON_FIRST = Op(
    "on_first",
    type=lambda x, *, axes: x,
    kernel=_on_first_kernel,
    shardings=_on_first_sharding,
    fuses=Fuses.MAP,
    inside_blocks=True,
)
