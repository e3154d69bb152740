"""Comparison of several layouts: reports side by side, and the differences from the first to every other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors.markup import page_part
from ...errors.units import number, percent, seconds, show_bytes
from .differences import changes, signed_bytes, signed_percent, signed_seconds
from .report import PARTS, Report
from .schema import SCHEMA_VERSION
from .tables import line_of, table, wrapped

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
