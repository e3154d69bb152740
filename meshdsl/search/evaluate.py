"""The cost of one layout, as `Compiled.cost` reports it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..compile.plan import Plan
from ..cost.report.report import Report
from ..ir import Graph
from ..layouts import Layout, Mesh


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A graph to search a layout for, and the function that compiles and costs it."""

    graph: Graph
    cost: Callable[[Mesh, Layout], Report]  # raises `LayoutError` for an illegal layout
    results: tuple[str, ...] | None = None  # paths of the results
    plain: bool = True  # True if programs are plain `partition` output and only single numbers are bucketed;
    # otherwise only the bounds of products and inputs hold
    plan: Plan = field(default_factory=Plan)  # the knobs other than mesh, layout and machine
    machine_of_plans: str | None = None  # if it decides part of them


@dataclass(frozen=True, eq=False)
class Entry:
    """One layout on one mesh, with the cost of its program on one device."""

    mesh: Mesh
    layout: Layout
    seconds: float
    peak_bytes: int
    wire_bytes: int
    fits: bool
    plan: Plan
    parts: Mapping[str, float]  # seconds by kind of instruction
    _cost: Callable[[], Report] = field(repr=False)

    @cached_property
    def report(self) -> Report:
        """The report of `Compiled.cost`; compiled again on first access."""
        return self._cost()

    @property
    def outcome(self) -> tuple[float, int, int]:
        """Seconds, peak bytes, bytes sent."""
        return self.seconds, self.peak_bytes, self.wire_bytes

    @property
    def exposed(self) -> float:
        """The share of the step in which it only communicates."""
        return self.parts.get("exposed communication", 0.0) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "mesh": dict(self.mesh.axes),
            "layout": str(self.layout),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "wire_bytes": self.wire_bytes,
            "fits": self.fits,
        }


def evaluate(problem: SearchProblem, mesh: Mesh, layout: Layout) -> Entry:
    """Cost a layout on a mesh, with the knobs of the problem; raises `LayoutError` if the layout is illegal."""
    r = problem.cost(mesh, layout)
    plan = problem.plan.replace(mesh=mesh, layout=layout, machine=problem.machine_of_plans)
    again = functools.partial(problem.cost, mesh, layout)
    return Entry(mesh, layout, r.seconds, r.peak_bytes, r.wire_bytes, r.fits, plan, r.parts, again)
