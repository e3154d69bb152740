"""Time many programs that share loop bodies: each body is timed once."""

from __future__ import annotations

from ..cost.fusion import Loop
from ..cost.lanes import Schedule, Span
from ..cost.ledger import LazyLedger, ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..ir import Scan
from ..lowering import Program

__all__ = ["Clock"]


class Clock:
    """The seconds of programs and of loop bodies on one machine, as `Schedule` computes them."""

    def __init__(self, machine: Machine, placement: Placement):
        self.machine, self.placement = machine, placement
        self._bodies: dict[Program, tuple[Span, int]] = {}  # the time of one trip, and the bytes that it sends

    def seconds(self, program: Program) -> float:
        """The seconds of a program."""
        schedule = _Known(self, program)
        return max((item.end for item in schedule.ran(schedule.ledger.steps)), default=0.0)

    def body(self, body: Program) -> tuple[Span, int]:
        """The time of one trip of a loop body, and the bytes that it sends."""
        if body not in self._bodies:
            lines = ledger(body)
            span = Schedule(lines, self.machine, self.placement, pipelined=False).span(lines.steps)
            self._bodies[body] = span, lines.wire_bytes
        return self._bodies[body]


class _Known(Schedule):
    """A schedule that takes the times of loop bodies from a clock."""

    def __init__(self, clock: Clock, program: Program):
        super().__init__(LazyLedger(program), clock.machine, clock.placement, pipelined=clock.machine.pipelined)
        self.clock = clock

    def repeated(self, loop: Loop, depth: int) -> Span:
        if not isinstance(loop.eqn.control, Scan) or not isinstance(loop.eqn.control.body, Program):
            return super().repeated(loop, depth)
        once, _ = self.clock.body(loop.eqn.control.body)
        total = Span(once.seconds * loop.trips)
        total.add(Span(exposed=once.exposed, least=once.least), loop.trips)
        return total
