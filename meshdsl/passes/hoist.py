"""Move casts of weights out of loops, so that a weight is gathered once, after the cast.

A cast may follow operations that scale a layer's weight, also by a scale that is computed from it: quantised weights.
These then run on the stack of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from ..control import BARRIER
from ..control.batching import batched_graph
from ..ir import Eqn, Fuses, Graph, Scan, Var, read_by, sources_of, verify
from ..ops.dtypes import CAST
from ..ops.indexing import TAKE
from .constants import constant_values

SMALL = 16


def hoist_casts(graph: Graph) -> Graph:
    """The graph in which loops that only cast an input to one narrower dtype, also in loops inside, take the narrow
    value; as do lookups in an input whose rows are only cast."""
    of = frozenset(graph.ins)
    narrowed: dict[tuple[Var, np.dtype], Var] = {}
    rows: dict[Var, Var] = {}  # a cast of rows that are looked up -> the narrow rows
    eqns: list[Eqn] = []
    for original in graph.eqns:
        if original.op is CAST and original.outs[0] in rows:
            continue
        before, eqn = _scaled_before(original.reading(rows), of)
        eqns += before
        for v in dict.fromkeys(eqn.ins):
            cast = (_cast_in_loop(eqn, v) or _cast_of_rows(graph, eqn, v)) if v in of else None
            if cast is None:
                continue
            dtype = cast.outs[0].dtype
            if (v, dtype) not in narrowed:
                narrowed[v, dtype] = Var(v.dims, dtype, v.name)
                eqns.append(Eqn(CAST, (v,), (narrowed[v, dtype],), {"dtype": dtype}, cast.where, cast.backward))
            if eqn.scan is not None:
                eqn = _taking(eqn, {v: narrowed[v, dtype]})
            else:
                rows |= {reader.outs[0]: cast.outs[0] for reader in graph.readers[eqn.outs[0]]}
                eqn = eqn.replace(ins=(narrowed[v, dtype], *eqn.ins[1:]), outs=cast.outs)
        eqns.append(eqn)
    outs = tuple(rows.get(v, v) for v in graph.outs)
    return verify(graph.replace(eqns=tuple(eqns), outs=outs), "hoist_casts")


def scaled_casts(
    graph: Graph, v: Var, takes: Callable[[Eqn], bool] = lambda eqn: True, beside: Collection[Eqn] = ()
) -> list[Eqn]:
    """The casts of a value to fewer bytes, and what scales it before them; none if anything else reads the value.

    The scale may be computed from the value, as from its largest element; it has at most one number for `SMALL`
    elements. `beside` are equations that may read the value and what is scaled; `takes` refuses others.
    """
    scales = _elements(v) // SMALL
    scaled, casts = _scaled_and_cast(graph, v, scales, takes, beside)
    if not casts:
        return []
    path = {*casts, *sources_of(scaled, read_by(casts))}
    whole = {v, *(x for eqn in path.difference(casts) for x in eqn.outs if _elements(x) > scales)}
    others = (eqn for x in whole for eqn in graph.readers.get(x, ()) if eqn not in path and eqn not in beside)
    read = any(others) or not whole.isdisjoint(graph.outs)
    return [] if read else sorted(path, key=graph.places.__getitem__)


def _scaled_and_cast(
    graph: Graph, v: Var, scales: int, takes: Callable[[Eqn], bool], beside: Collection[Eqn]
) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that scale a value, by at most `scales` numbers, and those that cast it to fewer bytes."""
    scaled, casts, values, constants = list[Eqn](), list[Eqn](), {v}, constant_values(graph)
    for eqn in _reading(graph, values):
        if eqn in beside:
            continue
        if any(x not in values and _elements(x) > scales and x not in constants for x in eqn.ins):
            continue
        if eqn.op is CAST and eqn.outs[0].dtype.itemsize < v.dtype.itemsize:
            casts.append(eqn)
        elif _per_element(eqn) and takes(eqn):
            scaled.append(eqn)
            values.update(eqn.outs)
    return scaled, casts


def _reading(graph: Graph, values: Collection[Var]) -> Iterator[Eqn]:
    """The equations that read some values, in order; also those that read results of these, once they are added."""
    queue = sorted({graph.places[eqn] for v in values for eqn in graph.readers.get(v, ())})
    for i in iter(lambda: heappop(queue) if queue else None, None):
        eqn = graph.eqns[i]
        yield eqn
        for reader in dict.fromkeys(reader for v in eqn.outs if v in values for reader in graph.readers.get(v, ())):
            if graph.places[reader] not in queue:
                heappush(queue, graph.places[reader])


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)


def _per_element(eqn: Eqn) -> bool:
    """True for elementwise operations, moves and reductions."""
    op = eqn.operation
    return eqn.control is None and not op.product and op.fuses in (Fuses.MAP, Fuses.VIEW, Fuses.REDUCE)


def _cast_in_loop(eqn: Eqn, v: Var) -> Eqn | None:
    """One of the casts of an operand that a loop only casts, to one narrower dtype; else None."""
    if eqn.scan is None:
        return None
    consts, _, rows = eqn.scan.inputs(eqn.ins)
    inner_consts, _, inner_rows = eqn.scan.inputs(eqn.scan.body.ins)
    inside = [x for each, x in zip((*consts, *rows), (*inner_consts, *inner_rows), strict=True) if each is v]
    casts = [_only_cast(eqn.scan.body, x) for x in inside]
    return _one_dtype(casts, v) if len(inside) == eqn.ins.count(v) else None


def _cast_of_rows(graph: Graph, eqn: Eqn, v: Var) -> Eqn | None:
    """One of the casts of the rows that a lookup takes from v, if all that reads them casts them so; else None."""
    casts = graph.readers.get(eqn.outs[0], ()) if eqn.op is TAKE and eqn.ins[0] is v else ()
    others = eqn.outs[0] in graph.outs or any(reader.op is not CAST for reader in casts)
    return None if others else _one_dtype(casts, v)


def _only_cast(body: Graph, v: Var) -> Eqn | None:
    """One of the casts of a value, if a body only casts it, to one narrower dtype; else None."""
    if v in body.outs:
        return None
    casts: list[Eqn | None] = []
    for eqn in (eqn for eqn in body.eqns if v in eqn.ins):
        if eqn.op is BARRIER:  # rematerialised layers
            casts.append(_only_cast(body, eqn.outs[0]))
        else:
            casts.append(eqn if eqn.op is CAST else _cast_in_loop(eqn, v))
    return _one_dtype(casts, v)


def _scaled_before(loop: Eqn, of: Collection[Var]) -> tuple[list[Eqn], Eqn]:
    """Equations that scale and cast the stacked weights in `of`, and the loop that reads their results."""
    before: list[Eqn] = []
    for v in dict.fromkeys(loop.ins):
        scan = loop.scan
        if scan is None or v not in of or loop.ins.count(v) > 1:
            continue
        if (moved := _scaled_out(loop, scan, v)) is not None:
            eqns, loop = moved
            before += eqns
    return before, loop


def _scaled_out(loop: Eqn, scan: Scan, v: Var) -> tuple[list[Eqn], Eqn] | None:
    """The scaled casts of the rows of v, on the stack, and the loop that takes the rows of the results."""
    i, body, rows = loop.ins.index(v), scan.body, scan.consts + scan.carries
    path = scaled_casts(body, body.ins[i]) if i >= rows else []
    graph = _alone(path, body, body.ins[scan.consts : rows]) if len(path) > 1 else None
    if graph is None:
        return None
    in_rows = [body.ins.index(x) >= rows for x in graph.ins]
    stacked = batched_graph(graph, in_rows, scan.dim, [True] * len(graph.outs))
    outer = {x: loop.ins[body.ins.index(y)] for x, y in zip(stacked.ins, graph.ins, strict=True)}
    rest = tuple(eqn for eqn in body.eqns if eqn not in path)
    body = body.replace(ins=(*body.ins[:i], *body.ins[i + 1 :], *graph.outs), eqns=rest)
    loop = loop.replace(ins=(*loop.ins[:i], *loop.ins[i + 1 :], *stacked.outs)).with_control(body=body)
    return [eqn.reading(outer) for eqn in stacked.eqns], loop


def _alone(path: Sequence[Eqn], body: Graph, carried: Sequence[Var]) -> Graph | None:
    """These equations of a body as a graph of its inputs; None if they read a carry or what others compute."""
    computed = {x for eqn in path for x in eqn.outs}
    read = read_by(path) - computed
    numbers = [eqn for eqn in body.eqns if not eqn.ins and not read.isdisjoint(eqn.outs)]
    given = tuple(x for x in body.ins if x in read and x not in carried)
    if not read.issubset([*given, *(x for eqn in numbers for x in eqn.outs)]):
        return None
    others = read_by((eqn for eqn in body.eqns if eqn not in path), body.outs)
    leaving = tuple(x for eqn in path for x in eqn.outs if x in others)
    return Graph(given, (*numbers, *_without_barriers(path)), leaving)


def _without_barriers(path: Sequence[Eqn]) -> list[Eqn]:
    """The equations without the barriers of rematerialised layers."""
    same = {eqn.outs[0]: eqn.ins[0] for eqn in path if eqn.op is BARRIER}
    return [eqn.reading(same) for eqn in path if eqn.op is not BARRIER]


def _one_dtype(casts: Sequence[Eqn | None], v: Var) -> Eqn | None:
    """The first of the casts if all are there, to one dtype narrower than that of v."""
    dtypes = {cast and cast.outs[0].dtype for cast in casts}
    return casts[0] if len(dtypes) == 1 and casts[0] and casts[0].outs[0].dtype.itemsize < v.dtype.itemsize else None


def _taking(eqn: Eqn, narrow: Mapping[Var, Var]) -> Eqn:
    """A loop that takes some operands in their narrow form."""
    assert eqn.scan is not None
    inside = {x: narrow[v].dtype for v, x in zip(eqn.ins, eqn.scan.body.ins, strict=True) if v in narrow}
    return eqn.reading(narrow).with_control(body=_narrowed(eqn.scan.body, inside))


def _narrowed(body: Graph, inputs: Mapping[Var, np.dtype]) -> Graph:
    """A body whose inputs have the dtypes to which it casts them."""
    narrow = {v: Var(v.dims, dtype, v.name) for v, dtype in inputs.items()}
    renamed: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        x = narrow.get(eqn.ins[0]) if eqn.ins else None
        if eqn.op is CAST and x is not None:
            renamed[eqn.outs[0]] = x
        elif eqn.op is BARRIER and x is not None:
            narrow[eqn.outs[0]] = Var(x.dims, x.dtype, eqn.outs[0].name)
            eqns.append(eqn.replace(ins=(x,), outs=(narrow[eqn.outs[0]],)))
        else:
            eqn = eqn if narrow.keys().isdisjoint(eqn.ins) else _taking(eqn, narrow)
            eqns.append(eqn.reading(renamed))
    ins, outs = (tuple(new.get(v, v) for v in vs) for vs, new in ((body.ins, narrow), (body.outs, renamed)))
    return body.replace(ins=ins, eqns=tuple(eqns), outs=outs)
