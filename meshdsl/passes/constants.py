"""Find values without inputs: numbers, constants, iotas, and cheap functions of these alone (masks, tables).

Every device can compute its part of such a value in any sharding, so it is never sent: `lowering` computes it where it
is read. For the same reason, loops that read one compute it inside their body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..ir import Eqn, Fuses, Graph, Linear, Op, Reduce, Scan, Var

CHEAP = (Fuses.MAP, Fuses.VIEW)  # computed inside the kernel that reads it


@lru_cache(maxsize=8)
def constant_values(graph: Graph) -> Mapping[Var, Eqn]:
    """The values of a graph that depend on no input, with the equations that compute them."""
    constants: dict[Var, Eqn] = {}
    for eqn in graph.eqns:
        if not eqn.ins and eqn.control is None:
            constants.update((v, eqn) for v in eqn.outs)
        elif isinstance(eqn.op, Op) and _is_cheap(eqn) and all(v in constants for v in eqn.ins):
            constants[eqn.outs[0]] = eqn
    return constants


def _is_cheap(eqn: Eqn) -> bool:
    """True if equal dims of operands and result are split the same way, and recomputing costs almost nothing."""
    op = eqn.operation
    if eqn.control is not None or op.effects or op.rule or op.blocked or op.moves or len(eqn.outs) != 1:
        return False
    if op.linear is Linear.EACH and op.reduce is Reduce.SUM:  # an outer product if nothing is summed over
        return all(d in eqn.outs[0].dims for v in eqn.ins for d in v.dims)
    return op.fuses in CHEAP and op.reduce is Reduce.NONE and op.mask is None


def recompute_inside_loops(graph: Graph) -> Graph:
    """The graph in which scans compute their constants that depend on no input inside the body."""
    constants = constant_values(graph)
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        if eqn.scan is not None:
            eqn = _with_constants_inside(eqn, eqn.scan, constants)
        eqns.append(eqn.map_graphs(recompute_inside_loops))
    return graph.replace(eqns=tuple(eqns))


def _with_constants_inside(loop: Eqn, scan: Scan, constants: Mapping[Var, Eqn]) -> Eqn:
    body, consts = scan.body, scan.consts
    moved = [i for i, v in enumerate(loop.ins[:consts]) if v in constants and constants[v].ins]
    if not moved:
        return loop
    inside: dict[Var, Var] = {}
    before = [_copied(constants[v], inside) for v in _needed([loop.ins[i] for i in moved], constants)]
    renamed = {body.ins[i]: inside[loop.ins[i]] for i in moved}
    eqns = [e.reading(renamed) for e in body.eqns]
    remaining = [i for i in range(len(loop.ins)) if i not in moved]
    new = body.replace(
        ins=tuple(body.ins[i] for i in remaining),
        eqns=(*before, *eqns),
        outs=tuple(renamed.get(v, v) for v in body.outs),
    )
    inputs = tuple(loop.ins[i] for i in remaining)
    return loop.replace(ins=inputs).with_control(body=new, consts=consts - len(moved))


def _needed(values: Iterable[Var], constants: Mapping[Var, Eqn]) -> list[Var]:
    """These values and all values they are computed from, each after its operands."""
    order: dict[Var, None] = {}

    def visit(v: Var) -> None:
        if v not in order:
            for x in constants[v].ins:
                visit(x)
            order[v] = None

    for v in values:
        visit(v)
    return list(order)


def _copied(eqn: Eqn, inside: dict[Var, Var]) -> Eqn:
    (out,) = eqn.outs
    inside[out] = Var(out.dims, out.dtype, out.name)
    return dataclasses.replace(eqn, ins=tuple(inside[v] for v in eqn.ins), outs=(inside[out],))
