"""A jaxpr as elementwise operations of the language.

Calls inside it are opened. Every equation then either has no array in it, or is elementwise (`meshdsl.primitives`, the
check of `md.map`); any other is refused. A number that is broadcast stays a number until the end, so no shape of the
jaxpr is ever used on a device's shard.
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
from meshdsl import primitives

__all__ = ["Equation", "Flat", "Value", "flatten"]

Refuse = Callable[[str, Callable[[], tuple[str, str]]], Exception]


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the jaxpr, or a number in it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    number: Any = None


@dataclass(frozen=True, eq=False)
class Equation:
    """out = run(*ins) on tensors; operands with dims all have the same."""

    run: Callable[..., md.Tensor]
    ins: tuple[Value, ...]
    out: Value


@dataclass(frozen=True, eq=False)
class Flat:
    """The whole function. A result may still be a number where the jaxpr has an array of it."""

    ins: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outs: tuple[Value, ...]

    def run(self, tensors: Sequence[md.Tensor], dims: Sequence[tuple[md.Dim, ...]]) -> list[md.Tensor]:
        """The results, given these dims where they are still numbers."""
        env = dict(zip(self.ins, tensors, strict=True))

        def of(value: Value) -> md.Tensor:
            return env[value] if value.number is None else md.cast(value.number, value.dtype)

        for equation in self.equations:
            result = equation.run(*map(of, equation.ins))
            env[equation.out] = result if result.dtype == equation.out.dtype else md.cast(result, equation.out.dtype)
        results = [of(value) for value in self.outs]
        return [md.broadcast(x, shape) if x.dims != shape else x for x, shape in zip(results, dims, strict=True)]

    def groups(self, together: Iterable[tuple[Value, Value]]) -> Callable[[Value], Value]:
        """A representative of the arrays that lie beside each other: those of one equation, and these pairs."""
        leader: dict[Value, Value] = {}

        def find(value: Value) -> Value:
            while value in leader:
                value = leader[value]
            return value

        pairs = [(x, equation.out) for equation in self.equations for x in equation.ins]
        for a, b in (*pairs, *together):
            a, b = find(a), find(b)
            if a is not b and a.shape and a.shape == b.shape:
                leader[a] = b
        return find


def flatten(closed: ClosedJaxpr, refuse: Refuse) -> Flat:
    """The function of a jaxpr. Raises what `refuse` makes of the first operation that is not elementwise."""
    made: list[Equation] = []
    ins = tuple(_value(v) for v in closed.jaxpr.invars)
    outs = _open(closed.jaxpr, closed.consts, ins, made, refuse)
    return Flat(ins, tuple(made), outs)


def _open(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    ins: Sequence[Value],
    made: list[Equation],
    refuse: Refuse,
    called_at: Any = None,
) -> tuple[Value, ...]:
    env: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if np.shape(const):
            raise refuse(f"with a constant array of shape {list(np.shape(const))}", lambda: ("the transformation", ""))
        env[var] = _number(const, var.aval)

    def of(atom: Any) -> Value:
        return _number(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        traceback = called_at or eqn.source_info.traceback  # JAX may have traced the inside for an earlier caller
        xs = tuple(of(atom) for atom in eqn.invars)
        inner = primitives.inner(eqn)
        if eqn.primitive.name in primitives.CALLS and inner:
            body, held = inner[0]
            env.update(zip(eqn.outvars, _open(body, held, xs, made, refuse, traceback), strict=True))
            continue
        outs = [_value(v) for v in eqn.outvars]
        if len(outs) != 1 or inner or eqn.effects or not _elementwise(eqn.primitive.name, xs, outs[0]):
            shapes = ", ".join(str(list(v.shape)) for v in xs if v.shape) or "numbers"
            result = ", ".join(str(list(v.shape)) for v in outs)
            what = f"{eqn.primitive.name} of {shapes} to {result}"
            raise refuse(what, partial(_source, traceback))
        made.append(Equation(_operation(eqn.primitive, eqn.params, xs), xs, outs[0]))
        env[eqn.outvars[0]] = outs[0]
    return tuple(of(atom) for atom in jaxpr.outvars)


def _value(var: Any) -> Value:
    return Value(tuple(var.aval.shape), np.dtype(var.aval.dtype))


def _number(number: Any, aval: Any) -> Value:
    return Value((), np.dtype(aval.dtype), np.asarray(number).item())


def _elementwise(name: str, ins: Sequence[Value], out: Value) -> bool:
    shapes = [x.shape for x in ins]
    if name == "broadcast_in_dim":
        return shapes[0] in ((), out.shape)
    numbers = not any((*shapes, out.shape))
    return numbers or primitives.elementwise(name, shapes, out.shape)


def _source(traceback: Any) -> tuple[str, str]:
    """The innermost `init` or `update` around an operation, by the name of what made it, and its file."""
    for frame in traceback.frames if traceback is not None else ():
        maker, made, function = frame.function_name.partition(".<locals>.")
        if made and function.startswith(("init", "update")):
            return maker, frame.file_name
    return "the transformation", ""


def _operation(primitive: Any, params: dict[str, Any], ins: Sequence[Value]) -> Callable[..., md.Tensor]:
    """The operation of the language for a primitive; md.map of the primitive itself where there is none."""
    whole = any(np.dtype(x.dtype).kind in "iu" for x in ins)
    if primitive.name in _OPERATIONS and not (whole and primitive.name in _OF_FLOATS):
        return partial(_OPERATIONS[primitive.name], params)
    if primitive.name == "select_n" and len(ins) == 3 and ins[0].dtype == np.bool_:
        return lambda which, no, yes: md.where(which, yes, no)

    def apply(*xs: Any) -> Any:
        return primitive.bind(*map(jnp.asarray, xs), **params)

    apply.__name__ = primitive.name
    return partial(md.map, apply)


def _plain(function: Callable[..., md.Tensor]) -> Callable[..., md.Tensor]:
    return lambda params, *xs: function(*xs)


# Primitives that the language has, with the jaxpr's meaning on every dtype but those of _OF_FLOATS.
_OPERATIONS: dict[str, Callable[..., md.Tensor]] = {
    **{name: _plain(getattr(operator, name)) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{name: _plain(lambda x, name=name: getattr(md, name)(x)) for name in (
        "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt", "sign", "sin", "sqrt", "square",
        "tanh",
    )},
    "neg": _plain(operator.neg),
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
_OF_FLOATS = {"div", "integer_pow"}  # whole numbers: the jaxpr's stay whole
