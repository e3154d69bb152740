"""Finish what a loop only returns after the loop: the trips stack sums, and a square root of them is computed once.

A square root, a cast or a quotient reads complete sums, so it costs a reduction in every trip. If no trip reads its
result, the loop returns the sum itself as its row. Rows stay pending (`lowering.partition.control`), so the sums of all
trips are reduced together, and the rest is computed on the stack. Only results of reductions and numbers are stacked
for it, which are smaller than the operands that the loop reduces.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping

from ..control.batching import batched_graph
from ..ir import Eqn, Graph, Product, Reduce, Scan, Var, dce
from ..ops.linear import is_linear, together
from .constants import constant_values


def finish_rows_after_loops(graph: Graph) -> Graph:
    """The graph in which loops return the sums, maxima and minima of their rows, and finish these afterwards."""
    eqns = (eqn.map_graphs(finish_rows_after_loops) for eqn in graph.eqns)
    return graph.replace(eqns=tuple(new for eqn in eqns for new in (_finished(eqn, eqn.scan) if eqn.scan else [eqn])))


def _finished(eqn: Eqn, loop: Scan) -> list[Eqn]:
    """A loop, and the equations after it that finish its rows."""
    consts, _, in_rows = loop.inputs(loop.body.ins)
    constants = constant_values(loop.body)
    outside = {*consts, *in_rows, *constants}  # known after the loop, or computed from nothing
    moved = _equations_to_move(loop, outside, constants)
    after = {v for e in moved for v in e.outs}
    read = [v for v in dict.fromkeys(v for e in moved for v in e.ins) if v not in after and v not in outside]
    if not moved or any(d.name == loop.dim.name for v in (*after, *read) for d in v.dims):
        return [eqn]
    short, stacks = _returning(eqn, loop, read, after)
    eqns = tuple(e for e in loop.body.eqns if e in moved or e.outs[0] in constants)
    tail = Graph((*read, *consts, *in_rows), eqns, ())
    outer = dict(zip(loop.body.ins, eqn.ins, strict=True)) | stacks
    rows = zip(loop.results(loop.body.outs)[1], loop.results(eqn.outs)[1], strict=True)
    finished = [_on_stacks(tail, v, loop, outer, out) for v, out in rows if v in after]  # `cse` merges what rows share
    return [short, *itertools.chain(*finished)]


def _returning(eqn: Eqn, loop: Scan, read: Collection[Var], after: Collection[Var]) -> tuple[Eqn, dict[Var, Var]]:
    """The loop that returns the values `read` as rows, instead of those computed `after` it; and all stacks of rows."""
    rows, stacked = loop.results(loop.body.outs)[1], loop.results(eqn.outs)[1]
    kept = {v: stack for v, stack in zip(rows, stacked, strict=True) if v not in after}
    stacks = {v: Var((loop.dim, *v.dims), v.dtype, v.name) for v in read if v not in kept}
    rest = [(v, out) for v, out in zip(loop.body.outs, eqn.outs, strict=True) if v not in after]
    body = dce(loop.body.replace(outs=(*(v for v, _ in rest), *stacks)))
    return eqn.replace(outs=(*(out for _, out in rest), *stacks.values())).with_control(body=body), kept | stacks


def _on_stacks(tail: Graph, row: Var, loop: Scan, outer: Mapping[Var, Var], out: Var) -> list[Eqn]:
    """The equations that compute all rows at once, into `out`; `outer` has the values outside the loop."""
    consts = loop.inputs(loop.body.ins)[0]
    stacked = batched_graph(dce(tail.replace(outs=(row,))), [v not in consts for v in tail.ins], loop.dim, [True])
    renamed = dict(zip(stacked.ins, (outer[v] for v in tail.ins), strict=True)) | {stacked.outs[0]: out}
    return [e.reading(renamed).replace(outs=tuple(renamed.get(v, v) for v in e.outs)) for e in stacked.eqns]


def _equations_to_move(loop: Scan, outside: Collection[Var], constants: Collection[Var]) -> list[Eqn]:
    """The equations between reductions and rows, unless the row of a pending sum stays one without them.

    That of a mean does. Where two rows share a reduction, its result is stacked once.
    """
    of, complete = _reductions_behind(loop, _movable(loop, outside), constants)
    shared = Counter(v for row in loop.results(loop.body.outs)[1] for v in of.get(row, ()))
    complete |= {v for v, rows in shared.items() if rows > 1}
    groups = [set[Var]().union(*(of.get(v, ()) for v in eqn.ins)) for eqn in loop.body.eqns]
    while more := set[Var]().union(*(group for group in groups if group & complete)) - complete:
        complete |= more
    return [eqn for eqn, group in zip(loop.body.eqns, groups, strict=True) if group & complete]


def _reductions_behind(
    loop: Scan, movable: Collection[Eqn], constants: Collection[Var]
) -> tuple[dict[Var, set[Var]], set[Var]]:
    """For each value, the reductions it is computed from that only rows read; and those of them that an equation needs
    complete."""
    readers, carried = loop.body.readers, loop.results(loop.body.outs)[0]
    pending, complete = dict[Var, Reduce](), set[Var]()
    of: dict[Var, set[Var]] = {}
    for eqn in loop.body.eqns:
        behind = set[Var]().union(*(of.get(v, ()) for v in eqn.ins))
        passed = _pending_results(eqn, pending, constants)
        if behind and not passed:
            complete |= behind
        elif behind:
            pending |= passed
        else:
            alone = {v for v in passed if v not in carried and all(e in movable for e in readers.get(v, ()))}
            pending |= {v: passed[v] for v in alone}
        of |= {v: behind or {v} for v in eqn.outs if behind or v in pending}
    return of, complete


def _pending_results(eqn: Eqn, pending: Mapping[Var, Reduce], constants: Collection[Var]) -> dict[Var, Reduce]:
    """The results that a loop may return as a pending sum, maximum or minimum."""
    if eqn.scan is not None:
        inner = dict[Var, Reduce]()
        for e in eqn.scan.body.eqns:
            inner |= _pending_results(e, inner, constant_values(eqn.scan.body))
        rows = list(zip(eqn.outs, eqn.scan.body.outs, strict=True))[eqn.scan.carries :]
        return {v: inner[row] for v, row in rows if row in inner}
    if pending.keys().isdisjoint(eqn.ins):
        return {eqn.outs[0]: eqn.operation.reduce} if _reduces(eqn) else {}
    sums = [v for v in eqn.ins if pending.get(v) is Reduce.SUM]
    others = [v for v in eqn.ins if v not in sums]
    passes = all(v in constants for v in others) if not together(eqn) else not others
    return dict.fromkeys(eqn.outs, Reduce.SUM) if passes and any(is_linear(eqn, v) for v in sums) else {}


def _reduces(eqn: Eqn) -> bool:
    """True for a reduction, also of a product, whose result is smaller than each operand."""
    if eqn.control is not None or eqn.operation.reduce is Reduce.NONE or len(eqn.outs) > 1:
        return False
    return all(set(v.dims) < set(x.dims) for v in eqn.outs for x in eqn.ins)


def _movable(loop: Scan, outside: Collection[Var]) -> set[Eqn]:
    """The equations from which only rows are computed, on operands that are small enough to be stacked."""
    readers, small, movable = loop.body.readers, _small(loop.body, outside), set[Eqn]()
    carried, rows = loop.results(loop.body.outs)
    for eqn in reversed(loop.body.eqns):
        only_rows = all(e in movable for v in eqn.outs for e in readers.get(v, ()))
        fits = all(v in small or v in rows for v in eqn.outs) and _reads_only(eqn, small, outside)
        if _runs_on_stacks(eqn) and only_rows and fits and set(carried).isdisjoint(eqn.outs):
            movable.add(eqn)
    return movable


def _small(body: Graph, outside: Collection[Var]) -> set[Var]:
    """Results of reductions, and what is computed from them without more elements."""
    small = set[Var]()
    for eqn in body.eqns:
        operands = [v for v in eqn.ins if v in small]
        if _reduces(eqn) or eqn.scan is not None:
            small.update(_pending_results(eqn, {}, ()))
        elif operands and _runs_on_stacks(eqn) and _reads_only(eqn, small, outside):
            small.update(v for v in eqn.outs if _elements(v) <= sum(map(_elements, operands)))
    return small


def _reads_only(eqn: Eqn, small: Collection[Var], outside: Collection[Var]) -> bool:
    """True if an equation reads nothing else, but numbers."""
    return all(v in small or v in outside or not v.dims for v in eqn.ins)


def _runs_on_stacks(eqn: Eqn) -> bool:
    """True for operations that a compiler fuses, so that they are as fast on the stack as in the trips."""
    op = eqn.operation
    return eqn.control is None and not (op.effects or op.acts or op.product is not Product.NONE) and bool(op.fuses)


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
