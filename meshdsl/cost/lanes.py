"""Schedule of a program on one device's lanes: when each step starts and ends.

Every lane runs its steps in the program's order. A step starts when its operands are available and its lanes are free.
A loop is never unrolled: its body is timed once, and the loop is one item among the steps around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import Where
from ..ir import Scan, Var
from ..lowering import CollectiveRecord
from ..lowering.asynchrony import Start
from .combining import combine
from .fusion import Branch, Kernel, LoopStep, Send, Step, Wait, holders
from .ledger import Ledger, Line
from .machine import Machine
from .network import Placement
from .roofline import kernel_time

COMPUTE = "compute"
HOST = "host memory"


def lane_of(axes: Sequence[str]) -> str:
    """The lane of collectives along mesh axes; an axis may have the name of the compute lane."""
    name = ",".join(axes)
    return f"axis {name}" if name == COMPUTE else name


class Event(NamedTuple):
    """One instruction on one lane, in seconds from the start. Inside a loop, the times are those of the first trip."""

    lane: str  # "compute", the mesh axes of a collective: "rows,cols", or "host memory"
    start: float
    seconds: float
    step: Step
    lines: tuple[Line, ...]  # ledger lines, for a kernel or a collective
    trips: float  # number of runs
    depth: int  # loop nesting depth
    ticks: str = ""  # of a pipeline, for its loops

    @property
    def where(self) -> Where:
        """The user's source line."""
        return self.step.eqns[-1].where if isinstance(self.step, Kernel) else self.step.eqn.where

    @property
    def name(self) -> str:
        """The operation that names the kernel: the heaviest kind, then the most FLOPs."""
        if isinstance(self.step, LoopStep):
            return self.ticks or f"{self.step.eqn.op} x{self.step.trips}"
        if isinstance(self.step, Branch):
            return str(self.step.eqn.op)
        ranks = {"matmul": 3, "conv": 3, "collective": 3, "host": 3, "vector": 1, "move": 0}
        heaviest = max(self.lines, key=lambda line: (ranks[line.kind], line.flops))
        return heaviest.op


@dataclass(eq=False)
class LaneSpan:
    """Time of a sequence of steps, from its start to the end of its last step."""

    seconds: float = 0.0
    exposed: float = 0.0
    events: list[Event] = field(default_factory=list[Event])
    seconds_of: dict[int, float] = field(default_factory=dict[int, float])  # by line index
    exposures: dict[int, float] = field(default_factory=dict[int, float])  # by line index, communication only
    least: dict[str, float] = field(default_factory=dict[str, float])  # by lane: its work at full efficiency

    @property
    def compute(self) -> float:
        return self.seconds - self.exposed

    def add(self, other: LaneSpan, trips: float = 1, stretch: float = 1.0) -> None:
        """Add another span's times by lane and by line, `trips` times, with compute times scaled by `stretch`."""
        for lane, seconds in other.least.items():
            self.least[lane] = self.least.get(lane, 0.0) + seconds * trips
        self.exposed += other.exposed * trips
        for index, seconds in other.seconds_of.items():
            longer = 1.0 if index in other.exposures else stretch
            self.seconds_of[index] = self.seconds_of.get(index, 0.0) + seconds * trips * longer
        for index, seconds in other.exposures.items():
            self.exposures[index] = self.exposures.get(index, 0.0) + seconds * trips


@dataclass(eq=False)
class LaneItem:
    """A step and the lanes it occupies: `work` seconds without slowdown, of which the fraction `share` is compute."""

    step: Step
    lanes: tuple[str, ...]
    work: float
    share: float
    least: dict[str, float]
    weights: Mapping[int, float] = field(default_factory=dict[int, float])  # by line index; they sum to 1
    inner: LaneSpan | None = None  # for a loop or a conditional: the span of all its trips
    marker: bool = False  # a start or a wait: it takes no time and keeps its position in the order
    needs: int = 0  # number of items that it still waits for
    readers: list[LaneItem] = field(default_factory=list["LaneItem"])
    start: float = 0.0
    end: float = 0.0
    alone: float = 0.0  # seconds in which nothing was computed

    @property
    def computes(self) -> bool:
        return COMPUTE in self.lanes


class LaneSchedule:
    """The schedule of one program on one machine."""

    def __init__(self, ledger: Ledger, machine: Machine, placement: Placement, pipelined: bool):
        self.ledger = ledger
        self.machine = machine
        self.placement = placement
        self.pipelined = pipelined

    def span(self, steps: Sequence[Step], depth: int = 0) -> LaneSpan:
        return self.summed(self.ran(steps, depth), depth)

    def ran(self, steps: Sequence[Step], depth: int = 0) -> list[LaneItem]:
        """The items of the steps, with their starts and ends."""
        items, _ = self.items(steps, depth, {})
        combine(items, self.record, self.placement)
        _run(items, self.machine.overlap_slowdown)
        return items

    def record(self, step: Send) -> CollectiveRecord:
        """The record of a collective."""
        (line,) = self.ledger.of(step)
        return line.record

    def items(
        self, steps: Sequence[Step], depth: int, makers: Mapping[Var, LaneItem]
    ) -> tuple[list[LaneItem], dict[Var, LaneItem]]:
        """Items for the steps, linked to their readers, and the item that makes each value."""
        items = [item for step in steps for item in self.issued(step, depth)]
        maker_of = dict(makers)
        for item in items:
            for source in dict.fromkeys(maker_of[v] for v in item.step.reads if v in maker_of):
                source.readers.append(item)
                item.needs += 1
            if not item.marker and not (depth and HOST in item.lanes):  # a loop fetches one trip ahead
                maker_of.update((v, item) for v in item.step.writes)
        return items, maker_of

    def issued(self, step: Step, depth: int) -> list[LaneItem]:
        """Items for one step. A marker makes a started collective begin when the device reaches its start."""
        item = self.item(step, depth)
        if not isinstance(step, Send) or not isinstance(step.eqn.op, Start):
            return [item]
        start = LaneItem(step, (COMPUTE,), 0.0, 1.0, {}, marker=True, readers=[item])
        item.needs += 1
        return [start, item]

    def item(self, step: Step, depth: int) -> LaneItem:
        if isinstance(step, Kernel):
            lines = self.ledger.of(step)
            bound = kernel_time(step, lines, self.ledger.program, self.machine)
            weights = {line.index: w for line, w in zip(lines, bound.weights, strict=True)}
            if lines[0].kind == "host":
                return LaneItem(step, (HOST,), bound.seconds, 0.0, {HOST: bound.least}, weights)
            return LaneItem(step, (COMPUTE,), bound.seconds, 1.0, {COMPUTE: bound.least}, weights)
        if isinstance(step, Send):
            (line,) = self.ledger.of(step)
            record = line.record
            seconds, kind, lane = self.placement.seconds_of(record), record.op.timed_as, lane_of(record.axes)
            started = isinstance(step.eqn.op, Start)
            overlapped_kinds = self.machine.asynchronous if started else self.machine.overlapped_by_compiler
            lanes = (lane,) if kind in overlapped_kinds else (COMPUTE, lane)
            return LaneItem(step, lanes, seconds, 0.0, {lane: seconds}, {line.index: 1.0})
        if isinstance(step, Wait):
            return LaneItem(step, (COMPUTE,), 0.0, 1.0, {}, marker=True)
        if isinstance(step, Branch):
            inner = self.branch(step, depth)
        elif self.pipelined and step.eqn.scan is not None and step.trips > 1:
            inner = self.pipeline(step, step.eqn.scan, depth + 1)
        else:
            inner = self.repeated(step, depth)
        lanes = tuple(dict.fromkeys((COMPUTE, *inner.least)))
        share = inner.compute / inner.seconds if inner.seconds else 0.0
        return LaneItem(step, lanes, inner.seconds, share, inner.least, inner=inner)

    def branch(self, step: Branch, depth: int) -> LaneSpan:
        """The mean span of a branch of known frequency; otherwise that of the longer graph."""
        arms = {key: self.span(arm, depth) for key, arm in zip(step.eqn.graphs(), step.arms, strict=True)}
        if all(step.eqn.runs(key) == 1 for key in arms):
            return max(arms.values(), key=lambda arm: arm.seconds)
        total = LaneSpan()
        for key, arm in arms.items():
            often = step.eqn.runs(key)
            total.add(arm, often)
            total.seconds += arm.seconds * often
            total.events += [event._replace(trips=event.trips * often) for event in arm.events]
        return total

    def repeated(self, loop: LoopStep, depth: int) -> LaneSpan:
        """The span of a loop whose trips do not overlap."""
        once = self.span(loop.body, depth + 1)
        events = [event._replace(trips=event.trips * loop.trips) for event in once.events]
        total = LaneSpan(once.seconds * loop.trips, events=events)
        total.add(once, loop.trips)
        return total

    def pipeline(self, loop: LoopStep, scan: Scan, depth: int) -> LaneSpan:
        """Time a loop whose trips overlap: schedule three trips and extrapolate to the rest."""
        views = holders(scan.body)
        carried = zip(scan.inputs(scan.body.ins)[1], scan.results(scan.body.outs)[0], strict=True)
        before = {v: views.get(out, out) for v, out in carried}
        trips: list[list[LaneItem]] = []
        everything: list[LaneItem] = []
        maker: dict[Var, LaneItem] = {}
        for i in range(min(loop.trips, 3)):
            items, maker = self.items(loop.body, depth, {v: maker[out] for v, out in before.items() if out in maker})
            if i >= 2:  # a trip runs at most one trip ahead
                end_marker = LaneItem(loop, ("",), 0.0, 0.0, {}, needs=len(trips[i - 2]), readers=items)
                for item in trips[i - 2]:
                    item.readers.append(end_marker)
                for item in items:
                    item.needs += 1
                everything.append(end_marker)
            combine(items, self.record, self.placement)
            trips.append(items)
            everything += items
        _run(everything, self.machine.overlap_slowdown)
        spans = [self.summed(items, depth) for items in trips]
        total = LaneSpan(spans[-1].seconds)
        total.events = [event._replace(trips=event.trips * loop.trips) for event in spans[0].events]
        for span in spans:
            total.add(span)
        if loop.trips > len(trips):
            self.add_steady(total, spans[1], trips[1], spans[1].seconds - spans[0].seconds, loop.trips - len(trips))
        return total

    @staticmethod
    def add_steady(total: LaneSpan, trip: LaneSpan, items: Sequence[LaneItem], interval: float, trips: int) -> None:
        """Add `trips` more trips like `trip`, `interval` apart; the interval is at least each lane's busy time."""
        busy = [sum(item.end - item.start for item in items if lane in item.lanes) for lane in trip.least]
        interval = max(interval, *busy)
        total.add(trip, trips)
        total.seconds += trips * interval
        # the exposed time of a steady trip differs from that of the timed trip
        waited = interval - sum(seconds for index, seconds in trip.seconds_of.items() if index not in trip.exposures)
        total.exposed += trips * (waited - trip.exposed)
        known = any(trip.exposures.values())  # trip.exposed is rounded
        by = trip.exposures if known else {index: trip.seconds_of[index] for index in trip.exposures}
        for index, part in by.items():
            total.exposures[index] += trips * (waited * part / sum(by.values()) - trip.exposures[index])

    def summed(self, items: Sequence[LaneItem], depth: int) -> LaneSpan:
        """The span of items that have run."""
        total = LaneSpan(max((item.end for item in items), default=0.0))
        for item in items:
            if item.marker:
                continue
            took = item.end - item.start
            lines = self.ledger.of(item.step)
            lane = COMPUTE if item.inner is not None else _lane(item)
            if item.inner is not None:
                computed = took - item.inner.exposed
                total.add(item.inner, stretch=computed / item.inner.compute if item.inner.compute else 1.0)
            else:
                alone = took if lane != COMPUTE and item.computes else item.alone
                times = {index: took * weight for index, weight in item.weights.items()}
                total.add(
                    LaneSpan(took, alone, [], times, dict.fromkeys(times, alone) if lane != COMPUTE else {}, item.least)
                )
            ticks = self.ledger.program.ticks(item.step.eqn) if isinstance(item.step, LoopStep) else ""
            total.events.append(Event(lane, item.start, took, item.step, lines, 1, depth, ticks))
            if item.inner is not None:
                total.events += [e._replace(start=item.start + e.start) for e in item.inner.events]
        return total


def _lane(item: LaneItem) -> str:
    if isinstance(item.step, Send):
        return lane_of(item.step.axes)
    return HOST if HOST in item.lanes else COMPUTE


class Lanes:
    """The clock: items on the lanes of one device. Each lane runs one item at a time, in the order in which they are
    put, and a computation beside a collective is slower by `slowdown`."""

    def __init__(self, slowdown: float):
        self.slowdown, self.now = slowdown, 0.0
        self.queues: dict[str, deque[LaneItem]] = {}
        self.remaining: dict[LaneItem, float] = {}  # running items: seconds left without slowdown

    def put(self, item: LaneItem) -> None:
        for lane in item.lanes:
            self.queues.setdefault(lane, deque()).append(item)

    def advance(self) -> LaneItem:
        """Start the items whose operands and lanes are available, and run until the first one ends, which leaves."""
        for queue in self.queues.values():
            item = queue[0]
            waits = item.needs or any(self.queues[lane][0] is not item for lane in item.lanes)
            if item not in self.remaining and not waits:
                item.start = self.now
                self.remaining[item] = item.work
        first, passed = _advance(self.remaining, self.slowdown)
        self.now += passed
        first.end = self.now
        for lane in first.lanes:
            self.queues[lane].popleft()
            if not self.queues[lane]:
                del self.queues[lane]
        return first


def _run(items: Sequence[LaneItem], slowdown: float) -> None:
    """Set the start and end of every item, each lane in order."""
    lanes = Lanes(slowdown)
    for item in items:
        lanes.put(item)
    while lanes.queues:
        for reader in lanes.advance().readers:
            reader.needs -= 1


def _advance(remaining: dict[LaneItem, float], slowdown: float) -> tuple[LaneItem, float]:
    """Run all items until the first of them ends, which leaves `remaining`; returns it, and the seconds passed."""
    sending = [item for item in remaining if not item.computes]
    slow = slowdown - 1 if sending else 0.0
    pace = {item: 1 + slow * item.share for item in remaining}
    first = min(remaining, key=lambda item: remaining[item] * pace[item])
    passed = remaining[first] * pace[first]
    if len(sending) == len(remaining):
        for item in sending:
            item.alone += passed / len(sending)
    for item in remaining:
        remaining[item] -= passed / pace[item]
    del remaining[first]
    return first, passed
