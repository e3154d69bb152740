"""Split a loop's body into a forward half, a backward half, and the residuals saved between them.

Choose the residuals of a loop: the minimum cut between its halves, weighed by bytes stored and work done again.

Every value that the backward half reads is either stored by the forward loop and read back, or computed again from
others. A value to compute again needs its operands, which are stored or computed again in turn. The cheapest choice is
a minimum cut: a value is cut before its equation (store it) or behind it (pay for the equation).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..ir import Eqn, Fuses, Graph, Op, Var, dce, operations, read_by
from ..ir.min_cut import FlowGraph
from .autodiff import vjp_of_graph
from .host import keep_on_device


def split(body: Graph, consts: int, carries: int, active: Sequence[bool], read: Sequence[bool]):
    """Returns (forward, backward, primal_inputs, wrt): two graphs, and the indices of two sets of the body's inputs.

    `forward` returns the body's results and the residuals. `backward` takes the inputs `primal_inputs`, the residuals
    and the cotangents of the floating results that are `read`; it returns the cotangents of the inputs `wrt`.

    Residuals are the forward values that the backward half uses, or from which it computes those again, whichever costs
    less (`recompute.choose`). Constants of the loop and slices of its inputs are passed again, and values that depend
    on constants alone are always computed again.
    """
    joint, forward_values, wrt = vjp_of_graph(body, active, read)
    n, outs = len(body.ins), len(body.outs)
    ins, cts = joint.ins[:n], joint.ins[n:]
    free = {*ins[:consts], *ins[consts + carries :]}
    eqns = list(keep_on_device(joint.eqns, free))
    forward_eqns = [eqn for eqn in eqns if eqn.outs[0] in forward_values]
    backward_eqns = [eqn for eqn in eqns if eqn.outs[0] not in forward_values]
    used = read_by(backward_eqns, joint.outs[outs:]) - {v for eqn in backward_eqns for v in eqn.outs} - set(cts)
    residuals, recomputed = choose(forward_eqns, used, free, _constant(forward_eqns, ins[:consts]))
    recompute_eqns = [eqn for eqn in forward_eqns if not recomputed.isdisjoint(eqn.outs)]
    saved = [v for v in (*ins, *(v for eqn in forward_eqns for v in eqn.outs)) if v in residuals]
    needed = read_by([*recompute_eqns, *backward_eqns], joint.outs[outs:])
    primal_inputs = [i for i, v in enumerate(ins) if v in free & needed]
    forward = dce(Graph(ins, tuple(forward_eqns), (*joint.outs[:outs], *saved)))
    backward = dce(
        Graph((*(ins[i] for i in primal_inputs), *saved, *cts), (*recompute_eqns, *backward_eqns), joint.outs[outs:])
    )
    return forward, backward, primal_inputs, wrt


def _constant(eqns: Sequence[Eqn], consts: Sequence[Var]) -> set[Var]:
    """The constants of the loop and the values that depend on them alone."""
    constant = set(consts)
    for eqn in eqns:
        if not eqn.operation.effects and eqn.control is None and all(v in constant for v in eqn.ins):
            constant.update(eqn.outs)
    return constant


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
    graph, nodes = _flow(makers, [v for v in used if v not in free], free, constant)
    cheaper = nodes - graph.sink_side(_SOURCE, _SINK)
    needed = {v for v in cheaper if isinstance(v, Var)}
    remade = {v for v in needed if makers.get(v) in cheaper}
    return needed - remade, remade


_SOURCE, _SINK = object(), object()


def _flow(
    makers: Mapping[Var, Eqn], used: Sequence[Var], free: Collection[Var], constant: Collection[Var]
) -> tuple[FlowGraph, set[Var | Eqn]]:
    """The graph to cut, and its nodes: the values that may be stored, and the equations that may compute them again."""
    graph, pending = FlowGraph(), list(used)
    for v in pending:
        graph.add(_SOURCE, v)
    seen: set[Var | Eqn] = set()
    while pending:
        v = pending.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = makers.get(v)
        cost = None if eqn is None else 0 if v in constant else again(eqn)
        if eqn is None or cost is None:
            graph.add(v, _SINK, stored(v))
            continue
        graph.add(v, eqn, stored(v))
        if eqn not in seen:
            seen.add(eqn)
            graph.add(eqn, _SINK, cost)
            operands = [x for x in eqn.ins if x not in free]
            pending += operands
            for x in operands:
                graph.add(eqn, x)
    return graph, seen


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
