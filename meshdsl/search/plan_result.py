"""The result of a search over plans: the best plans, what their knobs are worth, and the plan on half the devices."""

from __future__ import annotations

from ..compile.knobs import KNOBS
from ..cost.report.layout_edits import LayoutEdit, layout_edits
from ..cost.report.report import Report
from ..layouts import Layout, Mesh
from .evaluate import Entry
from .knobs import title
from .plans import PlanSearch
from .result import SearchResult
from .result_text import layouts_text, plan_text
from .worth import Half, KnobWorth

__all__ = ["plan_result"]


def plan_result(run: PlanSearch) -> SearchResult:
    """The result of a finished search; raises `LayoutError` if no plan fits."""
    best = run.costed.ranked()
    if not best:
        raise run.nothing_fits()
    return SearchResult(
        title=run.variants.title,
        machine=run.machine,
        objective=run.request.objective,
        limit=run.costed.limit,
        best=best[0],
        runners_up=tuple(best[1:]),
        front=_front(run) if run.request.front else (),
        counts=run.counts(),
        bound=run.lower_bound(),
        stopped=run.stopped,
        seconds=run.costed.elapsed,
        _edits=lambda: _edits(run, best[0]),
        _text=plan_text if run.turns else layouts_text,
        knobs=tuple(turn.knob for turn in run.turns),
        fixed=_fixed(run),
        costed=tuple(run.costed.entries.values()),
        _worth=lambda: _worth(run, best[0]),
        _half=lambda: _half(run, best[0]) if run.turns else None,
    )


def _edits(run: PlanSearch, best: Entry) -> tuple[LayoutEdit, ...]:
    """The best layout with one dim changed, for each dim; none in a search of plans, whose knobs count for more."""
    if run.turns:
        return ()
    problem = run.variants.problem(best.plan)

    def recost(layout: Layout) -> Report:
        return problem.cost(best.mesh, layout, run.machine, run.costed.limit, run.assignment)

    return tuple(layout_edits(best.report, recost, run.layouts.group(best.plan, best.mesh).space.dims))


def _front(run: PlanSearch) -> tuple[Entry, ...]:
    """The Pareto front of the costed plans in time and memory, fastest first."""
    front: list[Entry] = []
    for entry in sorted(run.costed.entries.values(), key=lambda e: (e.seconds, e.peak_bytes)):
        if not front or entry.peak_bytes < front[-1].peak_bytes:
            front.append(entry)
    return tuple(front)


def _fixed(run: PlanSearch) -> tuple[str, ...]:
    """The knobs of the step of which no candidate but the first could be made, with the first reason."""
    base, costed = run.variants.base, {entry.plan.replace(mesh="", layout="") for entry in run.costed.entries.values()}
    reasons: list[str] = []
    for name in ("remat", "microbatches"):
        other = "microbatches" if name == "remat" else "remat"
        tried = {base.replace(remat=r, microbatches=m): why for (r, m), why in run.variants.refused.items()}
        alone = [why for plan, why in tried.items() if getattr(plan, other) == getattr(base, other)]
        if alone and len({getattr(plan, name) for plan in costed}) == 1:
            reasons.append(f"{title(name)}: {alone[0].splitlines()[0]}")
    return tuple(reasons)


def _worth(run: PlanSearch, best: Entry) -> tuple[KnobWorth, ...]:
    worth: list[KnobWorth] = []
    for knob in KNOBS:
        if knob.name not in [turn.knob for turn in run.turns] or getattr(best.plan, knob.name) == knob.default:
            continue
        back = best.plan.replace(**{knob.name: knob.default})
        entry = run.costed.look(back)
        known = run.variants.canonical(back)
        why = "" if entry is not None or known is None else run.costed.why_not(known)
        if entry is not best:
            change = f"{knob.title}: {knob.show(getattr(best.plan, knob.name))} -> {knob.show(knob.default)}"
            worth.append(KnobWorth(knob.name, change, entry, why))
    return tuple(worth)


def _half(run: PlanSearch, best: Entry) -> Half | None:
    """Halve the mesh, then turn the knobs that save memory, in turn, until the plan fits."""
    halved = halved_mesh(best.mesh)
    if halved is None:
        return None
    update = best.plan.weight_update
    plan = best.plan.replace(mesh=halved, weight_update=type(update)(update.mode, regather=update.regather))
    entry = run.costed.look(plan)
    if entry is None:
        known = run.variants.canonical(plan)
        why = "the step cannot be made" if known is None else run.costed.why_not(known)
        return Half(halved.size, run.costed.limit, None, None, why=why)
    fitting = _fitting(run, entry)
    changes = str(plan.diff(fitting.plan)) if fitting.fits else ""
    return Half(halved.size, run.costed.limit, entry, fitting if fitting.fits else None, changes)


def _fitting(run: PlanSearch, entry: Entry) -> Entry:
    """The plan with the knobs turned that save memory, in their order, until it fits."""
    for turn in run.turns:
        for value in turn.candidates(entry.plan) if turn.knob != "overlap" else ():
            near = None if entry.fits else run.costed.look(entry.plan.replace(**{turn.knob: value}))
            if near is not None and near.peak_bytes < entry.peak_bytes:
                entry = near
    return entry


def halved_mesh(mesh: Mesh) -> Mesh | None:
    """The mesh with its largest even axis halved; None if there is none.

    >>> print(halved_mesh(Mesh("x:4 y:16")))
    x:4 y:8
    """
    even = [axis for axis, n in mesh.axes.items() if n % 2 == 0]
    if not even:
        return None
    largest = max(even, key=mesh.axes.__getitem__)
    return Mesh({axis: n // 2 if axis == largest else n for axis, n in mesh.axes.items()})
