"""The result of a search and its text: the best layout, runners-up, time against memory, and single changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

from ..cost.machine import Machine
from ..markup import titled
from ..plan import Plan
from ..report.layout_edits import LayoutEdit, reason_of
from ..report.schema import SCHEMA_VERSION, plain
from ..report.tables import table
from ..units import seconds, show_bytes
from .evaluate import Entry
from .worth import Half, KnobWorth

__all__ = ["Counts", "Progress", "SearchResult", "heading"]

NEAR = 8  # maximum edits shown of each kind; `SearchResult.edits` has all


class _Result(Protocol):
    """The fields that both kinds of search result have."""

    @property
    def title(self) -> str: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def objective(self) -> str: ...

    @property
    def limit(self) -> float: ...


def heading(result: _Result) -> dict[str, Any]:
    """The first fields of a result's JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        "title": result.title,
        "machine": result.machine.name,
        "objective": result.objective,
        "limit_bytes": result.limit,
    }


@dataclass(frozen=True)
class Counts:
    """Number of candidates by outcome: the last five sum to `candidates`."""

    meshes: int = 0
    candidates: int = 0  # every combination of one option per dim, on every mesh
    illegal: int = 0  # two dims of a tensor would share an axis, or partition raises for another reason
    over_memory: int = 0  # by a bound
    excluded: int = 0  # by a bound that is no better than the worst layout shown
    costed: int = 0  # exactly
    unseen: int = 0  # not visited when the search stopped; may include illegal layouts

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})

    def __str__(self) -> str:
        unseen = f", {self.unseen:,} not looked at" if self.unseen else ""
        return (
            f"{self.candidates:,} candidates on {self.meshes} mesh{'es' * (self.meshes > 1)}: "
            f"{self.illegal:,} illegal, {self.over_memory:,} over memory by a bound, "
            f"{self.excluded:,} excluded by a bound, {self.costed:,} costed{unseen}"
        )


@dataclass(frozen=True)
class Progress:
    """State of a running search. `print` shows one line."""

    seconds: float
    counts: Counts
    best: Entry | None
    objective: str
    bound: float

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.seconds:.0f} s: nothing costed yet"
        fits = "" if self.best.fits else " (over the limit)"
        return (
            f"{self.seconds:.0f} s: {self.counts.costed:,} costed, {self.counts.unseen:,} to go; best "
            f"{_amount(getattr(self.best, self.objective), self.objective)}{fits} with '{self.best.layout}' on "
            f"'{self.best.mesh}', gap {gap(getattr(self.best, self.objective), self.bound):.1%}"
        )


def gap(best: float, bound: float) -> float:
    """The largest possible improvement on `best`, as a fraction, if every cost is at least `bound`."""
    return max(0.0, 1 - bound / best) if best else 0.0


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best layouts found. `print` shows them; pass `best.layout` and `best.mesh` to `md.compile`."""

    title: str
    machine: Machine
    objective: str
    limit: float
    best: Entry
    runners_up: tuple[Entry, ...]
    front: tuple[Entry, ...]  # Pareto front of the costed layouts, fastest first; empty if not requested
    tolerance: float  # a proven front is complete to within this fraction, in time and in memory
    counts: Counts
    bound: float  # lower bound of the objective for every candidate that fits
    stopped: str  # reason for an early stop; empty if the search ran to its end
    seconds: float  # duration of the search
    left_out: tuple[str, ...]  # layouts removed from the candidates because there were too many
    _edits: Callable[[], tuple[LayoutEdit, ...]] = field(repr=False)
    knobs: tuple[str, ...] = ()  # searched besides mesh and layout
    fixed: tuple[str, ...] = ()  # knobs that the function does not take, each with the reason
    costed: tuple[Entry, ...] = ()  # every plan costed
    _worth: Callable[[], tuple[KnobWorth, ...]] = field(default=tuple, repr=False)
    _half: Callable[[], Half | None] = field(default=lambda: None, repr=False)

    @property
    def plan(self) -> Plan:
        """The best plan: `md.compile(step, plan=result.plan)`."""
        return self.best.plan

    @property
    def gap(self) -> float:
        """How much better than `best` another candidate can be at most, as a fraction; 0: `best` is proven optimal.

        Layouts in `left_out` are not candidates.
        """
        return gap(getattr(self.best, self.objective), self.bound)

    @cached_property
    def edits(self) -> tuple[LayoutEdit, ...]:
        """The best layout with one dim changed, for each dim and option, best first; costed on first access."""
        return self._edits()

    @cached_property
    def worth(self) -> tuple[KnobWorth, ...]:
        """What each knob of the best plan is worth: the plan with that knob at its default; costed on first access."""
        return self._worth()

    @cached_property
    def half(self) -> Half | None:
        """The best plan on half the devices, and what makes it fit; None for one device. Costed on first access."""
        return self._half()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        half = self.half
        return plain(
            {
                **heading(self),
                "plan": self.plan.to_dict(),
                "knobs": list(self.knobs),
                "not_searched": list(self.fixed),
                "worth": [each.to_dict() for each in self.worth],
                "half_the_devices": None if half is None else half.to_dict(),
                "best": self.best.to_dict(),
                "runners_up": [entry.to_dict() for entry in self.runners_up],
                "front": [entry.to_dict() for entry in self.front],
                "front_tolerance": self.tolerance,
                "edits": [edit.to_dict() for edit in self.edits],
                "counts": vars(self.counts),
                "bound": self.bound,
                "gap": self.gap,
                "stopped": self.stopped,
                "search_seconds": self.seconds,
                "left_out": list(self.left_out),
            }
        )

    def __repr__(self) -> str:
        title = self.title or "search"
        return f"<{title} on {self.machine.name}: best {self.best.layout or '(no sharding)'} on {self.best.mesh}>"

    def _repr_html_(self) -> str:
        return titled(str(self), self.best.mesh.axes)

    def __str__(self) -> str:
        return _shown(self)


def _shown(found: SearchResult) -> str:
    """The text of `print(found)`."""
    if found.knobs:
        return plan_text(found)
    best = found.best
    parts = [
        f"{found.title or 'search'} on {found.machine.name}: the best layout by {found.objective}",
        f"  mesh    {best.mesh}\n  layout  {best.layout or '(everything replicated)'}\n  {_figures(best)}",
        _proof(found),
    ]
    if found.left_out:
        parts.append("left out, as there would be too many layouts (--dims, --axes choose others)\n  "
                     + "\n  ".join(found.left_out))  # fmt: skip
    if found.runners_up:
        parts.append("then\n" + _entries(found.runners_up, best))
    if len(found.front) > 1:
        within = f", to within {found.tolerance:.0%}" if found.tolerance else ""
        within = ", of the layouts costed" if found.stopped else within
        parts.append(f"time against memory{within}\n" + _entries(found.front, best))
    legal = [near for near in found.edits if near.report is not None]
    illegal = [near for near in found.edits if near.report is None]
    if legal:
        parts.append("one dim changed\n" + _changes(legal[:NEAR], best) + _more(legal))
    if illegal:
        parts.append("illegal with one dim changed\n" + _reasons(illegal[:NEAR]) + _more(illegal))
    return "\n\n".join(parts)


def _proof(found: SearchResult) -> str:
    how = f"proven: {found.counts}" if not found.stopped else f"stopped by {found.stopped}: {found.counts}"
    best, least = (_amount(n, found.objective) for n in (getattr(found.best, found.objective), found.bound))
    open_gap = f"\n  no candidate takes less than {least}; the best takes {best}" if found.gap else ""
    return f"{how}; gap {found.gap:.0%}, {seconds(found.seconds)}{open_gap}"


def _amount(n: float, objective: str) -> str:
    return seconds(n) if objective == "seconds" else show_bytes(n)


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
            str(entry.layout) or "(everything replicated)",
        )
        for entry in entries
    ]
    return table(("time", "", "memory", "sent", "mesh", "layout"), rows, ">>>><<")


def _changes(edits: Iterable[LayoutEdit], best: Entry) -> str:
    rows = [
        (
            f"{each.dim}: {_axes(each.before)} -> {_axes(each.after)}",
            _change(entry.seconds, best.seconds),
            _difference(entry.peak_bytes - best.peak_bytes) + ("" if entry.fits else " !"),
            _difference(entry.wire_bytes - best.wire_bytes),
        )
        for each in edits
        if (entry := each.report) is not None
    ]
    return table(("change", "time", "memory", "sent"), rows, "<>>>")


def _reasons(near: Iterable[LayoutEdit]) -> str:
    rows = [(f"{each.dim}:{','.join(each.after)}", reason_of(each)) for each in near]
    return table(("change", "why not"), rows, "<<")


def _axes(axes: Iterable[str]) -> str:
    return ",".join(axes) or "whole"


def _change(now: float, before: float) -> str:
    return f"{now / before - 1:+.1%}" if before else ""


def _difference(n: int) -> str:
    return ("+" if n > 0 else "-" if n < 0 else "") + show_bytes(abs(n))


def _more(near: list[LayoutEdit]) -> str:
    return f"\n  and {len(near) - NEAR} more" if len(near) > NEAR else ""


def plan_text(found: SearchResult) -> str:
    """The text of a search over plans."""
    best = found.best
    parts = [
        f"{found.title or 'search'} on {found.machine.name}: the best plan by {found.objective}",
        "  " + str(found.plan).replace("\n", "\n  ") + f"\n\n  {_figures(best)}",
        _proof(found),
    ]
    if found.fixed:
        parts.append("not searched\n  " + "\n  ".join(found.fixed))
    if found.worth:
        rows = [(each.change, *_worth(each, best)) for each in found.worth]
        parts.append("one knob back at its default\n" + table(("change", "time", "memory"), rows, "<>>"))
    for i, entry in enumerate(found.runners_up):
        title = "next" if not i else "then"
        change = _change(entry.seconds, best.seconds)
        why = _slower(entry, best)
        lines = [f"{title}: {seconds(entry.seconds)} ({change}), {show_bytes(entry.peak_bytes)}{why}"]
        lines += [f"  {line}" for line in str(best.plan.diff(entry.plan)).splitlines()]
        parts.append("\n".join(lines))
    if len(found.front) > 1:
        parts.append("time against memory, of the plans costed\n" + _entries(found.front, best))
    if found.half is not None:
        parts.append(str(found.half))
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
