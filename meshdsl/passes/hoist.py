"""Move casts of weights out of loops, so that a weight is gathered once, after the cast."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from ..control import BARRIER
from ..ir import Eqn, Graph, Var, verify
from ..ops.dtypes import CAST


def hoist_casts(graph: Graph, of: Collection[Var]) -> Graph:
    """The graph in which loops that only cast an input in `of` to one narrower dtype take the narrow value."""
    narrowed: dict[tuple[Var, np.dtype], Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        if eqn.scan is not None:
            ins, body = list(eqn.ins), eqn.scan.body
            first, after = eqn.scan.consts, eqn.scan.consts + eqn.scan.carries
            for i, v in enumerate(eqn.ins):
                cast = None if v not in of or first <= i < after else _only_cast(body, body.ins[i])
                if cast is None:
                    continue
                dtype = cast.outs[0].dtype
                if (v, dtype) not in narrowed:
                    narrowed[v, dtype] = Var(v.dims, dtype, v.name)
                    eqns.append(Eqn(CAST, (v,), (narrowed[v, dtype],), {"dtype": dtype}, cast.where, cast.backward))
                ins[i], body = narrowed[v, dtype], _without_casts(body, body.ins[i], dtype)
            eqn = eqn.replace(ins=tuple(ins)).with_control(body=body)
        eqns.append(eqn)
    return verify(graph.replace(eqns=tuple(eqns)), "hoist_casts")


def _only_cast(body: Graph, v: Var) -> Eqn | None:
    """One of the casts of a value, if a body only casts it, to one narrower dtype; else None."""
    readers = [eqn for eqn in body.eqns if v in eqn.ins]
    if v in body.outs or not readers:
        return None
    casts = [_only_cast(body, eqn.outs[0]) if eqn.op is BARRIER else eqn for eqn in readers]  # rematerialised layers
    narrowing_casts = [eqn for eqn in casts if eqn is not None and eqn.op is CAST]
    dtypes = {eqn.outs[0].dtype for eqn in narrowing_casts}
    same = len(narrowing_casts) == len(readers) and len(dtypes) == 1
    return narrowing_casts[0] if same and min(dtypes).itemsize < v.dtype.itemsize else None


def _without_casts(body: Graph, v: Var, dtype: np.dtype) -> Graph:
    narrow = Var(v.dims, dtype, v.name)
    new: dict[Var, Var] = {v: narrow}
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        if eqn.op is CAST and eqn.ins[0] in new and eqn.ins[0] is not new[eqn.ins[0]] and eqn.outs[0].dtype == dtype:
            new[eqn.outs[0]] = new[eqn.ins[0]]
            continue
        outs = eqn.outs
        if eqn.op is BARRIER and eqn.ins[0] in new:
            outs = (Var(eqn.outs[0].dims, dtype, eqn.outs[0].name),)
            new[eqn.outs[0]] = outs[0]
        eqns.append(dataclasses.replace(eqn, ins=tuple(new.get(x, x) for x in eqn.ins), outs=outs))
    ins = tuple(narrow if x is v else x for x in body.ins)
    return body.replace(ins=ins, eqns=tuple(eqns), outs=tuple(new.get(x, x) for x in body.outs))
