"""The layouts that a search has costed, on any of its meshes, and which of them are best.

The compiler costs layouts (`evaluate`). Every costed layout is checked against its bounds; a bound above the cost is an
`InternalError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..cost.machine import Machine
from ..cost.network import place
from ..cost.report.layout_edits import LayoutEdit
from ..errors import InternalError, LayoutError
from ..errors.units import show_bytes
from ..layouts import Layout, Mesh
from .candidates import Candidates, Status
from .evaluate import Assignment, Entry, Problem, evaluate
from .request import ROUNDING, SearchRequest
from .result import Counts
from .screen import ILLEGAL
from .space import Row, prune_space

__all__ = ["Key", "LayoutCosts"]

Key = tuple[int, Row]  # mesh number, and a layout on that mesh


class LayoutCosts:
    """The cost of layouts over groups of candidates (the layouts of a problem on a mesh), each computed once."""

    def __init__(
        self,
        groups: Sequence[tuple[Problem, Mesh]],
        machine: Machine,
        request: SearchRequest,
        assignment: Assignment | None,
    ):
        self.machine, self.request = machine, request
        self.objective, self.limit, self.assignment = request.objective, request.limit, assignment
        self.entries: dict[Key, Entry] = {}
        self.refused: dict[Key, str] = {}
        self._ranked: list[Entry] | None = None  # of these entries
        self.meshes: list[Candidates] = []
        left_out: list[str] = []
        for problem, mesh in groups:
            r = request
            space, text = prune_space(
                problem.graph, mesh, fixed=r.fixed, dims=r.dims, axes=r.axes, several=r.several, orders=r.orders
            )
            placement = place(machine.network, mesh, assignment)
            self.meshes.append(Candidates(problem, space, machine, placement, request.objective))
            left_out += [f"on '{mesh}': {text}"] if text else []
        self.left_out = tuple(left_out)

    def bound(self, key: Key) -> float:
        """The best bound of a layout, cached; `ILLEGAL` if the layout is known to be illegal."""
        k, row = key
        bound = self.meshes[k].screened(row, self.worst())
        if bound == ILLEGAL:
            self.refused.setdefault(key, "")
        return bound

    def look(self, key: Key) -> Entry | None:
        """The cost of a layout, cached; None if it is illegal."""
        k, row = key
        mesh = self.meshes[k]
        if key in self.refused:
            return None
        if key not in self.entries:
            try:
                entry = self.cost(mesh, mesh.space.layout(row))
            except LayoutError as error:
                self.refused[key] = str(error)
                mesh.mark(row, Status.ILLEGAL)
                return None
            self.entries[key] = entry
            self._ranked = None
            mesh.mark(row, Status.COSTED)
            self.check(mesh, row, entry)
        return self.entries[key]

    def cost(self, mesh: Candidates, layout: Layout) -> Entry:
        program = mesh.screen.program(layout) if mesh.screen.usable else None
        return evaluate(mesh.problem, mesh.space.mesh, layout, self.machine, self.limit, self.assignment, program)

    def check(self, mesh: Candidates, row: Row, entry: Entry) -> None:
        for name, bound in mesh.claims(row).items():
            if bound * (1 - ROUNDING) > getattr(entry, name):
                raise InternalError(
                    f"search: the bound of {name} is {bound}, above the {getattr(entry, name)} that the program costs\n"
                    f"  layout '{entry.layout}' on the mesh '{entry.mesh}'"
                )

    def score(self, entry: Entry) -> tuple[bool, float, int]:
        """Sort key, smallest best: layouts that fit by the objective; layouts that don't fit by their memory."""
        amount = getattr(entry, self.objective) if entry.fits else entry.peak_bytes
        return not entry.fits, amount, len(entry.layout.rules)

    def best(self) -> Entry | None:
        """The best layout costed; one that does not fit if none does."""
        return min(self.entries.values(), key=self.score, default=None)

    def ranked(self) -> list[Entry]:
        """The best layouts that fit, one per outcome: of layouts with equal costs, the one with the fewest rules."""
        if self._ranked is None:
            self._ranked = self._by_rank()
        return self._ranked

    def _by_rank(self) -> list[Entry]:
        each: dict[tuple[float, ...], Entry] = {}
        for key in sorted(self.entries, key=lambda key: (len(self.entries[key].layout.rules), key)):
            entry = self.entries[key]
            if entry.fits:
                each.setdefault((getattr(entry, self.objective), *entry.outcome), entry)
        return [each[outcome] for outcome in sorted(each)[: 1 + self.request.runners_up]]

    def worst(self) -> float:
        """The objective of the last layout kept; infinite while fewer than requested are kept."""
        best = self.ranked()
        return getattr(best[-1], self.objective) if len(best) > self.request.runners_up else math.inf

    def least(self) -> float:
        """The objective of the best layout; infinite while none fits."""
        return min((getattr(e, self.objective) for e in self.entries.values() if e.fits), default=math.inf)

    def lower_bound(self) -> float:
        """A lower bound of the objective for every candidate that fits."""
        least = self.least()
        return min([least, *(mesh.open_bound(self.limit, least) for mesh in self.meshes)])

    def staircase(self) -> tuple[Entry, ...]:
        """The Pareto front of the costed layouts in time and memory, fastest first."""
        front: list[Entry] = []
        for entry in sorted(self.entries.values(), key=lambda e: (e.seconds, e.peak_bytes)):
            if not front or entry.peak_bytes < front[-1].peak_bytes:
                front.append(entry)
        return tuple(front)

    def counts(self) -> Counts:
        total = Counts(meshes=len(self.meshes))
        for mesh in self.meshes:
            total = total + mesh.counts(self.limit, self.worst())
        return total

    def nothing_fits(self, stopped: str) -> LayoutError:
        """The error if there is no result: every layout is illegal, or the smallest one exceeds the limit."""
        names = [f"'{mesh.space.mesh}'" for mesh in self.meshes]
        where = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        if not self.entries:
            reasons = list(dict.fromkeys(self.reasons()))
            shown = "\n\n".join(reasons[:5]) + (f"\n\nand {len(reasons) - 5} more" if len(reasons) > 5 else "")
            return LayoutError(f"every layout on {where} is illegal\n\n{shown}")
        entry = min(self.entries.values(), key=lambda e: e.peak_bytes)
        none = "no layout" if not stopped else f"no layout costed before {stopped}"
        return LayoutError(
            f"{none} on {where} fits {show_bytes(self.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}: '{entry.layout}' on '{entry.mesh}'\n"
            f"  {self.counts()}\n" + "\n".join(entry.report.problems())
        )

    def reasons(self) -> Iterator[str]:
        """Reasons why layouts are illegal; if none was costed, partition's error for the fixed rules."""
        for k, row in list(self.refused)[:6] or [(k, None) for k in range(len(self.meshes))]:
            mesh = self.meshes[k]
            try:
                self.cost(mesh, mesh.space.fixed if row is None else mesh.space.layout(row))
            except LayoutError as error:
                yield str(error)

    def edits(self, best: Entry) -> tuple[LayoutEdit, ...]:
        """The best layout with one dim changed, for each dim and option, best first."""
        return tuple(sorted(self.edited(best), key=lambda edit: (edit.report is None, _amount(edit, self.objective))))

    def edited(self, best: Entry) -> Iterator[LayoutEdit]:
        alike = [mesh for mesh in self.meshes if mesh.space.mesh is best.mesh]
        mesh = next((mesh for mesh in alike if mesh.problem.plan == best.plan.replace(mesh="", layout="")), alike[0])
        space, row = mesh.space, mesh.space.row(best.layout)
        for i, (dim, cuts) in enumerate(zip(space.dims, space.options, strict=True)):
            for n, cut in enumerate(cuts):
                if n == row[i]:
                    continue
                edited = space.layout((*row[:i], n, *row[i + 1 :]))
                try:
                    report = mesh.problem.cost(space.mesh, edited, self.machine, self.limit, self.assignment)
                    yield LayoutEdit(dim, cuts[row[i]], cut, best.report, report)
                except LayoutError as error:
                    yield LayoutEdit(dim, cuts[row[i]], cut, best.report, None, str(error))


def _amount(edit: LayoutEdit, objective: str) -> float:
    if edit.report is None:
        return 0.0
    return getattr(edit.report, "seconds" if objective == "energy" else objective)  # of one mesh
