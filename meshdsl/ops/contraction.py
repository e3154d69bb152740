"""Contractions and reductions: sum, maximum and the like over dims that the result lacks.

Over a sharded dim the local result is partial. The planner then inserts a psum or a reduce-scatter, or nothing if a
later sum absorbs it.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ..backend import Local, letters
from ..dims import Dim, DimsLike, Shape, merge, names, pick, show
from ..errors import ShapeError, at, caller, located
from ..ir import Bounded, Fuses, Linear, Op, Product, Reduce, Type
from ..trace import Tensor, as_tensor, bind1
from .dtypes import as_dtype, cast, check_ordered, kind, promote
from .elementwise import logical_not, square, where

__all__ = [
    "all", "any", "broadcast", "dot", "einsum", "max", "mean", "min", "prod", "sum", "var",
]  # fmt: skip


def over_dims(x: Tensor, over: DimsLike | None) -> Shape:
    """The dims that a reduction removes: all dims of x if `over` is None."""
    return located(lambda: x.dims if over is None else pick(over, x.dims))


def _einsum_type(*xs: Type, out: Shape, dtype: np.dtype) -> Type:
    table = merge(x.shape for x in xs)
    for dim in out:
        if dim.name not in table:
            raise ShapeError(
                f"einsum cannot make dim {dim.name!r}: no operand has it\n"
                f"  the operands are {', '.join(show(x.shape) for x in xs)}\n"
                f"  broadcast the result with md.broadcast, or give an operand the dim"
            )
    if kind(dtype) in "fi" and any_complex(xs):
        raise ShapeError(f"einsum of complex numbers cannot be a {dtype.name}: the imaginary part would be lost")
    return Type(out, dtype)


def any_complex(xs: Sequence[Type]) -> bool:
    """True if any operand is complex."""
    return builtins.any(kind(x.dtype) == "c" for x in xs)


def _einsum_kernel(c: Local, *xs: Any, out: Shape, dtype: np.dtype) -> Any:
    return c.xp.einsum(letters([b.shape for b in c.ins], c.outs[0].shape), *xs, dtype=dtype).astype(dtype)


def _einsum_vjp(ct: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """Each operand's gradient is the einsum of ct with the other operands, in that operand's dim order."""
    grads = []
    for i, x in enumerate(xs):
        others = (*xs[:i], *xs[i + 1 :])
        available = {d.name for y in (ct, *others) for d in y.dims}
        grad = einsum(*others[:i], ct, *others[i:], out=[d for d in x.dims if d.name in available], dtype=x.dtype)
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
)


def einsum(*xs: Tensor, out: DimsLike, dtype: Any = None) -> Tensor:
    """Multiply tensors, matching dims by name, and sum over every dim that is not in `out`.

    >>> import meshdsl as md
    >>> x, w = md.tensor([[1.0, 2.0]], "batch io"), md.tensor([[1.0], [3.0]], "io hidden")
    >>> md.einsum(x, w, out="batch hidden")
    tensor(float32[batch=1 hidden=1], [[7.]])

    `dtype` is the dtype of the sum, also of partial sums on each device (default: the operands' common dtype).
    More than two tensors are multiplied two at a time, first the pair with the fewest multiplications, by whole sizes.
    Raises `ShapeError` if `out` contains a dim that no operand has.
    """
    if not xs:
        raise at(ShapeError("md.einsum needs at least one tensor"), caller())
    xs = promote(*xs)
    shape = located(lambda: pick(out, merge(x.dims for x in xs).values(), what="output dim"))
    dtype = located(lambda: as_dtype(dtype or xs[0].dtype))
    while len(xs) > 2:
        xs = promote(*_with_one_pair_multiplied(xs, shape, dtype))
    if len(xs) > 1 and kind(xs[0].dtype) in "fc":
        xs = tuple(_without_alone(x, (*xs[:i], *xs[i + 1 :]), shape, dtype) for i, x in enumerate(xs))
        if len({x.dtype for x in xs}) > 1:  # some were summed, in the dtype of the sum
            widest = builtins.max((x.dtype for x in xs), key=lambda kind: kind.itemsize)
            xs = tuple(cast(x, widest) for x in xs)
    return bind1(EINSUM, *xs, out=shape, dtype=dtype)


def _with_one_pair_multiplied(xs: Sequence[Tensor], out: Shape, dtype: np.dtype) -> list[Tensor]:
    """The operands of an einsum, the two with the fewest multiplications replaced by their product.

    The order of the products depends on whole sizes only, so an infinite factor meets the same sums under every layout.
    """

    def multiplications(pair: tuple[int, int]) -> int:
        return math.prod(d.size for d in merge(xs[i].dims for i in pair).values())

    pair = builtins.min(combinations(range(len(xs)), 2), key=multiplications)
    rest = [x for i, x in enumerate(xs) if i not in pair]
    read = {*names(out), *(d.name for x in rest for d in x.dims)}
    kept = [d for d in merge(xs[i].dims for i in pair).values() if d.name in read]
    wider = builtins.max(xs[0].dtype, dtype, key=lambda each: each.itemsize)
    return [*rest, einsum(*(xs[i] for i in pair), out=kept, dtype=wider)]


def _without_alone(x: Tensor, others: Sequence[Tensor], out: Shape, dtype: np.dtype) -> Tensor:
    """x summed over the dims that no other operand and not the result has, in the dtype of the sum if that is wider.

    An infinite factor then multiplies the complete sum, under every layout.
    """
    kept = {d.name for d in out} | {d.name for y in others for d in y.dims}
    alone = [d for d in x.dims if d.name not in kept]
    wider = kind(x.dtype) == kind(dtype) and dtype.itemsize > x.dtype.itemsize
    return sum(cast(x, dtype) if wider else x, alone) if alone else x


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


def _reduced(x: Type, over: Shape) -> Shape:
    return tuple(d for d in x.shape if d not in over)


def _reduction(
    name: str,
    kernel: str,
    vjp: Any,
    *,
    reduce: Reduce = Reduce.NONE,
    mask: Any,
    linear: Linear = Linear.NONE,
    blocked: Any = None,
) -> Op:
    def infer(x: Type, *, over: Shape) -> Type:
        if reduce in (Reduce.MAX, Reduce.MIN):
            check_ordered(name, x.dtype)
        return Type(_reduced(x, over), x.dtype)

    def run(c: Local, x: Any, *, over: Shape) -> Any:
        axis = tuple(c.ins[0].position(d) for d in over)
        return getattr(c.xp, kernel)(x, axis=axis).astype(x.dtype)

    def flops(ins: Any, outs: Any, **_: Any) -> float:
        return float(math.prod(ins[0]))

    return Op(
        name, infer, run, vjp, flops=flops, reduce=reduce, mask=mask, linear=linear, blocked=blocked, fuses=Fuses.REDUCE
    )


def _extreme_vjp(ct: Tensor, x: Tensor, out: Tensor, over: Shape) -> tuple[Tensor]:
    """Divide ct equally among ties. If the extreme is NaN, no element equals it, so the gradient is 0 / 0 = NaN."""
    ties = cast(broadcast(out, x.dims) == x, ct.dtype)
    return (ties * broadcast(ct, x.dims) / broadcast(sum(ties, over), x.dims),)


def _prod_vjp(ct: Tensor, x: Tensor, over: Shape) -> tuple[Tensor]:
    """The gradient is the product of the other elements. Zeros are counted, so it is correct for exact zeros too."""
    zero = x == 0
    zeros = sum(cast(zero, "int32"), over)
    rest = prod(where(zero, 1, x), over)
    alone = where(zeros == 1, rest, 0)
    every = broadcast(where(zeros == 0, rest, 0), x.dims) / where(zero, 1, x)
    return (ct * where(zero, broadcast(alone, x.dims), every),)


_SUM = _reduction("sum", "sum", lambda ct, x: (ct,), reduce=Reduce.SUM, mask=0, linear=Linear.JOINT)
_MAX = _reduction("max", "max", _extreme_vjp, reduce=Reduce.MAX, mask="low")
_MIN = _reduction("min", "min", _extreme_vjp, reduce=Reduce.MIN, mask="high")
PROD = _reduction("prod", "prod", _prod_vjp, mask=1, blocked=lambda x, *, over: names(over))


def _check_nonempty(name: str, x: Tensor, over: Shape) -> None:
    if builtins.any(d.size == 0 for d in over):
        raise at(ShapeError(f"md.{name} of no elements: {show(over)} of {x.type} has size 0"), caller())


def sum(x: Any, over: DimsLike | None = None) -> Tensor:
    """The sum over one or several dims, or all (default). Booleans are counted in int32.

    >>> import meshdsl as md
    >>> md.sum(md.tensor([[1.0, 2.0], [3.0, 4.0]], "a b"), "a")
    tensor(float32[b=2], [4. 6.])

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    x = cast(x, "int32") if kind(x.dtype) == "b" else x
    return bind1(_SUM, x, over=over_dims(x, over))


def mean(x: Any, over: DimsLike | None = None) -> Tensor:
    """The arithmetic mean over one or several dims, or all (default). Padding is never counted.

    >>> import meshdsl as md
    >>> md.mean(md.tensor([1.0, 2.0, 6.0], "a"))
    tensor(float32[], 3.)

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    reduced_dims = over_dims(x, over)
    total = sum(x, reduced_dims)
    return total / math.prod(d.size for d in reduced_dims)


def max(x: Any, over: DimsLike | None = None) -> Tensor:
    """The maximum over one or several dims, or all (default). NaN propagates; ties share the gradient equally.

    >>> import meshdsl as md
    >>> md.max(md.tensor([[1.0, 5.0], [3.0, 2.0]], "a b"), "a")
    tensor(float32[b=2], [3. 5.])

    Raises `ShapeError` for a dim that x lacks or whose size is 0, and for complex numbers.
    """
    x = as_tensor(x)
    reduced_dims = over_dims(x, over)
    _check_nonempty("max", x, reduced_dims)
    return bind1(_MAX, x, over=reduced_dims)


def min(x: Any, over: DimsLike | None = None) -> Tensor:
    """The minimum over one or several dims, or all (default). NaN propagates; ties share the gradient equally.

    >>> import meshdsl as md
    >>> md.min(md.tensor([[1.0, 5.0], [3.0, 2.0]], "a b"), "a")
    tensor(float32[b=2], [1. 2.])

    Raises `ShapeError` for a dim that x lacks or whose size is 0, and for complex numbers.
    """
    x = as_tensor(x)
    reduced_dims = over_dims(x, over)
    _check_nonempty("min", x, reduced_dims)
    return bind1(_MIN, x, over=reduced_dims)


def prod(x: Any, over: DimsLike | None = None) -> Tensor:
    """The product over one or several dims, or all (default).

    >>> import meshdsl as md
    >>> md.prod(md.tensor([2.0, 3.0], "a"))
    tensor(float32[], 6.)

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    return bind1(PROD, x, over=over_dims(x, over))


def any(x: Any, over: DimsLike | None = None) -> Tensor:
    """True where any element is true, over one or several dims, or all (default). Nonzero numbers count as true.

    >>> import meshdsl as md
    >>> md.any(md.tensor([True, False], "a"))
    tensor(bool[], True)

    Raises `ShapeError` for a dim that x lacks.
    """
    return sum(cast(cast(x, bool), "int32"), over) > 0


def all(x: Any, over: DimsLike | None = None) -> Tensor:
    """True where all elements are true, over one or several dims, or all (default). Nonzero numbers count as true.

    >>> import meshdsl as md
    >>> md.all(md.tensor([True, False], "a"))
    tensor(bool[], False)

    Raises `ShapeError` for a dim that x lacks.
    """
    return sum(cast(logical_not(cast(x, bool)), "int32"), over) == 0


def var(x: Any, over: DimsLike | None = None) -> Tensor:
    """The population variance over one or several dims, or all (default); two-pass.

    >>> import meshdsl as md
    >>> md.var(md.tensor([1.0, 3.0], "a"))
    tensor(float32[], 1.)

    Raises `ShapeError` for a dim that x lacks.
    """
    x = as_tensor(x)
    reduced_dims = over_dims(x, over)
    return mean(square(x - broadcast(mean(x, reduced_dims), x.dims)), reduced_dims)


def _broadcast_type(x: Type, *, shape: Shape) -> Type:
    missing = [d for d in x.shape if d not in shape]
    if missing:
        merge([x.shape, shape])
        raise ShapeError(
            f"md.broadcast to {show(shape)} would lose {show(missing)} of {x}\n"
            "  remove dims with md.sum, md.mean or another reduction, or name them in the result too"
        )
    return Type(shape, x.dtype)


def _broadcast_kernel(c: Local, x: Any, *, shape: Shape) -> Any:
    return c.xp.broadcast_to(c.align(x, c.ins[0], c.outs[0]), c.outs[0].sizes)


BROADCAST = Op(
    "broadcast",
    type=_broadcast_type,
    kernel=_broadcast_kernel,
    vjp=lambda ct, x: (ct,),
    vmap=lambda x, *, new, shape: broadcast(x, (new, *shape)),
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
    cheap=True,
    bounded=Bounded.BY_OPERANDS,
)


def broadcast(x: Any, dims: DimsLike) -> Tensor:
    """The tensor repeated along the dims that it lacks, stored in the order of `dims`.

    >>> import meshdsl as md
    >>> md.broadcast(md.tensor([1.0, 2.0], "a"), "b:2 a").numpy()
    array([[1., 2.],
           [1., 2.]], dtype=float32)

    Raises `ShapeError` if `dims` lacks a dim of x.
    """
    x = as_tensor(x)
    shape = located(lambda: pick(dims, x.dims, new=True))
    return x if shape == x.dims else bind1(BROADCAST, x, shape=shape)


def spread(xs: Sequence[Tensor], new: Dim) -> list[Tensor]:
    """The tensors, each with the dim `new` first: those without it are repeated along it."""
    return [x if new in x.dims else broadcast(x, (new, *x.dims)) for x in xs]
