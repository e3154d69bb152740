"""Finish what a loop only returns after the loop: the trips stack sums, and a square root of them is computed once.

A square root, a cast or a quotient reads complete sums, so it costs a reduction in every trip. If no trip reads its
result, the loop returns the sum itself as its row. Rows stay pending (`lowering.partition.control`), so the sums of all
trips are reduced together, and the rest is computed on the stack. Only results of reductions and numbers are stacked
for it, which are smaller than the operands that the loop reduces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ..control.batching import batched_graph
from ..ir import Eqn, Graph, Product, Reduce, Scan, Var, dce, readers_of
from .linear import is_linear, together
from .unmade import unmade_values


def finish_rows_after_loops(graph: Graph) -> Graph:
    """The graph in which loops return the sums, maxima and minima of their rows, and finish these afterwards."""
    eqns = (eqn.map_graphs(finish_rows_after_loops) for eqn in graph.eqns)
    return graph.replace(eqns=tuple(new for eqn in eqns for new in (_finished(eqn, eqn.scan) if eqn.scan else [eqn])))


def _finished(eqn: Eqn, loop: Scan) -> list[Eqn]:
    """A loop, and the equations after it that finish its rows."""
    body, n = loop.body, loop.carries
    consts, _, in_rows = loop.inputs(body.ins)
    unmade = unmade_values(body)
    outside = {*consts, *in_rows, *unmade}  # known after the loop, or computed from nothing
    moved = _equations_to_move(loop, outside, unmade)
    after = {v for e in moved for v in e.outs}
    read = [v for v in dict.fromkeys(v for e in moved for v in e.ins) if v not in after and v not in outside]
    if not moved or any(d.name == loop.dim.name for v in (*after, *read) for d in v.dims):
        return [eqn]
    kept = {v: stack for v, stack in zip(body.outs[n:], eqn.outs[n:], strict=True) if v not in after}
    stacks = {v: Var((loop.dim, *v.dims), v.dtype, v.name) for v in read if v not in kept}
    outer = dict(zip(body.ins, eqn.ins, strict=True)) | kept | stacks
    rest = [i for i, v in enumerate(body.outs) if v not in after]
    new = body.replace(outs=(*(body.outs[i] for i in rest), *stacks))
    eqns = [eqn.replace(outs=(*(eqn.outs[i] for i in rest), *stacks.values())).with_control(body=dce(new))]
    ins = [v for v in outer if v in read or v in consts or v in in_rows]
    tail = tuple(e for e in body.eqns if e in moved or e.outs[0] in unmade)
    for v, out in zip(body.outs[n:], eqn.outs[n:], strict=True):
        if v in after:  # `cse` merges what two rows share
            row = dce(Graph(tuple(ins), tail, (v,)))
            stacked = batched_graph(row, [x in read or x in in_rows for x in ins], loop.dim, [True])
            eqns += _placed(stacked, [outer[x] for x in ins], out)
    return eqns


def _placed(graph: Graph, ins: Collection[Var], out: Var) -> list[Eqn]:
    """The equations of a graph with one result, on these inputs."""
    renamed = dict(zip(graph.ins, ins, strict=True)) | {graph.outs[0]: out}
    return [
        e.replace(ins=tuple(renamed.get(v, v) for v in e.ins), outs=tuple(renamed.get(v, v) for v in e.outs))
        for e in graph.eqns
    ]


def _equations_to_move(loop: Scan, outside: Collection[Var], unmade: Collection[Var]) -> list[Eqn]:
    """The equations between reductions and rows, unless the row of a pending sum stays one without them.

    That of a mean does. Where two rows share a reduction, its result is stacked once.
    """
    movable, readers = _movable(loop, outside), readers_of(loop.body)
    carried, rows = loop.results(loop.body.outs)
    pending, complete = dict[Var, Reduce](), set[Var]()
    of: dict[Var, set[Var]] = {}  # the reductions from which a value is computed
    for eqn in loop.body.eqns:
        behind = set[Var]().union(*(of.get(v, ()) for v in eqn.ins))
        passed = _pending_results(eqn, pending, unmade)
        if behind and not passed:
            complete |= behind
        elif behind:
            pending |= passed
        else:
            alone = {v for v in passed if v not in carried and movable.issuperset(readers.get(v, ()))}
            pending |= {v: passed[v] for v in alone}
        of |= {v: behind or {v} for v in eqn.outs if behind or v in pending}
    shared = [v for row in rows for v in of.get(row, ())]
    complete |= {v for v in shared if shared.count(v) > 1}
    groups = [set[Var]().union(*(of.get(v, ()) for v in eqn.ins)) for eqn in loop.body.eqns]
    while more := set[Var]().union(*(group for group in groups if group & complete)) - complete:
        complete |= more
    return [eqn for eqn, group in zip(loop.body.eqns, groups, strict=True) if group & complete]


def _pending_results(eqn: Eqn, pending: Mapping[Var, Reduce], unmade: Collection[Var]) -> dict[Var, Reduce]:
    """The results that a loop may return as a pending sum, maximum or minimum."""
    if eqn.scan is not None:
        inner = dict[Var, Reduce]()
        for e in eqn.scan.body.eqns:
            inner |= _pending_results(e, inner, unmade_values(eqn.scan.body))
        rows = list(zip(eqn.outs, eqn.scan.body.outs, strict=True))[eqn.scan.carries :]
        return {v: inner[row] for v, row in rows if row in inner}
    if pending.keys().isdisjoint(eqn.ins):
        return {eqn.outs[0]: eqn.operation.reduce} if _reduces(eqn) else {}
    sums = [v for v in eqn.ins if pending.get(v) is Reduce.SUM]
    others = [v for v in eqn.ins if v not in sums]
    passes = all(v in unmade for v in others) if not together(eqn) else not others
    return dict.fromkeys(eqn.outs, Reduce.SUM) if passes and any(is_linear(eqn, v) for v in sums) else {}


def _reduces(eqn: Eqn) -> bool:
    """True for a reduction, also of a product, whose result is smaller than each operand."""
    if eqn.control is not None or eqn.operation.reduce is Reduce.NONE or len(eqn.outs) > 1:
        return False
    return all(set(v.dims) < set(x.dims) for v in eqn.outs for x in eqn.ins)


def _movable(loop: Scan, outside: Collection[Var]) -> set[Eqn]:
    """The equations from which only rows are computed, on operands that are small enough to be stacked."""
    body, small, movable = loop.body, set[Var](), set[Eqn]()
    for eqn in body.eqns:
        operands = [v for v in eqn.ins if v in small]
        if _reduces(eqn) or eqn.scan is not None:
            small.update(_pending_results(eqn, {}, ()))
        elif operands and _runs_on_stacks(eqn) and all(v in small or v in outside or not v.dims for v in eqn.ins):
            small.update(v for v in eqn.outs if _elements(v) <= sum(map(_elements, operands)))
    readers = readers_of(body)
    carried, rows = loop.results(body.outs)
    for eqn in reversed(body.eqns):
        later = [e for v in eqn.outs for e in readers.get(v, ())]
        if not _runs_on_stacks(eqn) or not movable.issuperset(later) or not set(carried).isdisjoint(eqn.outs):
            continue
        fits = all(v in small or v in rows for v in eqn.outs)
        if fits and all(v in small or v in outside or not v.dims for v in eqn.ins):
            movable.add(eqn)
    return movable


def _runs_on_stacks(eqn: Eqn) -> bool:
    """True for operations that a compiler fuses, so that they are as fast on the stack as in the trips."""
    op = eqn.operation
    return eqn.control is None and not (op.effects or op.acts or op.product is not Product.NONE) and bool(op.fuses)


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
