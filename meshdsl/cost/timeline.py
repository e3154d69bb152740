"""When everything of one step happens on one device: a compute lane, and one for each set of mesh axes that sends.

Every lane runs its own instructions in the program's order; one starts when what it reads is there and its lanes are
free. A collective that is not asynchronous on the machine holds the compute lane too. Compute is slower by
`machine.overlap_slowdown` while anything is being sent beside it. So, always,

    lower bound <= seconds = compute + exposed

where exposed is the time in which something is sent and nothing computed, and the lower bound is the longest lane's
work at full efficiency, as if it waited for nothing.

A loop is never unrolled: its body is timed once. It holds the compute lane and those that its body sends on, and
as XLA keeps an asynchronous collective within the trip that starts it, every trip takes as long as the first. Under
`pipelined` trips run into each other, as far as the carry allows: the first trip, then the steady interval between two.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Var
from .fusion import Branch, Kernel, Loop, Send, Step
from .ledger import Ledger, Line
from .machine import Machine
from .network import Placement, full_bytes, place
from .roofline import roofline
from .tables import seconds as show_seconds

__all__ = ["COMPUTE", "Cost", "Event", "Timeline", "timeline"]

COMPUTE = "compute"


@dataclass(frozen=True, eq=False)
class Event:
    """One instruction on one lane, in seconds from the start; of what a loop holds, the first of its trips."""

    lane: str  # "compute", or the mesh axes that are sent over: "rows,cols"
    start: float
    seconds: float
    step: Step
    lines: tuple[Line, ...]  # of a kernel or a collective
    trips: int  # how often it runs in all
    depth: int  # the loops around it

    @property
    def name(self) -> str:
        """The operation that the kernel is named after: the last of the heaviest kind."""
        if isinstance(self.step, Loop):
            return f"{self.step.eqn.op} x{self.step.trips}"
        if isinstance(self.step, Branch):
            return str(self.step.eqn.op)
        ranks = {"matmul": 3, "conv": 3, "collective": 3, "vector": 1, "move": 0}
        heaviest = max(self.lines, key=lambda line: (ranks[line.kind], line.flops))
        return heaviest.op


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
    mesh lies as `place` puts it. Raises `LayoutError` for a mesh that is larger than the machine.
    """
    placement = place(machine.network, ledger.program.mesh) if placement is None else placement
    clock = _Clock(ledger, machine, placement, pipelined)
    span = clock.span(ledger.steps, 0)
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


@dataclass(eq=False)
class _Span:
    """What a sequence of steps takes, from its start to the end of the last of them."""

    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    events: list[Event] = field(default_factory=list[Event])
    seconds_of: dict[int, float] = field(default_factory=dict[int, float])  # by line index
    exposures: dict[int, float] = field(default_factory=dict[int, float])
    least: dict[str, float] = field(default_factory=dict[str, float])  # by lane: its work at full efficiency


@dataclass(eq=False)
class _Item:
    """A step on the lanes that it holds: `work` seconds when nothing slows it, `share` of them compute."""

    step: Step
    lanes: tuple[str, ...]
    work: float
    share: float
    least: dict[str, float]
    weights: Mapping[int, float] = field(default_factory=dict[int, float])  # by line index, adding up to 1
    inner: _Span | None = None  # of a loop: one trip
    trips: int = 1
    needs: int = 0  # what it reads and is not there yet
    readers: list[_Item] = field(default_factory=list["_Item"])
    start: float = 0.0
    end: float = 0.0
    alone: float = 0.0  # seconds in which nothing was computed

    @property
    def computes(self) -> bool:
        return COMPUTE in self.lanes


class _Clock:
    """One program on one machine."""

    def __init__(self, ledger: Ledger, machine: Machine, placement: Placement, pipelined: bool):
        self.ledger = ledger
        self.machine = machine
        self.placement = placement
        self.pipelined = pipelined

    def span(self, steps: Sequence[Step], depth: int) -> _Span:
        items = [self.item(step, depth) for step in steps]
        maker: dict[Var, _Item] = {}
        for item in items:
            for source in {maker[v] for v in item.step.reads if v in maker}:
                source.readers.append(item)
                item.needs += 1
            maker.update((v, item) for v in item.step.writes)
        self.run(items)
        return self.summed(items, depth)

    def item(self, step: Step, depth: int) -> _Item:
        if isinstance(step, Kernel):
            lines = self.ledger.of(step)
            found = roofline(lines, self.machine)
            weights = {line.index: w for line, w in zip(lines, found.weights, strict=True)}
            return _Item(step, (COMPUTE,), found.seconds, 1.0, {COMPUTE: found.least}, weights)
        if isinstance(step, Send):
            (line,) = self.ledger.of(step)
            record = line.collective
            assert record is not None
            n = self.placement.mesh.count(record.axes)
            seconds = self.placement.seconds(record.kind, record.axes, full_bytes(record, n))
            lane = ",".join(record.axes)
            lanes = (lane,) if record.kind in self.machine.asynchronous else (COMPUTE, lane)
            return _Item(step, lanes, seconds, 0.0, {lane: seconds}, {line.index: 1.0})
        if isinstance(step, Branch):
            arms = [self.span(arm, depth) for arm in step.arms]
            inner, trips = max(arms, key=lambda arm: arm.seconds), 1
        else:
            inner, trips = self.span(step.body, depth + 1), step.trips
        least = {lane: seconds * trips for lane, seconds in inner.least.items()}
        lanes = tuple(dict.fromkeys((COMPUTE, *inner.least)))
        share = inner.compute / inner.seconds if inner.seconds else 0.0
        return _Item(step, lanes, inner.seconds * trips, share, least, inner=inner, trips=trips)

    def run(self, items: Sequence[_Item]) -> None:
        """Set the start and the end of every item, lanes in order, from one completion to the next."""
        queues: dict[str, deque[_Item]] = defaultdict(deque)
        for item in items:
            for lane in item.lanes:
                queues[lane].append(item)
        left: dict[_Item, float] = {}  # of what is running: seconds at full speed
        now = 0.0
        while queues:
            for queue in queues.values():
                item = queue[0]
                if item not in left and not item.needs and all(queues[lane][0] is item for lane in item.lanes):
                    item.start = now
                    left[item] = item.work
            sending = [item for item in left if not item.computes]
            slow = self.machine.overlap_slowdown - 1 if sending else 0.0
            pace = {item: 1 + slow * item.share for item in left}
            first = min(left, key=lambda item: left[item] * pace[item])
            passed = left[first] * pace[first]
            if len(sending) == len(left):
                for item in sending:
                    item.alone += passed / len(sending)
            now += passed
            for item in left:
                left[item] -= passed / pace[item]
            del left[first]
            first.end = now
            for lane in first.lanes:
                queues[lane].popleft()
                if not queues[lane]:
                    del queues[lane]
            for reader in first.readers:
                reader.needs -= 1

    def summed(self, items: Sequence[_Item], depth: int) -> _Span:
        """The span of items that have run."""
        total = _Span(seconds=max((item.end for item in items), default=0.0))
        for item in items:
            took = item.end - item.start
            exposed = item.alone
            if isinstance(item.step, Send) and item.computes:
                exposed = took
            if item.inner is not None:
                exposed = item.trips * item.inner.exposed
                self.add_inner(total, item, took - exposed)
            for index, weight in item.weights.items():
                total.seconds_of[index] = took * weight
                total.exposures[index] = exposed * weight
            total.exposed += exposed
            for lane, seconds in item.least.items():
                total.least[lane] = total.least.get(lane, 0.0) + seconds
            lane = COMPUTE if not isinstance(item.step, Send) else ",".join(item.step.eqn.op.axes)
            lines = self.ledger.of(item.step)
            total.events.append(Event(lane, item.start, took, item.step, lines, 1, depth))
        total.compute = total.seconds - total.exposed
        total.events.sort(key=lambda event: event.start)
        return total

    def add_inner(self, total: _Span, item: _Item, computed: float) -> None:
        """What a loop or an arm holds: its times by line, all trips, and its events, of the first trip."""
        inner = item.inner
        assert inner is not None
        stretch = computed / (item.trips * inner.compute) if inner.compute and item.trips else 1.0
        for index, seconds in inner.seconds_of.items():
            hidden = stretch if index not in inner.exposures or not inner.exposures[index] else 1.0
            total.seconds_of[index] = seconds * item.trips * hidden
            total.exposures[index] = inner.exposures.get(index, 0.0) * item.trips
        for event in inner.events:
            total.events.append(replace(event, start=item.start + event.start, trips=event.trips * item.trips))
