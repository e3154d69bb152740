"""How a search is shown: the best layout, those after it, the front of time and memory, and what a change would do."""

from __future__ import annotations

from collections.abc import Iterable

from ..lowering.program import show_bytes
from .search import Entry, Found, Neighbour
from .tables import seconds, table

__all__ = ["shown"]

NEAR = 8  # neighbours of each kind that are shown; `Found.neighbours` has all


def shown(found: Found) -> str:
    """The text of `print(found)`."""
    best = found.best
    parts = [
        f"{found.title or 'search'} on {found.machine.name}: the best layout by {found.objective}",
        f"  mesh    {best.mesh}\n  layout  {best.layout or '(everything whole)'}\n  {_figures(best)}",
        f"proven: {found.counts}; gap {found.gap:.0%}, {seconds(found.seconds)}",
    ]
    if found.left_out:
        parts.append("left out, as there would be too many layouts (--dims, --axes choose others)\n  "
                     + "\n  ".join(found.left_out))  # fmt: skip
    if found.runners_up:
        parts.append("then\n" + _entries(found.runners_up, best))
    if len(found.front) > 1:
        within = f", to within {found.tolerance:.0%}" if found.tolerance else ""
        parts.append(f"time against memory{within}\n" + _entries(found.front, best))
    legal = [near for near in found.neighbours if near.entry is not None]
    illegal = [near for near in found.neighbours if near.entry is None]
    if legal:
        parts.append("one dim changed\n" + _changes(legal[:NEAR], best) + _more(legal))
    if illegal:
        parts.append("illegal with one dim changed\n" + _reasons(illegal[:NEAR]) + _more(illegal))
    return "\n\n".join(parts)


def _figures(entry: Entry) -> str:
    over = "" if entry.fits else ", over the limit"
    sent = f"{show_bytes(entry.wire_bytes)} sent"
    return f"{seconds(entry.seconds)} a step, {show_bytes(entry.peak_bytes)} on each device{over}, {sent}"


def _entries(entries: Iterable[Entry], best: Entry) -> str:
    rows = [
        (
            seconds(entry.seconds),
            _change(entry.seconds, best.seconds),
            show_bytes(entry.peak_bytes) + ("" if entry.fits else " !"),
            show_bytes(entry.wire_bytes),
            str(entry.mesh),
            str(entry.layout) or "(everything whole)",
        )
        for entry in entries
    ]
    return table(("time", "", "memory", "sent", "mesh", "layout"), rows, ">>>><<")


def _changes(near: Iterable[Neighbour], best: Entry) -> str:
    rows = [
        (
            f"{each.dim}: {_axes(best.layout.axes(each.dim))} -> {_axes(each.axes)}",
            _change(entry.seconds, best.seconds),
            _difference(entry.peak_bytes - best.peak_bytes) + ("" if entry.fits else " !"),
            _difference(entry.wire_bytes - best.wire_bytes),
        )
        for each in near
        if (entry := each.entry) is not None
    ]
    return table(("change", "time", "memory", "sent"), rows, "<>>>")


def _reasons(near: Iterable[Neighbour]) -> str:
    rows = [(f"{each.dim}:{','.join(each.axes)}", _reason(each.problem)) for each in near]
    return table(("change", "why not"), rows, "<<")


def _reason(problem: str) -> str:
    """The line that says between what the conflict is, or else the first."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return next((line for line in lines if "the layout maps" in line), lines[0] if lines else "")


def _axes(axes: Iterable[str]) -> str:
    return ",".join(axes) or "whole"


def _change(now: float, before: float) -> str:
    return f"{now / before - 1:+.1%}" if before else ""


def _difference(n: int) -> str:
    return ("+" if n > 0 else "-" if n < 0 else "") + show_bytes(abs(n))


def _more(near: list[Neighbour]) -> str:
    return f"\n  and {len(near) - NEAR} more" if len(near) > NEAR else ""
