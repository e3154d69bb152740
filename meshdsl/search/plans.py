"""Search over whole plans: mesh, layout, weight update, rematerialisation, micro-batches and overlap.

Three phases, each of which improves the best plan so far. First, layouts are descended on a few meshes, with the memo
of the layout search (`screen`) and without a memory limit. Then the best of them are improved one knob at a time; mesh
and layout are knobs too. If there are few plans, `anytime.Search` then proves the best one, over every combination.
Otherwise the gap is measured against the least work of any plan (`floor`), divided over all devices.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..display.units import show_bytes
from ..errors import LayoutError
from ..errors.deadline import OutOfTimeError, deadline
from ..layouts import Mesh
from ..lowering import Program
from ..tune.weight_update import WeightUpdate
from .anytime import EVERY, ROUNDING, Search, SearchRequest
from .bound import rule_bound
from .candidates import Candidates
from .costed import Costed
from .evaluate import Assignment, Entry, check_objective
from .knobs import Turn
from .moves import meshes_near, named_rows, rows_near
from .result import Counts, Progress
from .space import Row, space
from .variants import Variants

__all__ = ["PlanSearch"]

FEW_PLANS = 3_000  # up to which every combination is searched
STARTS = 3  # plans that are improved
FIRST_MESHES = 5
LAYOUTS_SHARE = 0.3  # of the time limit, for the first phase
LAYOUT_MOVES = 6  # layouts that are costed in a round


class PlanSearch:
    """The state of a search over plans."""

    def __init__(
        self,
        variants: Variants,
        meshes: Sequence[Mesh],
        machine: Machine,
        request: SearchRequest,
        turns: Sequence[Turn],
        hints: Mapping[str, tuple[str, str]],
        assignment: Assignment | None,
        start: Plan | None = None,
    ):
        check_objective(request.objective, machine)
        self.costed = Costed(variants, machine, request, assignment, self.partitioned)
        self.variants, self.machine, self.request = variants, machine, request
        self.turns, self.hints, self.assignment = turns, hints, assignment
        self.meshes, self.start = list(meshes), start
        self.proof: Search | None = None
        self.proven = False
        self.stopped = ""
        self.turning = False
        self._turned: set[tuple[Any, ...]] = set()  # outcomes of plans, and the turns tried on one of them
        self._groups: dict[tuple[Plan, Mesh], Candidates] = {}
        self._size = 0
        self._floor: float | None = None

    def until_done(self) -> None:
        """Search to the end, the time limit or an interrupt; re-raise an interrupt if no plan is costed yet."""
        told, collecting = 0.0, gc.isenabled()
        gc.disable()
        try:
            for _ in self.steps():
                if self.request.progress is not None and self.costed.elapsed >= told + EVERY:
                    told = self.costed.elapsed
                    self.request.progress(self.progress())
                self.stopped = self.out_of_time()
                if self.stopped:
                    break
        except KeyboardInterrupt:
            if not self.costed.entries:
                raise
            self.stopped = "an interrupt"
        except OutOfTimeError:
            self.stopped = self.out_of_time()
        finally:
            if collecting:
                gc.enable()
        self.adopt()
        self.costed.finish()
        if not self.stopped and not self.proven:
            self.stopped = "the end of the improvements, as there are too many plans to prove the best"

    def out_of_time(self) -> str:
        """The reason to stop now; "" if there is none, or if no plan that fits is costed yet and there is time."""
        limit, patience = self.request.time_limit, self.request.patience
        if limit is not None and self.costed.elapsed > limit and self.costed.entries:
            return f"the time limit of {limit:g} s"
        if patience is not None and self.turning and self.costed.waited > patience and self.costed.least() < math.inf:
            return f"{patience:g} s without anything better"
        return ""

    def steps(self) -> Iterator[None]:
        """All phases; yields after each evaluation."""
        starts: list[Plan] = []
        if self.start is not None:
            self.costed.look(self.start)
            yield
        yield from self.descended(starts)
        self.costed.touch()  # patience starts with the knobs
        self.turning = True
        first = [] if self.start is None else [self.start]
        first += [entry.plan for entry in self.costed.ranked()[:1]]
        for plan in list(dict.fromkeys([*first, *starts]))[:STARTS]:
            yield from self.raised(plan)
        yield from self.reordered()
        yield from self.proved()

    def descended(self, starts: list[Plan]) -> Iterator[None]:
        """The fastest layout of a few meshes by the memo, ignoring memory, with the first plan's knobs."""
        base = self.variants.canonical(self.variants.base)
        if base is None:
            raise LayoutError(next(iter(self.variants.refused.values())))
        chosen = sorted(self.meshes, key=lambda mesh: (len(mesh.axes), *_skew(mesh)))[:FIRST_MESHES]
        best: list[tuple[float, Plan]] = []
        for mesh in chosen:
            if best and self.costed.elapsed > LAYOUTS_SHARE * (self.request.time_limit or math.inf):
                break
            group = self.group(base, mesh)
            row, seconds = (0,) * len(group.space.dims), math.inf
            named = list(named_rows(group.space, self.hints))
            for each in named:  # people's layouts fit where the fastest one does not
                self.costed.look(base.replace(mesh=mesh, layout=group.space.layout(each)))
                yield
            before = [near for _, plan in best for near in meshes_near(plan, [mesh])]
            known = [group.space.row(near.layout) for near in before if group.space.contains(near.layout)]
            rows = [*known, row, *named, *rows_near(group.space, row)]
            while rows:
                found = row
                for each in dict.fromkeys(rows):
                    amount = self.screened(group, each, seconds)
                    if amount < seconds:
                        found, seconds = each, amount
                    if (
                        self.costed.elapsed > LAYOUTS_SHARE * (self.request.time_limit or math.inf)
                        and seconds < math.inf
                    ):
                        break
                    yield
                rows, row = (rows_near(group.space, found) if found != row else []), found
            plan = base.replace(mesh=mesh, layout=group.space.layout(row))
            self.costed.look(plan)
            best.append((seconds, plan))
            yield
        starts += [plan for _, plan in sorted(best, key=lambda each: each[0])]

    def screened(self, group: Candidates, row: Row, enough: float) -> float:
        """The objective of a layout without sharded updates and overlap; stops early once it reaches `enough`."""
        if group.screen.usable and group.objective != "peak_bytes":
            with deadline(self.costed.time_left()):
                if enough < math.inf:
                    return group.screened(row, enough)
                return group.exact(row, enough)
        if group.by_rules(row)[group.objective] >= enough:
            return enough
        entry = self.costed.look(group.problem.plan.replace(mesh=group.space.mesh, layout=group.space.layout(row)))
        return math.inf if entry is None else getattr(entry, group.objective)

    def raised(self, plan: Plan) -> Iterator[None]:
        """Turn one knob at a time as long as that improves the plan."""
        best = self.costed.look(plan)
        yield
        while best is not None:
            before = best
            for turn in self.turns:
                for value in () if turn.knob == "overlap" else self.values(turn, best):
                    if self.is_new(best, turn.knob, value):
                        best = self.better(best, best.plan.replace(**{turn.knob: value}))
                        yield
            for near in itertools.chain(
                self.traded(best), meshes_near(best.plan, self.meshes), self.layouts_near(best)
            ):
                best = best if near is None else self.better(best, near)
                yield
            if best is before:
                return

    def reordered(self) -> Iterator[None]:
        """Overlap plans of the best plan, last, because each takes seconds to make for a deep model."""
        self.costed.touch()
        best = min(self.costed.entries.values(), key=self.costed.score, default=None)
        if best is None:
            return
        for turn in self.turns:
            for value in self.values(turn, best) if turn.knob == "overlap" else ():
                self.costed.look(best.plan.replace(overlap=value))
                yield

    def traded(self, best: Entry) -> Iterator[Plan | None]:
        """Plans that spend less time by one knob that saves memory, and more by another, until they fit."""
        spending = [turn for turn in self.turns if turn.spends]
        for less, more in itertools.permutations(spending, 2):
            for value in self.values(less, best) if best.fits else ():
                if not self.is_new(best, less.knob, value, more.knob):
                    continue
                plan = best.plan.replace(**{less.knob: value})
                values = list(more.candidates(plan))
                now = getattr(plan, more.knob)
                for each in values[values.index(now) + 1 if now in values else 0 :]:
                    entry = self.costed.look(plan.replace(**{more.knob: each}))
                    if entry is None or entry.fits:
                        yield None if entry is None else entry.plan
                        break
                    yield None

    def is_new(self, best: Entry, *turned: Any) -> bool:
        """True if these turns were not tried on a plan of equal outcome: such plans have equal programs.

        A turn that names mesh axes is tried on each mesh.
        """
        names_axes = any(isinstance(each, WeightUpdate) and each.group is not None for each in turned)
        key = (*best.outcome, *turned, best.mesh if names_axes else None)
        new = key not in self._turned
        self._turned.add(key)
        return new

    def better(self, best: Entry, plan: Plan) -> Entry:
        """The better of an entry and a plan."""
        entry = self.costed.look(plan)
        return entry if entry is not None and self.costed.score(entry) < self.costed.score(best) else best

    def values(self, turn: Turn, best: Entry) -> Sequence[Any]:
        """The candidates of a knob that may improve a plan; if it fits, not those that only save memory."""
        now, values = getattr(best.plan, turn.knob), list(turn.candidates(best.plan))
        if turn.spends and best.fits and self.request.objective != "peak_bytes":
            values = values[: values.index(now)] if now in values else values[:1]
        return [value for value in values if value != now]

    def layouts_near(self, best: Entry) -> Iterator[Plan | None]:
        """Layouts that change one dim: those of least time without sharded updates, or of least memory if it lacks.

        Yields None after each bound.
        """
        plan = self.variants.canonical(best.plan.replace(weight_update="replicated", overlap="none"))
        if plan is None:
            return
        group = self.group(plan, best.mesh)
        try:
            row = group.space.row(best.layout)
        except ValueError:
            return
        exact = group.screen.usable and best.fits and group.objective != "peak_bytes"
        now = group.exact(row, math.inf) if exact else math.inf
        amounts: list[tuple[float, Row]] = []
        times = {now}  # layouts that take equal time have equal programs
        for near in rows_near(group.space, row):
            with deadline(self.costed.time_left()):
                amount = group.screened(near, 1.1 * now) if exact else group.by_rules(near)["peak_bytes"]
            if amount < 1.1 * now and not (exact and amount in times):
                amounts.append((amount, near))
                times.add(amount)
            yield None
        for _, near in sorted(amounts)[:LAYOUT_MOVES]:
            yield best.plan.replace(layout=group.space.layout(near))

    def group(self, knobs: Plan, mesh: Mesh) -> Candidates:
        """The candidates of a mesh for a plan's knobs, cached; only single layouts of it are looked at."""
        key = (knobs.replace(mesh="", layout=""), mesh)
        if key not in self._groups:
            run = Search([(self.variants.problem(key[0]), mesh)], self.machine, self.request, self.assignment)
            self._groups[key] = run.meshes[0]
        return self._groups[key]

    def partitioned(self, plan: Plan) -> Program | None:
        """The program of a plan on a mesh whose layouts are lowered with a memo; None on others, and if illegal."""
        group = self._groups.get((plan.replace(mesh="", layout=""), plan.mesh))
        if group is None or not group.screen.usable or not group.space.contains(plan.layout):
            return None
        return group.screen.program(plan.layout)

    def combinations(self) -> Iterator[Plan]:
        """Every combination of mesh and knobs."""
        plans = [self.variants.base.replace(mesh=mesh) for mesh in self.meshes]
        for turn in self.turns:
            plans = [plan.replace(**{turn.knob: value}) for plan in plans for value in self._all(turn, plan)]
        yield from plans

    def _all(self, turn: Turn, plan: Plan) -> list[Any]:
        return list(dict.fromkeys([getattr(plan, turn.knob), *turn.candidates(plan)]))

    def proved(self) -> Iterator[None]:
        """Search every combination with bounds, if there are few."""
        if self.size() > FEW_PLANS:
            return
        groups: dict[Plan, tuple[Any, Mesh]] = {}
        for plan in self.combinations():
            known = self.variants.canonical(plan)
            yield
            if known is not None and known not in groups:
                groups[known] = self.variants.problem(known), known.mesh
        self.proof = Search(list(groups.values()), self.machine, self.request, self.assignment)
        for _ in self.proof.steps():
            if self.proof.least() < self.costed.least():
                self.costed.touch()
            yield
        self.proven = True

    def size(self) -> int:
        """Number of plans: combinations of mesh and knobs, times the layouts of the mesh."""
        if not self._size:
            graph = self.variants.problem(self._base()).graph
            r = self.request
            for mesh in self.meshes:
                each = space(graph, mesh, fixed=r.fixed, dims=r.dims, axes=r.axes, several=r.several is not False)
                knobs = math.prod(len(self._all(turn, Plan(mesh))) for turn in self.turns)
                self._size += each.size * knobs
        return self._size

    def _base(self) -> Plan:
        return self.variants.canonical(self.variants.base) or self.variants.base

    def adopt(self) -> None:
        """Take over the entries of the proof."""
        if self.proof is not None:
            for entry in self.proof.entries.values():
                self.costed.entries.setdefault(entry.plan, entry)

    def lower_bound(self) -> float:
        """A lower bound of the objective for every plan."""
        if self.proven and self.proof is not None:
            return min(self.costed.least(), self.proof.lower_bound())
        return min(self.costed.least(), self.floor())

    def floor(self) -> float:
        """The least work of any plan: that of the step that recomputes nothing, divided over all devices."""
        if self._floor is None:
            free = {"remat": "none", "microbatches": 1}
            turned = {turn.knob for turn in self.turns}
            least = self._base().replace(**{name: value for name, value in free.items() if name in turned})
            problem = self.variants.problem(self.variants.canonical(least) or self._base())
            by_size = {mesh.size: mesh for mesh in self.meshes}.values()
            bounds = [rule_bound(problem.graph, space(problem.graph, m), self.machine, plain=False) for m in by_size]
            undecided = [bound.of(np.zeros((1, len(bound.space.dims)), np.int64)) for bound in bounds]
            amounts = [float(getattr(amounts, self.request.objective)[0]) for amounts in undecided]
            self._floor = min(amounts) * (1 - ROUNDING)
        return self._floor

    def progress(self) -> Progress:
        """The state, for a progress line."""
        best = min(self.costed.entries.values(), key=self.costed.score, default=None)
        return Progress(self.costed.elapsed, self.counts(), best, self.request.objective, self.lower_bound())

    def counts(self) -> Counts:
        """Number of plans by outcome."""
        size, costed, illegal = self.size(), len(self.costed.entries), len(self.costed.refused)
        if self.proven:
            return Counts(len(self.meshes), size, illegal=size - costed, costed=costed)
        return Counts(len(self.meshes), size, illegal=illegal, costed=costed, unseen=max(size - costed - illegal, 0))

    def nothing_fits(self) -> LayoutError:
        """Why there is no result."""
        if not self.costed.entries:
            reasons = list(dict.fromkeys(self.costed.refused.values())) or ["no plan was costed"]
            return LayoutError("every plan is illegal\n\n" + "\n\n".join(reasons[:5]))
        entry = min(self.costed.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no plan costed fits {show_bytes(self.costed.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}:\n  " + str(entry.plan).replace("\n", "\n  ")
        )


def _skew(mesh: Mesh) -> tuple[int, ...]:
    """Two axes: small inner axes first, as in a node."""
    return tuple(reversed(mesh.axes.values()))
