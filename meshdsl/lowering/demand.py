"""When to finish a pending sum: now, or after the linear operations that follow.

Waiting pays when what is reduced later is smaller (a sum over it), shared (two pending sums added), or outside a
loop; it costs when several consumers would each reduce something. `Demand` compares the two by bytes, on the graph
alone: it asks which values could be pending at all, not over which axes.
"""

from __future__ import annotations

from ..dims import size_of
from ..ir import Eqn, Graph, Op, Var
from ..trace import FULL

__all__ = ["Demand", "may_stay_pending"]


class Demand:
    """For every value of one graph, the bytes that will be reduced if a sum over it stays pending."""

    def __init__(self, graph: Graph, is_body: bool):
        self.is_body = is_body
        self.users: dict[Var, list[Eqn]] = {}
        self.results = set(graph.outs)
        self.zero: set[Var] = set()
        self.may: set[Var] = set()
        for eqn in graph.eqns:
            for v in dict.fromkeys(eqn.ins):
                self.users.setdefault(v, []).append(eqn)
            self._classify(eqn)
        self._later: dict[Var, float] = {}
        for eqn in reversed(graph.eqns):  # users come after definitions, so one sweep settles everything
            for v in (*eqn.outs, *eqn.ins):
                self.later(v)

    def _classify(self, eqn: Eqn) -> None:
        op: Op = eqn.op
        zero = (op is FULL and eqn.params["value"] == 0) or (op.name == "broadcast" and eqn.ins[0] in self.zero)
        if zero:
            self.zero.update(eqn.outs)
        sums = op.reduce == "sum" or op.control
        passes = any(may_stay_pending(eqn, v) and self._joins(eqn, v) for v in eqn.ins if v in self.may)
        if sums or passes:
            self.may.update(eqn.outs)

    def _joins(self, eqn: Eqn, v: Var) -> bool:
        """Whether the other operands allow v to pass pending."""
        joint = eqn.op.linear in ("joint", "padded", "branches")
        others = eqn.ins[1:] if eqn.op.linear == "branches" else eqn.ins
        return not joint or all(x in self.may or x in self.zero for x in others)

    def now(self, v: Var) -> float:
        """The bytes reduced when the sum is finished here."""
        return float(size_of(v.shape) * v.dtype.itemsize)

    def later(self, v: Var) -> float:
        """The bytes reduced when it is left to the consumers; a reduction that two sums share counts half for each."""
        if v not in self._later:
            total = 0.0 if v not in self.results or self.is_body else self.now(v)
            for eqn in self.users.get(v, []):
                if not may_stay_pending(eqn, v) or not self._joins(eqn, v):
                    total += self.now(v)
                    break
                sharers = sum(x in self.may for x in dict.fromkeys(eqn.ins)) if eqn.op.linear == "joint" else 1
                total += sum(min(self.later(out), self.now(out)) for out in eqn.outs) / max(1, sharers)
            self._later[v] = total
        return self._later[v]

    def waits(self, v: Var) -> bool:
        """Whether leaving the sum pending reduces fewer bytes than finishing it."""
        return self.later(v) < self.now(v)


def may_stay_pending(eqn: Eqn, v: Var) -> bool:
    """Whether the operation is linear in this operand, as far as the graph alone can tell."""
    op: Op = eqn.op
    match op.linear:
        case "joint":
            return True
        case "padded":
            return eqn.params["value"] == 0
        case "each":
            return sum(x is v for x in eqn.ins) == 1
        case "first":
            return eqn.ins[0] is v and v not in eqn.ins[1:]
        case "second":
            return eqn.ins[1] is v and eqn.ins[0] is not v
        case "branches":
            return eqn.ins[0] is not v
        case _:
            return False
