"""Softmax, its logarithm, and the logarithm of its denominator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dims import DimsLike, Shape, size_of
from ..errors import ShapeError
from ..ir import Call, Op
from ..trace import Tensor, as_tensor, bind, trace
from .dtypes import as_dtype, cast, check_kind, in_wide, kind, mean_dtype
from .elementwise import exp, isfinite, log, stop_gradient, where
from .reductions import max, over_dims, sum


def logsumexp(x: Any, over: DimsLike | None = None) -> Tensor:
    """log(sum(exp(x))) over one or several dims, or all (default), without overflow.

    >>> import meshdsl as md
    >>> md.logsumexp(md.tensor([1000.0, 1000.0], "a"), "a")
    tensor(float32[], 1000.6932)

    The dtype is that of `jax.nn.logsumexp`: float32 for integers and booleans (float64 for those of 64 bits). Floats of
    8 and 16 bits are computed in float32. Raises `ShapeError` for a dim that x lacks, and for complex numbers.
    """
    x = as_tensor(x)
    check_kind("logsumexp", x.dtype, "fib")
    gone = over_dims(x, over)

    def wide_logsumexp(x: Tensor) -> Tensor:
        top = stop_gradient(max(x, gone))
        shift = where(isfinite(top), top, 0)  # if all are -inf the result is -inf; if any is inf, inf
        return log(sum(exp(x - shift), gone)) + shift

    return in_wide(wide_logsumexp, x, mean_dtype(x.dtype))


def softmax(x: Any, over: DimsLike, dtype: Any = None) -> Tensor:
    """exp(x) / sum(exp(x)) over one or several dims. The gradient keeps only the result.

    >>> import meshdsl as md
    >>> md.softmax(md.tensor([0.0, 0.0], "a"), "a")
    tensor(float32[a=2], [0.5 0.5])

    It is computed in the dtype of x; `dtype` is that of the result, and of what the gradient keeps (default: the same).
    Raises `ShapeError` for a dim that x lacks, and for numbers that are not floats.
    """
    x = _floating("softmax", x)
    gone = over_dims(x, over)
    to = as_dtype(dtype or x.dtype)
    graph, _, _ = trace(lambda x: cast(_quotient(x, gone), to), [x.type])
    return bind(_SOFTMAX, x, over=gone, control=Call(graph))[0]


def _floating(name: str, x: Any) -> Tensor:
    x = as_tensor(x)
    if kind(x.dtype) != "f":
        raise ShapeError(f"md.{name} needs floats, got {x.type}; use md.cast(x, 'float32')")
    return x


def _quotient(x: Tensor, over: Shape) -> Tensor:
    e = exp(_at_most_zero(x, over))
    return e / sum(e, over)


def _at_most_zero(x: Tensor, over: Shape) -> Tensor:
    """x minus its maximum, which no elements have."""
    return x - stop_gradient(max(x, over)) if size_of(over) else x


def _softmax_fwd(x: Tensor, *, active: Sequence[bool], read: Sequence[bool], over: Shape, control: Call) -> Any:
    (out,) = control.graph.outs
    p = cast(_quotient(x, over), out.dtype)
    return [p], p


def _softmax_vjp(cts: Sequence[Tensor], p: Tensor, *, over: Shape, control: Call) -> list[Tensor]:
    """With respect to x: p (ct - sum(ct p)). Through exp and the quotient, a loop would store both."""
    p, ct = (cast(y, control.graph.ins[0].dtype) for y in (p, cts[0]))
    return [p * (ct - sum(ct * p, over))]


_SOFTMAX = Op(
    "call",  # inlined after differentiation
    type=lambda x, *, over, control: (control.graph.outs[0].type,),
    kernel=lambda run, x, *, over, control: run(control.graph, [x]),
    fwd=_softmax_fwd,
    vjp=_softmax_vjp,
)


def log_softmax(x: Any, over: DimsLike) -> Tensor:
    """log(softmax(x)) over one or several dims.

    >>> import meshdsl as md
    >>> md.log_softmax(md.tensor([0.0, 0.0], "a"), "a")
    tensor(float32[a=2], [-0.6931 -0.6931])

    Raises `ShapeError` for a dim that x lacks, and for numbers that are not floats.
    """
    x = _floating("log_softmax", x)
    gone = over_dims(x, over)
    shifted = _at_most_zero(x, gone)
    return shifted - log(sum(exp(shifted), gone))
