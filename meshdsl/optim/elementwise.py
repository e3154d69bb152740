"""Runs an elementwise jaxpr with md operations.

Each equation must be elementwise (`meshdsl.jax_functions.ELEMENTWISE`), or have only numbers and arrays that are
computed from numbers, as the boundaries of a schedule: every device computes these. Broadcast scalars stay scalars
until the end, so the array shapes of the jaxpr are never applied to a device's shard.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import meshdsl as md
from meshdsl import jax_functions

Dims = tuple[md.Dim, ...]
Refusal = Callable[[str, str, str], Exception]


MOST_NUMBERS = 4096  # elements of an array that every device computes


class Kind(StrEnum):
    """What the elements of a value in the jaxpr are."""

    TENSOR = "tensor"  # those of a parameter, or computed from them
    NUMBER = "number"  # one number everywhere
    ARRAY = "array"  # computed from numbers


def check_elementwise(
    closed: Any, refusal: Refusal, called_at: Any = None, given: Sequence[Kind] | None = None
) -> list[Kind]:
    """The kinds of a jaxpr's results, from those of its inputs (default: arrays are tensors).

    Raises `refusal(operation, function, file)` for the first operation that is not elementwise.
    """
    jaxpr, _ = jax_functions.opened(closed)
    kinds = dict(zip(jaxpr.invars, given or [_kind(v, Kind.TENSOR) for v in jaxpr.invars], strict=True))
    kinds.update((v, _kind(v, Kind.ARRAY)) for v in jaxpr.constvars)
    for eqn in jaxpr.eqns:
        traceback = called_at or eqn.source_info.traceback  # JAX may have traced the inner jaxpr for an earlier caller
        ins = [Kind.NUMBER if isinstance(v, Literal) else kinds[v] for v in eqn.invars]
        kinds.update(zip(eqn.outvars, _kinds_of_results(eqn, ins, refusal, traceback), strict=True))
    return [Kind.NUMBER if isinstance(v, Literal) else kinds[v] for v in jaxpr.outvars]


def _kinds_of_results(eqn: Any, ins: Sequence[Kind], refusal: Refusal, traceback: Any) -> list[Kind]:
    bodies = jax_functions.inner(eqn)
    if eqn.primitive.name in jax_functions.CALLS and bodies:
        return check_elementwise(bodies[0], refusal, traceback, ins)
    if Kind.ARRAY not in ins and not bodies and _is_elementwise(eqn):
        return [Kind.TENSOR if Kind.TENSOR in ins else Kind.NUMBER]
    if Kind.TENSOR not in ins and not eqn.effects and _elements(eqn) <= MOST_NUMBERS:
        return [_kind(v, Kind.ARRAY) for v in eqn.outvars]
    raise refusal(_what(eqn, ins), *_source(traceback))


def _what(eqn: Any, kinds: Sequence[Kind]) -> str:
    """A description of an equation, for the message that refuses it."""
    constants = [v.aval.shape for v, kind in zip(eqn.invars, kinds, strict=True) if kind is Kind.ARRAY]
    if constants and Kind.TENSOR in kinds:
        return f"with a constant array of shape {list(constants[0])}, by {eqn.primitive.name}"
    shapes = ", ".join(str(list(shape)) for shape in _shapes(eqn.invars)) or "numbers"
    results = ", ".join(str(list(v.aval.shape)) for v in eqn.outvars)
    return f"{eqn.primitive.name} of {shapes} to {results}"


def _kind(v: Any, of_arrays: Kind) -> Kind:
    return of_arrays if v.aval.shape else Kind.NUMBER


def _elements(eqn: Any) -> int:
    """The size of the largest operand or result."""
    return max(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))


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


@dataclass(frozen=True, eq=False)
class _Array:
    """An array that is computed from numbers."""

    numbers: tuple[md.Tensor, ...]
    value: Callable[[dict[int, Any]], Any]  # from the numbers' values by id; it adds results of equations

    @staticmethod
    def of(x: Any, v: Any) -> _Array:
        """A value of a jaxpr as an array: a number is repeated."""
        if isinstance(v, Literal):
            literal: Any = v  # its types are not those of JAX's stubs
            return _Array((), lambda known: jnp.asarray(literal.val, literal.aval.dtype))
        if isinstance(x, _Array):
            return x
        return _Array((x,), lambda known: jnp.broadcast_to(known[id(x)], v.aval.shape))

    def item(self, v: Any) -> md.Tensor:
        """The number that an array without axes is."""
        if not self.numbers:
            with jax.ensure_compile_time_eval():
                return _number(self.value({}), v)

        def numbers(*values: Any) -> Any:
            return self.value({id(x): value for x, value in zip(self.numbers, values, strict=True)})

        return md.map(numbers, *self.numbers)


def _arrays(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation of numbers and arrays."""
    operands = [_Array.of(x, v) for x, v in zip(xs, eqn.invars, strict=True)]
    numbers = tuple({id(x): x for each in operands for x in each.numbers}.values())

    def results(known: dict[int, Any]) -> Any:
        if id(results) not in known:
            y = eqn.primitive.bind(*(each.value(known) for each in operands), **eqn.params)
            known[id(results)] = y if eqn.primitive.multiple_results else [y]
        return known[id(results)]

    outs = [_Array(numbers, lambda known, k=k: results(known)[k]) for k in range(len(eqn.outvars))]
    return [out if v.aval.shape else out.item(v) for out, v in zip(outs, eqn.outvars, strict=True)]


def _results(closed: Any, tensors: Sequence[Any], combined: Callable[[Dims, Dims], Exception]) -> list[Any]:
    jaxpr, consts = jax_functions.opened(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, tensors, strict=True))
    env.update((v, _constant(x, v)) for v, x in zip(jaxpr.constvars, consts, strict=True))

    def read(v: Any) -> Any:
        return _number(v.val, v) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        xs, bodies = list(map(read, eqn.invars)), jax_functions.inner(eqn)
        if eqn.primitive.name in jax_functions.CALLS and bodies:
            env.update(zip(eqn.outvars, _results(bodies[0], xs, combined), strict=True))
            continue
        if bodies or not _is_elementwise(eqn) or any(isinstance(x, _Array) for x in xs):
            env.update(zip(eqn.outvars, _arrays(eqn, xs), strict=True))
            continue
        dims = list(dict.fromkeys(x.dims for x in xs if x.dims))
        if len(dims) > 1:
            raise combined(*dims[:2])
        out, y = eqn.outvars[0], _operation(eqn.primitive, eqn.params, xs)(*xs)
        env[out] = y if y.dtype == out.aval.dtype else md.cast(y, out.aval.dtype)
    return list(map(read, jaxpr.outvars))


def _constant(x: Any, v: Any) -> Any:
    return _Array((), lambda known: jnp.asarray(x)) if v.aval.shape else _number(x, v)


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
