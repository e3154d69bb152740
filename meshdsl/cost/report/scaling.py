"""Scaling of one plan: reports on growing meshes, with the same batch (strong) and the same batch per device (weak)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors.tables import table
from ...errors.units import number, percent, seconds, show_bytes
from .html import Cell, document, sortable
from .report import Report
from .svg import axis, decades, element, legend, logarithmic, picture, text

WIDTH, HEIGHT = 920, 400
CLASSES = {"strong": "kernel-matmul", "weak": "kernel-vector"}


@dataclass(frozen=True)
class Scaling:
    """Reports with rates by kind, "strong" or "weak", and number of devices; `skipped` says why others are missing."""

    title: str
    reports: Mapping[str, Mapping[int, Report]]
    skipped: Mapping[str, str]

    def efficiency(self, kind: str, devices: int) -> float:
        """The rate per device, relative to that of the fewest devices."""
        reports = self.reports[kind]
        return _rate(reports[devices]) / devices / (_rate(reports[min(reports)]) / min(reports))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title,
            **{kind: [self._record(kind, n) for n in reports] for kind, reports in self.reports.items()},
            "skipped": dict(self.skipped),
        }

    def _record(self, kind: str, n: int) -> dict[str, Any]:
        report = self.reports[kind][n]
        rates = None if report.rates is None else report.rates.to_dict()
        return {
            "devices": n,
            "mesh": dict(report.mesh.axes),
            "rates": rates,
            "efficiency": self.efficiency(kind, n),
            "peak_bytes": report.peak_bytes,
            "fits": report.fits,
        }

    def __str__(self) -> str:
        parts = [self.title]
        for kind, reports in self.reports.items():
            if reports:
                rows = [[cell.text for cell in self._row(kind, n)] for n in reports]
                parts.append(f"{TITLES[kind]}\n" + table(HEADER, rows, "><>>>>>"))
        parts += [f"{name}: {reason}" for name, reason in self.skipped.items()]
        return "\n\n".join(parts)

    def _row(self, kind: str, n: int) -> list[Cell]:
        report, efficiency = self.reports[kind][n], self.efficiency(kind, n)
        rates = report.rates
        assert rates is not None
        return [
            Cell(str(n), n),
            Cell(str(report.mesh)),
            Cell(seconds(report.seconds), report.seconds),
            Cell(f"{number(rates.per_second, rates.unit)}/s", rates.per_second),
            Cell(percent(rates.mfu, 1), rates.mfu),
            Cell(percent(efficiency, 1), efficiency),
            Cell(show_bytes(report.peak_bytes) + ("" if report.fits else " !"), report.peak_bytes),
        ]

    def page(self) -> str:
        """The tables and the picture as a self-contained HTML page."""
        sections = [element("h1", html.escape(self.title)), element("div", self.picture(), cls="wide")]
        for kind, reports in self.reports.items():
            rows = [self._row(kind, n) for n in reports]
            sections += [element("h2", html.escape(TITLES[kind])), sortable(HEADER, rows)]
        return document(self.title, sections)

    def picture(self) -> str:
        """Rates by number of devices on logarithmic axes; lines mark rates that grow as the devices do."""
        points = {kind: [(n, _rate(r)) for n, r in reports.items()] for kind, reports in self.reports.items()}
        every = [point for some in points.values() for point in some]
        left, right, bottom, top = 110, WIDTH - 24, HEIGHT - 48, 34
        low, high = min(r for _, r in every) / 1.5, max(r for _, r in every) * 1.5
        fewest, most = min(n for n, _ in every), max(n for n, _ in every)
        x, y = logarithmic(fewest / 1.3, most * 1.3, left, right), logarithmic(low, high, bottom, top)
        unit = next(r.rates.unit for reports in self.reports.values() for r in reports.values() if r.rates)
        drawn = [
            legend([(CLASSES[kind], TITLES[kind]) for kind in points], left, 2, right - left)[0],
            axis("bottom", x, sorted({n for n, _ in every}), lambda n: f"{n:g}", bottom, top),
            axis("left", y, decades(low, high), lambda rate: f"{number(rate, unit)}/s", left, right),
            text((left + right) / 2, bottom + 34, "devices", anchor="middle", cls="label"),
        ]
        for kind, some in points.items():
            drawn += _curve(some, CLASSES[kind], x, y, high)
        return picture(WIDTH, HEIGHT, "scaling", *drawn)


TITLES = {"strong": "the same batch (strong scaling)", "weak": "the same batch per device (weak scaling)"}
HEADER = ("devices", "mesh", "step", "rate", "MFU", "efficiency", "peak")


def _rate(report: Report) -> float:
    assert report.rates is not None
    return report.rates.per_second


def _curve(points: Sequence[tuple[int, float]], cls: str, x: Any, y: Any, high: float) -> list[str]:
    if not points:
        return []
    path = "L".join(f"{x(n):.1f} {y(rate):.1f}" for n, rate in points)
    (first, rate), (last, _) = points[0], points[-1]
    end = min(last, first * high / rate)  # inside the drawing
    ideal = f"M{x(first):.1f} {y(rate):.1f}L{x(end):.1f} {y(rate * end / first):.1f}"
    dots = [element("circle", tip=f"{n} devices", cls=cls, cx=x(n), cy=y(r), r=5.0) for n, r in points]
    return [element("path", d=ideal, cls="limit", fill="none"), element("path", d=f"M{path}", cls="roof"), *dots]
