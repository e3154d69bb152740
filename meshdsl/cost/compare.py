"""Several layouts side by side, and what differs between two of them, collective by collective."""

from __future__ import annotations

import html
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Where
from ..lowering.program import show_bytes
from ..schema import SCHEMA_VERSION, plain
from .report import PARTS, Report, dims_of
from .tables import line_of, number, percent, seconds, table, wrapped
from .timeline import Cost

__all__ = ["Change", "Comparison", "Sending", "changes", "compare"]

SHADES = dict(zip(PARTS, "█▓▒░", strict=True))


@dataclass(frozen=True)
class Sending:
    """The equal collectives that one line of the model asks for."""

    where: Where
    backward: bool
    kind: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    cause: str
    count: int
    bytes: int  # of each
    exposed: float  # seconds, of all

    def __str__(self) -> str:
        return f"{self.count} {self.kind} {show_bytes(self.bytes)} {','.join(self.axes)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain({**vars(self), "where": str(self.where)})


@dataclass(frozen=True)
class Change:
    """What one line of the model asks for under two layouts; None where it asks for nothing."""

    before: Sending | None
    after: Sending | None

    @property
    def what(self) -> str:
        """ "appears", "disappears", "becomes", "resized" or "same"."""
        if self.before is None or self.after is None:
            return "appears" if self.before is None else "disappears"
        if (self.before.kind, self.before.axes) != (self.after.kind, self.after.axes):
            return "becomes"
        same = (self.before.count, self.before.bytes) == (self.after.count, self.after.bytes)
        return "same" if same else "resized"

    @property
    def seconds(self) -> float:
        """How much more exposed communication there is afterwards."""
        return (self.after.exposed if self.after else 0.0) - (self.before.exposed if self.before else 0.0)

    @property
    def at(self) -> Sending:
        """The side that is there."""
        found = self.after or self.before
        assert found is not None
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "what": self.what,
            "seconds": self.seconds,
            "before": self.before and self.before.to_dict(),
            "after": self.after and self.after.to_dict(),
        }


def sendings(report: Report) -> list[Sending]:
    """The collectives of a report, equal ones of one line of the model together, in program order."""
    groups: dict[tuple[Any, ...], list[Cost]] = {}
    for cost in report.sends:
        line, record = cost.line, cost.line.collective
        assert record is not None
        key = (line.where, line.backward, record.kind, record.axes, dims_of(line), line.cause, record.bytes)
        groups.setdefault(key, []).append(cost)
    return [
        Sending(where, backward, kind, axes, dims, cause, sum(c.line.trips for c in costs), each, _exposed(costs))
        for (where, backward, kind, axes, dims, cause, each), costs in groups.items()
    ]


def _exposed(costs: Sequence[Cost]) -> float:
    return sum(cost.exposed for cost in costs)


def changes(before: Report, after: Report) -> list[Change]:
    """What two layouts send differently, the largest difference first; equal pairs are left out.

    Collectives are paired by source line and pass, and among those of one line by cause and kind, then by cause, then
    by kind, then in their order.
    """
    left, right = sendings(before), sendings(after)
    found: list[Change] = []
    rules: list[Callable[[Sending], Hashable]] = [
        lambda s: (s.where, s.backward, s.cause, s.kind, s.axes, s.bytes, s.count),
        lambda s: (s.where, s.backward, s.cause, s.kind, s.axes),
        lambda s: (s.where, s.backward, s.cause),
        lambda s: (s.where, s.backward, s.kind),
        lambda s: (s.where, s.backward),
    ]
    for key in rules:
        waiting: dict[Hashable, list[Sending]] = {}
        for each in right:
            waiting.setdefault(key(each), []).append(each)
        rest: list[Sending] = []
        for each in left:
            others = waiting.get(key(each))
            if others:
                other = others.pop(0)
                right.remove(other)
                found.append(Change(each, other))
            else:
                rest.append(each)
        left = rest
    found += [Change(each, None) for each in left] + [Change(None, each) for each in right]
    return sorted((c for c in found if c.what != "same"), key=lambda c: -abs(c.seconds))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Reports of several layouts, by name, in the order they were asked for; and the layouts that are illegal."""

    reports: Mapping[str, Report]
    illegal: Mapping[str, str]

    @property
    def best(self) -> str | None:
        """The fastest that fits; None where none does."""
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
        return f'<pre style="line-height:1.25">{html.escape(str(self))}</pre>'


def compare(reports: Mapping[str, Report], illegal: Mapping[str, str] | None = None) -> Comparison:
    """Several layouts side by side.

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


def _names(found: Comparison) -> str:
    first = next(iter(found.reports.values()), None)
    lines = []
    if first is not None:
        what = f"{first.title} on " if first.title else ""
        lines.append(f"{what}{first.machine.title}\n")
    for name, report in found.reports.items():
        mark = "*" if name == found.best else " "
        rules = str(report.layout or "").split() or ["nothing is split"]
        text = str(report.mesh) if name == str(report.layout) else f"{name}: {report.mesh}"
        lines.append(wrapped(rules, f"{mark} {text},  ", 6))
    best = found.best
    lines.append(f"\n* the fastest that fits: {best}" if best is not None else "\nnone of them fits")
    return "\n".join(lines)


def _figures(found: Comparison) -> str:
    fastest = min(report.seconds for report in found.reports.values())
    rows = [
        [
            f"{'*' if name == found.best else ' '} {name}",
            seconds(report.seconds),
            f"{report.seconds / fastest:.2f} x",
            *(seconds(report.parts[part]) for part in PARTS),
            number(report.flops),
            show_bytes(report.wire_bytes),
            show_bytes(report.peak_bytes) + ("" if report.fits else "!"),
        ]
        for name, report in found.reports.items()
    ]
    header = ["layout", "step", "", "products", "elementw.", "moves", "exposed", "FLOP", "sent", "peak"]
    note = "" if all(report.fits for report in found.reports.values()) else "\n  ! more than a device has"
    return table(header, rows, "<>>>>>>>>>", shrink=0, indent=0) + note


def _bars(found: Comparison, width: int = 60) -> str:
    """One bar for each layout, as long as its step, made of its parts."""
    slowest = max(report.seconds for report in found.reports.values()) or 1.0
    rows = []
    for name, report in found.reports.items():
        cells, done, drawn = "", 0.0, 0
        for part in PARTS:
            done += report.parts[part]
            n = round(width * done / slowest)
            cells, drawn = cells + SHADES[part] * (n - drawn), n
        rows.append([name, cells])
    legend = "   ".join(f"{shade} {part}" for part, shade in SHADES.items())
    return table(["", ""], rows, "<<", shrink=0).lstrip("\n") + f"\n\n  {legend}"


def _difference(one: tuple[str, Report], other: tuple[str, Report], top: int = 10) -> str:
    (before, a), (after, b) = one, other
    found = changes(a, b)
    title = f"from {before} to {after}: {signed_percent(b.seconds, a.seconds)} time, {signed_bytes(a, b)} peak"
    if not found:
        return f"{title}\n  the same collectives"
    rows = [
        [
            line_of(change.at.where),
            "bwd" if change.at.backward else "fwd",
            str(change.before or "-"),
            str(change.after or "-"),
            signed_seconds(change.seconds),
        ]
        for change in found[:top]
    ]
    rest = found[top:]
    more = f"\n  and {len(rest)} more, {signed_seconds(sum(c.seconds for c in rest))}" if rest else ""
    return f"{title}\n" + table(["asked for by", "pass", before, after, "exposed"], rows, "<<<<>", shrink=2) + more


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
