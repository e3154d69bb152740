"""Simplify a graph before partition: inline calls and checkpoints, remove equal and dead equations, weigh branches.

Two transposes in a row become one, or none if the dims are in the first order again.

Learn how often branches run from predicates that count: `i % n == k` holds in one of n runs.

i is taken to count, as a step or a loop's trip does (Xu et al., 2020, section 3.2, recognise the same pattern).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..control.host import OFFLOAD, keep_on_device
from ..ir import Call, Cond, Eqn, Graph, Scan, Var, cse, dce, rewritten
from ..ops.dtypes import CAST, CAST_PARTS, REDUCED_IN, widens
from ..ops.elementwise import ADD, EQUAL, NOT_EQUAL, REMAINDER
from ..ops.reshape import TRANSPOSE
from .accumulate import sums_begin_with_zero
from .constants import recompute_inside_loops
from .finish_rows import finish_rows_after_loops
from .narrow_products import narrow_products


def inline(graph: Graph) -> Graph:
    """Inline `checkpoint` and `call` equations, which after differentiation are equal to their bodies."""
    if graph.kinds.isdisjoint((Call, REDUCED_IN)):
        return graph
    renamed: dict[Var, Var] = {}
    eqns = tuple(_opened(graph.eqns, renamed))
    return graph.replace(eqns=eqns, outs=tuple(renamed.get(v, v) for v in graph.outs))


def _opened(eqns: tuple[Eqn, ...], renamed: dict[Var, Var], fresh: bool = False) -> Iterator[Eqn]:
    # a body may be inlined twice (forward, and again in a gradient), so its values get new variables
    for eqn in eqns:
        ins = tuple(renamed.get(v, v) for v in eqn.ins)
        if eqn.op is REDUCED_IN:  # differentiation has read it
            renamed[eqn.outs[0]] = ins[0]
            continue
        if isinstance(eqn.control, Call):
            body = eqn.control.graph
            inner = dict(zip(body.ins, ins, strict=True))
            for e in _opened(body.eqns, inner, fresh=True):
                yield e.replace(backward=e.backward or eqn.backward)
            renamed.update(zip(eqn.outs, (inner.get(v, v) for v in body.outs), strict=True))
            continue
        outs = tuple(dataclasses.replace(v) for v in eqn.outs) if fresh else eqn.outs
        renamed.update(zip(eqn.outs, outs, strict=True))
        yield eqn.replace(ins=ins, outs=outs).map_graphs(inline)


def simplify(graph: Graph) -> Graph:
    """Inline, rewrite for fewer bytes and faster products, then remove common subexpressions and dead code."""
    graph = narrow_products(join_transposes(inline(graph)))
    if Scan in graph.kinds:
        graph = recompute_inside_loops(sums_begin_with_zero(graph))
    if OFFLOAD in graph.kinds:
        graph = graph.replace(eqns=tuple(keep_on_device(graph.eqns, graph.ins)))
    graph = dce(cse(graph))
    if Scan in graph.kinds:
        graph = cast_rows_in_loops(cse(finish_rows_after_loops(graph)))
    return rewritten(graph, _with_frequency) if Cond in graph.kinds else graph


def cast_rows_in_loops(graph: Graph) -> Graph:
    """The graph in which loops cast rows that are only read so: parts of sums, and others if they are added up wider.

    Parts are stored in the narrow dtype then, and micro-batches add up what the loop over layers stacks.
    """
    readers, moved, eqns = graph.readers, set[Eqn](), list[Eqn]()
    for original in graph.eqns:
        eqn = original.map_graphs(cast_rows_in_loops)
        for v in original.outs[original.scan.carries :] if original.scan is not None else ():
            read = readers.get(v, [])
            if v not in graph.outs and len(read) == 1 and _casts_rows(read[0], readers):
                moved.add(read[0])
                eqn = _with_cast_row(eqn, v, read[0])
        eqns += [] if original in moved else [eqn]
    return graph.replace(eqns=tuple(eqns))


def _casts_rows(eqn: Eqn, readers: Mapping[Var, Sequence[Eqn]]) -> bool:
    if eqn.op is not CAST:
        return eqn.op is CAST_PARTS
    (v,), (wide,) = eqn.ins, eqn.outs
    return widens(v.dtype, wide.dtype) and [reader.op for reader in readers.get(wide, ())] == [ADD]


def _with_cast_row(loop: Eqn, v: Var, cast: Eqn) -> Eqn:
    """The loop that stacks the rows of v cast to another dtype."""
    assert loop.scan is not None
    i, body = loop.outs.index(v), loop.scan.body
    row = Var(body.outs[i].dims, cast.outs[0].dtype)
    eqn = cast.replace(ins=(body.outs[i],), outs=(row,))
    body = body.replace(eqns=(*body.eqns, eqn), outs=(*body.outs[:i], row, *body.outs[i + 1 :]))
    return loop.replace(outs=(*loop.outs[:i], cast.outs[0], *loop.outs[i + 1 :])).with_control(body=body)


def join_transposes(graph: Graph) -> Graph:
    """The graph in which no transpose reads another one; the graph itself if none does."""
    if TRANSPOSE not in graph.kinds:
        return graph
    sources: dict[Var, Var] = {}  # result of a transpose -> its operand
    renamed: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        eqn = eqn.map_graphs(join_transposes)
        ins = tuple(renamed.get(v, v) for v in eqn.ins)
        if eqn.op is TRANSPOSE:
            ins = (sources.get(ins[0], ins[0]),)
            if ins[0].type == eqn.outs[0].type:
                renamed[eqn.outs[0]] = ins[0]
                continue
            sources[eqn.outs[0]] = ins[0]
        eqns.append(eqn if ins == eqn.ins else eqn.replace(ins=ins))
    return graph.replace(eqns=tuple(eqns), outs=tuple(renamed.get(v, v) for v in graph.outs))


def _with_frequency(eqn: Eqn, producers: Mapping[Var, Eqn]) -> list[Eqn]:
    """A branch whose predicate counts has a frequency, unless the user gave one."""
    if not isinstance(eqn.control, Cond) or eqn.control.frequency is not None:
        return [eqn]
    return [eqn.with_control(frequency=_frequency(producers, eqn.ins[0]))]


def _frequency(producers: Mapping[Var, Eqn], predicate: Var) -> float | None:
    """The fraction of runs in which a predicate holds, if it compares a remainder with a number; else None."""
    eqn = producers.get(predicate)
    if eqn is None or eqn.op not in (EQUAL, NOT_EQUAL):
        return None
    remainder, k = producers.get(eqn.ins[0]), _number(producers, eqn.ins[1])
    n = _number(producers, remainder.ins[1]) if remainder is not None and remainder.op is REMAINDER else None
    if k is None or n is None or n <= 0:
        return None
    often = 1 / n if 0 <= k < n else 0.0
    return often if eqn.op is EQUAL else 1 - often


def _number(producers: Mapping[Var, Eqn], v: Var) -> int | None:
    """The value of an integer literal."""
    eqn = producers.get(v)
    if eqn is None or not eqn.operation.literal or v.dtype.kind not in "iu":
        return None
    return int(eqn.params["value"])
