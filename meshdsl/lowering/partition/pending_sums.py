"""The sums of a graph that can stay pending, under any layout: the operations they pass, and the values they reach.

An operation keeps a sum pending if it is linear in that operand. The values connected by such operations are a region;
`reduction_cut` chooses where the sums of one region are reduced under a layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...control import KEEP
from ...ir import Eqn, Graph, Linear, Reduce, Var
from ...ops.dtypes import CAST
from ...ops.elementwise import ADD, SUBTRACT
from ...ops.linear import is_linear
from ...ops.reductions import BROADCAST
from ...passes.constants import constant_values
from ...trace import FULL, number
from .magnitude import magnitudes

ADDITIONS = (ADD, SUBTRACT)  # one device adds a complete operand to its part of a pending sum


@dataclass(frozen=True)
class Body:
    """The use of a body by its loop.

    The inputs are constants, then carries, then rows. The first `carries` results replace the carries after each of
    `trips` trips; the other results are stacked. Results whose numbers are in `deferred` stay pending outside the loop
    too.
    """

    consts: int
    carries: int
    trips: int
    deferred: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class SumRegion:
    """Values connected by operations through which a sum can stay pending, under any layout."""

    eqns: list[Eqn] = field(default_factory=list[Eqn])  # equations that compute or read one of the values, in order
    values: set[Var] = field(default_factory=set[Var])


class PendingSums:
    """Facts about the pending sums of a graph that hold under every layout.

    `body` is set for a loop body. `zero` lists inputs that are known to be unmaterialized zeros; `pending` gives the
    pending axes of inputs.
    """

    def __init__(
        self,
        graph: Graph,
        body: Body | None = None,
        zero: Collection[Var] = (),
        pending: Iterable[tuple[Var, Sequence[str]]] = (),
    ):
        self.graph, self.body = graph, body
        self.zero = set(zero)
        self.arriving = {v: frozenset(axes) for v, axes in pending}
        self.bounds = magnitudes(graph)
        self.numbers: dict[Var, Any] = {}  # values whose elements are all this number
        self.constants = constant_values(graph)  # each device computes its own part of these, in any sharding
        self.users = graph.readers
        self.results = frozenset(() if body else graph.outs)  # needed complete; those of a body may leave it pending
        for eqn in graph.eqns:
            value = self._number(eqn)
            if value is not None:
                self.numbers[eqn.outs[0]] = value
            if value is not None and not value:
                self.zero.update(eqn.outs)

    def _number(self, eqn: Eqn) -> Any:
        """The number that all elements of an equation's result equal, if it is known."""
        if eqn.op is FULL:
            return eqn.params["value"]
        if eqn.operation.linear is Linear.FIRST and eqn.ins[0] in self.zero:
            return number(0, eqn.outs[0].dtype)
        if eqn.op not in (BROADCAST, CAST):
            return None
        value = 0 if eqn.ins[0] in self.zero else self.numbers.get(eqn.ins[0])
        return None if value is None else number(value, eqn.outs[0].dtype)

    def may_stay_pending(self, eqn: Eqn, v: Var) -> bool:
        """True if an operation may take this operand as a pending sum, as far as the graph tells.

        The operation must be linear in it. The other factors of a product must be finite, and a divisor not zero:
        otherwise the parts may add up to NaN where the complete sum gives infinity.
        """
        if not is_linear(eqn, v):
            return False
        match eqn.operation.linear:
            case Linear.EACH:
                return all(x in self.bounds for x in eqn.ins if x is not v)
            case Linear.RATIO:
                return self.numbers.get(eqn.ins[1], 0) != 0
            case _:
                return True

    def is_needed(self, v: Var) -> bool:
        """True if a reader takes the value complete under any layout, so that all of its readers do."""
        return any(not (self.may_stay_pending(eqn, v) or ignores(eqn, v)) for eqn in self.users.get(v, ()))

    @cached_property
    def regions(self) -> dict[Var, SumRegion]:
        """The region of every value that can be pending under some layout."""
        leaders = self._leaders()
        regions = {leader: SumRegion() for leader in dict.fromkeys(leaders.values())}
        of = {v: regions[leader] for v, leader in leaders.items()}
        for v, region in of.items():
            region.values.add(v)
        for eqn in self.graph.eqns:
            for region in dict.fromkeys(of[v] for v in (*eqn.ins, *eqn.outs) if v in of):
                region.eqns.append(eqn)
        return of

    def _leaders(self) -> dict[Var, Var]:
        """One value of its region for each value that can be pending: a union of operands and results."""
        leader: dict[Var, Var] = {v: v for v in self.arriving}

        def find(v: Var) -> Var:
            while leader[v] is not v:
                leader[v] = leader[leader[v]]
                v = leader[v]
            return v

        for eqn in self.graph.eqns:
            through = [v for v in dict.fromkeys(eqn.ins) if v in leader and self.may_stay_pending(eqn, v)]
            if through or eqn.operation.reduce is Reduce.SUM or eqn.control is not None:
                for v in eqn.outs:
                    leader[v] = find(through[0]) if through else v
                for v in through:
                    leader[find(v)] = find(eqn.outs[0])
        return {v: find(v) for v in leader}


def ignores(eqn: Eqn, v: Var) -> bool:
    """True if v is the stored operand of a `keep`, which reads the recomputed one instead."""
    return eqn.op is KEEP and eqn.ins[1] is not v
