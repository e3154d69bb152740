"""Contractions: products of tensors, summed over dims that the result lacks.

Over a sharded dim the local result is partial. The planner then inserts a psum or a reduce-scatter, or nothing if a
later sum absorbs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ..backend import Local, letters
from ..dims import DimsLike, Shape, merge, names, pick, show
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Product, Reduce, Type
from ..trace import Tensor, bind1
from .dtypes import as_dtype, cast, is_float8, kind, promote
from .reductions import over_dims, sum


def _einsum_type(*xs: Type, out: Shape, dtype: np.dtype) -> Type:
    table = merge(x.dims for x in xs)
    for dim in out:
        if dim.name not in table:
            raise ShapeError(
                f"einsum cannot make dim {dim.name!r}: no operand has it\n"
                f"  the operands are {', '.join(show(x.dims) for x in xs)}\n"
                f"  broadcast the result with md.broadcast, or give an operand the dim"
            )
    if kind(dtype) in "fi" and any(kind(x.dtype) == "c" for x in xs):
        raise ShapeError(f"einsum of complex numbers cannot be a {dtype.name}: the imaginary part would be lost")
    return Type(out, dtype)


def _einsum_kernel(c: Local, *xs: Any, out: Shape, dtype: np.dtype) -> Any:
    return c.xp.einsum(letters([b.dims for b in c.ins], c.outs[0].dims), *xs, dtype=dtype).astype(dtype)


def _einsum_vjp(ct: Tensor, *xs: Tensor, to_dtypes: Sequence[np.dtype]) -> tuple[Tensor, ...]:
    """Each operand's gradient is the einsum of ct with the other operands, in that operand's dim order."""
    grads = []
    for i, x in enumerate(xs):
        others = (*xs[:i], *xs[i + 1 :])
        available = {d.name for y in (ct, *others) for d in y.dims}
        out = [d for d in x.dims if d.name in available]
        grad = einsum(*others[:i], ct, *others[i:], out=out, dtype=to_dtypes[i])
        grads.append(grad)  # autodiff broadcasts over dims that only x has
    return tuple(grads)


def _einsum_flops(ins: Sequence[Any], outs: Sequence[Any], *, shapes: Sequence[Shape], **_: Any) -> float:
    sizes = {d.name: n for shape, local in zip(shapes, ins, strict=True) for d, n in zip(shape, local, strict=True)}
    return 2.0 * math.prod(sizes.values())


EINSUM = Op(
    "einsum",
    type=_einsum_type,
    kernel=_einsum_kernel,
    vjp=_einsum_vjp,
    vmap=lambda *xs, new, out, dtype: bind1(EINSUM, *xs, out=(new, *out), dtype=dtype),
    flops=_einsum_flops,
    linear=Linear.EACH,
    reduce=Reduce.SUM,
    product=Product.MATMUL,
    mask=0,
    fuses=Fuses.REDUCE,
    by_name=True,
)


def einsum(*xs: Tensor, out: DimsLike, dtype: Any = None) -> Tensor:
    """Multiply tensors, matching dims by name, and sum over every dim that is not in `out`.

    >>> import meshdsl as md
    >>> x, w = md.tensor([[1.0, 2.0]], "batch io"), md.tensor([[1.0], [3.0]], "io hidden")
    >>> md.einsum(x, w, out="batch hidden")
    tensor(float32[batch=1 hidden=1], [[7.]])

    `dtype` is the dtype of the sum, also of partial sums on each device (default: the operands' common dtype).
    More than two tensors are multiplied two at a time, first the pair with the fewest multiplications, by whole sizes.
    Two tensors may be 8-bit floats of two formats, if `dtype` is given. Raises `ShapeError` if `out` contains a dim
    that no operand has, and for operands without a common dtype.
    """
    if not xs:
        raise ShapeError("md.einsum needs at least one tensor")
    if dtype is None or len(xs) != 2 or not all(isinstance(x, Tensor) and is_float8(x.dtype) for x in xs):
        xs = promote(*xs)
    shape = pick(out, merge(x.dims for x in xs).values(), what="output dim")
    dtype = as_dtype(dtype or xs[0].dtype)
    while len(xs) > 2:
        xs = promote(*_with_one_pair_multiplied(xs, shape, dtype))
    if len(xs) > 1 and kind(xs[0].dtype) in "fc":
        xs = tuple(_without_alone(xs, shape, dtype))
    return bind1(EINSUM, *xs, out=shape, dtype=dtype)


def _with_one_pair_multiplied(xs: Sequence[Tensor], out: Shape, dtype: np.dtype) -> list[Tensor]:
    """The operands of an einsum, the two with the fewest multiplications replaced by their product.

    The order of the products depends on whole sizes only, so an infinite factor meets the same sums under every layout.
    """

    def multiplications(pair: tuple[int, int]) -> int:
        return math.prod(d.size for d in merge(xs[i].dims for i in pair).values())

    pair = min(combinations(range(len(xs)), 2), key=multiplications)
    rest = [x for i, x in enumerate(xs) if i not in pair]
    read = {*names(out), *(d.name for x in rest for d in x.dims)}
    kept = [d for d in merge(xs[i].dims for i in pair).values() if d.name in read]
    wider = max(xs[0].dtype, dtype, key=lambda each: each.itemsize)
    return [*rest, einsum(*(xs[i] for i in pair), out=kept, dtype=wider)]


def _without_alone(xs: Sequence[Tensor], out: Shape, dtype: np.dtype) -> list[Tensor]:
    """Two operands, each summed over the dims that only it has, in the dtype of the sum if that is wider.

    An infinite factor then multiplies the complete sum, under every layout.
    """
    summed: list[Tensor] = []
    for x, y in (xs, xs[::-1]):
        alone = [d for d in x.dims if d.name not in names(out) + names(y.dims)]
        wider = kind(x.dtype) == kind(dtype) and dtype.itemsize > x.dtype.itemsize
        summed.append(sum(cast(x, dtype) if wider else x, alone) if alone else x)
    widest = max((x.dtype for x in summed), key=lambda each: each.itemsize)
    return [cast(x, widest) if x.dtype.itemsize < widest.itemsize else x for x in summed]


def dot(x: Tensor, y: Tensor, over: DimsLike) -> Tensor:
    """Multiply and sum over the dims in `over`. The result has x's other dims, then the dims that only y has.

    >>> import meshdsl as md
    >>> md.dot(md.tensor([1.0, 2.0], "a"), md.tensor([3.0, 4.0], "a"), over="a")
    tensor(float32[], 11.)

    Raises `ShapeError` for a dim that neither operand has.
    """
    reduced_dims = over_dims(x, over)
    rest = [d for d in (*x.dims, *(d for d in y.dims if d.name not in names(x.dims))) if d not in reduced_dims]
    return einsum(x, y, out=rest)
