"""Runs an elementwise jaxpr with md operations.

Each equation must have only scalars or be elementwise (`meshdsl.jax_functions.ELEMENTWISE`). Broadcast scalars stay
scalars until the end, so the array shapes of the jaxpr are never applied to a device's shard.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import meshdsl as md
from meshdsl import jax_functions

Dims = tuple[md.Dim, ...]
Refusal = Callable[[str, str, str], Exception]


def check_elementwise(closed: Any, refusal: Refusal, called_at: Any = None) -> None:
    """Raise `refusal(operation, function, file)` for the first operation of a jaxpr that is not elementwise."""
    jaxpr, consts = jax_functions.opened(closed)
    for const in consts:
        if np.shape(const):
            raise refusal(f"with a constant array of shape {list(np.shape(const))}", "the transformation", "")
    for eqn in jaxpr.eqns:
        traceback = called_at or eqn.source_info.traceback  # JAX may have traced the inner jaxpr for an earlier caller
        name, bodies = eqn.primitive.name, jax_functions.inner(eqn)
        if name in jax_functions.CALLS and bodies:
            check_elementwise(bodies[0], refusal, traceback)
        elif bodies or not _is_elementwise(eqn):
            shapes = ", ".join(str(list(shape)) for shape in _shapes(eqn.invars)) or "numbers"
            results = ", ".join(str(list(v.aval.shape)) for v in eqn.outvars)
            raise refusal(f"{name} of {shapes} to {results}", *_source(traceback))


def _is_elementwise(eqn: Any) -> bool:
    """True if an equation without a body computes one result, element by element, or repeats numbers to fill it."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    kept = eqn.primitive.name in jax_functions.ELEMENTWISE or eqn.primitive.name == "broadcast_in_dim"
    return all(kept and outs == [shape] for shape in ins or outs)


def _shapes(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes of those that are no single numbers."""
    return [v.aval.shape for v in values if v.aval.shape]


def _source(traceback: Any) -> tuple[str, str]:
    """The function that created the innermost `init` or `update` around an operation, and its file."""
    for frame in traceback.frames if traceback is not None else ():
        maker, separator, function = frame.function_name.partition(".<locals>.")
        if separator and function.startswith(("init", "update")):
            return maker, frame.file_name
    return "the transformation", ""


def run(
    closed: Any, tensors: Sequence[md.Tensor], dims: Sequence[Dims], combined: Callable[[Dims, Dims], Exception]
) -> list[md.Tensor]:
    """Run a jaxpr that `check_elementwise` accepted; its results get these dims.

    If operands of one equation have different dims, or a result has other dims, this raises the exception that
    `combined(dims, other dims)` makes.
    """
    results = _results(closed, tensors, combined)
    for x, own in zip(results, dims, strict=True):
        if x.dims and x.dims != own:
            raise combined(x.dims, own)
    return [x if x.dims == own else md.broadcast(x, own) for x, own in zip(results, dims, strict=True)]


def _results(closed: Any, tensors: Sequence[md.Tensor], combined: Callable[[Dims, Dims], Exception]) -> list[md.Tensor]:
    jaxpr, consts = jax_functions.opened(closed)
    env: dict[Any, md.Tensor] = dict(zip(jaxpr.invars, tensors, strict=True))
    env.update((v, _number(x, v)) for v, x in zip(jaxpr.constvars, consts, strict=True))

    def read(v: Any) -> md.Tensor:
        return _number(v.val, v) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        xs, bodies = list(map(read, eqn.invars)), jax_functions.inner(eqn)
        if bodies:
            env.update(zip(eqn.outvars, _results(bodies[0], xs, combined), strict=True))
            continue
        dims = list(dict.fromkeys(x.dims for x in xs if x.dims))
        if len(dims) > 1:
            raise combined(*dims[:2])
        out, y = eqn.outvars[0], _operation(eqn.primitive, eqn.params, xs)(*xs)
        env[out] = y if y.dtype == out.aval.dtype else md.cast(y, out.aval.dtype)
    return list(map(read, jaxpr.outvars))


def _number(x: Any, v: Any) -> md.Tensor:
    return md.cast(np.asarray(x).item(), v.aval.dtype)


def _operation(primitive: Any, params: dict[str, Any], xs: Sequence[md.Tensor]) -> Callable[..., md.Tensor]:
    """The md operation for a primitive, or md.map of the primitive if there is none."""
    name, integer = primitive.name, any(x.dtype.kind in "iu" for x in xs)
    if name == "select_n" and len(xs) == 3 and xs[0].dtype == np.bool_:
        return lambda predicate, no, yes: md.where(predicate, yes, no)
    if name in _SAME:
        return getattr(md, name)
    if name in _OPERATORS:
        return getattr(operator, name)
    if name in _OPERATIONS and not (integer and name in _OF_FLOATS):
        return partial(_OPERATIONS[name], params)

    def apply(*xs: Any) -> Any:
        return primitive.bind(*map(jnp.asarray, xs), **params)

    apply.__name__ = name
    return partial(md.map, apply)


# Primitives with an md operation of the same name, and of other names; those in _OF_FLOATS differ for integers.
_SAME = {
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt", "sign", "sin", "sqrt", "square",
    "tanh",
}  # fmt: skip
_OPERATORS = {"add", "eq", "ge", "gt", "le", "lt", "mul", "ne", "sub"}
_OPERATIONS: dict[str, Callable[..., md.Tensor]] = {
    "neg": lambda _, x: -x,
    "div": lambda _, x, y: x / y,
    "max": lambda _, x, y: md.maximum(x, y),
    "min": lambda _, x, y: md.minimum(x, y),
    "and": lambda _, x, y: x & y,
    "or": lambda _, x, y: x | y,
    "is_finite": lambda _, x: md.isfinite(x),
    "logistic": lambda _, x: md.sigmoid(x),
    "integer_pow": lambda params, x: x if params["y"] == 1 else x ** params["y"],
    "convert_element_type": lambda params, x: md.cast(x, params["new_dtype"]),
    **dict.fromkeys(("broadcast_in_dim", "copy", "copy_p"), lambda _, x: x),
}  # fmt: skip
_OF_FLOATS = {"div", "integer_pow"}  # in a jaxpr they return integers for integers; the md operations do not
