"""Best-first search that can stop at any time: it keeps the best layouts, a bound on all others, and the gap.

The compiler costs layouts (`evaluate`). A layout is excluded only by a lower bound of that cost: first from rules
(`bound`), then, one layout at a time, with loops lowered (`screen`). When the search runs to its end, the gap is 0.
"""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..cost.machine import Machine
from ..layouts import Mesh
from .candidates import Status
from .evaluate import Assignment, Problem, check_objective
from .layout_costs import Key, LayoutCosts
from .request import EVERY, ROUNDING, SearchRequest
from .result import Progress, SearchResult
from .result_text import layouts_text

__all__ = ["Search", "search"]


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
    best = run.costs.ranked()
    if not best:
        raise run.costs.nothing_fits(run.stopped)
    return SearchResult(
        title=problem.title,
        machine=machine,
        objective=request.objective,
        limit=request.limit,
        best=best[0],
        runners_up=tuple(best[1:]),
        front=run.costs.staircase() if request.front else (),
        tolerance=request.tolerance,
        counts=run.costs.counts(),
        bound=run.costs.lower_bound(),
        stopped=run.stopped,
        seconds=run.elapsed,
        left_out=run.costs.left_out,
        _edits=lambda: run.costs.edits(best[0]),
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
        self.request, self.limit = request, request.limit
        self.stopped = ""  # reason for an early stop
        self.improved: float | None = None  # processor seconds after which the best layout that fits was found
        self.costs = LayoutCosts(groups, machine, request, assignment)

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
            if not self.costs.entries:
                raise
            self.stopped = "an interrupt"
        finally:
            if collecting:
                gc.enable()

    def out_of_time(self) -> str:
        """The reason to stop now; "" if there is none, or if no layout is costed yet."""
        limit, patience = self.request.time_limit, self.request.patience
        if limit is not None and self.elapsed > limit and self.costs.entries:
            return f"the time limit of {limit:g} s"
        if patience is not None and self.improved is not None and self.worked > self.improved + patience:
            return f"{patience:g} s without anything better"
        return ""

    def steps(self) -> Iterator[None]:
        """Run all phases of the search; yields after each layout."""
        yield from self.tried(self.seeds())
        yield from self.descended()
        yield from self.swept()
        if not self.costs.ranked():
            yield from self.smallest()
        elif self.request.front:
            yield from self.traded()

    def seeds(self) -> list[Key]:
        """The fixed rules alone, and for each dim the layout that splits only it, over as many devices as possible."""
        keys: list[Key] = []
        for k, mesh in enumerate(self.costs.meshes):
            options, whole = mesh.space.options, [0] * len(mesh.space.dims)
            keys.append((k, tuple(whole)))
            for i, cuts in enumerate(options):
                most = max(range(len(cuts)), key=lambda n: mesh.space.mesh.count(cuts[n]))
                keys.append((k, (*whole[:i], most, *whole[i + 1 :])))
        return [(k, row) for k, row in keys if self.costs.meshes[k].space.allows(row)]

    def tried(self, keys: Sequence[Key]) -> Iterator[None]:
        """Cost these layouts, lowest bound first, skipping those that cannot be among the best."""
        new = [key for key in dict.fromkeys(keys) if key not in self.costs.entries and key not in self.costs.refused]
        bounds: list[tuple[float, Key]] = []
        for key in new:
            bounds.append((self.costs.bound(key), key))
            yield
        for bound, key in sorted(bounds):
            if bound * (1 - ROUNDING) < self.costs.worst():
                self.look(key)
                yield

    def descended(self) -> Iterator[None]:
        """Change one dim of the best layout at a time, until no change improves it."""
        while self.costs.entries:
            k, row = key = min(self.costs.entries, key=lambda key: self.costs.score(self.costs.entries[key]))
            space = self.costs.meshes[k].space
            near = [
                (k, (*row[:i], n, *row[i + 1 :]))
                for i, cuts in enumerate(space.options)
                for n in range(len(cuts))
                if n != row[i]
            ]
            yield from self.tried([each for each in near if space.allows(each[1])])
            if min(self.costs.entries, key=lambda key: self.costs.score(self.costs.entries[key])) == key:
                return

    def swept(self) -> Iterator[None]:
        """Visit listed layouts in order of their bounds, until a bound is no better than the worst kept layout."""
        waiting: list[tuple[float, Key]] = []  # screened layouts, costed if nothing better follows
        for k, i in self.in_order():
            mesh = self.costs.meshes[k]
            if mesh.bounds[i] * (1 - ROUNDING) >= self.costs.worst():
                break
            key = (k, mesh.row(i))
            if mesh.status[i] != Status.UNSEEN or key in self.costs.entries or key in self.costs.refused:
                continue
            if mesh.peaks[i] * (1 - ROUNDING) > self.limit:
                mesh.status[i] = Status.OVER
                continue
            bound = self.costs.bound(key)
            if bound * (1 - ROUNDING) >= self.costs.worst():
                pass
            elif bound * (1 - ROUNDING) < self.costs.least():
                self.look(key)
            else:
                heapq.heappush(waiting, (bound, key))
            yield
        while waiting and waiting[0][0] * (1 - ROUNDING) < self.costs.worst():
            self.look(heapq.heappop(waiting)[1])
            yield

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Listed layouts of all meshes, lowest bound first; equal bounds in order of memory."""
        listed = [(k, mesh) for k, mesh in enumerate(self.costs.meshes) if len(mesh.bounds)]
        if not listed:
            return
        which = np.concatenate([np.full(len(mesh.bounds), k) for k, mesh in listed])
        index = np.concatenate([np.arange(len(mesh.bounds)) for _, mesh in listed])
        bounds = np.concatenate([mesh.bounds for _, mesh in listed])
        peaks = np.concatenate([mesh.peaks for _, mesh in listed])
        keys = (peaks, bounds) if self.costs.ranked() else (bounds, peaks)
        for at in np.lexsort(keys):
            yield int(which[at]), int(index[at])

    def smallest(self) -> Iterator[None]:
        """Cost layouts until no other can need less memory than the smallest costed one."""
        order = sorted(
            (float(peak), k, i) for k, mesh in enumerate(self.costs.meshes) for i, peak in enumerate(mesh.peaks)
        )
        for peak, k, i in order:
            if peak * (1 - ROUNDING) >= min((e.peak_bytes for e in self.costs.entries.values()), default=math.inf):
                return
            self.look((k, self.costs.meshes[k].row(i)))
            yield

    def traded(self) -> Iterator[None]:
        """Cost layouts that may be on the front of time and memory, at any memory limit."""
        more = 1 + self.request.tolerance

        def beaten(seconds: float, peak: float) -> bool:
            return any(e.seconds <= seconds * more and e.peak_bytes <= peak * more for e in self.costs.entries.values())

        for k, mesh in enumerate(self.costs.meshes):
            times = mesh.amounts.seconds
            for i in np.argsort(times, kind="stable"):
                key = (k, mesh.row(int(i)))
                if key not in self.costs.entries and not beaten(float(times[i]), float(mesh.peaks[i])):
                    self.look(key)
                    yield

    def look(self, key: Key) -> None:
        """Cost a layout, and note when the best one improved."""
        before = self.costs.least()
        self.costs.look(key)
        if self.costs.least() < before:
            self.improved = self.worked

    def progress(self) -> Progress:
        """The state, for a progress line."""
        best, bound = self.costs.best(), self.costs.lower_bound()
        return Progress(self.elapsed, self.costs.counts(), best, self.request.objective, bound)
