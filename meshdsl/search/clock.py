"""Time many programs that share loop bodies: each body is timed once."""

from __future__ import annotations

from typing import Any

from ..cost.lanes import LaneSchedule, LaneSpan
from ..cost.ledger import LazyLedger, ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..dims import Dim
from ..ir import walk
from ..lowering import Program
from ..targets.fusion import LoopStep

__all__ = ["Clock"]


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
