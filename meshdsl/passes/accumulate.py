"""Make sums over the trips of a loop start from a constant zero, however the user wrote the zeros.

A carry that starts from a constant and only adds pending sums, such as the gradients of microbatches, stays pending and
is reduced once, after the loop (`lowering.partition.control`). A start of `params * 0`, or of zeros from NumPy, would
be complete from the beginning, and every trip would reduce. Computed zeros, which are NaN where a weight is not finite,
are added after the loop instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir import Eqn, Graph, Linear, Var, rewritten
from ..ops.dtypes import CAST
from ..ops.elementwise import ADD, SUBTRACT
from ..ops.reductions import BROADCAST
from ..trace import CONSTANT, FULL, number


def sums_begin_with_zero(graph: Graph) -> Graph:
    """The graph in which loops that add to zeros start from a constant."""
    return rewritten(graph, _summed)


def _summed(eqn: Eqn, producers: Mapping[Var, Eqn]) -> list[Eqn]:
    loop = eqn.scan
    if loop is None:
        return [eqn]
    body, consts = loop.body, loop.consts
    ins, outs, before, after = list(eqn.ins), list(eqn.outs), list[Eqn](), list[Eqn]()
    for i in range(loop.carries):
        start, total, step = ins[consts + i], outs[i], running_sum(body, body.ins[consts + i], body.outs[i])
        if step is None or not _is_zero(start, producers) or number_in_all(start, producers) is not None:
            continue
        zero = ins[consts + i] = Var(start.dims, start.dtype, start.name)
        positive = producers[start].op is CONSTANT and not any(producers[start].params["value"].tobytes())
        params = {"value": number(0.0 if positive else -0.0, start.dtype), "shape": start.dims}  # -0.0 + x is x
        before.append(Eqn(FULL, (), (zero,), params, producers[start].where))
        if not positive:
            outs[i] = Var(total.dims, total.dtype, total.name)
            after.append(step.replace(ins=(outs[i], start), outs=(total,)))
    return [*before, eqn.replace(ins=tuple(ins), outs=tuple(outs)), *after]


def running_sum(body: Graph, carry: Var, out: Var) -> Eqn | None:
    """The equation that adds to a carry, if nothing else in the body reads the carry; else None."""
    readers = [eqn for eqn in body.eqns if carry in eqn.ins]
    if len(readers) != 1 or carry in body.outs or readers[0].op is not ADD or readers[0].outs[0] is not out:
        return None
    x, y = readers[0].ins
    return readers[0] if x is not y and x.type == y.type and body.outs.count(out) == 1 else None


def number_in_all(v: Var, producers: Mapping[Var, Eqn]) -> Any:
    """The number that all elements of a value are made from; None if that is not known."""
    eqn = producers.get(v)
    while eqn is not None and eqn.op in (CAST, BROADCAST):
        eqn = producers.get(eqn.ins[0])
    return eqn.params["value"] if eqn is not None and eqn.op is FULL else None


def _is_zero(v: Var, producers: Mapping[Var, Eqn]) -> bool:
    """True if a value is zero wherever the values it is computed from are finite."""
    eqn = producers.get(v)
    if eqn is None:
        return False
    if eqn.op is FULL:
        return bool(eqn.params["value"] == 0)
    if eqn.op is CONSTANT:
        return not np.any(eqn.params["value"])
    zeros = (_is_zero(x, producers) for x in eqn.ins)  # as few as decide
    match eqn.operation.linear:
        case Linear.EACH:
            return any(zeros)
        case Linear.JOINT:
            return (eqn.op is SUBTRACT and eqn.ins[0] is eqn.ins[1]) or all(zeros)
        case Linear.BRANCHES:
            return all(_is_zero(x, producers) for x in eqn.ins[1:])
        case _:
            return eqn.op is CAST and all(zeros)
