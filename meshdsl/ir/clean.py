"""Dead code and common subexpressions are removed, in the bodies of loops and branches too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from .graph import Eqn, G, Graph, Scan, Var
from .op import Op

__all__ = ["cse", "dce"]


def dce(graph: G) -> G:
    """Dead code elimination: equations whose results nobody uses are left out, inside bodies too."""
    live = set(graph.outs)
    kept: list[Eqn] = []
    for eqn in reversed(graph.eqns):
        if live.isdisjoint(eqn.outs):
            continue
        eqn = _without_unused_operands(_without_unused_rows(eqn, live).map_graphs(dce))
        kept.append(eqn)
        live.update(eqn.ins)
    return graph.replace(eqns=tuple(reversed(kept)))


def _without_unused_rows(eqn: Eqn, live: set[Var]) -> Eqn:
    """A loop without the stacked results that nobody uses, and without the carries that only feed themselves."""
    loop = eqn.control
    if not isinstance(loop, Scan):
        return eqn
    body, held, n = loop.body, loop.consts, loop.carries
    used = {i for i, v in enumerate(eqn.outs) if v in live}
    while True:
        read = _reads(body, [body.outs[i] for i in used])
        more = {i for i in range(n) if body.ins[held + i] in read} - used
        if not more:
            break
        used |= more
    gone = set(range(n)) - used
    outs = [i for i in range(len(body.outs)) if i in used]
    ins = [i for i in range(len(body.ins)) if i - held not in gone or not held <= i < held + n]
    body = body.replace(ins=tuple(body.ins[i] for i in ins), outs=tuple(body.outs[i] for i in outs))
    eqn = eqn.replace(ins=tuple(eqn.ins[i] for i in ins), outs=tuple(eqn.outs[i] for i in outs))
    return eqn.with_control(body=body, carries=n - len(gone))


def _reads(graph: Graph, outs: Sequence[Var]) -> set[Var]:
    """Every value that these depend on, themselves included."""
    needed = set(outs)
    for eqn in reversed(graph.eqns):
        if not needed.isdisjoint(eqn.outs):
            needed.update(eqn.ins)
    return needed


def _without_unused_operands(eqn: Eqn) -> Eqn:
    """A loop without the constants and slices that its body does not read; its carry stays whole."""
    loop = eqn.control
    if not isinstance(loop, Scan):
        return eqn
    body, consts, n = loop.body, loop.consts, loop.carries
    read = {v for inner in body.eqns for v in inner.ins} | set(body.outs)
    used = [i for i, v in enumerate(body.ins) if v in read or consts <= i < consts + n]
    body = body.replace(ins=tuple(body.ins[i] for i in used))
    eqn = eqn.replace(ins=tuple(eqn.ins[i] for i in used))
    return eqn.with_control(body=body, consts=sum(i < consts for i in used))


def cse(graph: G) -> G:
    """Common subexpressions: equal equations on equal values are computed once."""
    same: dict[Var, Var] = {}
    seen: dict[Hashable, Eqn] = {}
    kept: list[Eqn] = []
    for eqn in graph.eqns:
        eqn = eqn.replace(ins=tuple(same.get(v, v) for v in eqn.ins)).map_graphs(cse)
        key = _key(eqn)
        if key is not None and key in seen:
            same.update(zip(eqn.outs, seen[key].outs, strict=True))
            continue
        if key is not None:
            seen[key] = eqn
        kept.append(eqn)
    return graph.replace(eqns=tuple(kept), outs=tuple(same.get(v, v) for v in graph.outs))


def _key(eqn: Eqn) -> Hashable:
    """What equal equations have in common; None for one that is never merged."""
    if eqn.control is not None or (isinstance(eqn.op, Op) and eqn.op.effects):
        return None
    params: Any = tuple((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in sorted(eqn.params.items()))
    key = (eqn.op, eqn.ins, params, tuple((v.shape, v.dtype, v.sharding) for v in eqn.outs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
