"""Timeline of one step on one device: a lane for compute, for each set of mesh axes with collectives, and for the host.

Every lane runs its instructions in the program's order. An instruction starts when its operands are available and its
lanes are free. A collective with a `start` and a `wait` begins when the compute lane reaches its start, and the compute
lane stops at its wait until the result has arrived; kinds outside `machine.asynchronous` block the compute lane
meanwhile. A collective without start and wait blocks the compute lane too, unless its kind is in
`machine.overlapped_by_compiler`: there we assume that the device's compiler overlaps it with everything that does not
read it. Independent collectives share a launch, as compilers combine them. Copies to and from the host's memory run on
a lane of their own; in a loop, a value is fetched one trip ahead, as the TPU compiler does. Compute is slower by
`machine.overlap_slowdown` while a collective or such a copy runs beside it. Therefore always

    lower bound <= seconds = compute + exposed

where exposed is the time in which something is sent and nothing is computed, and the lower bound is the longest lane's
work at full efficiency, without waiting.

A loop is never unrolled: its body is timed once. It occupies the compute lane and the lanes that its body sends on.
XLA keeps an asynchronous collective within the trip that starts it, so every trip takes as long as the first. With
`pipelined`, a trip may begin together with the one before it, as far as the carry allows, until a steady interval is
reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors.units import seconds as show_seconds
from .fusion import Kernel
from .lanes import Event, LaneSchedule
from .ledger import Ledger, Line
from .machine import Machine
from .network import Placement, place
from .roofline import is_fused, peak_seconds, roofline


@dataclass(frozen=True)
class Cost:
    """Time of one ledger line in a step, summed over its trips."""

    line: Line
    seconds: float
    exposed: float  # of communication: the part in which nothing is computed

    @property
    def blocking(self) -> float:
        """The line's part of the step time; the parts of all lines sum to `Timeline.seconds`."""
        return self.exposed if self.communicates else self.seconds

    @property
    def communicates(self) -> bool:
        """True for a collective, and for a copy to or from the host's memory."""
        return self.line.kind in ("collective", "host")


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of a program on one machine, in seconds: an estimate, its lower bound and its interval."""

    ledger: Ledger
    machine: Machine
    placement: Placement
    events: tuple[Event, ...]
    costs: tuple[Cost, ...]  # one for each ledger line that runs, in ledger order
    seconds: float
    compute: float  # time in which something is computed
    communication: float  # of all collectives and copies to or from the host, hidden or not
    exposed: float  # time in which something is sent and nothing is computed
    lower_bound: float
    utilisation: float  # seconds the products would take at the peak / seconds of the step

    @property
    def regime(self) -> str:
        """The main influence on the estimate: "network" if a quarter of the step is exposed communication, "launch" if
        half of its other seconds are in kernels bound by launches, otherwise "compute"."""
        if self.exposed > 0.25 * self.seconds:
            return "network"
        launches = sum(cost.seconds for cost in self.costs if self._launch_bound(cost.line))
        return "launch" if launches > 0.5 * self.compute else "compute"

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """The dtypes of the products that run, whose peaks `utilisation` is a fraction of."""
        lines = [cost.line for cost in self.costs if cost.line.kind in ("matmul", "conv")]
        return tuple(dict.fromkeys(line.dtype.name for line in lines))

    def _launch_bound(self, line: Line) -> bool:
        return isinstance(line.step, Kernel) and roofline(self.ledger.of(line.step), self.machine).bound == "launch"

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the measured time is in nine of ten cases.

        From `seconds` / (1 + u) to `seconds` * (1 + u), and not under the lower bound; u is the machine's `uncertainty`
        for what bounds the step: compute, launches or the network (`regime`).
        """
        u = self.machine.half_width(self.regime)
        return max(self.lower_bound, self.seconds / (1 + u)), self.seconds * (1 + u)

    def __str__(self) -> str:
        low, high = self.interval
        dtypes = self.product_dtypes
        peak = f"{dtypes[0]} peak" if len(dtypes) == 1 else "peak"
        return (
            f"{show_seconds(self.seconds)} a step ({show_seconds(low)} to {show_seconds(high)}, "
            f"at least {show_seconds(self.lower_bound)}): compute {show_seconds(self.compute)}, "
            f"communication {show_seconds(self.communication)} of which {show_seconds(self.exposed)} exposed, "
            f"{self.utilisation:.1%} of the {peak} on {self.machine.name}"
        )


def timeline(
    ledger: Ledger, machine: Machine, placement: Placement | None = None, *, pipelined: bool = False
) -> Timeline:
    """Estimate how long one step takes and how the time divides.

    A conditional counts its longer arm; a while loop, whose trip count is unknown, counts one trip. Without a placement
    the mesh is mapped by `place`. With `pipelined` here or in the machine, the trips of a scan overlap, as XLA does if
    told to (a collective of the next trip starts early).

    Raises `LayoutError` for a mesh that is larger than the machine.
    """
    placement = place(machine.network, ledger.program.mesh) if placement is None else placement
    span = LaneSchedule(ledger, machine, placement, pipelined or machine.pipelined).span(ledger.steps)
    by_index = {line.index: line for line in ledger.lines}
    costs = tuple(
        Cost(by_index[i], seconds, span.exposures.get(i, 0.0)) for i, seconds in sorted(span.seconds_of.items())
    )
    products = [line for line in ledger.lines if line.kind in ("matmul", "conv") and line.index in span.seconds_of]
    at_peak = sum(peak_seconds(x, machine, is_fused(ledger.of(x.step), machine)) * x.trips for x in products)
    return Timeline(
        ledger,
        machine,
        placement,
        events=tuple(span.events),
        costs=costs,
        seconds=span.seconds,
        compute=span.compute,
        communication=sum(cost.seconds for cost in costs if cost.communicates),
        exposed=span.exposed,
        lower_bound=max(span.least.values(), default=0.0),
        utilisation=at_peak / span.seconds if span.seconds else 0.0,
    )
