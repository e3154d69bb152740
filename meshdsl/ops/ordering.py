"""Along one dim: running sums, the largest elements, and sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, find
from ..errors import ShapeError
from ..ir import Fuses, Op, Type
from ..trace import Tensor, as_tensor, bind, bind1
from .dtypes import check_ordered, countable, in_wide
from .elementwise import stop_gradient
from .index_map import replaced
from .indexing import new_dim, put_along
from .reshape import transpose
from .slicing import along, shift

CUMSUM = along(
    "cumsum",
    lambda dim, *, reverse: dim,
    lambda c, x, *, axis, dim, reverse: running(c, x, axis, reverse),
    lambda ct, x, dim, reverse: (cumsum(ct, dim, reverse=not reverse),),
    fuses=Fuses.KERNEL,
)


def running(c: Local, x: Any, axis: int, reverse: bool) -> Any:
    """The running sum along an axis, from its end if `reverse`."""
    x = c.xp.flip(x, axis) if reverse else x
    x = c.xp.cumsum(x, axis).astype(x.dtype)
    return c.xp.flip(x, axis) if reverse else x


def block_edges(c: Local, xs: Sequence[Any], dim: Dim, reverse: bool) -> list[Any]:
    """The elements of running results that are those of whole blocks: the last along the dim, or the first."""
    edges = []
    for x, block, out in zip(xs, c.ins, c.outs, strict=True):
        axis = block.position(dim)
        edge = 0 if reverse else block.sizes[axis] - 1
        empty = not block.sizes[axis]
        edges.append(c.xp.zeros(out.sizes, x.dtype) if empty else x[(slice(None),) * axis + (slice(edge, edge + 1),)])
    return edges


def cumsum(x: Any, over: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running sum along a dim, from the start, or from the end if `reverse`.

    Each element is included in its own sum, unless `exclusive`.

    >>> import meshdsl as md
    >>> md.cumsum(md.tensor([1.0, 2.0, 3.0], "a"), "a", exclusive=True)
    tensor(float32[a=3], [0. 1. 3.])

    The dtype is that of `jnp.cumsum`: integers keep theirs, so those of 8 and 16 bits can wrap; booleans are counted in
    JAX's default integer. Floats of 8 and 16 bits are added in float32, over devices too, and rounded once. Raises
    `ShapeError` for a dim that x lacks.
    """
    x = countable(x)
    dim = find(over, x.dims)
    total = in_wide(lambda wide: bind1(CUMSUM, wide, dim=dim, reverse=reverse), x, x.dtype)
    return shift(total, dim, -1 if reverse else 1) if exclusive else total


def ranked(x: Type, over: Dim, k: Dim) -> tuple[Type, Type]:
    """The types of `k` elements along a dim, and of their indices."""
    shape = replaced(x.dims, over, k)
    return Type(shape, x.dtype), Type(shape, np.dtype(np.int32))


def _order_kernel(c: Local, x: Any, *, over: Dim, k: Dim) -> Any:
    axis = c.ins[0].position(over)
    x = c.xp.moveaxis(x, axis, -1)
    return tuple(c.xp.moveaxis(y, -1, axis) for y in c.xp.top_k(x, k.size))


def _order_type(x: Type, *, over: Dim, k: Dim) -> tuple[Type, Type]:
    check_ordered("top_k", x.dtype)
    if k.size > over.size:
        raise ShapeError(f"md.top_k of {k!r} out of {over!r}: there are not that many")
    return ranked(x, over, k)


def _order_vjp(cts: Any, x: Tensor, outs: Any, over: Dim, k: Dim) -> tuple[Tensor]:
    return (transpose(put_along(cts[0], stop_gradient(outs[1]), k, over), x.dims),)


TOP_K = Op(
    "top_k",
    type=_order_type,
    kernel=_order_kernel,
    vjp=_order_vjp,
    blocked=lambda x, *, over, k: (over.name, k.name),
    flops=lambda ins, outs, **_: float(math.prod(ins[0])),
)


def top_k(x: Any, over: DimLike, k: DimLike) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim, in descending order, and their indices (int32).

    NaN is first; ties are in index order. `k` is the dim that replaces `over`, as md.Dim("k", 2) or "k:2".

    >>> import meshdsl as md
    >>> md.top_k(md.tensor([3.0, 1.0, 2.0], "a"), "a", "k:2")[1]
    tensor(int32[k=2], [0 2])

    Raises `ShapeError` for a dim that x lacks, for a k larger than the dim, and for complex numbers.
    """
    x = as_tensor(x)
    dim = find(over, x.dims)
    values, index = bind(TOP_K, x, over=dim, k=new_dim(k))
    return values, index


def _sort_kernel(c: Local, x: Any, *, over: Dim) -> Any:
    axis = c.ins[0].position(over)
    index = c.xp.argsort(x, axis=axis, stable=True)
    return c.xp.take_along_axis(x, index, axis=axis), index.astype(np.int32)


def _sort_type(x: Type, *, over: Dim) -> tuple[Type, Type]:
    check_ordered("sort", x.dtype)
    return ranked(x, over, over)


SORT = Op(
    "sort",
    type=_sort_type,
    kernel=_sort_kernel,
    vjp=lambda cts, x, outs, over: _order_vjp(cts, x, outs, over, over),
    blocked=lambda x, *, over: (over.name,),
    flops=lambda ins, outs, **_: float(math.prod(ins[0])),
)


def argsort(x: Any, over: DimLike) -> Tensor:
    """The indices (int32) that sort a dim in ascending order, NaN last; stable.

    >>> import meshdsl as md
    >>> md.argsort(md.tensor([3.0, 1.0, 2.0], "a"), "a")
    tensor(int32[a=3], [1 2 0])

    Raises `ShapeError` for a dim that x lacks, and for complex numbers.
    """
    return _ascending(x, over)[1]


def sort(x: Any, over: DimLike) -> Tensor:
    """Sort the elements along a dim in ascending order, NaN last.

    >>> import meshdsl as md
    >>> md.sort(md.tensor([3.0, 1.0, 2.0], "a"), "a")
    tensor(float32[a=3], [1. 2. 3.])

    Raises `ShapeError` for a dim that x lacks, and for complex numbers.
    """
    return _ascending(x, over)[0]


def _ascending(x: Any, over: DimLike) -> tuple[Tensor, Tensor]:
    x = as_tensor(x)
    values, index = bind(SORT, x, over=find(over, x.dims))
    return values, index
