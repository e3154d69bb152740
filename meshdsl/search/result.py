"""The result of a search and its text: the best layout, runners-up, time against memory, and single changes.

The worth of single knobs of a plan, and its fit on half the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..cost.report.layout_edits import LayoutEdit
from ..cost.report.schema import SCHEMA_VERSION, plain
from ..errors.markup import titled
from ..errors.units import number, seconds, show_bytes
from .evaluate import Entry


@dataclass(frozen=True)
class Counts:
    """Number of candidates by outcome: the last three sum to `candidates`."""

    meshes: int = 0
    candidates: int = 0  # every combination of knobs and of one option per dim, on every mesh
    illegal: int = 0  # two dims of a tensor would share an axis, or partition raises for another reason
    costed: int = 0
    unseen: int = 0  # not visited; may include illegal layouts

    def __str__(self) -> str:
        unseen = f", {self.unseen:,} not looked at" if self.unseen else ""
        return (
            f"{self.candidates:,} candidates on {self.meshes} mesh{'es' * (self.meshes > 1)}: "
            f"{self.illegal:,} illegal, {self.costed:,} costed{unseen}"
        )


@dataclass(frozen=True)
class SearchProgress:
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
            f"{amount(getattr(self.best, self.objective), self.objective)}{fits} with '{self.best.layout}' on "
            f"'{self.best.mesh}', gap {gap(getattr(self.best, self.objective), self.bound):.1%}"
        )


def amount(n: float, objective: str) -> str:
    """A quantity of an objective as text."""
    if objective == "energy":
        return number(n, "J")
    return seconds(n) if objective == "seconds" else show_bytes(n)


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
    counts: Counts
    bound: float  # lower bound of the objective for every candidate that fits
    stopped: str  # reason for an early stop; empty if the search ran to its end
    seconds: float  # duration of the search
    _edits: Callable[[], tuple[LayoutEdit, ...]] = field(repr=False)
    _text: Callable[[SearchResult], str] = field(repr=False)
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
        """The most by which another candidate can be better than `best`, as a fraction; 0: every other is costed."""
        return gap(getattr(self.best, self.objective), self.bound)

    @cached_property
    def edits(self) -> tuple[LayoutEdit, ...]:
        """The best layout with one dim changed, for each dim and option, best first; costed on first access."""
        return self._edits()

    @cached_property
    def worth(self) -> tuple[KnobWorth, ...]:
        """The worth of each knob of the best plan: the plan with that knob at its default; costed on first access."""
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
                "schema_version": SCHEMA_VERSION,
                "title": self.title,
                "machine": self.machine.name,
                "objective": self.objective,
                "limit_bytes": self.limit,
                "plan": self.plan.to_dict(),
                "knobs": list(self.knobs),
                "not_searched": list(self.fixed),
                "worth": [each.to_dict() for each in self.worth],
                "half_the_devices": None if half is None else half.to_dict(),
                "best": self.best.to_dict(),
                "runners_up": [entry.to_dict() for entry in self.runners_up],
                "front": [entry.to_dict() for entry in self.front],
                "edits": [edit.to_dict() for edit in self.edits],
                "counts": vars(self.counts),
                "bound": self.bound,
                "gap": self.gap,
                "stopped": self.stopped,
                "search_seconds": self.seconds,
            }
        )

    def __repr__(self) -> str:
        title = self.title or "search"
        return f"<{title} on {self.machine.name}: best {str(self.best.layout) or '(no sharding)'} on {self.best.mesh}>"

    def _repr_html_(self) -> str:
        return titled(str(self), self.best.mesh.axes)

    def __str__(self) -> str:
        return self._text(self)


@dataclass(frozen=True, eq=False)
class KnobWorth:
    """The best plan with one knob back at its default; no entry if that is illegal or the step does not take it."""

    knob: str
    change: str
    entry: Entry | None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        entry = None if self.entry is None else self.entry.to_dict()
        return {"knob": self.knob, "change": self.change, "entry": entry, "why": self.why}


@dataclass(frozen=True, eq=False)
class Half:
    """The best plan on half the devices, and the plan with what makes it fit there; `print` shows both."""

    devices: int
    limit: float
    entry: Entry | None  # as it is
    fitting: Entry | None  # with the fewest of the changes that save memory; None if none fits
    changes: str = ""
    why: str = ""  # if there is no entry

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        entries = {"entry": self.entry, "fitting": self.fitting}
        shown = {name: None if entry is None else entry.to_dict() for name, entry in entries.items()}
        return {"devices": self.devices, "limit_bytes": self.limit, **shown, "changes": self.changes}

    def __str__(self) -> str:
        title = f"on half the devices ({self.devices})"
        if self.entry is None:
            return f"{title}: {self.why}"
        amount = f"{seconds(self.entry.seconds)}, {show_bytes(self.entry.peak_bytes)} on each device"
        if self.entry.fits:
            return f"{title} the plan fits: {amount}"
        if self.fitting is None:
            return f"{title} nothing makes it fit: {amount}"
        fits = f"{seconds(self.fitting.seconds)}, {show_bytes(self.fitting.peak_bytes)}"
        changes = "\n".join(f"  {line}" for line in self.changes.splitlines())
        return f"{title}: {amount}, over the limit; it fits with\n{changes}\n  {fits}"
