"""Check a graph: every value is defined once, before its uses, and has the type its operation's rule infers.

Equations and graphs are immutable, so each is checked once, however many passes keep it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InternalError
from .borders import borders
from .graph import Eqn, G, known, learn
from .op import Op


def inferred(eqn: Eqn) -> Eqn:
    """The equation, whose results have the types that its rule has just given them: `verify` does not ask again."""
    if eqn.control is None:
        learn(eqn, "typed")
    return eqn


def verify(graph: G, made_by: str) -> G:
    """Return the graph unchanged; raise `InternalError`, naming the pass `made_by`, if a check fails."""
    if known(graph, "verified"):
        return graph
    defined = set(graph.ins)
    if len(defined) != len(graph.ins):
        raise InternalError(f"{made_by}: an input appears twice")
    for eqn in graph.eqns:
        if not defined.issuperset(eqn.ins):
            missing = next(v for v in eqn.ins if v not in defined)
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} uses {missing} before it is defined")
        if not known(eqn, "typed"):
            for problem in _type_problems(eqn):
                raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} {problem}")
            learn(eqn, "typed")
        for sub in eqn.graphs().values():
            verify(sub, made_by)
        if not defined.isdisjoint(eqn.outs):
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} defines a value twice")
        defined.update(eqn.outs)
    if not defined.issuperset(graph.outs):
        raise InternalError(f"{made_by}: a result is never defined")
    learn(graph, "verified")
    return graph


def _type_problems(eqn: Eqn) -> Iterator[str]:
    if isinstance(eqn.op, Op):
        inferred = eqn.op.infer([v.type for v in eqn.ins], eqn.params)
        if inferred != tuple(v.type for v in eqn.outs):
            yield f"declares {[v.type for v in eqn.outs]}, its rule says {inferred}"
    for role, outer, inner, stacked in borders(eqn):
        shape = outer.dims[1:] if stacked else outer.dims
        if (shape, outer.dtype) != (inner.dims, inner.dtype):
            yield f"has {role} of types {outer.type} and {inner.type}"
