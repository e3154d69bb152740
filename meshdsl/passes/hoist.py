"""Casts of weights move out of loops, so that a weight is gathered after the cast, and once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from ..ir import Eqn, Graph, Var, verify
from ..ops.elementwise import CAST

__all__ = ["hoist_casts"]


def hoist_casts(graph: Graph, of: Collection[Var]) -> Graph:
    """The graph in which loops that only cast these inputs to one narrower dtype are given the narrow values."""
    made: dict[tuple[Var, np.dtype], Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        if eqn.op.name == "scan":
            ins, body = list(eqn.ins), eqn.params["body"]
            first, after = eqn.params["consts"], eqn.params["consts"] + eqn.params["carries"]
            for i, v in enumerate(eqn.ins):
                cast = None if v not in of or first <= i < after else _only_cast(body, body.ins[i])
                if cast is None:
                    continue
                dtype = cast.outs[0].dtype
                if (v, dtype) not in made:
                    made[v, dtype] = Var(v.shape, dtype, v.name)
                    eqns.append(Eqn(CAST, (v,), (made[v, dtype],), {"dtype": dtype}, cast.where, cast.backward))
                ins[i], body = made[v, dtype], _without_casts(body, body.ins[i], dtype)
            eqn = dataclasses.replace(eqn, ins=tuple(ins), params={**eqn.params, "body": body})
        eqns.append(eqn)
    return verify(graph.replace(eqns=tuple(eqns)), "hoist_casts")


def _only_cast(body: Graph, v: Var) -> Eqn | None:
    """One of the casts that are all that a body does with a value, to one narrower dtype; None if it does more."""
    readers = [eqn for eqn in body.eqns if v in eqn.ins]
    if v in body.outs or not readers or any(eqn.op is not CAST for eqn in readers):
        return None
    dtypes = {eqn.outs[0].dtype for eqn in readers}
    return readers[0] if len(dtypes) == 1 and min(dtypes).itemsize < v.dtype.itemsize else None


def _without_casts(body: Graph, v: Var, dtype: np.dtype) -> Graph:
    narrow = Var(v.shape, dtype, v.name)
    new = {eqn.outs[0]: narrow for eqn in body.eqns if v in eqn.ins}
    eqns = tuple(
        dataclasses.replace(eqn, ins=tuple(new.get(x, x) for x in eqn.ins)) for eqn in body.eqns if v not in eqn.ins
    )
    ins = tuple(narrow if x is v else x for x in body.ins)
    return body.replace(ins=ins, eqns=eqns, outs=tuple(new.get(x, x) for x in body.outs))
