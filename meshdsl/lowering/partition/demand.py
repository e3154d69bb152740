"""When to finish a pending sum: now, or after the linear operations that follow.

Waiting pays when what is reduced later is smaller (a sum over it), shared (two pending sums added), or outside a
loop; it costs when several consumers would each reduce something. The least that can be reduced later is a minimum
cut between the value and the operations that need it whole, each value on the way weighing its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from ...dims import size_of
from ...ir import Eqn, Graph, Linear, Reduce, Var
from ...ops.contraction import BROADCAST
from ...trace import FULL

__all__ = ["Demand", "may_stay_pending"]


class Demand:
    """What becomes of the pending sums of one graph, judged on the graph alone: which values could be pending at all.

    `zero` and `pending` are inputs known to be zeros not yet stored, and inputs that arrive pending.
    """

    def __init__(self, graph: Graph, is_body: bool, zero: Collection[Var] = (), pending: Collection[Var] = ()):
        self.users: dict[Var, list[Eqn]] = {}
        self.needed: set[Var] = set() if is_body else set(graph.outs)  # a body's results may leave it pending
        self.zero = set(zero)
        self.floor: dict[Var, float] = {v: self.now(v) for v in pending}  # of every value that could be pending
        self.maker: dict[Var, Eqn] = {}
        for eqn in graph.eqns:
            for v in dict.fromkeys(eqn.ins):
                self.users.setdefault(v, []).append(eqn)
            self._classify(eqn)
        self._waits: dict[Var, bool] = {}

    def _classify(self, eqn: Eqn) -> None:
        op = eqn.operation
        if (op is FULL and eqn.params["value"] == 0) or (op is BROADCAST and eqn.ins[0] in self.zero):
            self.zero.update(eqn.outs)
        before = [self.floor[v] for v in dict.fromkeys(eqn.ins) if v in self.floor and self._passes(eqn, v)]
        starts = op.reduce is Reduce.SUM or eqn.control is not None
        for v in eqn.outs:
            self.maker[v] = eqn
            if starts or before:  # the bytes of the cheapest point at which this sum could have been finished
                self.floor[v] = self.now(v) if starts or not before else min(self.now(v), sum(before))

    def _passes(self, eqn: Eqn, v: Var) -> bool:
        """Whether a pending v may go through the operation, given what its other operands could be."""
        if not may_stay_pending(eqn, v):
            return False
        if eqn.operation.linear not in (Linear.JOINT, Linear.PADDED, Linear.BRANCHES):
            return True
        others = eqn.ins[1:] if eqn.operation.linear is Linear.BRANCHES else eqn.ins
        return all(x in self.floor or x in self.zero for x in others)

    def now(self, v: Var) -> float:
        """The bytes reduced when the sum is finished here; one collective more counts as one byte more."""
        return float(size_of(v.shape) * v.dtype.itemsize + 1)

    def waits(self, v: Var) -> bool:
        """Whether leaving the sum pending reduces fewer bytes than finishing it."""
        if v not in self._waits:
            self._waits[v] = self._least_later(v) < self.now(v)
        return self._waits[v]

    def _least_later(self, v: Var) -> float:
        """The minimum cut below v, by augmenting paths; at least `now(v)` is not told apart."""
        reached, order = {v}, [v]
        onward: dict[Var, list[Var]] = {}
        sinks: set[Var] = set()
        for x in order:
            onward[x] = []
            if x in self.needed:
                sinks.add(x)
            for eqn in self.users.get(x, ()):
                if not self._passes(eqn, x):
                    sinks.add(x)
                    continue
                onward[x] += eqn.outs
                order += [out for out in eqn.outs if out not in reached]
                reached.update(eqn.outs)
        if v in sinks:
            return self.now(v)
        room = {x: self._weight(x, reached) for x in order}
        room[v] = float("inf")
        return _flow(v, onward, sinks, room, self.now(v))

    def _weight(self, x: Var, reached: set[Var]) -> float:
        """The bytes of finishing x, shared with the sums from elsewhere that it includes."""
        eqn = self.maker.get(x)
        if eqn is None or eqn.operation.linear is not Linear.JOINT:
            return self.now(x)
        floors = {y: self.floor[y] for y in eqn.ins if y in self.floor}
        ours = sum(n for y, n in floors.items() if y in reached)
        return self.now(x) * ours / sum(floors.values()) if ours else self.now(x)


def _flow(source: Var, onward: dict[Var, list[Var]], sinks: set[Var], room: dict[Var, float], enough: float) -> float:
    """The maximum flow from the source to the sinks, through values with limited room."""
    through: dict[tuple[Var, Var], float] = {}
    back: dict[Var, list[Var]] = {}
    total = 0.0
    while total < enough:
        # a state is (value, inside): entered, and having paid for passing, or not (undoing an earlier path)
        parent: dict[tuple[Var, bool], tuple[Var, bool] | None] = {(source, True): None}
        queue = [(source, True)]
        end = None
        for state in queue:
            x, paid = state
            if paid and x in sinks:
                end = state
                break
            steps: list[tuple[Var, bool]] = [(x, True)] if not paid and room[x] > 0 else []
            if paid:
                steps += [(y, False) for y in onward.get(x, ())]
                steps += [(x, False)] if any(through.get((w, x), 0) > 0 for w in back.get(x, ())) else []
            else:
                steps += [(w, True) for w in back.get(x, ()) if through.get((w, x), 0) > 0]
            for step in steps:
                if step not in parent:
                    parent[step] = state
                    queue.append(step)
        if end is None:
            return total
        path = [end]
        while (before := parent[path[-1]]) is not None:
            path.append(before)
        path.reverse()
        amount = enough - total
        for (a, a_paid), (b, b_paid) in pairwise(path):
            if a is b and b_paid:
                amount = min(amount, room[b])
            elif a is not b and not a_paid and b_paid:
                amount = min(amount, through[(b, a)])
        for (a, a_paid), (b, b_paid) in pairwise(path):
            if a is b:
                room[b] += -amount if b_paid else amount
            elif a_paid:
                through[(a, b)] = through.get((a, b), 0) + amount
                back.setdefault(b, []).append(a)
            else:
                through[(b, a)] -= amount
        total += amount
    return total


def may_stay_pending(eqn: Eqn, v: Var) -> bool:
    """Whether the operation is linear in this operand, as far as the graph alone can tell."""
    op = eqn.operation
    match op.linear:
        case Linear.JOINT:
            return True
        case Linear.PADDED:
            return eqn.params["value"] == 0
        case Linear.EACH:
            return sum(x is v for x in eqn.ins) == 1
        case Linear.FIRST:
            return eqn.ins[0] is v and v not in eqn.ins[1:]
        case Linear.SECOND:
            return eqn.ins[1] is v and eqn.ins[0] is not v
        case Linear.BRANCHES:
            return eqn.ins[0] is not v
        case _:
            return False
