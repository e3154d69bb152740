"""Local search over plans: fit a plan into memory, then turn one knob at a time as long as that improves it.

Mesh and layout are knobs too. `costed` keeps the best plan, and may stop the search at any evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..compile.plan import Plan
from ..layouts import Layout
from ..pipelines import bubble
from ..updates.weight_update import WeightUpdate
from .evaluate import Entry
from .knobs import Turn
from .moves import divided, meshes_near, renamed
from .plan_layouts import PlanLayouts

SAVED_BY_KNOBS = 0.25  # largest share of a step that knobs which save memory are expected to save in time
REORDERED = 1.1  # other weight updates, by time over that of the best plan, whose overlap is tried
MICROBATCHES = (2, 4, 8)  # of a pipeline, for each stage
STAGED = 2  # pipelines over one axis that are costed
HIDDEN = 0.01  # least share of the step that an overlap plan must be able to hide


class LocalSearch:
    """The moves from one plan to better ones, and what was tried already."""

    def __init__(self, layouts: PlanLayouts):
        space = layouts.space
        self.layouts, self.costed, self.space = layouts, layouts.costed, space
        self.variants, self.turns = space.variants, space.turns
        self._fitted: set[tuple[float, ...]] = set()  # outcomes of plans
        self._staged: set[Plan] = set()  # pipelines whose time was estimated
        self._turned: set[tuple[Any, ...]] = set()  # outcomes of plans, and the turns tried on one of them

    def fitted(self, plan: Plan) -> None:
        """Turn the knobs that save memory, fastest values first, until the plan fits; skips plans that are too slow."""
        best = self.costed.look(plan)
        if best is None or best.outcome in self._fitted:
            return
        self._fitted.add(best.outcome)
        if best.seconds * (1 - SAVED_BY_KNOBS) > self.costed.least():
            return
        for turn in self.turns:
            for value in self.values(turn, best):
                if best.fits:
                    return
                best = self.better(best, best.plan.replace(**{turn.knob: value}))

    def raised(self, plan: Plan) -> None:
        """Make one change at a time as long as that improves the plan."""
        best = self.costed.look(plan)
        while best is not None:
            before = best
            best = self.turned(best)
            for moves in (
                self.traded,
                self.layouts.near,
                self.resized,
                self.layouts.divided,
                self.staged,
                self.interleaved,
                self.rare,
            ):
                best = self._improved(best, moves)
            if best is before:
                return

    def turned(self, best: Entry) -> Entry:
        """The best plan after each knob is turned once, mesh and layout excepted."""
        for turn in self.turns:
            for value in self.values(turn, best):
                if self.is_new(best, turn.knob, value):
                    best = self.better(best, best.plan.replace(**{turn.knob: value}))
        return best

    def _improved(self, best: Entry, moves: Callable[[Entry], Iterator[Plan]]) -> Entry:
        """The best plan after these moves, which start again from every better plan."""
        before = None
        while best is not before:
            before = best
            for near in moves(best):
                best = self.better(best, near)
                if best is not before:
                    break
        return best

    def resized(self, best: Entry) -> Iterator[Plan]:
        """The plan on meshes with a factor moved between axes, or with the axes in another order."""
        yield from filter(self.space.keeps_request, meshes_near(best.plan, self.space.meshes))

    def staged(self, best: Entry) -> Iterator[Plan]:
        """The plan with the layers of a loop in pipeline stages over an axis, or over a part of a divided one.

        Stages store what several micro-batches save, so what does not fit is tried with everything recomputed too.
        Chunks are tried on a pipeline that they may make the best plan.
        """
        knobs = {turn.knob: turn.candidates(best.plan) for turn in self.turns}
        if "microbatches" not in knobs:
            return
        remats = dict.fromkeys((best.plan.remat, *(remat for remat in knobs.get("remat", ()) if remat == "full")))
        for staged in self.in_stages(best, knobs["microbatches"]):
            for near in (staged.replace(remat=remat) for remat in remats):
                yield near
                entry = self.costed.look(near)
                yield from () if entry is None else self.interleaved(entry)
                if entry is None or entry.fits:
                    break

    def in_stages(self, best: Entry, microbatches: Sequence[int]) -> Iterator[Plan]:
        """A loop's layers over an axis, other dims as in the best plan or in a named layout on the other axes.

        Of an axis, these are the `STAGED` plans of least time without communication between stages, if that is less
        than the time of the best plan.
        """
        dims = self.space.request.dims
        loops = [dim for dim in self.space.loops if dims is None or dim.name in dims]
        whole = [(best.plan, tuple(best.mesh.axes)), *divided(best.plan, self.space.meshes)]
        for (plan, axis), dim in itertools.product([(plan, axis) for plan, axes in whole for axis in axes], loops):
            stages = plan.mesh.axes[axis]
            if 1 < stages <= dim.size:
                counts = [n for n in microbatches if n // stages in MICROBATCHES]
                ranked = sorted(self._over(plan, axis, dim.name, counts), key=lambda pair: pair[0])
                yield from (staged for seconds, staged in ranked[:STAGED] if seconds < self.costed.least())

    def _over(self, plan: Plan, axis: str, dim: str, counts: Sequence[int]) -> Iterator[tuple[float, Plan]]:
        """New pipelines over one axis with these numbers of micro-batches, and their estimated seconds."""
        stages, others = plan.mesh.axes[axis], [a for a in plan.mesh.axes if a != axis]
        own = {d: left for d, cut in plan.layout.rules.items() if (left := tuple(a for a in cut if a != axis))}
        named = (each.rules for each in renamed(self.layouts.hints, others))
        distinct = {str(Layout(rules)): rules for rules in (own, *named)}.values()
        for parts, rules in itertools.product(counts, distinct):
            inside = plan.replace(layout=Layout(rules, overrides=plan.layout.overrides), microbatches=parts, chunks=1)
            staged = inside.replace(layout=Layout({**rules, dim: (axis,)}, overrides=plan.layout.overrides))
            known = staged.replace(steps="flat")
            if known not in self._staged and self.space.keeps_request(staged):
                self._staged.add(known)
                yield self.layouts.seconds(inside) / stages / (1 - bubble(stages, parts)), staged

    def interleaved(self, best: Entry) -> Iterator[Plan]:
        """A pipeline with chunks, where their shorter bubble alone could make it the best plan."""
        for turn in self.turns:
            for chunks in turn.candidates(best.plan) if turn.knob == "chunks" else ():
                shorter = self.space.shorter(best.plan, chunks)
                if shorter < 1 and (1 - best.exposed) * best.seconds * shorter < self.costed.least():
                    yield best.plan.replace(chunks=chunks)
                    entry = self.costed.look(best.plan.replace(chunks=chunks))
                    if entry is None or entry.seconds > best.seconds:
                        return

    def rare(self, best: Entry) -> Iterator[Plan]:
        """The values of knobs that seldom help, without overlap plans; and those that save memory and cost time.

        Recomputing can be faster than reading and writing, so the latter are tried even if the plan fits.
        """
        for turn in self.turns:
            values = self.values(turn, best, rare=True) if turn.knob not in ("overlap", "chunks") else ()
            if turn.spends and best.fits:
                known = list(turn.candidates(best.plan))
                now = self._position(turn, known, best.plan)
                saving = known if now is None else known[now + 1 :]
                values = saving[:1] if turn.knob == "microbatches" else saving
            for value in values:
                if self.is_new(best, turn.knob, value):
                    yield best.plan.replace(**{turn.knob: value})

    def traded(self, best: Entry) -> Iterator[Plan]:
        """Plans that spend less time by one knob that saves memory, and more by another, until they fit."""
        spending = [turn for turn in self.turns if turn.spends]
        for less, more in itertools.permutations(spending, 2):
            for value in self.values(less, best) if best.fits else ():
                if not self.is_new(best, less.knob, value, more.knob):
                    continue
                plan = best.plan.replace(**{less.knob: value})
                entry = self.costed.look(plan)
                for each in () if entry is None or entry.fits else self.values(more, entry):
                    if entry is None or entry.fits or entry.seconds >= best.seconds:
                        break
                    entry = self.costed.look(plan.replace(**{more.knob: each}))
                if entry is not None and entry.fits:
                    yield entry.plan

    def reorder(self, modes: Collection[str]) -> None:
        """Cost overlap plans, in these modes, of the best plan without overlap, and of it under other weight updates;
        and of the best pipeline, for which "ticks" is the mode.

        They come last, because each takes seconds to make for a deep model. A plan is left out if it could not be the
        best even without its exposed communication.
        """
        turn = next((turn for turn in self.turns if turn.knob == "overlap"), None)
        if turn is None:
            return
        plain = [entry for entry in self.costed.entries.values() if entry.plan.overlap.mode == "none"]
        for in_stages in (False, True):
            alike = [entry for entry in plain if bool(self.space.stages(entry.plan)) == in_stages]
            for entry in self._updated(min(alike, key=self.costed.score)) if alike else ():
                for value in self.values(turn, entry, rare=True):
                    suits = value.mode in modes and (value.mode == "ticks") == in_stages
                    if suits and self._may_hide(entry) and self.is_new(entry, turn.knob, value):
                        self.costed.look(entry.plan.replace(overlap=value))

    def _may_hide(self, entry: Entry) -> bool:
        """False if the plan could not be the best one even without its exposed communication."""
        hidden = entry.seconds * (1 - entry.exposed)
        return not entry.fits or hidden <= (1 - HIDDEN) * self.costed.least()

    def _updated(self, best: Entry) -> list[Entry]:
        """The plan, and those costed that differ in the weight update alone and are little slower; best first."""
        near, most = {best.outcome: best}, REORDERED * best.seconds
        for turn in self.turns:
            for value in turn.candidates(best.plan) if turn.knob == "weight_update" else ():
                plan = self.variants.canonical(best.plan.replace(weight_update=value))
                entry = self.costed.entries.get(plan) if plan is not None else None
                if entry is not None and entry.fits and entry.seconds < most:
                    near.setdefault(entry.outcome, entry)
        return sorted(near.values(), key=self.costed.score)[:2]

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

    def values(self, turn: Turn, best: Entry, rare: bool = False) -> Sequence[Any]:
        """The candidates of a knob that may improve a plan.

        Of knobs that trade time for memory, these are the faster candidates if the plan fits, and the smaller ones if
        it does not.
        """
        values = [value for value in turn.candidates(best.plan) if turn.rare(value) == rare]
        now = self._position(turn, values, best.plan)
        if turn.spends and best.fits:
            return values[:now]
        if turn.spends and not best.fits and now is not None:
            return values[now + 1 :]
        return [value for i, value in enumerate(values) if i != now]

    def _position(self, turn: Turn, values: Sequence[Any], plan: Plan) -> int | None:
        """The place of the plan's value among others; "model" has that of the value that makes the same step."""
        for i, value in enumerate(values):
            if value == getattr(plan, turn.knob):
                return i
        if turn.knob != "remat":
            return None
        same = (i for i, value in enumerate(values) if self.variants.canonical(plan.replace(remat=value)) == plan)
        return next(same, None)
