"""The result of a search over plans: the best plans, what their knobs are worth, and the plan on half the devices.

The texts of search results: of layouts, and of whole plans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..compile.knobs import KNOBS
from ..cost.report.layout_edits import LayoutEdit, edits_text, layout_edits
from ..cost.report.tables import table
from ..cost.report.tradeoff import pareto
from ..errors.units import number, seconds, show_bytes
from ..layouts import Mesh
from .evaluate import Entry
from .knobs import title
from .plans import PlanSearch
from .result import Half, KnobWorth, SearchResult, amount


def plan_result(run: PlanSearch) -> SearchResult:
    """The result of a finished search; raises `LayoutError` if no plan fits."""
    best = run.costed.ranked()
    if not best:
        raise run.nothing_fits()
    return SearchResult(
        title=run.variants.title,
        machine=run.request.machine,
        objective=run.request.objective,
        limit=run.request.limit,
        best=best[0],
        runners_up=tuple(best[1:]),
        front=tuple(pareto(run.costed.entries.values())) if run.request.front else (),
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
    recost = functools.partial(run.variants.problem(best.plan).cost, best.mesh)
    return tuple(layout_edits(best.report, recost, run.layouts.group(best.plan, best.mesh).space.dims))


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
        return Half(halved.size, run.request.limit, None, None, why=why)
    fitting = _fitting(run, entry)
    changes = str(plan.diff(fitting.plan)) if fitting.fits else ""
    return Half(halved.size, run.request.limit, entry, fitting if fitting.fits else None, changes)


def _fitting(run: PlanSearch, entry: Entry) -> Entry:
    """The plan with the knobs turned that save memory, in their order, until it fits."""
    for turn in run.turns:
        for value in turn.candidates(entry.plan) if turn.knob not in ("overlap", "chunks") else ():
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


NEAR = 8  # maximum edits shown of each kind; `SearchResult.edits` has all


def layouts_text(result: SearchResult) -> str:
    """The printed result of a search that chose only a layout: the best one, the runners-up, and single changes."""
    best = result.best
    parts = [
        f"{result.title or 'search'} on {result.machine.name}: the best layout by {result.objective}",
        f"  mesh    {best.mesh}\n  layout  {str(best.layout) or '(everything replicated)'}\n  {_figures(best)}",
        _proof(result),
    ]
    if result.runners_up:
        parts.append("then\n" + _entries(result.runners_up, best))
    if len(result.front) > 1:
        parts.append("time against memory, of the layouts costed\n" + _entries(result.front, best))
    if result.edits:
        parts.append(edits_text(result.edits, NEAR))
    return "\n\n".join(parts)


def _proof(result: SearchResult) -> str:
    how = f"all costed: {result.counts}" if not result.stopped else f"stopped by {result.stopped}: {result.counts}"
    best, least = (amount(n, result.objective) for n in (getattr(result.best, result.objective), result.bound))
    open_gap = f"\n  no candidate takes less than {least}; the best takes {best}" if result.gap else ""
    return f"{how}; gap {result.gap:.0%}, {seconds(result.seconds)}{open_gap}"


def _figures(entry: Entry) -> str:
    over = "" if entry.fits else ", over the limit"
    sent = f"{show_bytes(entry.wire_bytes)} sent" + (f", at most {number(entry.energy, 'J')}" if entry.energy else "")
    return f"{seconds(entry.seconds)} a step, {show_bytes(entry.peak_bytes)} on each device{over}, {sent}"


def _entries(entries: Iterable[Entry], best: Entry) -> str:
    rows = [
        (
            seconds(entry.seconds),
            _change(entry.seconds, best.seconds),
            show_bytes(entry.peak_bytes) + ("" if entry.fits else " !"),
            show_bytes(entry.wire_bytes),
            str(entry.mesh),
            str(entry.layout) or "(everything replicated)",
        )
        for entry in entries
    ]
    return table(("time", "", "memory", "sent", "mesh", "layout"), rows, ">>>><<")


def _change(now: float, before: float) -> str:
    return f"{now / before - 1:+.1%}" if before else ""


def _difference(n: int) -> str:
    return ("+" if n > 0 else "-" if n < 0 else "") + show_bytes(abs(n))


def plan_text(result: SearchResult) -> str:
    """The text of a search over plans."""
    best = result.best
    parts = [
        f"{result.title or 'search'} on {result.machine.name}: the best plan by {result.objective}",
        "  " + str(result.plan).replace("\n", "\n  ") + f"\n\n  {_figures(best)}",
        _proof(result),
    ]
    if result.fixed:
        parts.append("not searched\n  " + "\n  ".join(result.fixed))
    if result.worth:
        rows = [(each.change, *_worth_row(each, best)) for each in result.worth]
        parts.append("one knob back at its default\n" + table(("change", "time", "memory"), rows, "<>>"))
    for i, entry in enumerate(result.runners_up):
        title = "next" if not i else "then"
        change = _change(entry.seconds, best.seconds)
        why = _slower(entry, best)
        lines = [f"{title}: {seconds(entry.seconds)} ({change}), {show_bytes(entry.peak_bytes)}{why}"]
        changes = str(best.plan.diff(entry.plan)).splitlines()
        lines += [f"  {line}" for line in changes if not line.startswith("machine ")]  # it follows from the others
        parts.append("\n".join(lines))
    if len(result.front) > 1:
        parts.append("time against memory, of the plans costed\n" + _entries(result.front, best))
    if result.half is not None:
        parts.append(str(result.half))
    return "\n\n".join(parts)


def _slower(entry: Entry, best: Entry) -> str:
    """The part of the step in which an entry is slower than the best."""
    more = {name: entry.parts[name] - best.parts[name] for name in best.parts}
    name = max(more, key=more.__getitem__)
    return f"; {seconds(more[name])} more {name}" if more[name] > 0 else ""


def _worth_row(each: KnobWorth, best: Entry) -> tuple[str, str]:
    if each.entry is None:
        return "illegal", ""
    memory = _difference(each.entry.peak_bytes - best.peak_bytes)
    return _change(each.entry.seconds, best.seconds), memory + ("" if each.entry.fits else " !")
