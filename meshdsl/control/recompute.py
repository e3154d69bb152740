"""Choose the residuals of a loop: the minimum cut between its halves, weighed by bytes stored and work done again.

Every value that the backward half reads is either stored by the forward loop and read back, or computed again from
others. A value to compute again needs its operands, which are stored or computed again in turn. The cheapest choice is
a minimum cut: a value is cut before its equation (store it) or behind it (pay for the equation).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..ir import Eqn, Fuses, Op, Var, operations
from ..ir.min_cut import FlowGraph

__all__ = ["again", "choose", "stored"]

# Elementwise operations that take as long as moving a byte to or from memory; machine files have 4 to 22
ELEMENTWISE = 4.0
TRANSCENDENTAL = 0.4


def choose(
    eqns: Sequence[Eqn], used: Collection[Var], free: Collection[Var], constant: Collection[Var]
) -> tuple[set[Var], set[Var]]:
    """The values to store, and the values to compute again, of those in `used` and those they are computed from.

    `eqns` are those of the forward half. `free` are values that cost nothing to read again, and `constant` those that
    cost nothing to compute again, because they are equal in every trip.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outs}
    source, sink, graph = object(), object(), FlowGraph()
    pending = [v for v in used if v not in free]
    for v in pending:
        graph.add(source, v)
    seen: set[Var | Eqn] = set()
    while pending:
        v = pending.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = makers.get(v)
        cost = None if eqn is None else 0 if v in constant else again(eqn)
        if eqn is None or cost is None:
            graph.add(v, sink, stored(v))
            continue
        graph.add(v, eqn, stored(v))
        if eqn not in seen:
            seen.add(eqn)
            graph.add(eqn, sink, cost)
            operands = [x for x in eqn.ins if x not in free]
            pending += operands
            for x in operands:
                graph.add(eqn, x)
    cheaper = seen - graph.sink_side(source, sink)
    needed = {v for v in cheaper if isinstance(v, Var)}
    remade = {v for v in needed if makers.get(v) in cheaper}
    return needed - remade, remade


def stored(v: Var) -> int:
    """The bytes that storing a value moves: it is written once and read once."""
    return 2 * math.prod(d.size for d in v.dims) * v.dtype.itemsize


def again(eqn: Eqn) -> int | None:
    """The bytes that could be moved while an equation is computed again; None if it is not computed again."""
    op = eqn.operation
    if eqn.control is not None or not (op.again or _elementwise(op)):
        return None
    work = operations(eqn, lambda v: tuple(d.size for d in v.dims))
    return 1 + int(work / (TRANSCENDENTAL if op.transcendental else ELEMENTWISE))


def _elementwise(op: Op) -> bool:
    """True if an operation is elementwise, so that under every layout each device computes its own elements."""
    others = op.moves or op.blocked or op.inside_blocks or op.shardings or op.reduce
    return op.fuses is Fuses.MAP and not (others or op.effects or op.acts)
