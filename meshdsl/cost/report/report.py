"""`Report`: the cost of one program on one machine, combining its ledger, memory and timeline.

Every figure is a sum over the ledger's lines or the memory's values; a report adds no estimate of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors.markup import page_part
from ...errors.tables import grouped
from ...errors.units import seconds as show_seconds
from ...errors.units import show_bytes
from ...layouts import Layout, Mesh
from ...lowering import Program
from ..comm_groups import CommGroup, dims_of
from ..fusion import Kernel, Step
from ..ledger import Ledger, Line
from ..machine import Machine
from ..memory import Memory
from ..padding import PaddedDim, padded_dims
from ..profile import Coverage
from ..roofline import coverage, roofline
from ..timeline import Cost, Timeline
from .rates import Budget, Rates, Work
from .schema import SCHEMA_VERSION, plain

PARTS = ("products", "elementwise", "moves", "exposed communication")  # the step's time by part; the parts sum to it
PART_OF = {"matmul": "products", "conv": "products", "vector": "elementwise", "move": "moves"}


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """The cost of one program on one machine. `print(report)` shows the text of `meshdsl analyze`; see `Compiled.cost`.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "batch:rows")
    >>> report = step.cost(md.spec("batch:8192 io:8192"), md.spec("io:8192 hidden:8192"), machine="tpu-v4")
    >>> report.fits, report.lower_bound <= report.seconds <= report.interval[1]
    (True, True)
    """

    title: str
    layout: Layout | None
    machine: Machine
    ledger: Ledger
    memory: Memory
    timeline: Timeline
    limit: float  # memory of one device, in bytes
    mesh: Mesh  # the requested mesh; if groups share an update, the program's mesh may split an axis in two
    text: Callable[[Report], str]  # the function behind `print`
    work: Work | None = None  # what the step does, if known
    budget: Budget | None = None  # to an amount of tokens, if asked for

    @property
    def program(self) -> Program:
        """The program of one device."""
        return self.ledger.program

    @property
    def seconds(self) -> float:
        """Estimated seconds of one step."""
        return self.timeline.seconds

    @property
    def lower_bound(self) -> float:
        """Lower bound in seconds for any schedule and any kernels."""
        return self.timeline.lower_bound

    @property
    def interval(self) -> tuple[float, float]:
        """Range of seconds that should contain the measured step."""
        return self.timeline.interval

    @property
    def exposed(self) -> float:
        """Seconds in which something is sent and nothing is computed."""
        return self.timeline.exposed

    @property
    def utilisation(self) -> float:
        """Seconds the products would take at the machine's peak, divided by the seconds of the step."""
        return self.timeline.utilisation

    @cached_property
    def rates(self) -> Rates | None:
        """Tokens or samples a second, and model and hardware FLOP utilisation; None if the work is not known."""
        if self.work is None or not self.seconds:
            return None
        devices = self.mesh.size
        mfu = self.work.peak_seconds(self.machine, devices) / self.seconds
        return Rates(
            self.seconds, devices, self.work.amount, self.work.unit, mfu, self.utilisation, self.machine.tdp * devices
        )

    @property
    def flops(self) -> float:
        """FLOPs of one device in one step."""
        return self.ledger.flops

    @cached_property
    def padding(self) -> tuple[PaddedDim, ...]:
        """The dims that are stored with padding where something is computed, with the FLOPs that it costs."""
        return padded_dims(self.ledger)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that one device reads and writes in one step."""
        return self.ledger.hbm_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return self.ledger.wire_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one device in bytes."""
        return self.memory.peak

    @property
    def fits(self) -> bool:
        """True if the peak is within the limit."""
        return self.peak_bytes <= self.limit

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by kind of instruction; they sum to `seconds`."""
        totals: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for each in self.timeline.costs:
            totals[PART_OF.get(each.line.kind, "exposed communication")] += each.blocking
        return totals

    @cached_property
    def waits(self) -> dict[str, float]:
        """Seconds of a step by limiting resource, largest first; they sum to `seconds`."""
        bounds: dict[Step, str] = {}
        totals: dict[str, float] = {}
        for each in self.timeline.costs:
            step = each.line.step
            if step not in bounds:
                bounds[step] = self._limiting_resource(step, each.line)
            totals[bounds[step]] = totals.get(bounds[step], 0.0) + each.blocking
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _limiting_resource(self, step: Step, line: Line) -> str:
        if line.collective is not None:
            return f"network along {','.join(line.collective.axes)}"
        if line.kind == "host":
            return "link to the host's memory"
        assert isinstance(step, Kernel)
        bound = roofline(self.ledger.of(step), self.machine).bound
        return {"memory": "memory bandwidth", "launch": "kernel launches"}.get(bound, "compute")

    @cached_property
    def coverage(self) -> Coverage:
        """Number of kernels that take their time from the machine's profile."""
        return coverage(self.ledger, self.machine)

    @property
    def constraint(self) -> str:
        """The limiting resource: "memory" if the program doesn't fit, otherwise the resource with the most time."""
        return next(iter(self.waits), "nothing") if self.fits else "memory"

    @cached_property
    def sends(self) -> tuple[Cost, ...]:
        """Every collective that runs, in program order; its index is the number that `explain` uses."""
        return tuple(each for each in self.timeline.costs if each.line.collective is not None)

    @cached_property
    def collectives(self) -> tuple[CommGroup, ...]:
        """Collectives grouped by dims, axes and kind, most exposed first."""
        groups = grouped(self.sends, lambda each: (each.line.record.kind, each.line.record.axes, dims_of(each.line)))
        merged = (CommGroup(*key, tuple(costs)) for key, costs in groups.items())
        return tuple(sorted(merged, key=lambda group: (-group.exposed, -group.seconds)))

    def problems(self) -> list[str]:
        """Reasons why the program doesn't fit, with the peak's composition; empty if it fits."""
        if self.fits:
            return []
        categories = sorted(self.memory.by_category.items(), key=lambda item: -item[1])
        most = [f"{name} {show_bytes(n)}" for name, n in categories if n]
        largest = self.memory.by_tensor[0]
        return [
            f"the layout needs {show_bytes(self.peak_bytes)} per device; only {show_bytes(self.limit)} is available\n"
            f"  the peak is at {self.memory.at.op} ({self.memory.at.where}): {', '.join(most)}\n"
            f"  the largest tensor is {largest.name}, {show_bytes(largest.bytes)}; split another of its dims, "
            f"or use a larger mesh"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON, in seconds and bytes."""
        by_line = {each.line.index: each for each in self.timeline.costs}
        lines = [
            {**line.to_dict(), "seconds": each.seconds if each else 0.0, "blocking": each.blocking if each else 0.0}
            for line in self.ledger.lines
            for each in [by_line.get(line.index)]
        ]
        return plain(
            {
                "schema_version": SCHEMA_VERSION,
                "title": self.title,
                "mesh": self.mesh.axes,
                "layout": None if self.layout is None else str(self.layout),
                "machine": {"name": self.machine.name, "title": self.machine.title, "hbm": self.machine.hbm},
                "profile": self._profile(),
                "placement": str(self.timeline.placement),
                "notes": list(self.timeline.placement.notes),
                "fits": self.fits,
                "limit_bytes": self.limit,
                "peak_bytes": self.peak_bytes,
                "seconds": self.seconds,
                "lower_bound": self.lower_bound,
                "interval": list(self.interval),
                "compute": self.timeline.compute,
                "communication": self.timeline.communication,
                "exposed": self.exposed,
                "utilisation": self.utilisation,
                "rates": self._rates(),
                "pipelines": [each.to_dict() for each in self.program.schedules],
                "flops": self.flops,
                "padding": [each.to_dict() for each in self.padding],
                "hbm_bytes": self.hbm_bytes,
                "wire_bytes": self.wire_bytes,
                "parts": self.parts,
                "waits": self.waits,
                "constraint": self.constraint,
                "collectives": [group.to_dict() for group in self.collectives],
                "instructions": lines,
                "memory": self.memory.to_dict(),
            }
        )

    def _rates(self) -> dict[str, Any] | None:
        if self.rates is None:
            return None
        return {**self.rates.to_dict(), "budget": None if self.budget is None else self.budget.to_dict()}

    def _profile(self) -> dict[str, Any] | None:
        profile = self.machine.profile
        if profile is None:
            return None
        origin = {name: getattr(profile, name) for name in ("file", "device", "jax", "date", "rounds")}
        return origin | vars(self.coverage)

    def __repr__(self) -> str:
        what = f"{self.title!r} on " if self.title else ""
        fits = "" if self.fits else ", does not fit"
        figures = f"{show_seconds(self.seconds)}, peak {show_bytes(self.peak_bytes)}{fits}"
        return f"<Report of {what}{self.mesh or 'one device'}, {self.machine.name}: {figures}>"

    def __str__(self) -> str:
        return self.text(self)

    def _repr_html_(self) -> str:
        return page_part(repr(self)[1:-1], str(self), self.mesh.axes)
