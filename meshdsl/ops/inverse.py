"""`md.inverse_index`: the position of the index that names each slot, where no two indices name the same slot."""

# pyright: standard
# (kernels work on arrays of NumPy or JAX)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, Shape, find, pick, show
from ..errors import ShapeError
from ..ir import Labels, Op, Reduce, Type, named
from ..trace import Tensor, as_tensor, bind1
from .indexing import flat_index
from .reductions import spread
from .reshape import transpose


def _inverse_type(*indices: Type, over: Dim, into: Shape) -> Type:
    return Type((*(d for d in indices[0].dims if d != over), *into), np.dtype(np.int32))


def slot_of(i: Any, into: Shape) -> list[Any]:
    """The coordinates that row-major indices have along the dims; the first is out of range where an index is."""
    found: list[Any] = []
    for d in reversed(into[1:]):
        found.append(i % max(d.size, 1))
        i = i // max(d.size, 1)
    return [i, *reversed(found)]


def _inverse_kernel(c: Local, *indices: Any, over: Dim, into: Shape) -> Any:
    out, groups = c.outs[0], [d for d in c.ins[0].dims if d != over]
    rows = math.prod(out.size(d) for d in into)
    total = rows * math.prod(out.size(d) for d in groups)
    places: list[Any] = []
    for block, i in zip(c.ins, indices, strict=True):
        inside, flat = True, 0
        for d, at in zip(into, slot_of(i, into), strict=True):
            start = c.xp.asarray(c.start(out, d), np.int32)
            inside = inside & (at >= start) & (at < start + out.size(d)) & (at < d.size)
            flat = flat * out.size(d) + at - start
        places.append(c.xp.where(inside, flat_index(c, c.xp.where(inside, flat, 0), block, groups, rows), total))
    numbers = [c.xp.broadcast_to(c.positions(block, over) + 1, block.sizes).reshape(-1) for block in c.ins]
    index = c.xp.concatenate([place.reshape(-1) for place in places])
    return (c.xp.scatter_add(total, index, c.xp.concatenate(numbers)) - 1).astype(np.int32).reshape(out.sizes)


def _inverse_rule(*indices: Type, over: Dim, into: Shape) -> Labels:
    out = _inverse_type(*indices, over=over, into=into).dims
    return Labels(tuple(named(i.dims) for i in indices), (named(out),))


INVERSE = Op(
    "inverse_index",
    type=_inverse_type,
    kernel=_inverse_kernel,
    vmap=lambda *i, new, over, into: bind1(INVERSE, *spread(i, new), over=over, into=into),
    flops=lambda ins, outs, **_: float(sum(math.prod(sizes) for sizes in ins)),
    reduce=Reduce.MAX,
    mask=-1,
    rule=_inverse_rule,
)


def inverse_index(*indices: Any, over: DimLike, into: Sequence[DimLike] | DimLike) -> Tensor:
    """The position along `over` of the index that names each slot, as int32; -1 for a slot that none names.

    >>> import meshdsl as md
    >>> md.inverse_index(md.tensor([2, 0, 9], "token"), over="token", into="slot:4").numpy().tolist()
    [1, -1, 0, -1]

    An index is a row-major place in the dims `into`; one out of range names no slot. The result has the other dims of
    the indices, then `into`. Several tensors of indices with the same dims name slots together, as the choices of a
    token do. No two indices may name the same slot: the result is unspecified there. Under every layout, `over` may be
    sharded: each device finds its own positions, and the largest is the result.

    Raises `ShapeError` for indices that are not integers or have other dims, and for `into` among their dims.
    """
    tensors = [as_tensor(i) for i in indices]

    if not tensors or any(i.dtype != np.dtype(np.int32) or set(i.dims) != set(tensors[0].dims) for i in tensors):
        shown = ", ".join(str(i.type) for i in tensors) or "none"
        raise ShapeError(
            f"md.inverse_index takes int32 tensors with the same dims, got {shown}\n"
            "  use md.cast(i, 'int32') and md.broadcast"
        )
    slots = pick(into, (), new=True)
    clash = [d for d in slots if d.name in {own.name for own in tensors[0].dims}]
    if clash or not slots:
        raise ShapeError(
            f"md.inverse_index: into={show(slots)} needs dims that the indices {tensors[0].type} lack\n"
            "  give new names and sizes, for example 'expert:8 slot:4'"
        )
    dim = find(over, tensors[0].dims)
    order = tensors[0].dims
    return bind1(INVERSE, *(transpose(i, order) for i in tensors), over=dim, into=slots)
