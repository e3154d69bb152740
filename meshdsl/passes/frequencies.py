"""Learn how often branches run from predicates that count: `i % n == k` holds in one of n runs.

i is taken to count, as a step or a loop's trip does (Xu et al., 2020, section 3.2, recognise the same pattern).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Cond, Eqn, Graph, Var
from ..ops.elementwise import EQUAL, NOT_EQUAL, REMAINDER

__all__ = ["learn_frequencies"]


def learn_frequencies(graph: Graph) -> Graph:
    """The graph in which branches whose predicate counts have a frequency, unless the user gave one."""
    producers = {v: eqn for eqn in graph.eqns for v in eqn.outs}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        eqn = eqn.map_graphs(learn_frequencies)
        if isinstance(eqn.control, Cond) and eqn.control.frequency is None:
            often = _frequency(producers, eqn.ins[0])
            eqn = eqn if often is None else eqn.with_control(frequency=often)
        eqns.append(eqn)
    return graph.replace(eqns=tuple(eqns))


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
