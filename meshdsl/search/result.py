"""The result of a search and its text: the best plan, and how the next best ones differ from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..cost.report.schema import SCHEMA_VERSION, plain
from ..errors.markup import titled
from ..errors.units import seconds, show_bytes
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
    bound: float

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.seconds:.0f} s: nothing costed yet"
        fits = "" if self.best.fits else " (over the limit)"
        return (
            f"{self.seconds:.0f} s: {self.counts.costed:,} costed, {self.counts.unseen:,} to go; best "
            f"{seconds(self.best.seconds)}{fits} with '{self.best.layout}' on "
            f"'{self.best.mesh}', gap {gap(self.best.seconds, self.bound):.1%}"
        )


def gap(best: float, bound: float) -> float:
    """The largest possible improvement on `best`, as a fraction, if every cost is at least `bound`."""
    return max(0.0, 1 - bound / best) if best else 0.0


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plans found. `print` shows them; pass `plan` to `md.compile`."""

    title: str
    machine: Machine
    limit: float
    best: Entry
    runners_up: tuple[Entry, ...]
    counts: Counts
    bound: float  # lower bound of the seconds of every candidate that fits
    stopped: str  # reason for an early stop; empty if the search ran to its end
    seconds: float  # duration of the search
    knobs: tuple[str, ...] = ()  # searched besides mesh and layout
    fixed: tuple[str, ...] = ()  # knobs that the function does not take, each with the reason

    @property
    def plan(self) -> Plan:
        """The best plan: `md.compile(step, plan=result.plan)`."""
        return self.best.plan

    @property
    def gap(self) -> float:
        """The most by which another candidate can be faster than `best`, as a fraction; 0: every other is costed."""
        return gap(self.best.seconds, self.bound)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(
            {
                "schema_version": SCHEMA_VERSION,
                "title": self.title,
                "machine": self.machine.name,
                "limit_bytes": self.limit,
                "plan": self.plan.to_dict(),
                "knobs": list(self.knobs),
                "not_searched": list(self.fixed),
                "best": self.best.to_dict(),
                "runners_up": [entry.to_dict() for entry in self.runners_up],
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
        parts = [
            f"{self.title or 'search'} on {self.machine.name}: the best plan",
            "  " + str(self.plan).replace("\n", "\n  ") + f"\n\n  {_figures(self.best)}",
            self._proof(),
        ]
        if self.fixed:
            parts.append("not searched\n  " + "\n  ".join(self.fixed))
        for i, entry in enumerate(self.runners_up):
            change = f"{entry.seconds / self.best.seconds - 1:+.1%}" if self.best.seconds else ""
            title, why = "then" if i else "next", _slower(entry, self.best)
            lines = [f"{title}: {seconds(entry.seconds)} ({change}), {show_bytes(entry.peak_bytes)}{why}"]
            changes = str(self.plan.diff(entry.plan)).splitlines()
            lines += [f"  {line}" for line in changes if not line.startswith("machine ")]  # it follows from the others
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def _proof(self) -> str:
        how = f"all costed: {self.counts}" if not self.stopped else f"stopped by {self.stopped}: {self.counts}"
        least, best = seconds(self.bound), seconds(self.best.seconds)
        open_gap = f"\n  no candidate takes less than {least}; the best takes {best}" if self.gap else ""
        return f"{how}; gap {self.gap:.0%}, {seconds(self.seconds)}{open_gap}"


def _figures(entry: Entry) -> str:
    over = "" if entry.fits else ", over the limit"
    sent = f"{show_bytes(entry.wire_bytes)} sent"
    return f"{seconds(entry.seconds)} a step, {show_bytes(entry.peak_bytes)} on each device{over}, {sent}"


def _slower(entry: Entry, best: Entry) -> str:
    """The part of the step in which an entry is slower than the best."""
    more = {name: entry.parts[name] - best.parts[name] for name in best.parts}
    name = max(more, key=more.__getitem__)
    return f"; {seconds(more[name])} more {name}" if more[name] > 0 else ""
