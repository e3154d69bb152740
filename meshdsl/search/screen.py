"""The time of many layouts of one graph: first a lower bound with the loops lowered, then the whole program.

A loop occupies the compute lane for its trips times the span of its body (`schedule`), independent of the steps around
it. Its body is the program that `lower_scan` makes from the shardings of its inputs. The program's seconds are
therefore at least those of its loops plus the floor of everything else, because all of it shares the compute lane.
The program sends at least the bytes that its loops send.

This lowers only the equations up to the last loop, each once for all layouts that agree on it (`lowering.memo`), and
all of them only for a layout that may be fast enough. It requires `memoisable`: then no pass after the loops removes
anything from their bodies.

Time many programs that share loop bodies: each body is timed once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..cost.lanes import LaneSchedule, LaneSpan
from ..cost.ledger import LazyLedger, ledger
from ..cost.machine import Machine
from ..cost.network import Placement, full_bytes
from ..dims import Dim, Shape
from ..ir import Eqn, Graph, Var, walk
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from ..lowering import CollectiveRecord, Program
from ..lowering.partition.demand import Demand
from ..lowering.partition.equation import lower
from ..lowering.partition.legality import named_by_layouts, shard_problems
from ..lowering.partition.memo import IllegalError, Memo, memoisable
from ..lowering.partition.partition import add_input, assemble, extents_of, lower_graph, preferences, shard_splits
from ..lowering.partition.scope import Scope, Setting
from ..lowering.partition.whole_dims import whole_dims
from ..targets.fusion import LoopStep
from ..updates.bucket_collectives import bucket_collectives
from .floor import floor, kernels

__all__ = ["ILLEGAL", "Screen"]

ILLEGAL = math.inf


Cuts = tuple[Axes | None, ...]  # the axes of some dims


@dataclass
class _Loop:
    """A loop of the top level, and its time under each choice of the rules that determine it.

    An equation that no loop depends on counts too: it may reshard a value that a later loop reads, and the loop then
    takes that.
    """

    until: int  # number of equations up to it
    dims: tuple[str, ...]  # mentioned by these equations, or in what decides their shardings
    times: dict[Cuts, tuple[float, float]] = field(default_factory=dict[Cuts, tuple[float, float]])  # seconds, bytes


@dataclass
class _Illegal:
    """The rules for some dims that no legal layout has together."""

    dims: tuple[str, ...]
    cuts: set[Cuts] = field(default_factory=set[Cuts])


class Screen:
    """The loops of one graph on one mesh, lowered under many layouts."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        machine: Machine,
        placement: Placement,
        results: tuple[str, ...] | None = None,
        plain: bool = True,
    ):
        self.graph, self.mesh, self.machine, self.placement = graph, mesh, machine, placement
        self.results = results
        self.usable = plain and memoisable(graph)
        self.memo, self.hints, self.shards = Memo(), preferences(graph), shard_splits(graph)
        self.rows = whole_dims(graph)
        self.demand = Demand(graph)
        self.clock = Clock(machine, placement)
        scans = [i for i, eqn in enumerate(graph.eqns) if eqn.scan is not None and self.usable]
        self.loops = [_Loop(i + 1, self._dims(i + 1)) for i in scans]
        read = {v for eqn in graph.eqns[: self.loops[-1].until if scans else 0] for v in eqn.ins}
        self.inputs = [v for v in graph.ins if v in read]
        self.illegal: dict[int, _Illegal] = {}
        self.outside = floor((work for work in kernels(graph) if not work.inside), machine, mesh.size)

    @cached_property
    def misplaced(self) -> bool:
        """True if a `md.shard` of the graph names an axis that the mesh lacks."""
        return bool(shard_problems(self.graph, self.mesh))

    @cached_property
    def named(self) -> tuple[set[str], dict[str, Shape]]:
        """The dims and paths that a layout can name."""
        return named_by_layouts(self.graph, self.results)

    def amount(self, layout: Layout, objective: str, enough: float) -> float:
        """The seconds or bytes sent of a layout; `ILLEGAL` for an illegal one.

        Stops early, with a lower bound, once that reaches `enough`.
        """
        bound = self._bound(layout, objective, enough)
        return bound if bound >= enough else max(bound, self._exact(layout, objective, enough))

    def _bound(self, layout: Layout, objective: str, enough: float) -> float:
        """A lower bound of the seconds, or of the bytes sent, with the loops lowered; stops early at `enough`."""
        if self._known_illegal(layout):
            return ILLEGAL
        total = self.outside if objective == "seconds" else 0.0
        scope, lowered = None, 0
        for loop in self.loops:
            key = _cuts(layout, loop.dims)
            if key not in loop.times:
                try:
                    scope = scope or self._scope(layout, self.inputs)
                    lower(scope, self.graph.eqns[lowered : loop.until])
                except IllegalError as error:
                    self._remember(layout, lowered + error.lowered if error.lowered else 0)
                    return ILLEGAL
                lowered = loop.until
                loop.times[key] = self._loop(scope.eqns)
            took, sent = loop.times[key]
            total += took if objective == "seconds" else sent
            if total >= enough:
                break
        return total

    def _dims(self, lowered: int) -> tuple[str, ...]:
        """The dims whose axes determine the lowering of the first equations."""
        return self.memo.dims(self.demand, self.graph.eqns[:lowered])

    def _known_illegal(self, layout: Layout) -> bool:
        """True if a problem of another layout depends only on rules that this one has too."""
        return any(_cuts(layout, each.dims) in each.cuts for each in self.illegal.values())

    def _remember(self, layout: Layout, lowered: int) -> None:
        """Remember a problem that lowering so many equations has shown."""
        if lowered:
            if lowered not in self.illegal:
                self.illegal[lowered] = _Illegal(self._dims(lowered))
            illegal = self.illegal[lowered]
            illegal.cuts.add(_cuts(layout, illegal.dims))

    def _scope(self, layout: Layout, inputs: Sequence[Var] = ()) -> Scope:
        ruled = layout.on(self.mesh)
        extents = extents_of(self.mesh, ruled, self.shards)
        setting = Setting(self.mesh, ruled, extents, self.hints, {}, self.rows, memo=self.memo)
        scope = Scope(setting, self.graph, self.demand)
        for v in inputs:
            add_input(scope, v)
        return scope

    def program(self, layout: Layout) -> Program | None:
        """The program of a layout after partition; None if the layout is illegal."""
        if self._known_illegal(layout) or self.misplaced or layout.problems(self.mesh, *self.named):
            return None
        scope = self._scope(layout)
        try:
            ins, outs = lower_graph(scope, self.results)
        except IllegalError as error:
            self._remember(layout, error.lowered)
            return None
        return assemble(scope, ins, outs)

    def _exact(self, layout: Layout, objective: str, enough: float) -> float:
        """The seconds or bytes sent of the layout's program, or a lower bound if that already reaches `enough`."""
        program = self.program(layout)
        if program is None:
            return ILLEGAL
        if objective == "seconds":
            least = self._serial(program)
            if least >= enough:
                return least
        program = self.machine.target.prepare(bucket_collectives(program))
        return ledger(program).wire_bytes if objective == "wire_bytes" else self.clock.seconds(program)

    def _serial(self, program: Program) -> float:
        """Seconds of the loops and of the collectives outside them that cannot run at the same time.

        These are the loops with all collectives that occupy the compute lane, or with the later collectives on one set
        of axes that depend on the last loop. Collectives of single numbers do not count, because they may be bucketed.
        """
        at = [i for i, eqn in enumerate(program.eqns) if eqn.scan is not None]
        last = at[-1] if at else len(program.eqns)
        after: set[Var] = set()
        lanes: dict[tuple[str, ...], list[CollectiveRecord]] = defaultdict(list)
        computing: list[CollectiveRecord] = []
        for i, eqn in enumerate(program.eqns):
            if i == last or not after.isdisjoint(eqn.ins):
                after.update(eqn.outs)
            if not eqn.sends or not eqn.ins[0].dims:
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

    def _loop(self, eqns: list[Eqn]) -> tuple[float, float]:
        """Seconds and bytes sent of the loop that was lowered last."""
        loop, body = next((eqn, eqn.scan.body) for eqn in reversed(eqns) if eqn.scan is not None)
        assert isinstance(body, Program)
        once, sent = self.clock.body(body)
        # trips that overlap still compute one after another, and may be slowed less
        least = once.compute / self.machine.overlap_slowdown if self.machine.pipelined else once.seconds
        return least * loop.trips, sent * loop.trips


def _cuts(layout: Layout, dims: Sequence[str]) -> Cuts:
    rules = layout.rules
    return tuple([rules.get(d) for d in dims])


class Clock:
    """The seconds of programs and of loop bodies on one machine, as `LaneSchedule` computes them."""

    def __init__(self, machine: Machine, placement: Placement):
        self.machine, self.placement = machine, placement
        self._bodies: dict[Program, tuple[LaneSpan, int]] = {}  # the time of one trip, and the bytes that it sends
        self._times: dict[tuple[Any, ...], tuple[LaneSpan, int]] = {}  # the same, by equations and stored sizes
        self._dims: dict[tuple[tuple[Any, ...], ...], tuple[Dim, ...]] = {}  # of bodies with these equations

    def seconds(self, program: Program) -> float:
        """The seconds of a program."""
        schedule = _Known(self, program)
        return max((item.end for item in schedule.ran(schedule.ledger.steps)), default=0.0)

    def body(self, body: Program) -> tuple[LaneSpan, int]:
        """The time of one trip of a loop body, and the bytes that it sends."""
        if body not in self._bodies:
            same = body.ins, body.eqns, body.outs
            if same not in self._dims:
                values = (*body.ins, *(v for eqn, _ in walk(body) for v in (*eqn.ins, *eqn.outs)))
                self._dims[same] = tuple({d for v in values for d in v.dims})
            key = (*same, *map(body.extents.padded, self._dims[same]))
            if key not in self._times:
                self._times[key] = self._timed(body)
            self._bodies[body] = self._times[key]
        return self._bodies[body]

    def _timed(self, body: Program) -> tuple[LaneSpan, int]:
        lines = ledger(body)
        return LaneSchedule(lines, self.machine, self.placement, pipelined=False).span(lines.steps), lines.wire_bytes


class _Known(LaneSchedule):
    """A schedule that takes the times of loop bodies from a clock."""

    def __init__(self, clock: Clock, program: Program):
        super().__init__(LazyLedger(program), clock.machine, clock.placement, pipelined=clock.machine.pipelined)
        self.clock = clock

    def repeated(self, loop: LoopStep, depth: int) -> LaneSpan:
        if loop.eqn.scan is None or not isinstance(loop.eqn.scan.body, Program):
            return super().repeated(loop, depth)
        once, _ = self.clock.body(loop.eqn.scan.body)
        total = LaneSpan(once.seconds * loop.trips)
        total.add(LaneSpan(exposed=once.exposed, least=once.least), loop.trips)
        return total
