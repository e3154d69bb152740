"""The result of a search and its text: the best plan, and how the next best ones differ from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..cost.report.schema import SCHEMA_VERSION, plain
from ..errors.markup import titled
from ..errors.units import seconds, show_bytes
from .costed import Entry


@dataclass(frozen=True)
class Counts:
    """Number of plans by outcome."""

    meshes: int = 0
    estimated: int = 0  # all at once, from the graph; where every plan is costed: the combinations of all choices
    illegal: int = 0  # two dims of a tensor would share an axis, or the compiler refuses the plan for another reason
    costed: int = 0  # exactly
    ratios: tuple[float, float] | None = None  # the least and the greatest of exact over estimated seconds

    def __str__(self) -> str:
        on = f" on {self.meshes} meshes" if self.meshes > 1 else ""
        refused = f", {self.illegal:,} illegal" if self.illegal else ""
        if self.ratios is None:
            return f"{self.estimated:,} candidates{on}{refused}, {self.costed:,} costed exactly"
        low, high = (f"{ratio:.2f}" for ratio in self.ratios)
        between = low if low == high else f"{low} to {high}"
        return (
            f"{self.estimated:,} plans estimated{on}, {self.costed:,} costed exactly{refused}; exact/estimate {between}"
        )


@dataclass(frozen=True)
class SearchProgress:
    """State of a running search. `print` shows one line."""

    counts: Counts
    best: Entry | None
    bound: float

    def __str__(self) -> str:
        if self.best is None:
            return "nothing costed yet"
        fits = "" if self.best.fits else " (over the limit)"
        return (
            f"{self.counts.costed:,} costed; best {seconds(self.best.seconds)}{fits} with '{self.best.layout}' on "
            f"'{self.best.mesh}'"
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
    complete: bool  # every plan is costed
    stopped: str = ""  # reason for an early stop; empty if the search ran to its end
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
                "complete": self.complete,
                "stopped": self.stopped,
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
        if self.complete:
            return f"every plan is costed: {self.counts}"
        early = f"; stopped by {self.stopped}" if self.stopped else ""
        floor = f"products, reductions and updates alone, divided over all devices, take {seconds(self.bound)}"
        return f"{self.counts}{early}\n  {floor}, {self.gap:.0%} less than the best plan: a bound, not a plan"


def _figures(entry: Entry) -> str:
    over = "" if entry.fits else ", over the limit"
    sent = f"{show_bytes(entry.wire_bytes)} sent"
    return f"{seconds(entry.seconds)} a step, {show_bytes(entry.peak_bytes)} on each device{over}, {sent}"


def _slower(entry: Entry, best: Entry) -> str:
    """The part of the step in which an entry is slower than the best."""
    more = {name: entry.parts[name] - best.parts[name] for name in best.parts}
    name = max(more, key=more.__getitem__)
    return f"; {seconds(more[name])} more {name}" if more[name] > 0 else ""
