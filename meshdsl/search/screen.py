"""Tighter lower bounds of one layout from the compiler itself: first with its loops lowered, then its whole program.

A loop occupies the compute lane for its trips times the span of its body (`schedule`), independent of the steps around
it. Its body is the program that `lower_scan` makes from the shardings of its inputs. The program's seconds are
therefore at least those of its loops plus the rule bound of everything else, because all of it shares the compute lane.
The program sends at least the bytes that its loops send.

This lowers only the equations up to the last loop, each once for all layouts that agree on it (`lowering.memo`).
`exact` lowers all equations and schedules the program. Both require `memoisable`: then no pass after the loops removes
anything from their bodies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement, full_bytes
from ..ir import Eqn, Graph, Scan, Var
from ..layouts import Layout, Mesh
from ..lowering import CollectiveRecord, Program
from ..lowering.partition.demand import Demand
from ..lowering.partition.equation import lower
from ..lowering.partition.memo import IllegalError, Memo, memoisable
from ..lowering.partition.partition import (
    add_input,
    assemble,
    extents_of,
    lower_graph,
    preferences,
    shard_splits,
)
from ..lowering.partition.scope import Scope, Setting
from ..lowering.partition.whole_dims import whole_dims
from ..schedule.bucket_collectives import bucket_collectives
from .bound import RuleBound, loops
from .clock import Clock

__all__ = ["ILLEGAL", "Screen"]

ILLEGAL = math.inf


class Screen:
    """The loops of one graph on one mesh, lowered under many layouts."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        machine: Machine,
        placement: Placement,
        results: tuple[str, ...] | None = None,
        gather_limit: float | None = None,
        plain: bool = True,
    ):
        self.graph, self.mesh, self.machine, self.placement = graph, mesh, machine, placement
        self.results, self.gather_limit = results, gather_limit
        self.usable = plain and memoisable(graph)
        self.equations = _until_the_last_loop(graph) if self.usable else ()
        self.numbers = {eqn: i for i, eqn in enumerate(loops(graph))}
        self.dims = tuple(dict.fromkeys(d.name for v in _values(self.equations) for d in v.shape))
        self.memo, self.hints, self.shards = Memo(), preferences(graph), shard_splits(graph)
        self.rows = whole_dims(graph)
        self.demand = Demand(graph)
        self.clock = Clock(machine, placement)
        self.bounds: dict[Any, float] = {}

    def bound(self, layout: Layout, rules: RuleBound, used: int, objective: str, enough: float) -> float:
        """A lower bound of the seconds, or of the bytes sent; `ILLEGAL` for an illegal layout.

        Stops early once the bound reaches `enough`. `rules` bounds the equations outside loops; `used` are the layout's
        axes.
        """
        if not self.equations or objective == "peak_bytes":
            return 0.0
        key = (objective, used, *[layout.rules.get(d) for d in self.dims])
        if key not in self.bounds:
            try:
                self.bounds[key] = self._bound(layout, rules.least(used), objective, enough)
            except IllegalError:
                self.bounds[key] = ILLEGAL
        return self.bounds[key]

    def _scope(self, layout: Layout) -> Scope:
        ruled = layout.on(self.mesh)
        extents = extents_of(self.mesh, ruled, self.shards)
        setting = Setting(self.mesh, ruled, extents, self.hints, self.gather_limit, {}, self.rows, memo=self.memo)
        return Scope(setting, self.graph, self.demand)

    def _bound(self, layout: Layout, least: tuple[float, dict[int, float]], objective: str, enough: float) -> float:
        scope = self._scope(layout)
        seconds, inside = least
        total = seconds if objective == "seconds" else 0.0
        for eqn in self.equations:
            for v in eqn.ins:
                if v not in scope.default_sharding and v not in scope.unmaterialized:
                    self._input(scope, v)
            lower(scope, eqn)
            if isinstance(eqn.control, Scan):
                took, sent = self._loop(scope.eqns)
                total += max(took - inside.get(self.numbers[eqn], 0.0), 0.0) if objective == "seconds" else sent
                if total >= enough:
                    break
        return total

    def exact(self, layout: Layout, objective: str, enough: float) -> float:
        """The seconds or bytes sent of the layout's program, or a lower bound if that already reaches `enough`."""
        scope = self._scope(layout)
        try:
            ins, outs = lower_graph(scope, self.results)
        except IllegalError:
            return ILLEGAL
        program = assemble(scope, ins, outs)
        if objective == "seconds":
            least = self._serial(program)
            if least >= enough:
                return least
        program = bucket_collectives(program)
        return ledger(program).wire_bytes if objective == "wire_bytes" else self.clock.seconds(program)

    def _serial(self, program: Program) -> float:
        """Seconds of the loops and of the collectives outside them that cannot run at the same time.

        These are the loops with all collectives that occupy the compute lane, or with the later collectives on one set
        of axes that depend on the last loop. Collectives of single numbers do not count, because they may be bucketed.
        """
        at = [i for i, eqn in enumerate(program.eqns) if isinstance(eqn.control, Scan)]
        last = at[-1] if at else len(program.eqns)
        after: set[Var] = set()
        lanes: dict[tuple[str, ...], list[CollectiveRecord]] = defaultdict(list)
        computing: list[CollectiveRecord] = []
        for i, eqn in enumerate(program.eqns):
            if i == last or not after.isdisjoint(eqn.ins):
                after.update(eqn.outs)
            if not eqn.sends or not eqn.ins[0].shape:
                continue
            record = program.record(eqn, 1)
            if not after.isdisjoint(eqn.outs):
                lanes[record.axes].append(record)
            if record.op.timed_as not in self.machine.overlapped_by_compiler:
                computing.append(record)
        loops_take = sum(self._loop([program.eqns[i]])[0] for i in at)
        return loops_take + max(map(self._sending, (computing, *lanes.values())))

    def _sending(self, records: Sequence[CollectiveRecord]) -> float:
        """Seconds of these collectives one after another; those that may be combined, as one of all their bytes."""
        total, together = 0.0, defaultdict[tuple[str, tuple[str, ...]], int](int)
        for record in records:
            kind, size = record.op.timed_as, full_bytes(record, self.mesh.count(record.axes))
            if kind in self.placement.network.combine:
                together[kind, record.axes] += size
            else:
                total += self.placement.seconds(kind, record.axes, size)
        return total + sum(self.placement.seconds(kind, axes, size) for (kind, axes), size in together.items())

    def _input(self, scope: Scope, v: Var) -> None:
        rules = scope.setting.layout.for_path(v.name)
        key = ("input", v, *(rules.get(d.name) for d in v.shape))
        version = scope.once(key, lambda: add_input(scope, v, rules))
        scope.versions[v], scope.default_sharding[v] = [version], version.sharding

    def _loop(self, eqns: list[Eqn]) -> tuple[float, float]:
        """Seconds and bytes sent of the loop that was lowered last."""
        loop, body = next((eqn, eqn.control.body) for eqn in reversed(eqns) if isinstance(eqn.control, Scan))
        assert isinstance(body, Program)
        once, sent = self.clock.body(body)
        # trips that overlap still compute one after another, and may be slowed less
        least = once.compute / self.machine.overlap_slowdown if self.machine.pipelined else once.seconds
        return least * loop.trips, sent * loop.trips


def _values(eqns: Sequence[Eqn]) -> Iterator[Var]:
    """Every value in these equations, including their bodies."""
    for eqn in eqns:
        yield from (*eqn.ins, *eqn.outs)
        for sub in eqn.graphs().values():
            yield from (*sub.ins, *_values(sub.eqns))


def _until_the_last_loop(graph: Graph) -> tuple[Eqn, ...]:
    """The equations of a graph up to its last loop.

    Also those that no loop depends on: they may reshard a value that a later loop reads, and the loop then takes that.
    """
    last = max((i for i, eqn in enumerate(graph.eqns) if isinstance(eqn.control, Scan)), default=-1)
    return graph.eqns[: last + 1]
