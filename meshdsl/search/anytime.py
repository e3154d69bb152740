"""Best-first search that can stop at any time: it keeps the best layouts, a bound on all others, and the gap.

The compiler costs layouts (`evaluate`). A layout is excluded only by a lower bound of that cost: first from rules
(`bound`), then, one layout at a time, with loops lowered (`screen`). When the search runs to its end, the gap is 0.
Every costed layout is checked against its bounds; a bound above the cost is an `InternalError`.
"""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost.machine import Machine
from ..cost.network import place
from ..display.units import show_bytes
from ..errors import InternalError, LayoutError
from ..layouts import Layout, Mesh
from ..report.layout_edits import LayoutEdit
from .candidates import Candidates, Status
from .evaluate import Assignment, Entry, Problem, check_objective, evaluate
from .result import Counts, Progress, SearchResult
from .result_text import layouts_text
from .screen import ILLEGAL
from .space import Row, prune_space

__all__ = ["Search", "SearchRequest", "search"]

EVERY = 0.5  # seconds between two progress reports
ROUNDING = 1e-9  # relative tolerance: a bound sums the same numbers in another order

Key = tuple[int, Row]  # mesh number, and a layout on that mesh


@dataclass(frozen=True)
class SearchRequest:
    """The objective of a search, its candidates, and its limits."""

    objective: str = "seconds"
    limit: float = math.inf  # bytes per device
    fixed: Layout = field(default_factory=Layout)
    dims: Collection[str] | None = None
    axes: Collection[str] | None = None
    several: bool | None = None
    orders: bool = False
    runners_up: int = 4
    front: bool = False
    tolerance: float = 0.01
    time_limit: float | None = 60.0  # seconds
    patience: float | None = None  # stop after this many processor seconds without improvement
    progress: Callable[[Progress], None] | None = None
    started: float | None = None  # by `time.perf_counter`; default: when the search begins


def search(
    problem: Problem,
    meshes: Sequence[Mesh],
    machine: Machine,
    request: SearchRequest,
    assignment: Assignment | None = None,
) -> SearchResult:
    """The best layouts of a problem over these meshes; see `md.search`."""
    check_objective(request.objective, machine)
    run = Search([(problem, mesh) for mesh in meshes], machine, request, assignment)
    run.until_done()
    best = run.ranked()
    if not best:
        raise run.nothing_fits()
    return SearchResult(
        title=problem.title,
        machine=machine,
        objective=request.objective,
        limit=request.limit,
        best=best[0],
        runners_up=tuple(best[1:]),
        front=run.staircase() if request.front else (),
        tolerance=request.tolerance,
        counts=run.counts(),
        bound=run.lower_bound(),
        stopped=run.stopped,
        seconds=run.elapsed,
        left_out=run.left_out,
        _edits=lambda: run.edits(best[0]),
        _text=layouts_text,
    )


class Search:
    """The state of a search over groups of candidates: the layouts of a problem on a mesh."""

    def __init__(
        self,
        groups: Sequence[tuple[Problem, Mesh]],
        machine: Machine,
        request: SearchRequest,
        assignment: Assignment | None,
    ):
        self.started = time.perf_counter() if request.started is None else request.started
        self.begun = time.process_time()
        self.machine, self.request = machine, request
        self.objective, self.limit, self.assignment = request.objective, request.limit, assignment
        self.entries: dict[Key, Entry] = {}
        self._ranked: list[Entry] | None = None  # of these entries
        self.refused: dict[Key, str] = {}
        self.stopped = ""  # reason for an early stop
        self.improved: float | None = None  # processor seconds after which the best layout that fits was found
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

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def worked(self) -> float:
        """Processor seconds since the start, which other programs on the machine do not change."""
        return time.process_time() - self.begun

    def until_done(self) -> None:
        """Search to the end, the time limit or an interrupt; re-raise an interrupt if no layout is costed yet."""
        told, collecting = 0.0, gc.isenabled()
        gc.disable()  # cached values are many, and live as long as the search
        try:
            for _ in self.steps():
                if self.request.progress is not None and self.elapsed >= told + EVERY:
                    told = self.elapsed
                    self.request.progress(self.progress())
                self.stopped = self.out_of_time()
                if self.stopped:
                    break
        except KeyboardInterrupt:
            if not self.entries:
                raise
            self.stopped = "an interrupt"
        finally:
            if collecting:
                gc.enable()

    def out_of_time(self) -> str:
        """The reason to stop now; "" if there is none, or if no layout is costed yet."""
        limit, patience = self.request.time_limit, self.request.patience
        if limit is not None and self.elapsed > limit and self.entries:
            return f"the time limit of {limit:g} s"
        if patience is not None and self.improved is not None and self.worked > self.improved + patience:
            return f"{patience:g} s without anything better"
        return ""

    def steps(self) -> Iterator[None]:
        """Run all phases of the search; yields after each layout."""
        yield from self.tried(self.seeds())
        yield from self.descended()
        yield from self.swept()
        if not self.ranked():
            yield from self.smallest()
        elif self.request.front:
            yield from self.traded()

    def seeds(self) -> list[Key]:
        """The fixed rules alone, and for each dim the layout that splits only it, over as many devices as possible."""
        keys: list[Key] = []
        for k, mesh in enumerate(self.meshes):
            options, whole = mesh.space.options, [0] * len(mesh.space.dims)
            keys.append((k, tuple(whole)))
            for i, cuts in enumerate(options):
                most = max(range(len(cuts)), key=lambda n: mesh.space.mesh.count(cuts[n]))
                keys.append((k, (*whole[:i], most, *whole[i + 1 :])))
        return [(k, row) for k, row in keys if self.meshes[k].space.allows(row)]

    def tried(self, keys: Sequence[Key]) -> Iterator[None]:
        """Cost these layouts, lowest bound first, skipping those that cannot be among the best."""
        new = [key for key in dict.fromkeys(keys) if key not in self.entries and key not in self.refused]
        bounds: list[tuple[float, Key]] = []
        for key in new:
            bounds.append((self.bound(key), key))
            yield
        for bound, key in sorted(bounds):
            if bound * (1 - ROUNDING) < self.worst():
                self.look(key)
                yield

    def descended(self) -> Iterator[None]:
        """Change one dim of the best layout at a time, until no change improves it."""
        while self.entries:
            k, row = key = min(self.entries, key=lambda key: self.score(self.entries[key]))
            space = self.meshes[k].space
            near = [
                (k, (*row[:i], n, *row[i + 1 :]))
                for i, cuts in enumerate(space.options)
                for n in range(len(cuts))
                if n != row[i]
            ]
            yield from self.tried([each for each in near if space.allows(each[1])])
            if min(self.entries, key=lambda key: self.score(self.entries[key])) == key:
                return

    def swept(self) -> Iterator[None]:
        """Visit listed layouts in order of their bounds, until a bound is no better than the worst kept layout."""
        waiting: list[tuple[float, Key]] = []  # screened layouts, costed if nothing better follows
        for k, i in self.in_order():
            mesh = self.meshes[k]
            if mesh.bounds[i] * (1 - ROUNDING) >= self.worst():
                break
            key = (k, mesh.row(i))
            if mesh.status[i] != Status.UNSEEN or key in self.entries or key in self.refused:
                continue
            if mesh.peaks[i] * (1 - ROUNDING) > self.limit:
                mesh.status[i] = Status.OVER
                continue
            bound = self.bound(key)
            if bound * (1 - ROUNDING) >= self.worst():
                pass
            elif bound * (1 - ROUNDING) < self.least():
                self.look(key)
            else:
                heapq.heappush(waiting, (bound, key))
            yield
        while waiting and waiting[0][0] * (1 - ROUNDING) < self.worst():
            self.look(heapq.heappop(waiting)[1])
            yield

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Listed layouts of all meshes, lowest bound first; equal bounds in order of memory."""
        listed = [(k, mesh) for k, mesh in enumerate(self.meshes) if len(mesh.bounds)]
        if not listed:
            return
        which = np.concatenate([np.full(len(mesh.bounds), k) for k, mesh in listed])
        index = np.concatenate([np.arange(len(mesh.bounds)) for _, mesh in listed])
        bounds = np.concatenate([mesh.bounds for _, mesh in listed])
        peaks = np.concatenate([mesh.peaks for _, mesh in listed])
        keys = (peaks, bounds) if self.ranked() else (bounds, peaks)
        for at in np.lexsort(keys):
            yield int(which[at]), int(index[at])

    def smallest(self) -> Iterator[None]:
        """Cost layouts until no other can need less memory than the smallest costed one."""
        order = sorted((float(peak), k, i) for k, mesh in enumerate(self.meshes) for i, peak in enumerate(mesh.peaks))
        for peak, k, i in order:
            if peak * (1 - ROUNDING) >= min((e.peak_bytes for e in self.entries.values()), default=math.inf):
                return
            self.look((k, self.meshes[k].row(i)))
            yield

    def traded(self) -> Iterator[None]:
        """Cost layouts that may be on the front of time and memory, at any memory limit."""
        more = 1 + self.request.tolerance

        def beaten(seconds: float, peak: float) -> bool:
            return any(e.seconds <= seconds * more and e.peak_bytes <= peak * more for e in self.entries.values())

        for k, mesh in enumerate(self.meshes):
            times = mesh.amounts.seconds
            for i in np.argsort(times, kind="stable"):
                key = (k, mesh.row(int(i)))
                if key not in self.entries and not beaten(float(times[i]), float(mesh.peaks[i])):
                    self.look(key)
                    yield

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
            if entry.fits and getattr(entry, self.objective) < self.least():
                self.improved = self.worked
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

    def progress(self) -> Progress:
        best = min(self.entries.values(), key=self.score, default=None)
        return Progress(self.elapsed, self.counts(), best, self.objective, self.lower_bound())

    def counts(self) -> Counts:
        total = Counts(meshes=len(self.meshes))
        for mesh in self.meshes:
            total = total + mesh.counts(self.limit, self.worst())
        return total

    def nothing_fits(self) -> LayoutError:
        """Why there is no result: every layout is illegal, or the smallest one exceeds the limit."""
        names = [f"'{mesh.space.mesh}'" for mesh in self.meshes]
        where = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        if not self.entries:
            reasons = list(dict.fromkeys(self.reasons()))
            shown = "\n\n".join(reasons[:5]) + (f"\n\nand {len(reasons) - 5} more" if len(reasons) > 5 else "")
            return LayoutError(f"every layout on {where} is illegal\n\n{shown}")
        entry = min(self.entries.values(), key=lambda e: e.peak_bytes)
        none = "no layout" if not self.stopped else f"no layout costed before {self.stopped}"
        return LayoutError(
            f"{none} on {where} fits {show_bytes(self.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}: '{entry.layout}' on '{entry.mesh}'\n"
            f"  {self.counts()}\n" + "\n".join(entry.report.problems())
        )

    def reasons(self) -> Iterator[str]:
        """Why layouts are illegal; if none was costed, partition's error for the fixed rules."""
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
