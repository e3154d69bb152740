"""Operations on each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl import jax_functions

from ..replay import Replay, operation
from ..steps import BodyStep
from ..tensors import axiswise, fit

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
WITH_PARAMETERS: dict[str, Callable[..., Any]] = {
    "integer_pow": lambda p, x: x ** int(p["y"]), "convert_element_type": lambda p, x: md.cast(x, p["new_dtype"]),
    "clamp": lambda p, low, x, high: md.minimum(md.maximum(x, low), high), "name": lambda p, x: md.name(x, p["name"]),
    "select_n": lambda p, which, x, y: md.where(which, y, x),
}  # fmt: skip
_ON_REALS = {"abs", "sign", "logistic", "div", "pow", "integer_pow", "sqrt", "rsqrt"}  # JAX's for other dtypes


@operation(*FUNCTIONS, *WITH_PARAMETERS)
def function(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    kind, name = np.dtype(step.ins[0].dtype), step.primitive
    if (
        (name in _ON_REALS and not jax.numpy.issubdtype(kind, np.floating))
        or (name in ("max", "min") and kind == np.bool_)
        or (name == "select_n" and (len(xs) != 3 or kind != np.bool_))
    ):
        return any_function(replay, step, xs)
    xs = operands(replay, step, xs)
    if not _has_tensor(xs):
        return of_numbers(step, xs)
    return WITH_PARAMETERS[name](step.params, *xs) if name in WITH_PARAMETERS else FUNCTIONS[name](*xs)


@operation(*jax_functions.ELEMENTWISE - {*FUNCTIONS, *WITH_PARAMETERS})
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
