"""Translates an elementwise jaxpr to md operations.

Calls inside the jaxpr are inlined. Each equation must have only scalars or be elementwise, by the same check as
`md.map` (`meshdsl.jaxprs`). Other equations raise an error. Broadcast scalars stay scalars until the end, so the
array shapes of the jaxpr are never applied to a device's shard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import meshdsl as md
from meshdsl import jaxprs

__all__ = ["Equation", "Flat", "Value", "flatten"]

Refuse = Callable[[str, Callable[[], tuple[str, str]]], Exception]


@dataclass(frozen=True, eq=False)
class Value:
    """A variable of the jaxpr, or a constant scalar if `number` is set."""

    shape: tuple[int, ...]
    dtype: np.dtype
    number: Any = None


@dataclass(frozen=True, eq=False)
class Equation:
    """out = run(*ins) on tensors; all operands that are not scalars have the same dims."""

    run: Callable[..., md.Tensor]
    ins: tuple[Value, ...]
    out: Value


@dataclass(frozen=True, eq=False)
class Flat:
    """The inlined function. A result may be a scalar where the jaxpr returns an array filled with it."""

    ins: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outs: tuple[Value, ...]

    def run(self, tensors: Sequence[md.Tensor], dims: Sequence[tuple[md.Dim, ...]]) -> list[md.Tensor]:
        """Runs the equations; results that are scalars are broadcast to `dims`."""
        env = dict(zip(self.ins, tensors, strict=True))

        def read(value: Value) -> md.Tensor:
            return env[value] if value.number is None else md.cast(value.number, value.dtype)

        for equation in self.equations:
            result = equation.run(*map(read, equation.ins))
            env[equation.out] = result if result.dtype == equation.out.dtype else md.cast(result, equation.out.dtype)
        results = [read(value) for value in self.outs]
        return [md.broadcast(x, shape) if x.dims != shape else x for x, shape in zip(results, dims, strict=True)]

    def groups(self, same_dims: Iterable[tuple[Value, Value]]) -> Callable[[Value], Value]:
        """Groups arrays that must have equal dims: those of one equation, and the given pairs.

        Returns a function from a value to the representative of its group.
        """
        leader: dict[Value, Value] = {}

        def find(value: Value) -> Value:
            while value in leader:
                value = leader[value]
            return value

        pairs = [(x, equation.out) for equation in self.equations for x in equation.ins]
        for a, b in (*pairs, *same_dims):
            a, b = find(a), find(b)
            if a is not b and a.shape and a.shape == b.shape:
                leader[a] = b
        return find


def flatten(closed: ClosedJaxpr, refuse: Refuse) -> Flat:
    """Inlines a jaxpr; raises `refuse(operation, source)` for the first operation that is not elementwise."""
    equations: list[Equation] = []
    ins = tuple(_value(v) for v in closed.jaxpr.invars)
    outs = _open(closed.jaxpr, closed.consts, ins, equations, refuse)
    return Flat(ins, tuple(equations), outs)


def _open(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    ins: Sequence[Value],
    equations: list[Equation],
    refuse: Refuse,
    called_at: Any = None,
) -> tuple[Value, ...]:
    env: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if np.shape(const):
            raise refuse(f"with a constant array of shape {list(np.shape(const))}", lambda: ("the transformation", ""))
        env[var] = _number(const, var.aval)

    def read(atom: Any) -> Value:
        return _number(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        traceback = called_at or eqn.source_info.traceback  # JAX may have traced the inner jaxpr for an earlier caller
        xs = tuple(read(atom) for atom in eqn.invars)
        inner = jaxprs.inner(eqn)
        if eqn.primitive.name in jaxprs.CALLS and inner:
            body, inner_consts = inner[0]
            env.update(zip(eqn.outvars, _open(body, inner_consts, xs, equations, refuse, traceback), strict=True))
            continue
        outs = [_value(v) for v in eqn.outvars]
        if len(outs) != 1 or inner or eqn.effects or not _elementwise(eqn.primitive.name, xs, outs[0]):
            shapes = ", ".join(str(list(v.shape)) for v in xs if v.shape) or "numbers"
            result = ", ".join(str(list(v.shape)) for v in outs)
            what = f"{eqn.primitive.name} of {shapes} to {result}"
            raise refuse(what, partial(_source, traceback))
        equations.append(Equation(_operation(eqn.primitive, eqn.params, xs), xs, outs[0]))
        env[eqn.outvars[0]] = outs[0]
    return tuple(read(atom) for atom in jaxpr.outvars)


def _value(var: Any) -> Value:
    return Value(tuple(var.aval.shape), np.dtype(var.aval.dtype))


def _number(number: Any, aval: Any) -> Value:
    return Value((), np.dtype(aval.dtype), np.asarray(number).item())


def _elementwise(name: str, ins: Sequence[Value], out: Value) -> bool:
    shapes = [x.shape for x in ins]
    if name == "broadcast_in_dim":
        return shapes[0] in ((), out.shape)
    scalars = not any((*shapes, out.shape))
    return scalars or (name in jaxprs.ELEMENTWISE and all(shape in ((), out.shape) for shape in shapes))


def _source(traceback: Any) -> tuple[str, str]:
    """The function that created the innermost `init` or `update` around an operation, and its file."""
    for frame in traceback.frames if traceback is not None else ():
        maker, separator, function = frame.function_name.partition(".<locals>.")
        if separator and function.startswith(("init", "update")):
            return maker, frame.file_name
    return "the transformation", ""


def _operation(primitive: Any, params: dict[str, Any], ins: Sequence[Value]) -> Callable[..., md.Tensor]:
    """The md operation for a primitive, or md.map of the primitive if there is none."""
    integer = any(np.dtype(x.dtype).kind in "iu" for x in ins)
    if primitive.name in _OPERATIONS and not (integer and primitive.name in _OF_FLOATS):
        return partial(_OPERATIONS[primitive.name], params)
    if primitive.name == "select_n" and len(ins) == 3 and ins[0].dtype == np.bool_:
        return lambda predicate, no, yes: md.where(predicate, yes, no)

    def apply(*xs: Any) -> Any:
        return primitive.bind(*map(jnp.asarray, xs), **params)

    apply.__name__ = primitive.name
    return partial(md.map, apply)


def _plain(function: Callable[..., md.Tensor]) -> Callable[..., md.Tensor]:
    return lambda params, *xs: function(*xs)


# Primitives with an md operation of the same meaning; those in _OF_FLOATS differ for integers.
_OPERATIONS: dict[str, Callable[..., md.Tensor]] = {
    **{name: _plain(getattr(operator, name)) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{name: _plain(lambda x, name=name: getattr(md, name)(x)) for name in (
        "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt", "sign", "sin", "sqrt", "square",
        "tanh",
    )},
    "neg": _plain(lambda x: -x),
    "div": _plain(operator.truediv),
    "max": _plain(lambda x, y: md.maximum(x, y)),
    "min": _plain(lambda x, y: md.minimum(x, y)),
    "and": _plain(operator.and_),
    "or": _plain(operator.or_),
    "is_finite": _plain(lambda x: md.isfinite(x)),
    "logistic": _plain(lambda x: md.sigmoid(x)),
    "integer_pow": lambda params, x: x if params["y"] == 1 else x ** params["y"],
    "convert_element_type": lambda params, x: md.cast(x, params["new_dtype"]),
    "broadcast_in_dim": _plain(lambda x: x),
    "copy": _plain(lambda x: x),
    "copy_p": _plain(lambda x: x),
}  # fmt: skip
_OF_FLOATS = {"div", "integer_pow"}  # in a jaxpr they return integers for integers; the md operations do not
