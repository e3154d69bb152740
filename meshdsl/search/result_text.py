"""The texts of search results: of layouts, and of whole plans."""

from __future__ import annotations

from collections.abc import Iterable

from ..cost.report.layout_edits import edits_text
from ..cost.report.tables import table
from ..errors.units import number, seconds, show_bytes
from .evaluate import Entry
from .result import SearchResult, amount
from .worth import KnobWorth

__all__ = ["layouts_text", "plan_text"]

NEAR = 8  # maximum edits shown of each kind; `SearchResult.edits` has all


def layouts_text(result: SearchResult) -> str:
    """The text of a search over layouts."""
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
        rows = [(each.change, *_worth(each, best)) for each in result.worth]
        parts.append("one knob back at its default\n" + table(("change", "time", "memory"), rows, "<>>"))
    for i, entry in enumerate(result.runners_up):
        title = "next" if not i else "then"
        change = _change(entry.seconds, best.seconds)
        why = _slower(entry, best)
        lines = [f"{title}: {seconds(entry.seconds)} ({change}), {show_bytes(entry.peak_bytes)}{why}"]
        lines += [f"  {line}" for line in str(best.plan.diff(entry.plan)).splitlines()]
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


def _worth(each: KnobWorth, best: Entry) -> tuple[str, str]:
    if each.entry is None:
        return "illegal", ""
    memory = _difference(each.entry.peak_bytes - best.peak_bytes)
    return _change(each.entry.seconds, best.seconds), memory + ("" if each.entry.fits else " !")
