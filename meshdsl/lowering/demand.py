"""When to finish a pending sum: now, or after the linear operations that follow.

Waiting pays when what is reduced later is smaller (a sum over it), shared (two pending sums added), or outside a
loop; it costs when several consumers would each reduce something. `Demand` compares the two by bytes.
"""

from __future__ import annotations

from ..dims import size_of
from ..ir import Eqn, Graph, Op, Var

__all__ = ["Demand"]


class Demand:
    """For every value of one graph, the bytes that will be reduced if a sum over it stays pending."""

    def __init__(self, graph: Graph, is_body: bool):
        self.graph = graph
        self.is_body = is_body
        self.users: dict[Var, list[Eqn]] = {}
        for eqn in graph.eqns:
            for v in dict.fromkeys(eqn.ins):
                self.users.setdefault(v, []).append(eqn)
        self.results = set(graph.outs)
        self._later: dict[Var, int] = {}
        for eqn in reversed(graph.eqns):  # users come after definitions, so this fills without recursion
            for v in (*eqn.outs, *eqn.ins):
                self.later(v)

    def now(self, v: Var) -> int:
        """The bytes reduced when the sum is finished here."""
        return size_of(v.shape) * v.dtype.itemsize

    def later(self, v: Var) -> int:
        """The bytes reduced when it is left to the consumers; at most `now`."""
        if v not in self._later:
            total = 0 if v not in self.results or self.is_body else self.now(v)
            for eqn in self.users.get(v, []):
                if not may_stay_pending(eqn, v):
                    total += self.now(v)
                    break
                total += sum(self.later(out) for out in eqn.outs)
            self._later[v] = min(total, self.now(v)) if self._single(v) else total
        return self._later[v]

    def _single(self, v: Var) -> bool:
        return len(self.users.get(v, [])) + (v in self.results) <= 1

    def waits(self, v: Var) -> bool:
        """Whether leaving the sum pending reduces no more bytes than finishing it."""
        return self.later(v) <= self.now(v)


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
