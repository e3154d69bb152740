"""Search over plans: mesh and layout, and of a training step its weight update, rematerialisation and other knobs.

If there are few plans, every one is costed. Otherwise, each phase improves the best plan so far. First, layouts are
descended on a few meshes, without a memory limit; the knobs that save memory are turned until the fastest ones fit. The
best plan is then improved by local search (`local_search`), and its overlap plans are tried; then the next best ones,
and other meshes. Patience ends the improvement of plans, not the overlap plans that follow it. At the end, choices that
save less than a hundredth are undone. The gap is measured against the least work of any plan (`floor`), divided over
all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.deadline import OutOfTimeError
from ..errors.units import show_bytes
from ..layouts import Layout, Mesh
from ..overlap.values import MODES
from .costed import Costed, ImpatientError
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
        self.costed = Costed(variants, self.tell)
        self.layouts = PlanLayouts(self.space, hints, self.costed)
        self.local = LocalSearch(self.layouts)
        self.meshes, self.start = list(meshes), start
        self.complete = False  # every plan is costed
        self.stopped = ""

    def until_done(self) -> None:
        """Search to the end, the time limit or an interrupt; re-raise an interrupt if no plan is costed yet."""
        try:
            self.steps()
        except KeyboardInterrupt:
            if not self.costed.entries:
                raise
            self.stopped = "an interrupt"
        except OutOfTimeError:
            self.stopped = f"the time limit of {self.request.time_limit:g} s"
        if not self.stopped and not self.complete:
            self.stopped = "the end of the improvements, as there are too many plans to cost every one"

    def tell(self) -> None:
        """Report the progress."""
        if self.request.progress is not None:
            self.request.progress(self.progress())

    def steps(self) -> None:
        """All phases."""
        if self.start is not None:
            self.costed.look(self.start)
        if self.variants.canonical(self.variants.base) is not None:
            _ = self.space.floor  # the result has it: it takes seconds, which belong to the time limit
        self.while_patient(self.every)
        if not self.complete and not self.stopped:
            self.local_phases()
        self.simplify()

    def local_phases(self) -> None:
        """Local search from the fastest layouts of a few meshes."""
        meshes = self.layouts.ordered(self.meshes)
        first = [mesh for mesh in meshes if len(mesh.axes) <= FIRST_AXES][:FIRST_MESHES] or meshes[:1]
        for mesh in first:
            if self.layouts.late() and self.costed.entries:
                break
            self.begin(mesh)
        self.costed.touch()  # patience starts with the knobs
        self.while_patient(self.improve)
        self.local.reorder(FIRST_OVERLAP)
        if not self.stopped:
            self.while_patient(lambda: self.improve_further([mesh for mesh in meshes if mesh not in first]))
            self.local.reorder(FIRST_OVERLAP)
        if not self.stopped:
            self.while_patient(lambda: self.local.reorder(MODES))

    def while_patient(self, phase: Callable[[], None]) -> None:
        """A phase, until the patience is over."""
        self.costed.patient = True
        try:
            phase()
        except ImpatientError:
            self.stopped = f"{self.request.patience:g} s without anything better"
        finally:
            self.costed.patient = False

    def begin(self, mesh: Mesh) -> None:
        """The fastest layout of a mesh, and knobs with which it fits; if that is the best plan, its other knobs too."""
        before = self.costed.least()
        self.local.fitted(self.layouts.descended(mesh))
        if self.costed.least() < before:
            self.local.turned(self.costed.ranked()[0])

    def improve(self) -> None:
        """Improve the start, and the best plan so far."""
        best = [entry.plan for entry in self.costed.ranked()[:1]]
        first = [] if self.start is None else [self.start]
        for plan in dict.fromkeys((*first, *(best or self.layouts.fastest))):
            self.local.raised(plan)

    def improve_further(self, meshes: Sequence[Mesh]) -> None:
        """Improve the next best plans, and those of more meshes."""
        for entry in self.costed.ranked()[1:STARTS]:
            self.local.raised(entry.plan)
        for mesh in meshes:
            before = self.costed.least()
            self.begin(mesh)
            if self.costed.least() < before:
                self.local.raised(self.costed.ranked()[0].plan)

    def every(self) -> None:
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
        self.complete = True

    def simplify(self) -> None:
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
