"""Asynchronous collectives and fences: a collective is one instruction, or a `start` and a `wait`.

From its start until it completes, a collective occupies the network. Its result is available at its wait; its buffers
stay allocated between the two. Any equation may run in between; nothing else overlaps. A fence ties values together:
none of its results is available before all of its operands are. Compilers preserve an order only if fences make it a
dependency (`jax.lax.optimization_barrier`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

from ..backend import varying
from ..errors import InternalError
from ..ir import Eqn, Fuses, Graph, Op, Start, Type
from ..layouts import Mesh, Sharding
from .casts import invariant


def _unchanged(eqn: Eqn) -> list[Sharding]:
    return [v.sharding for v in eqn.ins]


WAIT = Op(
    "wait",
    type=lambda x: x,
    kernel=lambda c, x: x,
    fuses=Fuses.VIEW,
    effects=True,
    shardings=_unchanged,
)
FENCE = Op(
    "fence",
    type=lambda *xs: tuple(Type(x.dims, x.dtype) for x in xs),
    kernel=lambda c, *xs: list(xs),  # the NumPy kernel; see `emit_fence` for JAX
    fuses=Fuses.VIEW,
    effects=True,
    shardings=_unchanged,
)


def emit_fence(eqn: Eqn, xs: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The operands of a fence, tied together in JAX.

    `optimization_barrier` types every result as varying over the axes of all operands. The operands are therefore cast
    to one type before it, and back to the types of their shardings after it.
    """
    own = [v.sharding.varying for v in eqn.ins]
    every = tuple(axis for axis in mesh.axes if any(axis in axes for axes in own))
    tied = lax.optimization_barrier([varying(x, every) for x in xs])
    return [invariant(y, tuple(a for a in every if a not in axes)) for y, axes in zip(tied, own, strict=True)]


def pairs(graph: Graph) -> dict[Eqn, Eqn]:
    """Map every start of one body to its wait."""
    waits = {eqn.ins[0]: eqn for eqn in graph.eqns if eqn.op is WAIT}
    return {eqn: waits[eqn.outs[0]] for eqn in graph.eqns if isinstance(eqn.op, Start)}


def check_pairs(graph: Graph, made_by: str) -> None:
    """Raise `InternalError` unless each start has exactly one wait, the only reader of its result, in every body."""
    for problem in _problems(graph):
        raise InternalError(f"{made_by}: {problem}")
    for eqn in graph.eqns:
        for sub in eqn.graphs().values():
            check_pairs(sub, made_by)


def _problems(graph: Graph) -> Iterator[str]:
    in_flight = {eqn.outs[0]: eqn for eqn in graph.eqns if isinstance(eqn.op, Start)}
    waited = set[Any]()
    for eqn in graph.eqns:
        if eqn.op is WAIT and eqn.ins[0] not in in_flight:
            yield f"a wait at {eqn.where} waits for {eqn.ins[0]}, which no collective of this body starts"
        for v in eqn.ins:
            if v not in in_flight:
                continue
            if eqn.op is not WAIT:
                yield f"{eqn.op} at {eqn.where} reads the result of '{in_flight[v].op}' before its wait"
            if v in waited:
                yield f"'{in_flight[v].op}' at {in_flight[v].where} is waited for twice"
            waited.add(v)
    for v, eqn in in_flight.items():
        if v not in waited or v in graph.outs:
            yield f"'{eqn.op}' at {eqn.where} is never waited for"
