"""The plans that a search has costed, and which of them are best."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..compile.plan import Plan
from ..cost.report.report import Report
from ..errors import LayoutError
from ..errors.no_effect import NoEffectError
from ..errors.units import seconds, show_bytes
from ..layouts import Layout, Mesh
from .variants import SearchProblem, Variants

SAME = 1.01  # plans whose cost differs by less are equal; the cost model is not more exact
RUNNERS_UP = 4  # plans of a result besides the best one


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
    plan = problem.plan.replace(mesh=mesh, layout=layout, machine=problem.machine)
    again = functools.partial(problem.cost, mesh, layout)
    return Entry(mesh, layout, r.seconds, r.peak_bytes, r.wire_bytes, r.fits, plan, r.parts, again)


def complexity(entry: Entry) -> int:
    """The number of choices of a plan that are not defaults: knobs, and axes in rules and in the mesh."""
    return len(entry.plan.to_dict()) + sum(map(len, entry.layout.rules.values())) + len(entry.mesh.axes)


class Costed:
    """The cost of plans, each computed once. `tell` is called after each."""

    def __init__(self, variants: Variants, tell: Callable[[], object]):
        self.variants, self.tell = variants, tell
        self.entries: dict[Plan, Entry] = {}
        self.refused: dict[Plan, str] = {}
        self.illegal = 0  # of the refused plans, those with an illegal layout

    def look(self, plan: Plan) -> Entry | None:
        """The cost of a plan, cached; None if it is illegal."""
        known = self.variants.canonical(plan)
        if known is None:
            return None
        if known not in self.entries and known not in self.refused:
            try:
                self.entries[known] = evaluate(self.variants.problem(known), known.mesh, known.layout)
            except LayoutError as error:
                self.refused[known] = str(error)
                self.illegal += not isinstance(error, NoEffectError)
            self.tell()
        return self.entries.get(known)

    def score(self, entry: Entry) -> tuple[bool, float, int]:
        """Sort key, smallest best: plans that fit by their time; plans that don't fit by their memory."""
        return not entry.fits, entry.seconds if entry.fits else entry.peak_bytes, complexity(entry)

    def best(self) -> Entry | None:
        """The fastest plan that fits, or the smallest if none fits; None before any is costed."""
        return min(self.entries.values(), key=self.score, default=None)

    def ranked(self) -> list[Entry]:
        """The best plans that fit, one per time and memory: first the simplest of those near the fastest."""
        each: dict[tuple[float, ...], Entry] = {}
        for entry in sorted((e for e in self.entries.values() if e.fits), key=complexity):
            each.setdefault(entry.outcome, entry)
        ranked = [each[outcome] for outcome in sorted(each)]
        near = [entry for entry in ranked if entry.seconds <= SAME * ranked[0].seconds]
        near.sort(key=complexity)
        listed: dict[tuple[str, str], Entry] = {}
        for entry in [*near[:1], *ranked]:
            listed.setdefault((seconds(entry.seconds), show_bytes(entry.peak_bytes)), entry)
        return list(listed.values())[: 1 + RUNNERS_UP]
