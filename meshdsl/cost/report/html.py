"""One HTML page about one or more layouts: self-contained, no downloads, light and dark mode; tables can be sorted.

Tables of an HTML report that a click on a heading sorts. Without scripts they read the same and stay in their order.

The script is part of the page and asks for nothing: the page's policy allows this one script, by its hash, and no
network at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors.tables import line_of
from ...errors.units import number, percent, seconds, show_bytes
from .charts import collective_bars, lanes, memory_over_time, roofline_scatter, time_bars
from .compare import compare
from .report import Report
from .svg import element


def _resource(name: str) -> str:
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")


PART_RULES = [f".part-{i} {{ fill: var(--part-{i}) }} " for i in range(4)]
HELD_RULES = [f".held-{i} {{ fill: var(--held-{i}) }} " for i in range(7)]
STYLE = "".join([_resource("page.css"), *PART_RULES, *HELD_RULES])
# The script has no "<" and "&": the page stays well-formed XML. A heading becomes a button, so that keys work too.
SCRIPT, SORTED = _resource("sortable.js"), _resource("sortable.css")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"


def page(reports: Mapping[str, Report], pictures: Mapping[str, str] | None = None) -> str:
    """The page as text. Requires at least one report; `pictures` are the programs' pictures as SVG, by layout.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> text = page({"summed": step.cost(md.spec("batch:64 io:64"), md.spec("io:64 hidden:64"))})
    >>> text[:15], text.count("<svg"), "://" in text
    ('<!doctype html>', 5, False)
    """
    first = next(iter(reports.values()))
    title = f"{first.title} on {first.machine.name}" if first.title else f"Layouts on {first.machine.name}"
    best = compare(reports).best
    several = len(reports) > 1
    most = max(report.peak_bytes for report in reports.values())
    width = 460 if several else 920
    sections = [
        element("h1", html.escape(title)),
        element("p", html.escape(f"{first.machine.title}. Times are estimates, of one step.")),
        _figures(reports, best),
        element("h2", "Time of a step"),
        element("p", "Below each bar: the likely interval of the measured time."),
        _wide(time_bars(reports)),
        element("h2", "Timeline"),
        element("p", "One step of one device; a collective is hidden where it runs above or below computation."),
        *_timelines(reports),
        element("h2", "Memory of one device over the program"),
        element("p", "Every step of the program in order; of a loop, one trip."),
        _each(reports, several, lambda report: memory_over_time(report, width, most)),
        element("h2", "Roofline"),
        element("p", "A circle is a kernel, as large as its share of the step; on the line it is as fast as can be."),
        _each(reports, several, lambda report: roofline_scatter(report, width)),
        element("h2", "Collectives by dim"),
        _sent_section(reports),
        *_drawn(pictures or {}),
        element("h2", "By line of the model"),
        element(
            "p", "Time of the step, work and bytes sent by the operations of each source line, forward and backward."
        ),
        *(_by_line(name if several else "", report) for name, report in reports.items()),
        element("h2", "In full"),
        *(_closed(name, element("pre", html.escape(str(report)))) for name, report in reports.items()),
    ]
    return document(title, sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A self-contained HTML page of these sections."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        + element("title", html.escape(title))
        + f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        + element("style", STYLE + SORTED)
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n'
        + "\n".join(sections)
        + element("script", SCRIPT)
        + "\n</body>\n</html>\n"
    )


def _wide(svg: str) -> str:
    """A chart that scrolls on a narrow screen, where its text would be too small."""
    return element("div", svg, cls="wide")


def _closed(name: str, content: str, opened: str = "") -> str:
    """Content under a name, which a click opens or closes."""
    return element("details", element("summary", html.escape(name)), content, open=opened)


def _sent_section(reports: Mapping[str, Report]) -> str:
    sends = any(report.collectives for report in reports.values())
    return _wide(collective_bars(reports)) if sends else element("p", "Nothing is sent.")


LINES = 40  # of the table by line
HEADER = ("layout", "rules", "mesh", "step", "likely", "peak memory", "of limit", "FLOP", "sent", "of peak", "MFU")
HEADER += ("rate", "bound by")


def _by_line(name: str, report: Report) -> str:
    """The longest source lines of one report: time, FLOPs, memory traffic and bytes sent."""
    totals: dict[str, list[float]] = {}
    for cost in report.timeline.costs:
        line, trips = cost.line, cost.line.trips
        row = totals.setdefault(line_of(line.where, 60) or "(no line)", [0.0] * 4)
        bytes_sent = line.collective.wire_bytes * trips if line.collective is not None else 0
        for i, amount in enumerate((cost.blocking, line.flops * trips, line.hbm_bytes * trips, bytes_sent)):
            row[i] += amount
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    rows = [
        (
            Cell(where),
            Cell(seconds(took), took),
            Cell(percent(took, report.seconds), took),
            Cell(number(flops), flops),
            Cell(show_bytes(traffic), traffic),
            Cell(show_bytes(bytes_sent), bytes_sent),
        )
        for where, (took, flops, traffic, bytes_sent) in ranked[:LINES]
    ]
    more = element("p", f"and {len(ranked) - LINES} more lines") if len(ranked) > LINES else ""
    table = sortable(("line", "time", "of step", "FLOP", "traffic", "sent"), rows) + more
    return _closed(name, table) if name else table


def _drawn(pictures: Mapping[str, str]) -> list[str]:
    if not pictures:
        return []
    words = "The devices that exchange, the sharding before and after, and the line that asks for it."
    parts = [_closed(name, _wide(svg), "" if len(pictures) > 1 else "open") for name, svg in pictures.items()]
    return [element("h2", "Collectives in program order"), element("p", words), *parts]


def _timelines(reports: Mapping[str, Report]) -> list[str]:
    longest = max(report.seconds for report in reports.values())
    named = len(reports) > 1
    return [
        element("div", *([element("h3", html.escape(name))] if named else []), _wide(lanes(report, longest)))
        for name, report in reports.items()
    ]


def _each(reports: Mapping[str, Report], several: bool, draw: Callable[[Report], str]) -> str:
    if not several:
        return _wide(draw(next(iter(reports.values()))))
    parts = (element("div", element("h3", html.escape(name)), draw(report)) for name, report in reports.items())
    return element("div", *parts, cls="pair")


def _figures(reports: Mapping[str, Report], best: str | None) -> str:
    rows = [_figures_of(name, report) for name, report in reports.items()]
    return sortable(HEADER, rows, ["best" if name == best and len(reports) > 1 else "" for name in reports])


def _figures_of(name: str, report: Report) -> list[Cell]:
    low, high = report.interval
    bad = "" if report.fits else "bad"
    rates = report.rates
    return [
        Cell(name),
        Cell(str(report.layout or "") or "nothing is sharded", cls="words"),
        Cell(str(report.mesh)),
        Cell(seconds(report.seconds), report.seconds),
        Cell(f"{seconds(low)} - {seconds(high)}", high),
        Cell(show_bytes(report.peak_bytes), report.peak_bytes, bad),
        Cell(percent(report.peak_bytes, report.limit), report.peak_bytes / report.limit, bad),
        Cell(number(report.flops), report.flops),
        Cell(show_bytes(report.wire_bytes), report.wire_bytes),
        Cell(percent(report.utilisation, 1), report.utilisation),
        Cell(percent(rates.mfu, 1), rates.mfu) if rates else Cell(""),
        Cell(f"{number(rates.per_second, rates.unit)}/s", rates.per_second) if rates else Cell(""),
        Cell(report.constraint, cls="words"),
    ]


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which it sorts; None: by its text. Cells of class "words" wrap."""

    text: str
    amount: float | None = None
    cls: str = ""


def sortable(header: Sequence[str], rows: Sequence[Sequence[Cell]], classes: Sequence[str] = ()) -> str:
    """A table that scrolls on a narrow screen; `classes` are those of the rows. A column without any text is left out.

    >>> print(sortable(["layout", "step"], [[Cell("a & b"), Cell("2.0 ms", 0.002)]]))
    <div class="scroll"><table class="sortable"><thead><tr><th>layout</th><th>step</th></tr></thead><tbody><tr><td>a \
&amp; b</td><td data-sort="0.002">2.0 ms</td></tr></tbody></table></div>
    """
    used = [i for i in range(len(header)) if not rows or any(row[i].text for row in rows)]
    header, rows = [header[i] for i in used], [[row[i] for i in used] for row in rows]
    words = [cell.cls == "words" for cell in rows[0]] if rows else [False] * len(header)
    head = element(
        "tr",
        *(element("th", html.escape(name), cls="words" if on else "") for name, on in zip(header, words, strict=True)),
    )
    body = [
        element("tr", *map(_cell, row), cls=cls) for row, cls in zip(rows, classes or [""] * len(rows), strict=True)
    ]
    return element(
        "div", element("table", element("thead", head), element("tbody", *body), cls="sortable"), cls="scroll"
    )


def _cell(cell: Cell) -> str:
    amount = "" if cell.amount is None else f"{cell.amount:.6g}"
    return element("td", html.escape(cell.text), cls=cell.cls, data_sort=amount)
