"""Reductions, such as sum and maximum over dims that the result lacks, and broadcasting, the transpose of a sum.

Over a sharded dim the local result is partial. The planner then inserts the collective that completes it, before an
operation that needs the complete value.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from ..backend import Local
from ..dims import Dim, DimsLike, Shape, merge, names, pick, show, size_of
from ..errors import ShapeError
from ..ir import Bounded, Fuses, Linear, Op, Reduce, Type
from ..trace import Tensor, as_tensor, bind1
from .dtypes import cast, check_ordered, in_wide, kind, mean_dtype, sum_dtype
from .elementwise import absolute_square, logical_not, where
from .masking import identity


def over_dims(x: Tensor, over: DimsLike | None) -> Shape:
    """The dims that a reduction removes: all dims of x if `over` is None."""
    return x.dims if over is None else pick(over, x.dims)


def _reduced(x: Type, over: Shape) -> Shape:
    return tuple(d for d in x.dims if d not in over)


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
        name,
        infer,
        run,
        vjp,
        flops=flops,
        reduce=reduce,
        mask=mask,
        linear=linear,
        blocked=blocked,
        fuses=Fuses.REDUCE,
        by_name=True,
    )


def _extreme_vjp(ct: Tensor, x: Tensor, out: Tensor, over: Shape) -> tuple[Tensor]:
    """Divide ct equally among ties. If the extreme is NaN, no element equals it, so the gradient is 0 / 0 = NaN."""
    ties = cast(broadcast(out, x.dims) == x, ct.dtype)
    return (ties * broadcast(ct, x.dims) / broadcast(sum(ties, over), x.dims),)


def _prod_vjp(ct: Tensor, x: Tensor, over: Shape) -> tuple[Tensor]:
    """The gradient is the product of the other elements. Zeros are counted, so it is correct for exact zeros too."""
    zero = x == 0
    zeros = total(cast(zero, "int32"), over)
    rest = prod(where(zero, 1, x), over)
    alone = where(zeros == 1, rest, 0)
    every = broadcast(where(zeros == 0, rest, 0), x.dims) / where(zero, 1, x)
    return (ct * where(zero, broadcast(alone, x.dims), every),)


SUM = _reduction("sum", "sum", lambda ct, x: (ct,), reduce=Reduce.SUM, mask=0, linear=Linear.JOINT)


MAX = _reduction("max", "max", _extreme_vjp, reduce=Reduce.MAX, mask="low")


_MIN = _reduction("min", "min", _extreme_vjp, reduce=Reduce.MIN, mask="high")


PROD = _reduction("prod", "prod", _prod_vjp, mask=1, blocked=lambda x, *, over: names(over))


def _check_nonempty(name: str, x: Tensor, over: Shape) -> None:
    if builtins.any(d.size == 0 for d in over):
        raise ShapeError(f"md.{name} of no elements: {show(over)} of {x.type} has size 0")


def total(x: Tensor, over: DimsLike | None = None) -> Tensor:
    """The sum in the dtype of x, also of the devices' partial sums: integers can wrap."""
    return bind1(SUM, x, over=over_dims(x, over))


def _kept(x: Any, where_: Any, fill: Any) -> Tensor:
    """x, with `fill` where the condition of a reduction is false; "low" and "high" are the extremes of the dtype."""
    x = as_tensor(x)
    return x if where_ is None else where(where_, x, as_tensor(identity(fill, x.dtype), x.dtype))


def count(where_: Any, x: Tensor, over: Shape) -> Any:
    """The number of elements that a reduction of x reads, along the dims that it removes."""
    if where_ is None:
        return size_of(over)
    return total(broadcast(cast(where_, mean_dtype(x.dtype)), x.dims), over)


def sum(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """The sum over one or several dims, or all (default).

    >>> import meshdsl as md
    >>> md.sum(md.tensor([[1.0, 2.0], [3.0, 4.0]], "a b"), "a")
    tensor(float32[b=2], [4. 6.])
    >>> md.sum(md.cast(md.tensor([100, 100], "a"), "int8")).item()
    200

    The dtype is that of `jnp.sum`: integers and booleans are added in JAX's default integer, int32 or uint32 (64 bits
    if JAX has them enabled). Floats of 8 and 16 bits are added in float32, over devices too, and rounded once.
    Only elements where the boolean tensor `where` is true are read. Raises `ShapeError` for a dim that x lacks.
    """
    return _accumulated(SUM, _kept(x, where, 0), over)


def _accumulated(op: Op, x: Tensor, over: DimsLike | None) -> Tensor:
    """The sum or product of x in the dtype of `jnp.sum`."""
    dtype = sum_dtype(x.dtype)
    return in_wide(lambda wide: bind1(op, wide, over=over_dims(x, over)), x, dtype)


def mean(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """The arithmetic mean over one or several dims, or all (default). Padding is never counted.

    >>> import meshdsl as md
    >>> md.mean(md.tensor([1.0, 2.0, 6.0], "a"))
    tensor(float32[], 3.)

    The dtype is that of `jnp.mean`: float32 for integers and booleans (float64 for those of 64 bits). Floats of 8 and
    16 bits are added in float32, over devices too, and rounded once. Only elements where `where` is true are read.
    Raises `ShapeError` for a dim that x lacks.
    """
    x = _kept(x, where, 0)
    reduced_dims = over_dims(x, over)

    def wide_mean(wide: Tensor) -> Tensor:
        return total(wide, reduced_dims) / count(where, wide, reduced_dims)

    return in_wide(wide_mean, x, mean_dtype(x.dtype))


def max(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """The maximum over one or several dims, or all (default). NaN propagates; ties share the gradient equally.

    >>> import meshdsl as md
    >>> md.max(md.tensor([[1.0, 5.0], [3.0, 2.0]], "a b"), "a")
    tensor(float32[b=2], [3. 5.])

    Only elements where `where` is true are read. Raises `ShapeError` for a dim that x lacks or whose size is 0, and for
    complex numbers.
    """
    x = _kept(x, where, "low")
    reduced_dims = over_dims(x, over)
    _check_nonempty("max", x, reduced_dims)
    return bind1(MAX, x, over=reduced_dims)


def min(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """The minimum over one or several dims, or all (default). NaN propagates; ties share the gradient equally.

    >>> import meshdsl as md
    >>> md.min(md.tensor([[1.0, 5.0], [3.0, 2.0]], "a b"), "a")
    tensor(float32[b=2], [1. 2.])

    Only elements where `where` is true are read. Raises `ShapeError` for a dim that x lacks or whose size is 0, and for
    complex numbers.
    """
    x = _kept(x, where, "high")
    reduced_dims = over_dims(x, over)
    _check_nonempty("min", x, reduced_dims)
    return bind1(_MIN, x, over=reduced_dims)


def prod(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """The product over one or several dims, or all (default); its dtype follows the rule of `md.sum`.

    >>> import meshdsl as md
    >>> md.prod(md.tensor([2.0, 3.0], "a"))
    tensor(float32[], 6.)

    Only elements where `where` is true are read. Raises `ShapeError` for a dim that x lacks.
    """
    return _accumulated(PROD, _kept(x, where, 1), over)


def any(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """True where any element is true, over one or several dims, or all (default). Nonzero numbers count as true.

    >>> import meshdsl as md
    >>> md.any(md.tensor([True, False], "a"))
    tensor(bool[], True)

    Only elements where `where` is true are read. Raises `ShapeError` for a dim that x lacks.
    """
    return total(cast(_kept(cast(x, bool), where, False), "int32"), over) > 0


def all(x: Any, over: DimsLike | None = None, where: Any = None) -> Tensor:
    """True where all elements are true, over one or several dims, or all (default). Nonzero numbers count as true.

    >>> import meshdsl as md
    >>> md.all(md.tensor([True, False], "a"))
    tensor(bool[], False)

    Only elements where `where` is true are read. Raises `ShapeError` for a dim that x lacks.
    """
    return total(cast(logical_not(_kept(cast(x, bool), where, True)), "int32"), over) == 0


def var(x: Any, over: DimsLike | None = None, where: Any = None, ddof: int = 0) -> Tensor:
    """The variance over one or several dims, or all (default); two-pass. `ddof=1`: that of a sample, by n - 1.

    >>> import meshdsl as md
    >>> md.var(md.tensor([1.0, 3.0], "a"))
    tensor(float32[], 1.)

    The variance of complex numbers is real: the mean of the squared distances from their mean. Otherwise the dtype is
    that of `md.mean`; it is computed in float32 or wider. Only elements where `where` is true are read. Raises
    `ShapeError` for a dim that x lacks.
    """
    x = _kept(x, where, 0)
    reduced_dims = over_dims(x, over)

    def wide_var(x: Tensor) -> Tensor:
        squares = absolute_square(x - broadcast(mean(x, reduced_dims, where), x.dims))
        if not ddof:
            return mean(squares, reduced_dims, where)
        return total(_kept(squares, where, 0), reduced_dims) / (count(where, squares, reduced_dims) - ddof)

    dtype = mean_dtype(x.dtype)
    return wide_var(x) if kind(dtype) == "c" else in_wide(wide_var, x, dtype)


def _broadcast_type(x: Type, *, shape: Shape) -> Type:
    missing = [d for d in x.dims if d not in shape]
    if missing:
        merge([x.dims, shape])
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
    by_name=True,
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
    shape = pick(dims, x.dims, new=True)
    return x if shape == x.dims else bind1(BROADCAST, x, shape=shape)


def spread(xs: Sequence[Tensor], new: Dim) -> list[Tensor]:
    """The tensors, each with the dim `new` first: those without it are repeated along it."""
    return [x if new in x.dims else broadcast(x, (new, *x.dims)) for x in xs]
