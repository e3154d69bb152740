"""Curves of runs, from the records that `meshdsl train --metrics` writes: an SVG chart for each metric, and a page."""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...errors.units import number
from .html import document
from .svg import axis, between, element, legend, linear, picture, steps, text

Curve = Sequence[tuple[int, float]]  # (step, value), ascending by step
WIDTH, HEIGHT = 920, 300
POINTS = 1200  # a longer curve is drawn by means of equal numbers of neighbours
_SKIPPED = ("step", "batches", "seconds_left", "compile_seconds", "skipped", "schema_version")


def curves_of(lines: Iterable[str]) -> dict[str, Curve]:
    """The curves in JSON lines, by name: `loss`, `eval loss`, `seconds`, ...

    >>> step, evaluation = '{"event": "step", "step": 1, "loss": 2.5}', '{"event": "eval", "step": 1, "loss": 2.0}'
    >>> curves_of([step, evaluation, "{}", '{"event": "st'])
    {'loss': [(1, 2.5)], 'eval loss': [(1, 2.0)]}

    If a step appears twice, as in a run that was resumed, the later line is used. Other lines are ignored,
    and so are NaN and infinities.
    """
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        record = _record(line)
        group = {"step": "", "eval": "eval "}.get(str(record.get("event")))
        step = record.get("step")
        if group is None or not isinstance(step, int):
            continue
        for name, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in _SKIPPED and abs(value) <= sys.float_info.max:  # NaN is not
                values.setdefault(group + name, {})[step] = float(value)
    return {name: sorted(by_step.items()) for name, by_step in values.items()}


def _record(line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the last line of a run that was killed
        return {}
    return record if isinstance(record, dict) else {}


def curves_page(runs: Mapping[str, Mapping[str, Curve]]) -> str:
    """A self-contained HTML page with a chart of each metric, in which every run is a curve.

    >>> text = curves_page({"a": {"loss": [(1, 2.5), (2, 2.0)]}, "b": {"loss": [(1, 2.4)]}})
    >>> text[:15], text.count("<svg"), "://" in text
    ('<!doctype html>', 1, False)
    """
    names = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    title = "Runs: " + ", ".join(runs) if len(runs) > 1 else f"Run {next(iter(runs), '')}"
    style = ".curve { fill: none; stroke-width: 1.6 } " + "".join(
        f".curve-{i} {{ stroke: var(--held-{i}) }} .dot-{i} {{ fill: var(--held-{i}) }} " for i in range(7)
    )  # fmt: skip
    sections = [element("h1", html.escape(title))]
    for name in names:
        sections += [
            element("h2", html.escape(name)),
            element("div", _chart(name, {r: c[name] for r, c in runs.items() if name in c}, list(runs)), cls="wide"),
        ]
    return document(title, sections, style)


def _chart(name: str, curves: Mapping[str, Curve], runs: Sequence[str]) -> str:
    left, right = 76, WIDTH - 12
    colour = {run: i % 7 for i, run in enumerate(runs)}
    drawn, top = legend([(f"held-{colour[run]}", run) for run in curves], left, 2, right - left)
    top, bottom = top + 8, HEIGHT + top
    points = [point for curve in curves.values() for point in curve]
    low, high = min(value for _, value in points), max(value for _, value in points)
    last = max(step for step, _ in points)
    x, y = linear(0, last, left, right), linear(low, high if high > low else low + 1.0, bottom, top)
    marks = [
        drawn,
        axis("left", y, between(low, high), _figure, left, right),
        axis("bottom", x, _whole(last), number, bottom, top),
    ]
    for run, curve in curves.items():
        marks.append(_line(_thinned(curve), x, y, run, colour[run]))
    return picture(WIDTH, bottom + 34, name, *marks, text(right, bottom + 30, "step", anchor="end", cls="tick"))


def _line(curve: Curve, x: Callable[[float], float], y: Callable[[float], float], run: str, colour: int) -> str:
    tip = f"{run}: {_figure(curve[-1][1])} at step {curve[-1][0]}"
    if len(curve) == 1:
        return element("circle", tip=tip, cx=x(curve[0][0]), cy=y(curve[0][1]), r=3, cls=f"dot-{colour}")
    path = " ".join(f"{'L' if n else 'M'}{x(step):.1f} {y(value):.1f}" for n, (step, value) in enumerate(curve))
    return element("path", tip=tip, d=path, cls=f"curve curve-{colour}")


def _thinned(curve: Curve) -> Curve:
    """At most `POINTS` points: the last step and the mean value of equal numbers of neighbours."""
    size = math.ceil(len(curve) / POINTS)
    groups = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _whole(last: int) -> list[float]:
    return [tick for tick in steps(max(last, 1)) if tick == int(tick)]


def _figure(value: float) -> str:
    return f"{value:.4g}"
