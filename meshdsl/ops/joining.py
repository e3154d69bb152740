"""Join tensors along an existing or a new dim, and split them again."""

from __future__ import annotations

from builtins import slice as builtin_slice
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, find, name_of, of_size, show
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Reduce, Type
from ..trace import Tensor, as_tensor, bind1
from .dtypes import promote
from .index_map import IndexMap, Piece
from .reductions import spread
from .reshape import transpose
from .slicing import pad, slice


def _promoted(name: str, xs: Sequence[Any]) -> tuple[Tensor, ...]:
    if not xs:
        raise ShapeError(f"md.{name} needs at least one tensor")
    return promote(*xs)


def _check_same(name: str, first: Tensor, x: Tensor, but: str = "") -> None:
    first_dims, other_dims = ({d for d in y.dims if d.name != but} for y in (first, x))
    if first_dims != other_dims:
        raise ShapeError(
            f"md.{name} of tensors with different dims: {show(first.dims)} and {show(x.dims)}\n"
            f"  they may differ {f'only in the size of {but!r}' if but else 'in their order alone'}; rename dims with "
            "md.rename, or add those that one lacks with md.broadcast"
        )


def concat(xs: Sequence[Any], over: DimLike) -> Tensor:
    """Concatenate tensors along a dim that all of them have; the result's size is the sum of their sizes.

    >>> import meshdsl as md
    >>> md.concat([md.iota("n:2"), md.iota("n:3")], "n").dims
    (n=5,)

    Raises `ShapeError` for an empty list, and for tensors whose other dims differ.
    """
    xs = _promoted("concat", xs)
    name = name_of(over)

    for x in xs:
        find(name, x.dims)
        _check_same("concat", xs[0], x, name)
    _check_size(over, [find(name, x.dims).size for x in xs])
    parts = [transpose(x, [name if d.name == name else d for d in xs[0].dims]) for x in xs]

    return bind1(_CONCAT, *parts, name=name)


def _check_size(over: DimLike, sizes: Sequence[int]) -> None:
    """Raise `ShapeError` if the dim is given with a size that neither a part nor the result has."""
    for n in sizes:
        with suppress(ShapeError):
            of_size(over, n, "")
            return
    of_size(over, sum(sizes), f"md.concat of sizes {', '.join(map(str, sizes))} makes a dim of size {sum(sizes)}")


def _concat_type(*xs: Type, name: str) -> Type:
    total = Dim(name, sum(find(name, x.dims).size for x in xs))
    return Type(tuple(total if d.name == name else d for d in xs[0].dims), xs[0].dtype)


def _concat_vjp(ct: Tensor, *xs: Tensor, name: str) -> tuple[Tensor, ...]:
    pieces = _concat_moves(*(x.type for x in xs), name=name).pieces
    return tuple(slice(ct, name, piece.to, piece.count) for piece in pieces)


def _concat_moves(*xs: Type, name: str) -> IndexMap:
    dims = tuple(find(name, x.dims) for x in xs)
    pieces, to = [], 0
    for k, dim in enumerate(dims):
        pieces.append(Piece(k, 0, to, dim.size))
        to += dim.size
    return IndexMap(dims, Dim(name, to), tuple(pieces))


_CONCAT = Op(
    "concat",
    type=_concat_type,
    kernel=lambda c, *xs, name: c.xp.concatenate(xs, c.ins[0].position(name)),
    vjp=_concat_vjp,
    vmap=lambda *xs, new, name: bind1(_CONCAT, *spread(xs, new), name=name),
    linear=Linear.JOINT,
    moves=_concat_moves,
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
)

STACK = Op(
    "stack",
    type=lambda *xs, dim: Type((dim, *xs[0].dims), xs[0].dtype),
    kernel=lambda c, *xs, dim: _stack_kernel(c, xs, dim),
    vjp=lambda ct, *xs, dim: tuple(unstack(ct, dim)),
    vmap=lambda *xs, new, dim: bind1(STACK, *spread(xs, new), dim=dim),
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
)


def _stack_kernel(c: Local, xs: Sequence[Any], dim: Dim) -> Any:
    """Stack all tensors; if the new dim is sharded, slice this device's block."""
    block = c.outs[0]
    stacked = c.xp.stack(xs)
    more = block.size(dim) * c.count(block.axes[0]) - dim.size
    stacked = c.xp.pad(stacked, [(0, more)] + [(0, 0)] * (stacked.ndim - 1)) if more else stacked
    return c.xp.dynamic_slice(stacked, c.start(block, dim), block.size(dim), 0) if block.axes[0] else stacked


def stack(xs: Sequence[Any], dim: DimLike) -> Tensor:
    """Stack tensors of equal dims along a new first dim, whose size is the number of tensors.

    >>> import meshdsl as md
    >>> md.stack([md.iota("n:2"), md.iota("n:2")], "m").dims
    (m=2, n=2)

    Raises `ShapeError` for an empty list, for tensors whose dims differ, and if they have a dim of the new name.
    """
    xs = _promoted("stack", xs)

    for x in xs:
        _check_same("stack", xs[0], x)
    new = of_size(dim, len(xs), f"md.stack of {len(xs)} tensors makes a dim of that size")
    parts = [transpose(x, xs[0].dims) for x in xs]
    return bind1(STACK, *parts, dim=new)


def _index_kernel(c: Local, x: Any, dim: Dim, at: int) -> Any:
    """The slice at index `at` on the devices that store it; zero on the others, so that the sum over devices is it."""
    axis = c.ins[0].position(dim)
    if not c.ins[0].axes[axis]:
        return x[(builtin_slice(None),) * axis + (at,)]
    local_index = c.xp.asarray(at, np.int32) - c.start(c.ins[0], dim)
    inside = (local_index >= 0) & (local_index < x.shape[axis])
    row = c.xp.take(x, c.xp.where(inside, local_index, 0), axis=axis)
    return c.xp.where(inside, row, c.xp.zeros((), x.dtype))


INDEX = Op(
    "index",
    type=lambda x, *, dim, at: Type(tuple(d for d in x.dims if d != dim), x.dtype),
    kernel=lambda c, x, *, dim, at: _index_kernel(c, x, dim, at),
    vjp=lambda ct, x, dim, at: (transpose(pad(stack([ct], dim.name), dim.name, at, dim.size - at - 1), x.dims),),
    linear=Linear.JOINT,
    reduce=Reduce.SUM,
    blocked=lambda x, *, dim, at: (dim.name,) if x.dtype.kind == "b" else (),
    flops=lambda *_, **__: 0,
    fuses=Fuses.PICK,
)


def unstack(x: Any, dim: DimLike) -> list[Tensor]:
    """The slices of x at each index of a dim, as a list of tensors without the dim.

    >>> import meshdsl as md
    >>> md.unstack(md.tensor([1.0, 2.0], "a"), "a")[1]
    tensor(float32[], 2.)

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    d = find(dim, x.dims)
    return [bind1(INDEX, x, dim=d, at=i) for i in range(d.size)]
