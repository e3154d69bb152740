"""Differences between the collectives of two programs, paired by the lines of the model that cause them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Where
from ...errors.units import percent, seconds, show_bytes
from ..comm_groups import dims_of
from ..timeline import Cost
from .report import Report
from .schema import plain


@dataclass(frozen=True)
class Sending:
    """Equal collectives caused by one line of the model."""

    where: Where
    backward: bool
    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    cause: str
    count: float
    bytes: int  # of each collective
    exposed: float  # seconds, total

    def __str__(self) -> str:
        return f"{round(self.count, 4)} {self.kind} {show_bytes(self.bytes)} {','.join(self.axes)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain({**vars(self), "where": str(self.where)})


@dataclass(frozen=True)
class LayoutDiff:
    """The collectives that one line of the model causes under two layouts; None for a layout without any."""

    before: Sending | None
    after: Sending | None

    @property
    def what(self) -> str:
        """The kind of difference: "appears", "disappears", "becomes", "resized" or "same"."""
        if self.before is None or self.after is None:
            return "appears" if self.before is None else "disappears"
        if (self.before.kind, self.before.axes) != (self.after.kind, self.after.axes):
            return "becomes"
        same = (self.before.count, self.before.bytes) == (self.after.count, self.after.bytes)
        return "same" if same else "resized"

    @property
    def seconds(self) -> float:
        """Increase of exposed communication, in seconds."""
        return (self.after.exposed if self.after else 0.0) - (self.before.exposed if self.before else 0.0)

    @property
    def at(self) -> Sending:
        """The `after` side; `before` if there is no `after`."""
        sending = self.after or self.before
        assert sending is not None
        return sending

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "what": self.what,
            "seconds": self.seconds,
            "before": self.before and self.before.to_dict(),
            "after": self.after and self.after.to_dict(),
        }


def sendings(report: Report) -> list[Sending]:
    """The collectives of a report in program order; equal ones of one line of the model are combined."""
    groups: dict[tuple[Any, ...], list[Cost]] = {}
    for cost in report.sends:
        line, record = cost.line, cost.line.record
        key = (line.where, line.backward, record.kind, record.axes, dims_of(line), str(line.cause), record.bytes)
        groups.setdefault(key, []).append(cost)
    return [
        Sending(where, backward, kind, axes, dims, cause, sum(c.line.trips for c in costs), each, _exposed(costs))
        for (where, backward, kind, axes, dims, cause, each), costs in groups.items()
    ]


def _exposed(costs: Sequence[Cost]) -> float:
    return sum(cost.exposed for cost in costs)


def changes(before: Report, after: Report) -> list[LayoutDiff]:
    """Differences between the collectives of two layouts, largest first; equal pairs are omitted.

    Collectives are paired by source line and pass; within one line by cause and kind, then by cause, then by kind, then
    by order.
    """
    old_sendings, new_sendings = sendings(before), sendings(after)
    diffs: list[LayoutDiff] = []
    rules: list[Callable[[Sending], Hashable]] = [
        lambda s: (s.where, s.backward, s.cause, s.kind, s.axes, s.bytes, s.count),
        lambda s: (s.where, s.backward, s.cause, s.kind, s.axes),
        lambda s: (s.where, s.backward, s.cause),
        lambda s: (s.where, s.backward, s.kind),
        lambda s: (s.where, s.backward),
    ]
    for key in rules:
        waiting: dict[Hashable, list[Sending]] = {}
        for sending in new_sendings:
            waiting.setdefault(key(sending), []).append(sending)
        unmatched: list[Sending] = []
        for sending in old_sendings:
            partners = waiting.get(key(sending))
            if partners:
                partner = partners.pop(0)
                new_sendings.remove(partner)
                diffs.append(LayoutDiff(sending, partner))
            else:
                unmatched.append(sending)
        old_sendings = unmatched
    diffs += [LayoutDiff(sending, None) for sending in old_sendings] + [
        LayoutDiff(None, sending) for sending in new_sendings
    ]
    return sorted((c for c in diffs if c.what != "same"), key=lambda c: -abs(c.seconds))


def signed_seconds(t: float) -> str:
    """A difference of times: "+1.20 ms"."""
    return ("+" if t > 0 else "") + seconds(t)


def signed_percent(after: float, before: float) -> str:
    """A change in percent: "-12 %"."""
    if after == before or not before:
        return "the same"
    return ("+" if after > before else "") + percent(after - before, before)


def signed_bytes(before: Report, after: Report) -> str:
    """The change of the peak: "+3.00 GB"."""
    n = after.peak_bytes - before.peak_bytes
    return "the same" if not n else ("+" if n > 0 else "-") + show_bytes(abs(n))
