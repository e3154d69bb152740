"""Slices and updates at a start that is known only at run time."""

from __future__ import annotations

import builtins
from builtins import slice as builtin_slice
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, find, show
from ..errors import ShapeError
from ..ir import Fuses, Labels, Linear, Op, Reduce, Type, named
from ..trace import Tensor, as_tensor, bind1
from .creation import zeros_like
from .dtypes import cast, promote
from .elementwise import maximum, minimum, where
from .index_map import replaced
from .indexing import gather, iota
from .reductions import broadcast, spread
from .reshape import transpose
from .slicing import clipped


def _picked(c: Local, x: Any, index: Any, axis: int, otherwise: Any) -> Any:
    """Gather elements at indices along an axis; `otherwise` for out-of-range indices."""
    inside = (index >= 0) & (index < x.shape[axis])
    values = c.xp.take(x, c.xp.where(inside, index, 0), axis=axis)
    return c.xp.where(inside.reshape((-1,) + (1,) * (x.ndim - axis - 1)), values, otherwise)


def _dynamic_slice_kernel(c: Local, x: Any, start: Any, *, dim: Dim, size: int) -> Any:
    """The elements of the slice that this device stores, and zeros for the others; devices sum the results."""
    axis = c.ins[0].position(dim)
    start = clipped(c, start, 0, dim.size - size)
    if not c.ins[0].axes[axis]:
        return c.xp.dynamic_slice(x, start, size, axis)
    index = c.xp.arange(size, dtype=np.int32) + start - c.xp.asarray(c.start(c.ins[0], dim), np.int32)
    return _picked(c, x, index, axis, c.xp.zeros((), x.dtype))


_DYNAMIC_SLICE = Op(
    "dynamic_slice",
    type=lambda x, start, *, dim, size: Type(replaced(x.dims, dim, Dim(dim.name, size)), x.dtype),
    kernel=_dynamic_slice_kernel,
    vjp=lambda ct, x, start, dim: (dynamic_update_slice(zeros_like(x), ct, dim, start), None),
    vmap=lambda x, start, *, new, dim, size: _slice_vmap(x, start, new, dim, size),
    linear=Linear.FIRST,
    reduce=Reduce.SUM,
    rule=lambda x, start, *, dim, size: Labels(
        ({d.name: d.name if d != dim else None if x.dtype.kind == "b" else f"{dim.name}*" for d in x.dims}, {}),
        (named(x.dims, [dim.name]),),
    ),
    flops=lambda *_, **__: 0,
    fuses=Fuses.PICK,
)


def _starts(start: Tensor, most: int) -> Tensor:
    """Start indices clipped to 0..most, in int32."""
    limits = np.iinfo(start.dtype)
    return cast(minimum(maximum(start, 0), builtins.min(most, int(limits.max))), "int32")


def _slice_vmap(x: Tensor, start: Tensor, new: Dim, dim: Dim, size: int) -> Tensor:
    """With one start per place of the new dim, a gather of the elements from there on."""
    if new not in start.dims:
        return bind1(_DYNAMIC_SLICE, x, start, dim=dim, size=size)
    part = Dim(dim.name, size)
    return gather(x, broadcast(_starts(start, dim.size - size), (new, part)) + iota(part), dim)


def dynamic_slice(x: Any, dim: DimLike, start: Any, size: int) -> Tensor:
    """Take `size` elements of a dim from a traced `start`, which is clipped so that the slice is in range.

    >>> import meshdsl as md
    >>> md.dynamic_slice(md.iota("n:5"), "n", md.tensor(2), 2)
    tensor(int32[n=2], [2 3])

    Raises `ShapeError` for a dim that x lacks or that has fewer elements, and if `start` is not an integer without
    dims.
    """
    x, start = as_tensor(x), as_tensor(start)

    d = find(dim, x.dims)
    if not 0 <= size <= d.size:
        raise ShapeError(f"md.dynamic_slice of {size} elements from {d!r}")
    if start.dims or start.dtype.kind not in "iu":
        raise ShapeError(f"the start is an integer without dims, got {start.type}")
    return bind1(_DYNAMIC_SLICE, x, start, dim=d, size=int(size))


def _dynamic_update_kernel(c: Local, x: Any, update: Any, start: Any, dim: Dim) -> Any:
    """Each device writes the part of the update that is in its block; in place, if it has all of dim."""
    axis = c.ins[0].position(dim)
    part = find(dim.name, c.ins[1].dims)
    update = update[(builtin_slice(None),) * axis + (builtin_slice(0, part.size),)]
    if not part.size or not x.size:
        return x
    start = clipped(c, start, 0, dim.size - part.size)  # also in place, where XLA clips: TPUs are 4 % slower without
    if start.size == 1 and not c.ins[0].axes[axis]:
        return c.xp.dynamic_update(x, update, start.reshape(()), axis)
    first = c.xp.asarray(c.start(c.ins[0], dim), np.int32)
    if not start.ndim:
        return _picked(c, update, c.xp.arange(x.shape[axis], dtype=np.int32) + first - start, axis, x)
    sizes = [n if d in c.ins[2].dims else 1 for d, n in zip(c.ins[0].dims, x.shape, strict=True)]
    place = c.xp.arange(x.shape[axis], dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    place = place + first - start.reshape(sizes)
    return c.xp.where(place == 0, update, x)  # several starts have updates of one element along `dim`


def _update_vjp(ct: Tensor, x: Tensor, update: Tensor, start: Tensor, dim: Dim) -> tuple[Any, ...]:
    part = find(dim.name, update.dims)
    zeros = bind1(_DYNAMIC_UPDATE, ct, zeros_like(update), start, dim=dim)
    if not start.dims:
        return zeros, dynamic_slice(ct, dim, start, part.size), None
    places = broadcast(_starts(start, dim.size - part.size), (*start.dims, part))
    return zeros, transpose(gather(ct, places, dim), update.dims), None


def _update_vmap(x: Tensor, update: Tensor, start: Tensor, new: Dim, dim: Dim) -> Tensor:
    """With one start per place of the new dim, a gather from the update where the element is written."""
    part = find(dim.name, update.dims)
    if new not in start.dims or part.size == 1:
        return bind1(_DYNAMIC_UPDATE, *spread([x, update], new), start, dim=dim)
    place = iota(dim) - broadcast(_starts(start, dim.size - part.size), (new, dim))
    written = (place >= 0) & (place < part.size)
    return where(written, gather(update, place, part), x)


_DYNAMIC_UPDATE = Op(
    "dynamic_update_slice",
    type=lambda x, update, start, *, dim: x,
    kernel=lambda c, x, update, start, *, dim: _dynamic_update_kernel(c, x, update, start, dim),
    vjp=_update_vjp,
    vmap=lambda x, update, start, *, new, dim: _update_vmap(x, update, start, new, dim),
    rule=lambda x, update, start, *, dim: Labels(
        (named(x.dims), named(update.dims, [dim.name]), named(start.dims)), (named(x.dims),)
    ),
    linear=Linear.UPDATE,
    flops=lambda *_, **__: 0,
    fuses=Fuses.UPDATE,
)


def dynamic_update_slice(x: Any, update: Any, dim: DimLike, start: Any) -> Tensor:
    """`x` with `update` written along a dim from a traced `start`, which is clipped so that the update fits.

    >>> import meshdsl as md
    >>> md.dynamic_update_slice(md.iota("n:4"), md.iota("n:2"), "n", md.tensor(2))
    tensor(int32[n=4], [0 1 0 1])

    Raises `ShapeError` for a dim that x or the update lacks, if the update is larger than x along the dim, and if the
    other dims differ.
    """
    x, update = promote(x, update)

    d = find(dim, x.dims)
    part = find(d.name, update.dims)
    if part.size > d.size or {e for e in update.dims if e != part} != {e for e in x.dims if e != d}:
        raise ShapeError(f"an update {show(update.dims)} does not fit into {show(x.dims)} along {d.name!r}")
    update = transpose(update, [part if e == d else e for e in x.dims])
    return bind1(_DYNAMIC_UPDATE, x, update, as_tensor(start), dim=d)
