"""Slice, pad, roll, shift and reverse along one dim.

An operation lists the elements it moves as `index_map.Piece` records; lowering exchanges exactly these between devices.
"""

from __future__ import annotations

from builtins import slice as builtin_slice
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import Dim, DimLike, find
from ..errors import ShapeError, whole
from ..ir import Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1, checked_number
from .index_map import IndexMap, Piece, replaced


def along(
    name: str,
    infer: Callable[..., Dim],
    kernel: Callable[..., Any],
    vjp: Any,
    *,
    linear: Linear = Linear.JOINT,
    fuses: Fuses = Fuses.MAP,
    pieces: Callable[..., tuple[Piece, ...]] | None = None,
) -> Op:
    """Make an operation that rearranges one dim, `dim`, and may change its size; `pieces` lists the moved elements."""

    def shape_of(x: Type, *more: Type, dim: Dim, **params: Any) -> Type:
        return Type(replaced(x.dims, dim, infer(dim, **params)), x.dtype)

    def run(c: Local, x: Any, *more: Any, dim: Dim, **params: Any) -> Any:
        return kernel(c, x, *more, axis=c.ins[0].position(dim), dim=dim, **params)

    def moves(x: Type, *, dim: Dim, value: Any = 0, **params: Any) -> IndexMap:
        out = infer(dim, **params)
        return IndexMap((dim,), out, pieces(dim, out, **params) if pieces else (), value)

    return Op(
        name,
        shape_of,
        run,
        vjp,
        linear=linear,
        blocked=lambda x, *more, dim, **_: (dim.name,),
        moves=moves if pieces is not None else None,
        flops=lambda *_, **__: 0,
        fuses=fuses,
    )


def _span(start: int, size: int, stride: int, axis: int) -> tuple[Any, ...]:
    stop = start + (size - 1) * stride + 1 if size else start
    return (builtin_slice(None),) * axis + (builtin_slice(start, stop, stride),)


SLICE = along(
    "slice",
    lambda dim, *, start, size, stride: Dim(dim.name, size),
    lambda c, x, *, axis, dim, start, size, stride: x[_span(start, size, stride, axis)],
    lambda ct, x, dim, start, size, stride: (
        pad(ct, dim.name, start, dim.size - (start + (size - 1) * stride + 1), inner=stride - 1) if size else None,
    ),
    pieces=lambda dim, out, *, start, size, stride: (Piece(0, start, 0, size, step=stride),),
    fuses=Fuses.PICK,
)


def slice(x: Any, dim: DimLike, start: int, size: int, stride: int = 1) -> Tensor:
    """Take `size` elements of a dim, every `stride`-th from `start`.

    >>> import meshdsl as md
    >>> md.slice(md.iota("n:6"), "n", 1, 2, stride=3)
    tensor(int32[n=2], [1 4])

    Raises `ShapeError` for a dim that x lacks, and for elements outside the dim.
    """
    x = as_tensor(x)

    d = find(dim, x.dims)
    start, size, stride = whole("start", start), whole("size", size), whole("stride", stride)
    last = start + (size - 1) * stride
    if start < 0 or size < 0 or stride < 1 or (size and last >= d.size):
        raise ShapeError(
            f"md.slice of {d!r} from {start}, size {size}, stride {stride} reaches outside; "
            f"it needs 0 <= start and start + (size - 1) * stride < {d.size}"
        )
    return bind1(SLICE, x, dim=d, start=start, size=size, stride=stride)


def _pad_size(dim: Dim, *, low: int, high: int, inner: int, value: Any = 0) -> Dim:
    return Dim(dim.name, low + high + dim.size + max(dim.size - 1, 0) * inner)


def _pad_kernel(c: Local, x: Any, *, axis: int, dim: Dim, low: int, high: int, inner: int, value: Any) -> Any:
    x = c.xp.moveaxis(x, axis, 0)
    if inner and x.shape[0]:
        gaps = c.xp.full((x.shape[0], inner, *x.shape[1:]), value, x.dtype)
        n = x.shape[0] * (inner + 1)
        x = c.xp.concatenate([x[:, None], gaps], 1).reshape((n, *x.shape[1:]))[: n - inner]
    x = x[max(0, -low) : x.shape[0] - max(0, -high)]
    pads = [(max(0, low), max(0, high))] + [(0, 0)] * (x.ndim - 1)
    return c.xp.moveaxis(c.xp.pad(x, pads, constant_values=value), 0, axis)


def _pad_vjp(ct: Tensor, x: Tensor, dim: Dim, low: int, high: int, inner: int) -> tuple[Tensor]:
    if not inner and min(low, high) < 0:  # cropped elements have gradient 0
        return (pad(ct, dim.name, -low, -high),)
    ct = pad(ct, dim.name, max(0, -low), max(0, -high))
    return (slice(ct, dim.name, max(0, low), dim.size, inner + 1),)


def _pad_pieces(dim: Dim, out: Dim, *, low: int, high: int, inner: int) -> tuple[Piece, ...]:
    every = inner + 1
    first = max(0, -(low // every)) if low < 0 else 0  # the first element that is not cropped
    count = min(dim.size, -(-(out.size - low) // every)) - first
    return (Piece(0, first, low + first * every, count, to_step=every),) if count > 0 else ()


PAD = along("pad", _pad_size, _pad_kernel, _pad_vjp, linear=Linear.PADDED, pieces=_pad_pieces)


def pad(x: Any, dim: DimLike, low: int, high: int, value: Any = 0, *, inner: int = 0) -> Tensor:
    """x with `value` before, after and between its elements; `resizing.pad` is the public function."""
    x = as_tensor(x)
    fill = checked_number(value, x.dtype)

    d = find(dim, x.dims)
    if d.size + max(d.size - 1, 0) * inner + min(low, 0) + min(high, 0) < 0 or inner < 0:
        raise ShapeError(f"md.pad of {d!r} by low={low} high={high} inner={inner} leaves a negative size")
    return bind1(PAD, x, dim=d, low=int(low), high=int(high), inner=int(inner), value=fill)


_REVERSE = along(
    "reverse",
    lambda dim: dim,
    lambda c, x, *, axis, dim: c.xp.flip(x, axis),
    lambda ct, x, dim: (reverse(ct, dim),),
    pieces=lambda dim, out: (Piece(0, dim.size - 1, 0, dim.size, step=-1),),
)


def reverse(x: Any, dim: DimLike) -> Tensor:
    """Reverse the elements along a dim.

    >>> import meshdsl as md
    >>> md.reverse(md.iota("n:3"), "n")
    tensor(int32[n=3], [2 1 0])

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    return bind1(_REVERSE, x, dim=find(dim, x.dims))


_ROLL = along(
    "roll",
    lambda dim, *, by: dim,
    lambda c, x, *, axis, dim, by: c.xp.roll(x, by, axis),
    lambda ct, x, dim, by: (roll(ct, dim, -by),),
    pieces=lambda dim, out, *, by: _roll_pieces(dim.size, by),
)


def _roll_pieces(size: int, by: int) -> tuple[Piece, ...]:
    by = by % size if size else 0
    return Piece(0, 0, by, size - by), Piece(0, size - by, 0, by)


def roll(x: Any, dim: DimLike, by: int) -> Tensor:
    """Rotate elements along a dim by `by` positions towards higher indices; the last elements move to the start.

    >>> import meshdsl as md
    >>> md.roll(md.iota("n:3"), "n", 1)
    tensor(int32[n=3], [2 0 1])

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    return bind1(_ROLL, x, dim=find(dim, x.dims), by=whole("by", by))


def shift(x: Any, dim: DimLike, by: int, fill: Any = 0) -> Tensor:
    """Shift elements along a dim by `by` positions towards higher indices; drop the last and insert `fill` first.

    A negative `by` shifts towards lower indices.

    >>> import meshdsl as md
    >>> md.shift(md.tensor([1.0, 2.0, 3.0], "n"), "n", 1)
    tensor(float32[n=3], [0. 1. 2.])

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    d = find(dim, x.dims)
    by = max(-d.size, min(d.size, whole("by", by)))
    return pad(x, d, by, -by, fill)


def clipped(c: Local, i: Any, low: int, high: int) -> Any:
    """Clip integers to a range and cast to int32; clip before the cast if their dtype is wider than int32."""
    i = c.xp.asarray(i)
    if i.dtype.itemsize < 4 or i.dtype == np.dtype(np.int32):
        return c.xp.clip(c.xp.asarray(i, np.int32), low, high)
    if i.dtype.kind == "u":  # a negative `low` does not fit into an unsigned dtype
        return c.xp.asarray(c.xp.minimum(i, np.asarray(high, i.dtype)), np.int32)
    return c.xp.asarray(c.xp.clip(i, low, high), np.int32)


def _swap_kernel(c: Local, x: Any, *, axis: int, dim: Dim, outer: int, inner: int) -> Any:
    sizes = x.shape[:axis], x.shape[axis + 1 :]
    blocks = c.xp.reshape(x, (*sizes[0], outer, inner, dim.size // (outer * inner), *sizes[1]))
    return c.xp.reshape(c.xp.moveaxis(blocks, axis, axis + 1), x.shape)


def _swap_pieces(dim: Dim, out: Dim, *, outer: int, inner: int) -> tuple[Piece, ...]:
    n = dim.size // (outer * inner)
    return tuple(Piece(0, (i * inner + j) * n, (j * outer + i) * n, n) for i in range(outer) for j in range(inner))


_SWAP_BLOCKS = along(
    "swap_blocks",
    lambda dim, *, outer, inner: dim,
    _swap_kernel,
    lambda ct, x, dim, outer, inner: (swap_blocks(ct, dim.name, inner, outer),),
    pieces=_swap_pieces,
    fuses=Fuses.KERNEL,
)


def swap_blocks(x: Tensor, dim: str, outer: int, inner: int) -> Tensor:
    """x with the blocks of a dim, of which there are outer x inner, in the order inner x outer.

    Along a sharded dim, devices send each other the blocks that change owner, each once.
    """
    return bind1(_SWAP_BLOCKS, x, dim=find(dim, x.dims), outer=outer, inner=inner)
