"""The time of many layouts of one graph: every program is lowered with one memo, and timed.

Equations, runs of them and loops on whose rules layouts agree are lowered once (`lowering.memo`), and each loop body is
timed once. This requires `memoisable`: then no pass after the loops removes anything from their bodies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..cost.lanes import LaneSchedule, LaneSpan
from ..cost.ledger import LazyLedger, ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..dims import Dim, Shape
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.partition.demand import Demand
from ..lowering.partition.legality import named_by_layouts, shard_problems
from ..lowering.partition.memo import IllegalError, Memo, memoisable
from ..lowering.partition.partition import assemble, extents_of, lower_graph, preferences, shard_splits
from ..lowering.partition.scope import Scope, Setting
from ..lowering.partition.whole_dims import whole_dims
from ..targets.fusion import LoopStep
from ..updates.bucket_collectives import bucket_collectives

ILLEGAL = math.inf


Cuts = tuple[Axes | None, ...]  # the axes of some dims


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
        # by number of equations: the dims that determine their lowering, and axes of these dims that are illegal
        self.illegal: dict[int, tuple[tuple[str, ...], set[Cuts]]] = {}

    @cached_property
    def misplaced(self) -> bool:
        """True if a `md.shard` of the graph names an axis that the mesh lacks."""
        return bool(shard_problems(self.graph, self.mesh))

    @cached_property
    def named(self) -> tuple[set[str], dict[str, Shape]]:
        """The dims and paths that a layout can name."""
        return named_by_layouts(self.graph, self.results)

    def seconds(self, layout: Layout) -> float:
        """The seconds of a layout's program; `ILLEGAL` for an illegal one."""
        program = self.program(layout)
        if program is None:
            return ILLEGAL
        return self.clock.seconds(self.machine.target.prepare(bucket_collectives(program)))

    def _known_illegal(self, layout: Layout) -> bool:
        """True if a problem of another layout depends only on rules that this one has too."""
        return any(_cuts(layout, dims) in illegal for dims, illegal in self.illegal.values())

    def _remember(self, layout: Layout, lowered: int) -> None:
        """Remember a problem that lowering so many equations has shown."""
        if lowered:
            if lowered not in self.illegal:
                self.illegal[lowered] = self.memo.dims(self.demand, self.graph.eqns[:lowered]), set()
            dims, illegal = self.illegal[lowered]
            illegal.add(_cuts(layout, dims))

    def program(self, layout: Layout) -> Program | None:
        """The program of a layout after partition; None if the layout is illegal."""
        if self._known_illegal(layout) or self.misplaced or layout.problems(self.mesh, *self.named):
            return None
        ruled = layout.on(self.mesh)
        extents = extents_of(self.mesh, ruled, self.shards)
        setting = Setting(
            self.mesh, ruled, self.graph.known_dim_names, extents, self.hints, {}, self.rows, memo=self.memo
        )
        scope = Scope(setting, self.graph, self.demand)
        try:
            ins, outs = lower_graph(scope, self.results)
        except IllegalError as error:
            self._remember(layout, error.lowered)
            return None
        return assemble(scope, ins, outs)


def _cuts(layout: Layout, dims: Sequence[str]) -> Cuts:
    rules = layout.rules
    return tuple([rules.get(d) for d in dims])


class Clock:
    """The seconds of programs and of loop bodies on one machine, as `LaneSchedule` computes them."""

    def __init__(self, machine: Machine, placement: Placement):
        self.machine, self.placement = machine, placement
        self._bodies: dict[Program, LaneSpan] = {}  # the time of one trip
        self._times: dict[tuple[Any, ...], LaneSpan] = {}  # the same, by equations and stored sizes
        self._dims: dict[tuple[tuple[Any, ...], ...], tuple[Dim, ...]] = {}  # of bodies with these equations

    def seconds(self, program: Program) -> float:
        """The seconds of a program."""
        schedule = _Known(self, program)
        return max((item.end for item in schedule.ran(schedule.ledger.steps)), default=0.0)

    def body(self, body: Program) -> LaneSpan:
        """The time of one trip of a loop body."""
        if body not in self._bodies:
            same = body.ins, body.eqns, body.outs
            if same not in self._dims:
                values = (*body.ins, *(v for eqn, _ in walk(body) for v in (*eqn.ins, *eqn.outs)))
                self._dims[same] = tuple({d for v in values for d in v.dims})
            key = (*same, *map(body.extents.padded, self._dims[same]))
            if key not in self._times:
                lines = ledger(body)
                schedule = LaneSchedule(lines, self.machine, self.placement, pipelined=False)
                self._times[key] = schedule.span(lines.steps)
            self._bodies[body] = self._times[key]
        return self._bodies[body]


class _Known(LaneSchedule):
    """A schedule that takes the times of loop bodies from a clock."""

    def __init__(self, clock: Clock, program: Program):
        super().__init__(LazyLedger(program), clock.machine, clock.placement, pipelined=clock.machine.pipelined)
        self.clock = clock

    def repeated(self, loop: LoopStep, depth: int) -> LaneSpan:
        if loop.eqn.scan is None or not isinstance(loop.eqn.scan.body, Program):
            return super().repeated(loop, depth)
        once = self.clock.body(loop.eqn.scan.body)
        total = LaneSpan(once.seconds * loop.trips)
        total.add(LaneSpan(exposed=once.exposed, least=once.least), loop.trips)
        return total
