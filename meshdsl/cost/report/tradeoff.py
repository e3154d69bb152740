"""The picture of a search: every costed plan by time and memory, with those that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...errors.units import seconds, show_bytes
from .svg import axis, element, legend, linear, picture, steps, text

WIDTH, HEIGHT = 920, 380


class TradeoffPoint(NamedTuple):
    """One plan: seconds of a step, peak bytes of a device, and its text."""

    seconds: float
    peak_bytes: float
    words: str


def tradeoff(points: Sequence[TradeoffPoint], limit: float) -> str:
    """Plans by memory and time as SVG; a line joins those on the front, another marks the memory limit.

    Requires at least one point. Plans slower than four times the fastest that fits are left out.

    >>> points = [TradeoffPoint(1.0, 2e9, "a"), TradeoffPoint(2.0, 1e9, "b"), TradeoffPoint(2.0, 3e9, "c")]
    >>> tradeoff(points, limit=2.5e9).count("<circle"), [p.words for p in pareto(points)]
    (3, ['a', 'b'])
    """
    fastest = min((p.seconds for p in points if p.peak_bytes <= limit), default=min(p.seconds for p in points))
    shown = [p for p in points if p.seconds <= 4 * fastest]
    left, right, bottom, top = 96, WIDTH - 20, HEIGHT - 46, 34
    most, slowest = 1.05 * max(p.peak_bytes for p in shown), 1.05 * max(p.seconds for p in shown)
    x, y = linear(0, most, left, right), linear(0, slowest, bottom, top)
    entries = [("kernel-matmul", "no other plan is faster and smaller"), ("kernel-vector", "others")]
    elements = [
        legend(entries, left, 2, right - left)[0],
        axis("bottom", x, steps(most), show_bytes, bottom, top),
        axis("left", y, steps(slowest), seconds, left, right),
        text((left + right) / 2, bottom + 34, "peak memory of one device", anchor="middle", cls="label"),
    ]
    if limit < most:
        elements.append(element("line", x1=x(limit), x2=x(limit), y1=float(bottom), y2=float(top), cls="limit"))
    front = pareto(shown)
    path = "L".join(f"{x(p.peak_bytes):.1f} {y(p.seconds):.1f}" for p in front)
    elements.append(element("path", d=f"M{path}", cls="roof"))
    for p in sorted(shown, key=lambda p: p in front):
        cls = "kernel-matmul" if p in front else "kernel-vector"
        tip = f"{seconds(p.seconds)}, {show_bytes(p.peak_bytes)}: {p.words}"
        elements.append(element("circle", tip=tip, cls=cls, cx=x(p.peak_bytes), cy=y(p.seconds), r=5.0))
    return picture(WIDTH, HEIGHT, "time against memory", *elements)


def pareto(points: Iterable[Any]) -> list[Any]:
    """The points, with `seconds` and `peak_bytes`, that no other beats in both; fastest first."""
    front: list[Any] = []
    for p in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not front or p.peak_bytes < front[-1].peak_bytes:
            front.append(p)
    return front
