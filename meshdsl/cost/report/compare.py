"""Comparison of several layouts: reports side by side, and the differences from the first to every other.

Differences are those between the collectives of two programs, paired by the lines of the model that cause them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Where
from ...errors.markup import page_part
from ...errors.tables import grouped, line_of, table, wrapped
from ...errors.units import number, percent, seconds, show_bytes
from ..comm_groups import dims_of
from ..timeline import Cost
from .report import PARTS, Report
from .schema import SCHEMA_VERSION, plain

SHADES = dict(zip(PARTS, "█▓▒░", strict=True))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Reports of several layouts by name, in the requested order, and the errors of illegal layouts."""

    reports: Mapping[str, Report]
    illegal: Mapping[str, str]

    @property
    def best(self) -> str | None:
        """The fastest layout that fits; None if none fits."""
        fitting = [name for name, report in self.reports.items() if report.fits]
        return min(fitting, key=lambda name: self.reports[name].seconds, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON: each report, and the differences from the first to every other."""
        first, *others = self.reports or [""]
        return {
            "schema_version": SCHEMA_VERSION,
            "best": self.best,
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
            "illegal": dict(self.illegal),
            "differences": {
                name: [change.to_dict() for change in changes(self.reports[first], self.reports[name])]
                for name in others
            },
        }

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join([*self.reports, *self.illegal])}; best {self.best}>"

    def __str__(self) -> str:
        sections = [_names(self)]
        if self.reports:
            sections += [_figures(self), _bars(self)]
            first, *others = self.reports.items()
            sections += [_difference(first, other) for other in others]
        sections += [f"{name} is illegal\n  " + text.replace("\n", "\n  ") for name, text in self.illegal.items()]
        return "\n\n".join(sections)

    def _repr_html_(self) -> str:
        axes = dict.fromkeys(axis for report in self.reports.values() for axis in report.mesh.axes)
        return page_part(repr(self)[1:-1], str(self), axes)


def compare(reports: Mapping[str, Report], illegal: Mapping[str, str] | None = None) -> Comparison:
    """Compare the reports of several layouts, given by name; `illegal` has the errors of the other layouts.

    >>> import meshdsl as md
    >>> x, w = md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096")
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> other = step.under("rows:4", "batch:rows")
    >>> found = compare({"summed": step.cost(x, w), "data": other.cost(x, w)})
    >>> found.best
    'data'
    >>> [(change.what, str(change.at)) for change in changes(*found.reports.values())]
    [('disappears', '1 all_reduce 67.11 MB rows')]
    """
    return Comparison(dict(reports), dict(illegal or {}))


def _names(comparison: Comparison) -> str:
    first = next(iter(comparison.reports.values()), None)
    lines = []
    if first is not None:
        what = f"{first.title} on " if first.title else ""
        lines.append(f"{what}{first.machine.title}\n")
    for name, report in comparison.reports.items():
        mark = "*" if name == comparison.best else " "
        rules = str(report.layout or "").split() or ["nothing is split"]
        text = str(report.mesh) if name == str(report.layout) else f"{name}: {report.mesh}"
        lines.append(wrapped(rules, f"{mark} {text},  ", 6))
    best = comparison.best
    lines.append(f"\n* the fastest that fits: {best}" if best is not None else "\nnone of them fits")
    return "\n".join(lines)


def _figures(comparison: Comparison) -> str:
    fastest = min(report.seconds for report in comparison.reports.values())
    rows = [
        [
            f"{'*' if name == comparison.best else ' '} {name}",
            seconds(report.seconds),
            f"{report.seconds / fastest:.2f} x",
            *(seconds(report.parts[part]) for part in PARTS),
            percent(report.rates.mfu, 1) if report.rates else number(report.flops),
            show_bytes(report.wire_bytes),
            show_bytes(report.peak_bytes) + ("" if report.fits else "!"),
        ]
        for name, report in comparison.reports.items()
    ]
    rated = all(report.rates for report in comparison.reports.values())
    header = [
        "layout",
        "step",
        "",
        "products",
        "elementw.",
        "moves",
        "exposed",
        "MFU" if rated else "FLOP",
        "sent",
        "peak",
    ]
    note = "" if all(report.fits for report in comparison.reports.values()) else "\n  ! more than a device has"
    return table(header, rows, "<>>>>>>>>>", shrink=0, indent=0) + note


def _bars(comparison: Comparison) -> str:
    """One bar per layout, as long as its step, divided into its parts."""
    slowest = max(report.seconds for report in comparison.reports.values()) or 1.0
    rows = []
    for name, report in comparison.reports.items():
        cells, done, filled = "", 0.0, 0
        for part in PARTS:
            done += report.parts[part]
            n = round(60 * done / slowest)  # of 60 characters
            cells, filled = cells + SHADES[part] * (n - filled), n
        rows.append([name, cells])
    legend = "   ".join(f"{shade} {part}" for part, shade in SHADES.items())
    return table(["", ""], rows, "<<", shrink=0).lstrip("\n") + f"\n\n  {legend}"


def _difference(one: tuple[str, Report], other: tuple[str, Report], top: int = 10) -> str:
    (before, a), (after, b) = one, other
    diffs = changes(a, b)
    title = f"from {before} to {after}: {signed_percent(b.seconds, a.seconds)} time, {signed_bytes(a, b)} peak"
    if not diffs:
        return f"{title}\n  the same collectives"
    rows = [
        [
            line_of(change.at.where),
            "bwd" if change.at.backward else "fwd",
            str(change.before or "-"),
            str(change.after or "-"),
            signed_seconds(change.seconds),
        ]
        for change in diffs[:top]
    ]
    rest = diffs[top:]
    more = f"\n  and {len(rest)} more, {signed_seconds(sum(c.seconds for c in rest))}" if rest else ""
    return f"{title}\n" + table(["asked for by", "pass", before, after, "exposed"], rows, "<<<<>", shrink=2) + more


@dataclass(frozen=True)
class Sending:
    """Equal collectives caused by one line of the model."""

    where: Where
    backward: bool
    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    cause: str
    bytes: int  # of each collective
    count: float
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

    def key(cost: Cost) -> tuple[Any, ...]:
        line, record = cost.line, cost.line.record
        return line.where, line.backward, record.kind, record.axes, dims_of(line), str(line.cause), record.bytes

    return [
        Sending(*same, count=sum(cost.line.trips for cost in costs), exposed=sum(cost.exposed for cost in costs))
        for same, costs in grouped(report.sends, key).items()
    ]


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
        waiting = grouped(new_sendings, key)
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
    diffs += [LayoutDiff(sending, None) for sending in old_sendings]
    diffs += [LayoutDiff(None, sending) for sending in new_sendings]
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
