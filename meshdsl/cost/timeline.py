"""When everything of one step happens on one device: a compute lane, and one for each set of mesh axes that sends.

Every lane runs its own instructions in the program's order; one starts when its operands are available and its lanes
are free. A collective with a `start` and a `wait` leaves when the compute lane reaches its start, and the compute lane
stops at its wait until the result has arrived; kinds outside `machine.asynchronous` hold the compute lane meanwhile. A
collective without them holds the compute lane too, unless its kind is in `machine.overlapped_by_compiler`: the
assumption that the device's own compiler overlaps it with whatever does not read it. Compute is slower by
`machine.overlap_slowdown` while anything is being sent beside it. So, always,

    lower bound <= seconds = compute + exposed

where exposed is the time in which something is sent and nothing computed, and the lower bound is the longest lane's
work at full efficiency, as if it waited for nothing.

A loop is never unrolled: its body is timed once. It holds the compute lane and those that its body sends on, and
as XLA keeps an asynchronous collective within the trip that starts it, every trip takes as long as the first. Under
`pipelined` a trip may begin when the one before it does, as far as the carry allows, and a steady interval is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..units import seconds as show_seconds
from .lanes import COMPUTE, Event, Schedule
from .ledger import Ledger, Line
from .machine import Machine
from .network import Placement, place

__all__ = ["COMPUTE", "Cost", "Event", "Timeline", "timeline"]


@dataclass(frozen=True)
class Cost:
    """What one line of the ledger adds to the time of a step, all its trips together."""

    line: Line
    seconds: float
    exposed: float  # of a collective: the part in which nothing is computed

    @property
    def blocking(self) -> float:
        """The part of the step's time that is this line's: they add up to `Timeline.seconds`."""
        return self.seconds if self.line.collective is None else self.exposed


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of a program on one machine. Seconds; an estimate, with a bound below it and an interval around."""

    ledger: Ledger
    machine: Machine
    placement: Placement
    events: tuple[Event, ...]
    costs: tuple[Cost, ...]  # one for each line of the ledger that runs, in its order
    seconds: float
    compute: float  # in which something is computed
    communication: float  # of all collectives, hidden or not
    exposed: float  # in which something is sent and nothing computed
    lower_bound: float
    utilisation: float  # the seconds that the products would take at the peak, over the seconds of the step

    @property
    def interval(self) -> tuple[float, float]:
        """Where the measured time should lie, by the machine's own statement of how far off it may be."""
        u = self.machine.uncertainty
        return max(self.lower_bound, self.seconds / (1 + u)), self.seconds * (1 + u)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{show_seconds(self.seconds)} a step ({show_seconds(low)} to {show_seconds(high)}, "
            f"at least {show_seconds(self.lower_bound)}): compute {show_seconds(self.compute)}, "
            f"communication {show_seconds(self.communication)} of which {show_seconds(self.exposed)} exposed, "
            f"{self.utilisation:.1%} of the peak on {self.machine.name}"
        )


def timeline(
    ledger: Ledger, machine: Machine, placement: Placement | None = None, *, pipelined: bool = False
) -> Timeline:
    """How long one step takes, and where the time goes.

    Of a conditional the longer arm counts; of a while loop, whose trips nobody knows, one trip. Without a placement the
    mesh lies as `place` puts it. `pipelined` lets the trips of a scan run into each other, as XLA does where it is
    told to (a collective of the next trip starts early).

    Raises `LayoutError` for a mesh that is larger than the machine.
    """
    placement = place(machine.network, ledger.program.mesh) if placement is None else placement
    span = Schedule(ledger, machine, placement, pipelined).span(ledger.steps)
    by_index = {line.index: line for line in ledger.lines}
    costs = tuple(
        Cost(by_index[i], seconds, span.exposures.get(i, 0.0)) for i, seconds in sorted(span.seconds_of.items())
    )
    products = [line for line in ledger.lines if line.kind in ("matmul", "conv") and line.index in span.seconds_of]
    at_peak = sum(line.flops * line.trips / machine.peak_of(line.dtype) for line in products)
    return Timeline(
        ledger,
        machine,
        placement,
        events=tuple(span.events),
        costs=costs,
        seconds=span.seconds,
        compute=span.compute,
        communication=sum(cost.seconds for cost in costs if cost.line.collective is not None),
        exposed=span.exposed,
        lower_bound=max(span.least.values(), default=0.0),
        utilisation=at_peak / span.seconds if span.seconds else 0.0,
    )
