"""Bound the magnitude of values, to know which of them are never infinite.

A sum over devices may be completed after a product only if the other factor is never infinite: with parts 2 and -1,
`inf * (2 - 1)` is inf, but `inf * 2 - inf * 1` is NaN. NaN needs no bound: any product with it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ir import Bounded, Eqn, Graph, Var
from ...ops.dtypes import kind, largest
from ...ops.elementwise import ISFINITE, WHERE
from ...trace import CONSTANT


def magnitudes(graph: Graph) -> dict[Var, float]:
    """For each value of a graph that is never infinite, the largest magnitude that an element can have.

    Inputs are unknown, unless they are integers; inputs of loop bodies too.

    >>> import meshdsl as md
    >>> graph = md.compile(lambda x: md.where(md.isnan(x), 3.0, md.tanh(x)) * x, "").graph(md.spec("n:2"))
    >>> sorted(bound for v, bound in magnitudes(graph).items() if v.dtype == "float32")
    [1.0, 3.0, 3.0]
    """
    bounds = {v: largest(v.dtype) for v in graph.ins if kind(v.dtype) in "ib"}
    finite_where: dict[Var, Var] = {}  # the result of isfinite -> its operand
    for eqn in graph.eqns:
        if eqn.op is ISFINITE:
            finite_where[eqn.outs[0]] = eqn.ins[0]
        chosen = eqn.ins[1] if eqn.op is WHERE and finite_where.get(eqn.ins[0]) is eqn.ins[1] else None
        known = bounds if chosen is None else {**bounds, chosen: largest(chosen.dtype)}
        for v in eqn.outs:
            bound = largest(v.dtype) if kind(v.dtype) in "ib" else _bound(eqn, known)
            if bound <= largest(v.dtype):
                bounds[v] = bound
    return bounds


def _bound(eqn: Eqn, bounds: Mapping[Var, float]) -> float:
    op = eqn.operation
    if op.literal or eqn.op is CONSTANT:
        return _largest(eqn.params["value"])
    match op.bounded:
        case Bounded.BY_ONE:
            return 1.0
        case Bounded.BY_OPERANDS:
            return max((bounds.get(v, math.inf) for v in eqn.ins), default=math.inf)
        case Bounded.NO:
            return math.inf


def _largest(value: Any) -> float:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        numbers = np.abs(np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64))
    return float(np.max(numbers, initial=0.0, where=~np.isnan(numbers)))
