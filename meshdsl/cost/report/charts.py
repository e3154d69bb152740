"""The charts of a report: time, memory, roofline and collectives. Each function takes reports and returns an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors.tables import cut, grouped, line_of
from ...errors.units import number, percent, seconds, show_bytes
from ..fusion import Kernel
from ..lanes import COMPUTE, Event
from ..memory import CATEGORIES, Moment
from .report import PART_OF, PARTS, Report
from .show import PART_TITLES
from .svg import Scale, axis, decades, element, label_width, legend, linear, logarithmic, picture, steps, text

WIDTH = 920
SMALL = 2e-3  # fraction of a step: shorter kernels are not drawn
COLUMNS = 360  # maximum columns of the memory profile; in a longer one, a column is the largest of several


def time_bars(reports: Mapping[str, Report], mark: str = "lower bound") -> str:
    """One bar per layout: the parts of its step, the likely interval, and the lower bound, titled `mark`."""
    names = [cut(name, 40) for name in reports]
    left, right = label_width(names) + 16, WIDTH - 84
    most = max(report.interval[1] for report in reports.values())
    scale = linear(0, most, left, right)
    swatches = [(f"part-{i}", PART_TITLES[part]) for i, part in enumerate(PARTS)]
    marks = [("bound", mark)] if any(report.lower_bound for report in reports.values()) else []
    legend_svg, top = legend([*swatches, *marks], 8, 2, WIDTH - 8)
    top += 8
    bottom = top + 40 * len(names) + 6
    elements = [legend_svg, axis("bottom", scale, steps(most), seconds, bottom, top)]
    for i, (name, report) in enumerate(zip(names, reports.values(), strict=True)):
        y, done = top + 40 * i + 7, 0.0
        elements.append(text(left - 10, y + 17, name, anchor="end", cls="label"))
        for k, part in enumerate(PARTS):
            t = report.parts[part]
            x, bar_width = scale(done), scale(t) - scale(0)
            tip = f"{PART_TITLES[part]}: {seconds(t)}, {percent(t, report.seconds)}"
            elements.append(element("rect", tip=tip, x=x, y=y, width=bar_width, height=26, cls=f"part-{k}"))
            if bar_width > 40:
                elements.append(
                    text(x + bar_width / 2, y + 17, percent(t, report.seconds), anchor="middle", cls="inside")
                )
            done += t
        low, high = map(scale, report.interval)
        tip = f"{seconds(report.interval[0])} to {seconds(report.interval[1])} likely"
        ends = (element("line", x1=x, x2=x, y1=y + 29, y2=y + 35, cls="interval") for x in (low, high))
        elements += [element("line", tip=tip, x1=low, x2=high, y1=y + 32, y2=y + 32, cls="interval"), *ends]
        bound = scale(report.lower_bound)
        tip = f"{mark}: {seconds(report.lower_bound)}"
        if report.lower_bound:
            elements.append(element("line", tip=tip, x1=bound, x2=bound, y1=y - 3, y2=y + 29, cls="bound"))
        elements.append(text(max(high, scale(report.seconds)) + 8, y + 17, seconds(report.seconds), cls="strong"))
    return picture(WIDTH, bottom + 24, "time of a step by layout", *elements)


def memory_over_time(report: Report, width: int = WIDTH, most: float | None = None) -> str:
    """Memory of one device at every step of the program, by category; `most` sets a common scale for several charts."""
    profile = _pooled(report.memory.profile)
    most = report.peak_bytes if most is None else most
    near = report.limit < 1.4 * most  # draw the limit only if it is close to the peak
    high = (max(report.limit, most) if near else most) * 1.12 or 1.0
    left, right, bottom = 76, width - 12, 232
    used = [i for i in range(len(CATEGORIES)) if any(moment.by_category[i] for moment in profile)]
    legend_svg, top = legend([(f"held-{i}", CATEGORIES[i]) for i in used], left, 2, right - left)
    top, bottom = top + 8, bottom + top
    x, y = linear(0, len(profile), left, right), linear(0, high, bottom, top)
    elements = [legend_svg, axis("left", y, steps(high, 4), show_bytes, left, right)]
    below = [0.0] * len(profile)
    for i in used:
        above = [b + moment.by_category[i] for b, moment in zip(below, profile, strict=True)]
        tip = f"{CATEGORIES[i]}: {show_bytes(report.memory.at.by_category[i])} at the peak"
        elements.append(element("path", tip=tip, d=_area(above, below, x, y), cls=f"held-{i}"))
        below = above
    if near:
        elements.append(element("line", x1=left, x2=right, y1=y(report.limit), y2=y(report.limit), cls="limit"))
        elements.append(
            text(right - 4, y(report.limit) - 5, f"limit {show_bytes(report.limit)}", anchor="end", cls="tick")
        )
    for i, moment in enumerate(profile):
        cls = "backward" if moment.backward else "forward"
        elements.append(element("rect", x=x(i), y=bottom + 4, width=x(1) - x(0) + 0.3, height=6, cls=cls))
    peak = next(i for i, moment in enumerate(profile) if moment.index == report.memory.at.index)
    peak_x = x(peak + 0.5)
    elements.append(element("line", x1=peak_x, x2=peak_x, y1=top, y2=bottom, cls="peak"))
    side, shift = ("end", -6) if peak_x > (left + right) / 2 else ("start", 6)
    elements.append(
        text(peak_x + shift, top + 9, f"peak {show_bytes(report.peak_bytes)}", anchor=side, cls="strong halo")
    )
    passes, tall = legend([("forward", "forward, update"), ("backward", "backward")], left, bottom + 18, right - left)
    return picture(width, bottom + 18 + tall, "memory over the steps of the program", *elements, passes)


def _pooled(profile: tuple[Moment, ...]) -> list[Moment]:
    """At most COLUMNS moments: the largest of each run of moments, so that the peak is always included."""
    each = math.ceil(len(profile) / COLUMNS)
    runs = (profile[i : i + each] for i in range(0, len(profile), each))
    return [max(run, key=lambda moment: moment.bytes) for run in runs]


def _area(above: Sequence[float], below: Sequence[float], x: Scale, y: Scale) -> str:
    """An SVG path: steps along the upper edge, then back along the lower edge."""
    up = [f"L{x(i):.1f} {y(v):.1f}L{x(i + 1):.1f} {y(v):.1f}" for i, v in enumerate(above)]
    down = [f"L{x(i + 1):.1f} {y(v):.1f}L{x(i):.1f} {y(v):.1f}" for i, v in reversed([*enumerate(below)])]
    return "M" + "".join([*up, *down])[1:] + "Z"


def roofline_scatter(report: Report, width: int = WIDTH) -> str:
    """Kernels by FLOP per byte and FLOP per second, sized by its share of the step, with the machine's roofline."""
    points = _points(report)
    left, right, bottom, top = 96, width - 16, 330, 36
    machine = report.machine
    peak_name, peak = max(machine.peak.items(), key=lambda item: item[1])
    named = {line.dtype.name for line in report.ledger.lines if line.kind in ("matmul", "conv")}
    if named:
        peak_name = max(named, key=machine.peak_of)
        peak = machine.peak_of(peak_name)
    ridge = peak / machine.hbm_bandwidth
    low_x = min([ridge / 30, *(p.intensity for p in points)]) / 1.6
    high_x = max([ridge * 8, *(p.intensity for p in points)]) * 1.6
    low_y = min([peak / 1e4, *(p.rate for p in points)]) / 1.6
    x, y = logarithmic(low_x, high_x, left, right), logarithmic(low_y, peak * 3, bottom, top)
    entries = [("kernel-matmul", "products"), ("kernel-vector", "elementwise, reductions")]
    legend_svg, _ = legend(entries, left, 2, right - left)
    elements = [
        legend_svg,
        axis("bottom", x, decades(low_x, high_x), lambda v: f"{v:g}", bottom, top),
        axis("left", y, decades(low_y, peak * 3, 6), lambda v: number(v, "FLOP/s"), left, right),
        text((left + right) / 2, bottom + 34, "FLOP for each byte of memory traffic", anchor="middle", cls="label"),
    ]
    corner = max(low_x, low_y / machine.hbm_bandwidth)
    roof = [(corner, corner * machine.hbm_bandwidth), (ridge, peak), (high_x, peak)]
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in roof)
    elements.append(element("path", d=f"M{path}", cls="roof"))
    elements.append(text(right - 4, y(peak) - 8, f"{peak_name}, {number(peak, 'FLOP/s')}", anchor="end", cls="tick"))
    for point, spent in sorted(points.items(), key=lambda item: -item[1]):
        radius = max(2.5, 34 * math.sqrt(spent / report.seconds))
        tip = f"{point.name} at {point.where}: {number(point.rate, 'FLOP/s')}, {seconds(spent)} of the step"
        circle = {"cx": x(point.intensity), "cy": y(point.rate), "r": radius}
        elements.append(element("circle", tip=tip, cls=f"kernel-{point.kind}", **circle))
    return picture(width, bottom + 42, "roofline", *elements)


class _Point(NamedTuple):
    """Equal kernels of one line of the model."""

    intensity: float  # FLOP per byte
    rate: float  # FLOP per second
    kind: str  # "matmul" or "vector"
    name: str
    where: str


def _points(report: Report) -> dict[_Point, float]:
    """Seconds per step of every kernel that computes; kernels with a negligible share are omitted."""
    points: dict[_Point, float] = {}
    for event in report.timeline.events:
        flops = sum(line.flops for line in event.lines)
        moved = sum(line.hbm_bytes for line in event.lines)
        if isinstance(event.step, Kernel) and flops and moved and event.seconds:
            kind = "matmul" if any(line.kind in ("matmul", "conv") for line in event.lines) else "vector"
            where = line_of(event.lines[-1].where, 60)
            point = _Point(flops / moved, flops / event.seconds, kind, event.name, where)
            points[point] = points.get(point, 0.0) + event.seconds * event.trips
    return {point: t for point, t in points.items() if t > SMALL * report.seconds}


def collective_bars(reports: Mapping[str, Report]) -> str:
    """Collectives of each layout, by dims, axes and kind, at most 12: exposed time, followed by hidden time."""
    rows = [(name, group) for name, report in reports.items() for group in report.collectives[:12]]
    labels = [cut(str(group), 62) for _, group in rows]
    left, right = label_width(labels) + 16, WIDTH - 110
    most = max((group.seconds for _, group in rows), default=0.0) or 1.0
    scale = linear(0, most, left, right)
    legend_svg, top_y = legend([("part-3", "exposed"), ("hidden", "hidden behind compute")], left, 2, WIDTH - left)
    y = top_y + 6
    elements, first = [], y
    last_name = ""
    body: list[str] = []
    for label, (name, group) in zip(labels, rows, strict=True):
        if name != last_name and len(reports) > 1:
            body.append(text(8, y + 15, name, cls="strong"))
            y += 24
        last_name = name
        share = percent(group.exposed, reports[name].seconds)
        body.append(text(left - 10, y + 14, label, anchor="end", cls="label"))
        bar_width = scale(group.exposed) - left
        body.append(element("rect", tip=str(group), x=left, y=y + 2, width=bar_width, height=16, cls="part-3"))
        hidden = max(scale(group.seconds) - left - bar_width, 0.0)
        body.append(element("rect", tip=str(group), x=left + bar_width, y=y + 2, width=hidden, height=16, cls="hidden"))
        words = f"{seconds(group.exposed)}, {share}"
        body.append(text(left + bar_width + hidden + 7, y + 14, words, cls="label"))
        y += 24
    elements.append(axis("bottom", scale, steps(most), seconds, y + 2, first))
    return picture(WIDTH, y + 26, "collectives by dim", legend_svg, *elements, *body)


def lanes(report: Report, longest: float) -> str:
    """The timeline of one step: a compute lane, and a lane per set of mesh axes; `longest` sets the scale.

    A lane says what takes most of its time. Loops show their first trip. Events narrower than a third of a pixel are
    not drawn.
    """
    events = [event for event in report.timeline.events if event.seconds > 0]
    by_lane = {COMPUTE: [], **grouped(events, lambda event: event.lane)}
    computed = {name: t for name, t in report.parts.items() if name != PARTS[-1]}
    labels = {
        lane: (cut(lane, 30), _longest(computed if lane == COMPUTE else _by_kind(held)))
        for lane, held in by_lane.items()
    }
    left, right = label_width(words for pair in labels.values() for words in pair) + 16, WIDTH - 12
    scale = linear(0, longest, left, right)
    used = sorted({_part(event) for event in events if event.lines})
    entries = [(f"part-{i}", PART_TITLES[PARTS[i]].removesuffix(", exposed")) for i in used]
    loops = [("forward", "further trips of a loop")] if any(not event.lines for event in events) else []
    legend_svg, top = legend([*entries, *loops], 8, 2, WIDTH - 8)
    top += 8
    bottom = top + 40 * len(labels)
    elements = [legend_svg, axis("bottom", scale, steps(longest), seconds, bottom, top)]
    for i, (lane, held) in enumerate(by_lane.items()):
        y = top + 40 * i
        name, contents = labels[lane]
        elements += [text(left - 10, y + 11, name, anchor="end", cls="label")]
        elements += [text(left - 10, y + 26, contents, anchor="end", cls="tick")] if contents else []
        elements += _drawn(held, scale, y)
    return picture(WIDTH, bottom + 24, "timeline of a step by lane", *elements)


def _drawn(events: Sequence[Event], scale: Scale, y: float) -> Iterator[str]:
    """The events of a lane as bars, with their names where there is room."""
    for event in events:
        x, bar_width = scale(event.start), scale(event.seconds) - scale(0)
        if bar_width < 0.3:
            continue
        cls = f"part-{_part(event)}" if event.lines else "forward"
        backward = ", backward" if any(line.backward for line in event.lines) else ""
        tip = f"{event.name}, {seconds(event.seconds)}{backward}, {event.where}"
        yield element("rect", tip=tip, x=x, y=y, width=bar_width, height=28, cls=cls)
        if event.lines and bar_width > label_width([event.name]) + 6:
            yield text(x + bar_width / 2, y + 18, event.name, anchor="middle", cls="inside")


def _part(event: Event) -> int:
    """The part of the step that an event belongs to: a kernel to that of its longest kind of work."""
    kinds = [PART_OF[line.kind] for line in event.lines if line.kind in PART_OF]
    return min((PARTS.index(kind) for kind in kinds), default=PARTS.index("exposed communication"))


def _by_kind(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of a step by the kind of collective or move."""
    totals: dict[str, float] = {}
    for event in events:
        if event.lines:
            kind = event.lines[0].op.partition("(")[0].partition(" ")[0]
            totals[kind] = totals.get(kind, 0.0) + event.seconds * event.trips
    return totals


def _longest(totals: Mapping[str, float]) -> str:
    """The two that take most of the time."""
    most = sorted(totals.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {seconds(t)}" for name, t in most if t)
