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

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..display.units import show_bytes
from ..errors import LayoutError
from ..errors.deadline import OutOfTimeError
from ..layouts import Mesh
from ..tune.weight_update import WeightUpdate
from .anytime import Search
from .evaluate import Assignment, Entry, check_objective
from .knobs import Turn
from .moves import meshes_near
from .plan_layouts import PlanLayouts
from .plan_space import PlanSpace
from .request import EVERY, SearchRequest
from .result import Counts, Progress
from .variants import Variants

__all__ = ["PlanSearch"]

FEW_PLANS = 3_000  # up to which every combination is searched
STARTS = 3  # plans that are improved


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
        self.layouts = PlanLayouts(variants, machine, request, hints, assignment)
        self.space = PlanSpace(variants, meshes, machine, request, turns)
        self.costed = self.layouts.costed
        self.variants, self.machine, self.request = variants, machine, request
        self.turns, self.assignment = turns, assignment
        self.meshes, self.start = list(meshes), start
        self.proof: Search | None = None
        self.proven = False
        self.stopped = ""
        self.turning = False
        self._turned: set[tuple[Any, ...]] = set()  # outcomes of plans, and the turns tried on one of them

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
        if self.variants.canonical(self.variants.base) is not None:
            self.space.floor()  # the result has it: it takes seconds, which belong to the time limit
        yield from self.layouts.descended(self.meshes, starts)
        self.costed.touch()  # patience starts with the knobs
        self.turning = True
        first = [] if self.start is None else [self.start]
        first += [entry.plan for entry in self.costed.ranked()[:1]]
        for plan in list(dict.fromkeys([*first, *starts]))[:STARTS]:
            yield from self.raised(plan)
        yield from self.reordered()
        yield from self.proved()

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
                self.traded(best), meshes_near(best.plan, self.meshes), self.layouts.near(best)
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

    def proved(self) -> Iterator[None]:
        """Search every combination with bounds, if there are few."""
        if self.space.size() > FEW_PLANS:
            return
        groups: dict[Plan, tuple[Any, Mesh]] = {}
        for plan in self.space.combinations():
            known = self.variants.canonical(plan)
            yield
            if known is not None and known not in groups:
                groups[known] = self.variants.problem(known), known.mesh
        self.proof = Search(list(groups.values()), self.machine, self.request, self.assignment)
        for _ in self.proof.steps():
            if self.proof.costs.least() < self.costed.least():
                self.costed.touch()
            yield
        self.proven = True

    def adopt(self) -> None:
        """Take over the entries of the proof."""
        if self.proof is not None:
            for entry in self.proof.costs.entries.values():
                self.costed.entries.setdefault(entry.plan, entry)

    def lower_bound(self) -> float:
        """A lower bound of the objective for every plan."""
        if self.proven and self.proof is not None:
            return min(self.costed.least(), self.proof.costs.lower_bound())
        return min(self.costed.least(), self.space.floor())

    def progress(self) -> Progress:
        """The state, for a progress line."""
        best = min(self.costed.entries.values(), key=self.costed.score, default=None)
        return Progress(self.costed.elapsed, self.counts(), best, self.request.objective, self.lower_bound())

    def counts(self) -> Counts:
        """Number of plans by outcome."""
        size, costed, illegal = self.space.size(), len(self.costed.entries), len(self.costed.refused)
        if self.proven:
            return Counts(len(self.meshes), size, illegal=size - costed, costed=costed)
        return Counts(len(self.meshes), size, illegal=illegal, costed=costed, unseen=max(size - costed - illegal, 0))

    def nothing_fits(self) -> LayoutError:
        """The error if there is no result."""
        if not self.costed.entries:
            reasons = list(dict.fromkeys(self.costed.refused.values())) or ["no plan was costed"]
            return LayoutError("every plan is illegal\n\n" + "\n\n".join(reasons[:5]))
        entry = min(self.costed.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no plan costed fits {show_bytes(self.costed.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}:\n  " + str(entry.plan).replace("\n", "\n  ")
        )
