"""Search over plans: mesh and layout, and of a training step its weight update, rematerialisation and other knobs.

If there are few plans, every one is costed. Otherwise, each phase improves the best plan so far. First, layouts are
descended on a few meshes, without a memory limit; the knobs that save memory are turned until the fastest ones fit. The
best plan is then improved by local search (`local_search`), and its overlap plans are tried; then the next best ones,
and other meshes. Patience ends the improvement of plans, not the overlap plans that follow it. At the end, choices that
save less than a hundredth are undone. The gap is measured against the least work of any plan (`floor`), divided over
all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.deadline import OutOfTimeError
from ..errors.units import show_bytes
from ..layouts import Layout, Mesh
from ..overlap.values import MODES
from .knobs import Turn, title
from .local_search import LocalSearch
from .plan_layouts import PlanLayouts
from .plan_space import PlanSpace
from .result import Counts, SearchProgress, SearchResult
from .variants import Variants

FEW = 300  # plans up to which every one is costed, ...
LISTED = 20_000  # ... of at most so many combinations, most of them illegal
FIRST_MESHES, FIRST_AXES = 5, 2  # meshes that are descended first, of at most so many axes
STARTS = 3  # plans that are improved
LOOKS = 6  # plans costed without anything better before patience ends, ...
LONGER = 3  # ... unless that takes so many times as long
EVERY = 0.5  # seconds between two progress reports
FIRST_OVERLAP = ("list", "ticks")  # the mode that most often helps, and that of pipelines


class PlanSearch:
    """The state of a search over plans."""

    def __init__(
        self,
        variants: Variants,
        meshes: Sequence[Mesh],
        turns: Sequence[Turn],
        hints: Mapping[str, tuple[str, str]],
        start: Plan | None = None,
    ):
        self.variants, self.request, self.turns = variants, variants.request, turns
        self.space = PlanSpace(variants, meshes, turns)
        self.layouts = PlanLayouts(self.space, hints)
        self.costed = self.layouts.costed
        self.local = LocalSearch(self.layouts)
        self.meshes, self.start = list(meshes), start
        self.complete = False  # every plan is costed
        self.stopped = ""

    def until_done(self) -> None:
        """Search to the end, the time limit or an interrupt; re-raise an interrupt if no plan is costed yet."""
        told = 0.0
        try:
            for _ in self.steps():
                if self.request.progress is not None and self.costed.elapsed >= told + EVERY:
                    told = self.costed.elapsed
                    self.request.progress(self.progress())
                if self.out_of_time():
                    self.stopped = self.out_of_time()
                    break
        except KeyboardInterrupt:
            if not self.costed.entries:
                raise
            self.stopped = "an interrupt"
        except OutOfTimeError:
            self.stopped = self.out_of_time()
        if not self.stopped and not self.complete:
            self.stopped = "the end of the improvements, as there are too many plans to cost every one"

    def out_of_time(self) -> str:
        """The reason to stop now; "" if there is time, or if no plan is costed yet."""
        limit = self.request.time_limit
        late = limit is not None and self.costed.elapsed > limit and self.costed.entries
        return f"the time limit of {limit:g} s" if late else ""

    def steps(self) -> Iterator[None]:
        """All phases; yields after each evaluation."""
        if self.start is not None:
            self.costed.look(self.start)
            yield
        if self.variants.canonical(self.variants.base) is not None:
            _ = self.space.floor  # the result has it: it takes seconds, which belong to the time limit
        yield from self.while_patient(self.every())
        if not self.complete and not self.stopped:
            yield from self.local_phases()
        yield from self.simplified()

    def local_phases(self) -> Iterator[None]:
        """Local search from the fastest layouts of a few meshes; yields after each evaluation."""
        meshes = self.layouts.ordered(self.meshes)
        first = [mesh for mesh in meshes if len(mesh.axes) <= FIRST_AXES][:FIRST_MESHES] or meshes[:1]
        for mesh in first:
            if self.layouts.late() and self.costed.entries:
                break
            yield from self.begun(mesh)
        self.costed.touch()  # patience starts with the knobs
        yield from self.while_patient(self.improved())
        yield from self.local.reordered(FIRST_OVERLAP)
        if not self.stopped:
            yield from self.while_patient(self.further([mesh for mesh in meshes if mesh not in first]))
            yield from self.local.reordered(FIRST_OVERLAP)
        if not self.stopped:
            yield from self.while_patient(self.local.reordered(MODES))

    def while_patient(self, steps: Iterator[None]) -> Iterator[None]:
        """These steps, until the patience is over."""
        patience = self.request.patience
        for _ in steps:
            yield
            if patience is None or self.costed.least() == math.inf:
                continue
            least = patience if self.costed.looked >= LOOKS else LONGER * patience
            if self.costed.waited > least:
                self.stopped = f"{patience:g} s without anything better"
                return

    def begun(self, mesh: Mesh) -> Iterator[None]:
        """The fastest layout of a mesh, and knobs with which it fits; if that is the best plan, its other knobs too."""
        before = self.costed.least()
        for plan in self.layouts.descended(mesh):
            yield
            if plan is not None:
                yield from self.local.fitted(plan)
        if self.costed.least() < before:
            yield from self.local.turned(self.costed.ranked()[0].plan)

    def improved(self) -> Iterator[None]:
        """The start, and the best plan so far, improved."""
        best = [entry.plan for entry in self.costed.ranked()[:1]]
        first = [] if self.start is None else [self.start]
        for plan in dict.fromkeys((*first, *(best or self.layouts.fastest))):
            yield from self.local.raised(plan)

    def further(self, meshes: Sequence[Mesh]) -> Iterator[None]:
        """The next best plans improved, and those of more meshes."""
        for entry in self.costed.ranked()[1:STARTS]:
            yield from self.local.raised(entry.plan)
        for mesh in meshes:
            before = self.costed.least()
            yield from self.begun(mesh)
            if self.costed.least() < before:
                yield from self.local.raised(self.costed.ranked()[0].plan)

    def every(self) -> Iterator[None]:
        """Cost every plan, if there are few."""
        if self.space.size > LISTED:
            return
        known = dict.fromkeys(filter(None, map(self.variants.canonical, self.space.combinations())))
        groups = [(plan, self.layouts.group(plan, plan.mesh).space) for plan in known]
        plans = [plan.replace(layout=space.layout(row)) for plan, space in groups for row in space.rows()]
        plans = [plan for plan in plans if plan.chunks == 1 or self.space.shorter(plan, plan.chunks) == 1]
        if len(plans) > FEW:
            return
        for plan in plans:
            self.costed.look(plan)
            yield
        self.complete = True

    def simplified(self) -> Iterator[None]:
        """Undo choices of the best plan, as long as that costs less than a hundredth; see `Costed.ranked`."""
        best, before = next(iter(self.costed.ranked()), None), None
        while best is not None and best is not before and not self.complete:
            fixed = self.request.fixed.rules
            rules = best.layout.rules
            fewer = [{d: cut for d, cut in rules.items() if d != gone} for gone in rules if gone not in fixed]
            plans = [best.plan.replace(layout=Layout(r, overrides=best.layout.overrides)) for r in fewer]
            plans += [best.plan.replace(**{turn.knob: getattr(self.variants.base, turn.knob)}) for turn in self.turns]
            for plan in plans:
                self.costed.look(plan)
                yield
            best, before = self.costed.ranked()[0], best

    def lower_bound(self) -> float:
        """A lower bound of the seconds of every plan."""
        return self.costed.least() if self.complete else min(self.costed.least(), self.space.floor)

    def progress(self) -> SearchProgress:
        """The state, for a progress line."""
        best = min(self.costed.entries.values(), key=self.costed.score, default=None)
        return SearchProgress(self.costed.elapsed, self.counts(), best, self.lower_bound())

    def counts(self) -> Counts:
        """Number of plans by outcome."""
        size, costed, illegal = self.space.size, len(self.costed.entries), len(self.costed.refused)
        if self.complete:
            return Counts(len(self.meshes), size, size - costed, costed)
        return Counts(len(self.meshes), size, illegal, costed, max(size - costed - illegal, 0))

    def result(self) -> SearchResult:
        """The result, after `until_done`; raises `LayoutError` if no plan fits."""
        ranked = self.costed.ranked()
        if not ranked:
            raise self.nothing_fits()
        return SearchResult(
            title=self.variants.title,
            machine=self.request.machine,
            limit=self.request.limit,
            best=ranked[0],
            runners_up=tuple(ranked[1:]),
            counts=self.counts(),
            bound=self.lower_bound(),
            stopped=self.stopped,
            seconds=self.costed.elapsed,
            knobs=tuple(turn.knob for turn in self.turns),
            fixed=self.fixed(),
        )

    def fixed(self) -> tuple[str, ...]:
        """The knobs of the step of which no candidate but the first could be made, with the first reason."""
        base, costed = (
            self.variants.base,
            {entry.plan.replace(mesh="", layout="") for entry in self.costed.entries.values()},
        )
        reasons: list[str] = []
        for name in ("remat", "microbatches"):
            other = "microbatches" if name == "remat" else "remat"
            tried = {base.replace(remat=r, microbatches=m): why for (r, m), why in self.variants.refused.items()}
            alone = [why for plan, why in tried.items() if getattr(plan, other) == getattr(base, other)]
            if alone and len({getattr(plan, name) for plan in costed}) == 1:
                reasons.append(f"{title(name)}: {alone[0].splitlines()[0]}")
        return tuple(reasons)

    def nothing_fits(self) -> LayoutError:
        """The error if there is no result."""
        if not self.costed.entries:
            reasons = list(dict.fromkeys(self.costed.refused.values())) or ["no plan was costed"]
            return LayoutError("every plan is illegal\n\n" + "\n\n".join(reasons[:5]))
        entry = min(self.costed.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no plan costed fits {show_bytes(self.request.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}:\n  " + str(entry.plan).replace("\n", "\n  ")
        )
