"""Operations on each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md

from ..replay import Replay
from ..steps import BodyStep
from ..tensors import axiswise, fit
from .registry import operation

SAME: Callable[[Any], Any] = lambda x: x  # noqa: E731
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": md.abs, "ceil": md.ceil, "cos": md.cos, "erf": md.erf, "exp": md.exp, "expm1": md.expm1, "floor": md.floor,
    "is_finite": md.isfinite, "log": md.log, "log1p": md.log1p, "logistic": md.sigmoid, "relu": md.relu,
    "rsqrt": md.rsqrt, "sign": md.sign, "sin": md.sin, "sqrt": md.sqrt, "square": md.square, "tanh": md.tanh,
    "stop_gradient": md.stop_gradient, "neg": lambda x: -x, "not": lambda x: ~x,
    **dict.fromkeys(("copy", "copy_p", "optimization_barrier", "md_named", "sharding_constraint", "reshard"), SAME),
    "add": lambda x, y: x + y, "add_any": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "max": md.maximum, "min": md.minimum, "pow": lambda x, y: x**y, "div": lambda x, y: x / y,
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "and": lambda x, y: x & y, "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}  # fmt: skip
_ON_REALS = {"abs", "sign", "logistic", "div", "pow", "sqrt", "rsqrt"}  # JAX's for other dtypes


@operation(*FUNCTIONS)
def function(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    kind = np.dtype(step.ins[0].dtype)
    floating = jax.numpy.issubdtype(kind, np.floating)
    if (step.primitive in _ON_REALS and not floating) or (step.primitive in ("max", "min") and kind == np.bool_):
        return any_function(replay, step, xs)
    xs = operands(replay, step, xs)
    return FUNCTIONS[step.primitive](*xs) if _has_tensor(xs) else of_numbers(step, xs)


@operation("integer_pow", "convert_element_type", "select_n", "clamp", "name")
def with_parameters(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    xs, p = operands(replay, step, xs), step.params
    if not _has_tensor(xs):
        return of_numbers(step, xs)
    if step.primitive == "integer_pow":
        floating = jax.numpy.issubdtype(step.outs[0].dtype, np.floating)
        return xs[0] ** int(p["y"]) if floating else any_function(replay, step, xs)
    if step.primitive == "convert_element_type":
        return md.cast(xs[0], p["new_dtype"])
    if step.primitive == "clamp":
        return md.minimum(md.maximum(xs[1], xs[0]), xs[2])
    if step.primitive == "name":
        return md.name(xs[0], p["name"])
    if len(xs) != 3 or step.ins[0].dtype != np.bool_:
        return any_function(replay, step, xs)
    return md.where(xs[0], xs[2], xs[1])


def any_function(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    """An elementwise primitive as it is."""
    xs = operands(replay, step, xs)
    if not _has_tensor(xs):
        return of_numbers(step, xs)
    tensors = [
        x if isinstance(x, md.Tensor) else md.full((), x, dtype=v.dtype) for v, x in zip(step.ins, xs, strict=True)
    ]

    def f(*arrays: Any) -> Any:
        return step.eqn.primitive.bind(*arrays, **step.params)

    f.__name__ = step.primitive
    return md.map(f, *tensors)


def _has_tensor(xs: Sequence[Any]) -> bool:
    return any(isinstance(x, md.Tensor) for x in xs)


def operands(replay: Replay, step: BodyStep, xs: list[Any]) -> list[Any]:
    """The operands with the result's dims, and one of them with all dims that any has."""
    out = step.outs[0]
    xs = [fit(x, *axiswise(v, out)) if v.shape else x for v, x in zip(step.ins, xs, strict=True)]
    tensors = [x for x in xs if isinstance(x, md.Tensor)]
    every = list(dict.fromkeys(d for x in tensors for d in x.dims))
    if not tensors or any(len(x.dims) == len(every) for x in tensors):
        return xs
    largest = max(tensors, key=lambda x: len(x.dims))
    return [replay.preferred(md.broadcast(x, every)) if x is largest else x for x in xs]


def of_numbers(step: BodyStep, xs: Sequence[Any]) -> Any:
    """The number that a step computes from numbers."""
    with jax.ensure_compile_time_eval():
        values = [np.asarray(x, v.dtype) for v, x in zip(step.ins, xs, strict=True)]
        if step.primitive in FUNCTIONS and (step.primitive == "relu" or FUNCTIONS[step.primitive] is SAME):
            return np.maximum(values[0], 0)[()] if step.primitive == "relu" else values[0][()]
        return np.asarray(step.eqn.primitive.bind(*values, **step.params))[()]
