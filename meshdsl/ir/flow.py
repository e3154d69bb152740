"""What depends on what: equations behind values, values that equations read, and values computed from others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .graph import Eqn, Var


def sources_of(eqns: Sequence[Eqn], values: Iterable[Var]) -> set[Eqn]:
    """The equations among these that compute the values, with all that they read."""
    needed, sources = set(values), set[Eqn]()
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outs):
            sources.add(eqn)
            needed.update(eqn.ins)
    return sources


def read_by(eqns: Iterable[Eqn], results: Iterable[Var] = ()) -> set[Var]:
    """The values that the equations read, and the results of their graph."""
    return {v for eqn in eqns for v in eqn.ins}.union(results)


def computed_from(eqns: Iterable[Eqn], values: Iterable[Var]) -> set[Var]:
    """The values, and the results of the equations that depend on one of them."""
    found = set(values)
    for eqn in eqns:
        if not found.isdisjoint(eqn.ins):
            found.update(eqn.outs)
    return found
