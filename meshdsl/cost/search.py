"""The best layouts of a graph, provably: every candidate is costed, or excluded by a bound on its cost.

What is reported was partitioned and costed as any program is, so a search agrees with `Compiled.cost` to the last bit.
Candidates are taken in the order of their bounds (`bounds`), until the next bound is no better than what has been
found. A bound that turns out above the cost it bounds is an `InternalError`, checked on every candidate costed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InternalError, LayoutError
from ..ir import Graph
from ..layouts import Layout, Mesh
from ..lowering import Program
from ..report.evaluate import cost
from ..report.report import Report
from ..units import show_bytes
from .bounds import Bounds, bounds
from .found import Counts, Entry, Found, Neighbour
from .machine import Machine
from .narrow import Asked, narrowed
from .network import Placement, place
from .space import Space

__all__ = ["OBJECTIVES", "Problem", "search"]

OBJECTIVES = ("seconds", "peak_bytes", "wire_bytes")
ROUNDING = 1e-9  # a bound adds the same numbers in another order


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be laid out: a graph, how it becomes a program, and which of its inputs are donated."""

    graph: Graph
    program: Callable[[Mesh, Layout], Program]  # raises LayoutError for an illegal layout
    donated: tuple[int, ...] = ()
    title: str = ""
    results: tuple[str, ...] | None = None  # their paths
    gather_limit: float | None = None
    plain: bool = True  # whether `program` is partition and nothing after it: only then there are bounds


def search(
    problem: Problem,
    over: Sequence[Mesh],
    machine: Machine,
    *,
    objective: str = "seconds",
    limit: float | None = None,
    fixed: Layout | None = None,
    dims: Collection[str] | None = None,
    axes: Collection[str] | None = None,
    several: bool | None = None,
    orders: bool = False,
    runners_up: int = 4,
    front: bool = True,
    tolerance: float = 0.01,
    assignment: Mapping[str, str | Sequence[str]] | None = None,
) -> Found:
    """The best layouts of a problem over these meshes; see `md.search`."""
    started = time.perf_counter()
    if objective not in OBJECTIVES:
        raise LayoutError(f"nothing can be searched for by {objective!r}; there are: {', '.join(OBJECTIVES)}")
    limit = machine.hbm if limit is None else limit
    placements = [place(machine.network, mesh, assignment) for mesh in over]
    asked = Asked(fixed, dims, axes, several, orders)
    hunt = _Hunt(problem, machine, over, asked, placements, limit)
    best = hunt.best(objective, 1 + runners_up)
    if not best:
        raise hunt.nothing_fits()
    pareto = hunt.front(tolerance) if front else ()
    return Found(
        problem.title,
        machine,
        objective,
        limit,
        best[0],
        tuple(best[1:]),
        pareto,
        tolerance,
        hunt.counts(objective),
        time.perf_counter() - started,
        hunt.left_out,
        lambda: hunt.neighbours(best[0], objective),
    )


class _Hunt:
    """The candidates of one search: their bounds, and what has been costed so far."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        over: Sequence[Mesh],
        asked: Asked,
        placements: Sequence[Placement],
        limit: float,
    ):
        self.problem, self.machine, self.placements, self.limit = problem, machine, placements, limit
        self.spaces: list[Space] = []
        parts: list[Bounds] = []
        left_out: list[str] = []
        for mesh, placement in zip(over, placements, strict=True):
            found, part, what = narrowed(problem.graph, mesh, asked, lambda s, p=placement: self.bounded(s, p))
            self.spaces.append(found)
            parts.append(part)
            left_out += [f"on '{mesh}': {what}"] if what else []
        self.left_out = tuple(left_out)
        self.first = np.cumsum([0, *(len(part) for part in parts)])
        self.bounds = Bounds.together(parts)
        self.entries: dict[int, Entry] = {}
        self.refused: dict[int, str] = {}

    def bounded(self, found: Space, placement: Placement) -> Bounds:
        """The bounds of one space."""
        problem = self.problem
        if not problem.plain:
            return Bounds.none(found)
        return bounds(
            problem.graph,
            found,
            self.machine,
            placement,
            donated=problem.donated,
            results=problem.results,
            gather_limit=problem.gather_limit,
        )

    def best(self, objective: str, wanted: int) -> list[Entry]:
        """The best entries that fit, the best first. Every other candidate is no better than the last of them."""
        bound = getattr(self.bounds, objective)
        worst = math.inf
        for i in np.argsort(bound, kind="stable"):
            if bound[i] * (1 - ROUNDING) >= worst:
                break
            if self.bounds.peak_bytes[i] * (1 - ROUNDING) > self.limit:
                continue
            self.look(int(i))
            found = self.ranked(objective, wanted)
            worst = getattr(found[-1], objective) if len(found) == wanted else math.inf
        return self.ranked(objective, wanted)

    def ranked(self, objective: str, wanted: int) -> list[Entry]:
        """The best that fit, one for each outcome: of layouts that cost the same, the one with the fewest rules."""
        each: dict[tuple[float, ...], tuple[float, int]] = {}
        for i, e in self.entries.items():
            outcome = getattr(e, objective), e.seconds, e.peak_bytes, e.wire_bytes
            if e.fits:
                each[outcome] = min(each.get(outcome, (math.inf, 0)), (len(e.layout.rules), i))
        return [self.entries[each[outcome][1]] for outcome in sorted(each)[:wanted]]

    def look(self, i: int) -> Entry | None:
        """The candidate's exact cost, or None where it is illegal."""
        if i in self.refused:
            return None
        if i not in self.entries:
            at = int(np.searchsorted(self.first, i, side="right")) - 1
            there = self.spaces[at]
            layout = there.layout(self.bounds.rows[at][i - self.first[at]])
            try:
                self.entries[i] = self.entry(at, layout)
            except LayoutError as error:
                self.refused[i] = str(error)
                return None
            self.check(i, self.entries[i])
        return self.entries[i]

    def entry(self, at: int, layout: Layout) -> Entry:
        """What a layout on one of the meshes costs; raises `LayoutError` for an illegal one."""
        mesh, placement = self.spaces[at].mesh, self.placements[at]

        def report() -> Report:
            program = self.problem.program(mesh, layout)
            donated = [program.ins[n] for n in self.problem.donated]
            return cost(
                program,
                self.machine,
                donated=donated,
                placement=placement,
                limit=self.limit,
                layout=layout,
                title=self.problem.title,
            )

        found = report()
        return Entry(mesh, layout, found.seconds, found.peak_bytes, found.wire_bytes, found.fits, report)

    def check(self, i: int, entry: Entry) -> None:
        for name in OBJECTIVES:
            bound, true = float(getattr(self.bounds, name)[i]), getattr(entry, name)
            if bound * (1 - ROUNDING) > true:
                raise InternalError(
                    f"search: the bound of {name} is {bound}, above the {true} that the program costs\n"
                    f"  layout '{entry.layout}' on the mesh '{entry.mesh}'"
                )

    def front(self, tolerance: float) -> tuple[Entry, ...]:
        """The entries that no candidate beats in time and memory, to within the tolerance."""
        seconds, peak = self.bounds.seconds * (1 + tolerance), self.bounds.peak_bytes * (1 + tolerance)
        open_to_all = np.ones(len(self.bounds), bool)
        open_to_all[list(self.refused)] = False
        for i, entry in self.entries.items():
            open_to_all[i] = False
            open_to_all &= (entry.seconds > seconds) | (entry.peak_bytes > peak)
        for i in np.argsort(self.bounds.seconds, kind="stable"):
            entry = self.look(int(i)) if open_to_all[i] else None
            if entry is not None:
                open_to_all &= (entry.seconds > seconds) | (entry.peak_bytes > peak)
        return self.staircase()

    def staircase(self) -> tuple[Entry, ...]:
        """Of what has been costed: those that nothing beats, the fastest first."""
        found: list[Entry] = []
        for entry in sorted(self.entries.values(), key=lambda e: (e.seconds, e.peak_bytes)):
            if not found or entry.peak_bytes < found[-1].peak_bytes:
                found.append(entry)
        return tuple(found)

    def counts(self, objective: str) -> Counts:
        rest = np.ones(len(self.bounds), bool)
        rest[[*self.entries, *self.refused]] = False
        over = rest & (self.bounds.peak_bytes > self.limit)
        return Counts(
            meshes=len(self.spaces),
            candidates=sum(found.size for found in self.spaces),
            illegal=sum(found.size for found in self.spaces) - len(self.bounds) + len(self.refused),
            over_memory=int(over.sum()),
            excluded=int((rest & ~over).sum()),
            costed=len(self.entries),
        )

    def nothing_fits(self) -> LayoutError:
        """Why there is no result: every layout is illegal, or the least memory of all is above the limit."""
        least = math.inf
        for i in np.argsort(self.bounds.peak_bytes, kind="stable"):
            if self.bounds.peak_bytes[i] * (1 - ROUNDING) >= least:
                break
            entry = self.look(int(i))
            least = min(least, entry.peak_bytes if entry else math.inf)
        where = ", ".join(f"'{found.mesh}'" for found in self.spaces[:3]) + ", ..." * (len(self.spaces) > 3)
        if not self.entries:
            reasons = list(dict.fromkeys(self.refused.values())) or list(self.fixed_problems())
            shown = "\n\n".join(reasons[:5]) + (f"\n\nand {len(reasons) - 5} more" if len(reasons) > 5 else "")
            return LayoutError(f"every layout on {where} is illegal\n\n{shown}")
        entry = min(self.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no layout on {where} fits {show_bytes(self.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}: '{entry.layout}' on '{entry.mesh}'\n"
            f"  {self.counts('peak_bytes')}\n" + "\n".join(entry.report.problems())
        )

    def fixed_problems(self) -> Iterator[str]:
        """What partition says of the fixed rules alone, on each mesh."""
        for at, found in enumerate(self.spaces):
            try:
                self.entry(at, found.fixed)
            except LayoutError as error:
                yield str(error)

    def neighbours(self, best: Entry, objective: str) -> tuple[Neighbour, ...]:
        at = next(i for i, found in enumerate(self.spaces) if found.mesh is best.mesh)
        return tuple(sorted(self._changed(at, best), key=lambda near: _rank(near, objective)))

    def _changed(self, at: int, best: Entry) -> Iterator[Neighbour]:
        there = self.spaces[at]
        known = {entry.layout: entry for entry in self.entries.values() if entry.mesh is best.mesh}
        now = there.row(best.layout)
        for d, (dim, options) in enumerate(zip(there.dims, there.options, strict=True)):
            for option, cut in enumerate(options):
                if option == now[d]:
                    continue
                layout = there.layout([*now[:d], option, *now[d + 1 :]])
                try:
                    yield Neighbour(dim, cut, known.get(layout) or self.entry(at, layout))
                except LayoutError as error:
                    yield Neighbour(dim, cut, None, str(error))


def _rank(near: Neighbour, objective: str) -> tuple[bool, float]:
    if near.entry is None:
        return (True, 0.0)
    return (False, getattr(near.entry, objective))
