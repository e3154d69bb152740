"""Move casts of weights out of loops, so that a weight is gathered once, after the cast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..control import BARRIER
from ..ir import Eqn, Graph, Var, verify
from ..ops.dtypes import CAST


def hoist_casts(graph: Graph, of: Collection[Var]) -> Graph:
    """The graph in which loops that only cast an input in `of` to one narrower dtype, also in loops inside, take the
    narrow value."""
    narrowed: dict[tuple[Var, np.dtype], Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        for v in dict.fromkeys(eqn.ins):
            cast = _cast_in_loop(eqn, v) if v in of else None
            if cast is None:
                continue
            dtype = cast.outs[0].dtype
            if (v, dtype) not in narrowed:
                narrowed[v, dtype] = Var(v.dims, dtype, v.name)
                eqns.append(Eqn(CAST, (v,), (narrowed[v, dtype],), {"dtype": dtype}, cast.where, cast.backward))
            eqn = _taking(eqn, {v: narrowed[v, dtype]})
        eqns.append(eqn)
    return verify(graph.replace(eqns=tuple(eqns)), "hoist_casts")


def _cast_in_loop(eqn: Eqn, v: Var) -> Eqn | None:
    """One of the casts of an operand that a loop only casts, to one narrower dtype; else None."""
    if eqn.scan is None:
        return None
    consts, _, rows = eqn.scan.inputs(eqn.ins)
    inner_consts, _, inner_rows = eqn.scan.inputs(eqn.scan.body.ins)
    inside = [x for each, x in zip((*consts, *rows), (*inner_consts, *inner_rows), strict=True) if each is v]
    casts = [_only_cast(eqn.scan.body, x) for x in inside]
    return _one_dtype(casts, v) if len(inside) == eqn.ins.count(v) else None


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


def _one_dtype(casts: Sequence[Eqn | None], v: Var) -> Eqn | None:
    """The first of the casts if all are there, to one dtype narrower than that of v."""
    dtypes = {cast and cast.outs[0].dtype for cast in casts}
    return casts[0] if len(dtypes) == 1 and casts[0] and casts[0].outs[0].dtype.itemsize < v.dtype.itemsize else None


def _taking(eqn: Eqn, narrow: Mapping[Var, Var]) -> Eqn:
    """A loop that takes some operands in their narrow form."""
    assert eqn.scan is not None
    inside = {x: narrow[v].dtype for v, x in zip(eqn.ins, eqn.scan.body.ins, strict=True) if v in narrow}
    return eqn.replace(ins=tuple(narrow.get(v, v) for v in eqn.ins)).with_control(body=_narrowed(eqn.scan.body, inside))


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
            eqns.append(eqn.replace(ins=tuple(renamed.get(v, v) for v in eqn.ins)))
    ins, outs = (tuple(new.get(v, v) for v in vs) for vs, new in ((body.ins, narrow), (body.outs, renamed)))
    return body.replace(ins=ins, eqns=tuple(eqns), outs=outs)
