"""A jaxpr as blocks of steps on values, with calls opened: each call has values of its own, and so names of its own."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from meshdsl import jax_functions

from .axes import Axis

LOOPS = {"scan", "while", "cond", "remat", "remat2", "checkpoint"}  # steps with bodies of their own
ALIKE = {"relu", "md_named", "optimization_barrier", "sharding_constraint"}  # each result is like its operand
OWN_RULES = {"custom_vjp_call", "custom_jvp_call"}
OVER_AXES = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}
KNOWN_RULES = {"relu": "relu"}  # functions of jax.nn with a rule of their own, as operations with the same rule


@dataclass(eq=False)
class Value:
    """A value of a jaxpr, with one class of axes for each axis. `label`: the path of an input, such as `params/w`."""

    shape: tuple[int, ...]
    dtype: Any
    const: Any = None
    where: Any = None
    label: str = ""
    maker: BodyStep | None = None
    places: tuple[int, ...] = ()  # of an input: its array, or those of the equal layers that it stacks
    axes: list[Axis] = field(default_factory=list[Axis])

    def __post_init__(self) -> None:
        self.axes = [Axis(n, {self}) for n in self.shape]

    @property
    def is_stacked(self) -> bool:
        return len(self.places) > 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return jax.numpy.issubdtype(self.dtype, jax.numpy.inexact)

    @property
    def is_key(self) -> bool:
        return jax.numpy.issubdtype(self.dtype, jax.dtypes.prng_key)


@dataclass(eq=False)
class BodyStep:
    """One equation. `groups`: of a reshape, the runs of axes that it merges and splits. `parts`: a split whose axis is
    stored as a dim of parts and a dim of places. `primitive`: its name in JAX, or `relu` and the like for a call.
    `transposed`: `jax.grad` made it."""

    primitive: str
    ins: list[Value]
    outs: list[Value]
    params: dict[str, Any]
    where: Any
    eqn: Any = None
    bodies: list[OpenedJaxpr] = field(default_factory=list["OpenedJaxpr"])
    groups: list[tuple[list[Axis], list[Axis]]] = field(default_factory=list[tuple[list[Axis], list[Axis]]])
    parts: bool = False
    transposed: bool = False

    def pairs(self) -> list[tuple[int, int, int | str]]:
        """(operand, axis, axis of the result, or what happens to the axis), by the table of primitives."""
        like = "neg" if self.primitive in ALIKE else self.primitive
        rule = jax_functions.TABLE.get(like)
        if rule is None:
            return [(k, i, jax_functions.MIX) for k, v in enumerate(self.ins) for i in range(len(v.shape))]
        targets = rule(jax_functions.Equation(self.params, [v.shape for v in self.ins], [v.shape for v in self.outs]))
        return [(k, i, t) for k, own in enumerate(targets) for i, t in enumerate(own)]


@dataclass(eq=False)
class OpenedJaxpr:
    ins: list[Value]
    outs: list[Value]
    steps: list[BodyStep]

    def walk(self) -> Iterator[BodyStep]:
        """Every step, those of bodies after the step that has them."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.walk()

    def values(self) -> Iterator[Value]:
        """Every value once or more: inputs first, then in the order of the steps."""
        yield from self.ins
        for step in self.walk():
            for body in step.bodies:
                yield from body.ins
            yield from step.outs
            yield from (v for v in step.ins if v.const is not None)
        yield from self.outs


def read(closed: Any, where: Any = None, derivatives: int | None = 2) -> OpenedJaxpr:
    """The block of a jaxpr, with steps whose results nothing reads.

    `derivatives`: how often functions with a derivative of their own may be differentiated, because a rule may call its
    function again. None opens these functions too: nothing here is differentiated.
    """
    jaxpr, consts = jax_functions.opened(closed)
    ins, reader = [_like(v, where) for v in jaxpr.invars], _Reader(derivatives)
    return OpenedJaxpr(ins, reader.run(jaxpr, consts, ins, where), reader.steps)


def prune(block: OpenedJaxpr) -> None:
    """Remove steps whose results nothing reads."""
    used, kept = set(block.outs), list[BodyStep]()
    for step in reversed(block.steps):
        if not used.isdisjoint(step.outs):
            kept.append(step)
            used.update(step.ins)
            for body in step.bodies:
                prune(body)
    block.steps = kept[::-1]


def _like(v: Any, where: Any) -> Value:
    return Value(tuple(getattr(v.aval, "shape", ())), v.aval.dtype, where=where)


class _Reader:
    """The steps of a jaxpr, and of the calls in it."""

    def __init__(self, derivatives: int | None) -> None:
        self.derivatives, self.steps, self.transposed = derivatives, list[BodyStep](), False

    def run(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Value], caller: Any) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((v, Value(np.shape(c), v.aval.dtype, const=c)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def value(v: Any) -> Value:
            if not isinstance(v, Literal):
                return env[v]
            of: Any = v.aval
            return Value(np.shape(v.val), of.dtype, const=v.val)

        for eqn in jaxpr.eqns:
            where = jax_functions.line_of(eqn, caller)
            before = self.transposed
            self.transposed = before or "transpose(" in str(eqn.source_info.name_stack)
            outs = self.results(eqn, [value(v) for v in eqn.invars], where)
            self.transposed = before
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def results(self, eqn: Any, values: list[Value], where: Any) -> list[Value]:
        """The results of an equation: of the steps of a function that it calls, or of a step of its own."""
        name, bodies = eqn.primitive.name, jax_functions.inner(eqn)
        if name in OWN_RULES and (known := _function_of(bodies[0])) in KNOWN_RULES:
            name, bodies = KNOWN_RULES[known], []
        if name in jax_functions.CALLS and name not in LOOPS and (self.derivatives is None or name not in OWN_RULES):
            return self.run(*jax_functions.opened(bodies[0]), values, where)
        outs, params = [_like(v, where) for v in eqn.outvars], eqn.params
        if name in OVER_AXES and all(isinstance(axis, int) for axis in params["axes"]):
            for v, out in zip(values, outs, strict=True):  # the axis of a jax.vmap, which is an axis of the arrays
                self.add(BodyStep(OVER_AXES[name], [v], [out], {"axes": params["axes"]}, where))
            return outs
        if name == "reshape" and (order := params["dimensions"]) is not None:  # it transposes first
            x = Value(tuple(values[0].shape[i] for i in order), values[0].dtype, where=where)
            self.add(BodyStep("transpose", values, [x], {"permutation": order}, where))
            values = [x]
        step = BodyStep(name, values, outs, params, where, eqn, self.bodies(name, eqn, bodies, where))
        if name == "scan":
            step.params = {**params, **_counts(step)}
        self.add(step)
        return outs

    def bodies(self, name: str, eqn: Any, bodies: Sequence[Any], where: Any) -> list[OpenedJaxpr]:
        """The bodies of a step, in the order in which they run: of a while loop, the test first."""
        if name in OWN_RULES:
            rule = _rule(eqn, where, self.derivatives - 1) if self.derivatives else ()
            return [read(bodies[0], where, derivatives=None), *rule]
        if name == "while":
            bodies = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        return [read(body, where, self.derivatives) for body in bodies if name in LOOPS]

    def add(self, step: BodyStep) -> None:
        step.transposed = self.transposed
        self.steps.append(step)
        for out in step.outs:
            out.maker = step


def _counts(step: BodyStep) -> dict[str, int]:
    """The numbers of constants and carries of a scan, by ranks: the parameters that say so changed in JAX 0.12."""
    (body,), rank = step.bodies, lambda v: len(v.shape)
    rows = sum(rank(v) > rank(w) for v, w in zip(step.ins, body.ins, strict=True))
    carry = sum(rank(v) == rank(w) for v, w in zip(step.outs, body.outs, strict=True))
    return {"num_consts": len(step.ins) - rows - carry, "num_carry": carry}


def _function_of(body: Any) -> str:
    """The name of the only function that a body calls."""
    eqns = jax_functions.opened(body)[0].eqns
    return eqns[0].params.get("name", "") if len(eqns) == 1 else ""


def _rule(eqn: Any, where: Any, derivatives: int) -> list[OpenedJaxpr]:
    """The derivative of a function that has its own, as two blocks: its forward pass and its backward pass.

    The forward pass returns the results and what JAX saves; the backward pass takes these, then the cotangents of the
    results, and returns the cotangents of the floating operands. Both are traced by `jax.vjp`, from the user's rule.
    """

    def f(*xs: Any) -> Any:
        return eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))

    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    moving = [jax.numpy.issubdtype(s.dtype, jax.numpy.inexact) for s in structs]

    def forward(*xs: Any) -> Any:
        def of_moving(*some: Any) -> Any:
            rest = iter(some)
            return f(*(next(rest) if on else x for x, on in zip(xs, moving, strict=True)))

        return jax.vjp(of_moving, *(x for x, on in zip(xs, moving, strict=True) if on))

    saved, (outs, pull) = jax.make_jaxpr(forward, return_shape=True)(*structs)
    residuals, structure = jax.tree.flatten(pull)

    def backward(residuals: Any, cts: Any) -> Any:
        return jax.tree.unflatten(structure, residuals)(cts)

    back = jax.make_jaxpr(backward)(residuals, outs)
    return [read(saved, where, derivatives), read(back, where, derivatives)]
