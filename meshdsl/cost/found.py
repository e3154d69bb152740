"""What a search found, and how it is shown: the best layout, those after it, the front of time and memory, and what a
change would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from ..report.report import Report
from ..report.schema import SCHEMA_VERSION, plain
from ..report.tables import table
from ..units import seconds, show_bytes
from .machine import Machine

__all__ = ["Counts", "Entry", "Found", "Neighbour", "heading"]

NEAR = 8  # neighbours of each kind that are shown; `Found.neighbours` has all


class Searched(Protocol):
    """What every search says of itself."""

    @property
    def title(self) -> str: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def objective(self) -> str: ...

    @property
    def limit(self) -> float: ...


def heading(found: Searched) -> dict[str, Any]:
    """What a search was asked, as plain values for JSON: the first fields of every search's record."""
    return {
        "schema_version": SCHEMA_VERSION,
        "title": found.title,
        "machine": found.machine.name,
        "objective": found.objective,
        "limit_bytes": found.limit,
    }


@dataclass(frozen=True, eq=False)
class Entry:
    """One layout on one mesh, with what its program costs on one device."""

    mesh: Mesh
    layout: Layout
    seconds: float
    peak_bytes: int
    wire_bytes: int
    fits: bool
    _cost: Callable[[], Report] = field(repr=False)

    @cached_property
    def report(self) -> Report:
        """All that `Compiled.cost` says of it; partitioned again when first asked for."""
        return self._cost()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mesh": dict(self.mesh.axes),
            "layout": str(self.layout),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "wire_bytes": self.wire_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Neighbour:
    """The best layout with the axes of one dim changed: what it costs, or why it cannot be."""

    dim: str
    axes: Axes
    entry: Entry | None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        cost = None if self.entry is None else self.entry.to_dict()
        return {"dim": self.dim, "axes": list(self.axes), "cost": cost, "problem": self.problem}


@dataclass(frozen=True)
class Counts:
    """Where every candidate went: the last four add up to `candidates`."""

    meshes: int
    candidates: int  # every combination of one option for each dim, on every mesh
    illegal: int  # two dims of a tensor would share an axis, or partition refuses them for another reason
    over_memory: int  # excluded: their memory is above the limit for certain
    excluded: int  # by a bound that is no better than what was found
    costed: int  # exactly

    def __str__(self) -> str:
        return (
            f"{self.candidates:,} candidates on {self.meshes} mesh{'es' * (self.meshes > 1)}: "
            f"{self.illegal:,} illegal, {self.over_memory:,} over memory by a bound, "
            f"{self.excluded:,} excluded by a bound, {self.costed:,} costed"
        )


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found. `print(found)` shows it; `best.layout` and `best.mesh` are arguments of `md.compile`."""

    title: str
    machine: Machine
    objective: str
    limit: float
    best: Entry
    runners_up: tuple[Entry, ...]
    front: tuple[Entry, ...]  # none of all candidates is faster and needs less memory; the fastest first
    tolerance: float  # what may be missing of the front is within this fraction, in time and in memory, of a part of it
    counts: Counts
    seconds: float  # that the search took
    left_out: tuple[str, ...]  # layouts that were not among the candidates, as there would have been too many
    _near: Callable[[], tuple[Neighbour, ...]] = field(repr=False)

    @property
    def gap(self) -> float:
        """How much better than `best` an unseen candidate could be: nothing, every one was costed or excluded.

        Layouts in `left_out` were no candidates.
        """
        return 0.0

    @cached_property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The best layout with one dim changed, each way; costed when first asked for, the best first."""
        return self._near()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(
            {
                **heading(self),
                "best": self.best.to_dict(),
                "runners_up": [entry.to_dict() for entry in self.runners_up],
                "front": [entry.to_dict() for entry in self.front],
                "front_tolerance": self.tolerance,
                "neighbours": [near.to_dict() for near in self.neighbours],
                "counts": vars(self.counts),
                "gap": self.gap,
                "search_seconds": self.seconds,
                "left_out": list(self.left_out),
            }
        )

    def __str__(self) -> str:
        return _shown(self)


def _shown(found: Found) -> str:
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
