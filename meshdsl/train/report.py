"""Text output: tables, curves, and the collectives of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..cost.report.tables import table
from ..errors.units import show_bytes

__all__ = ["chart", "collective_table", "collectives", "table"]


def collectives(program: Any) -> list[dict[str, Any]]:
    """The collectives of a program, summed per kind and axes: counts and bytes per device, with loop trips included."""
    rows: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for record in program.collectives:
        fresh = {"kind": record.kind, "axes": list(record.axes), "count": 0, "bytes": 0, "wire_bytes": 0}
        row = rows.setdefault((record.kind, record.axes), fresh)
        row["count"] += record.count
        row["bytes"] += record.count * record.bytes
        row["wire_bytes"] += record.count * record.wire_bytes
    return [rows[key] for key in sorted(rows)]


def collective_table(program: Any) -> str:
    """`collectives` as a table, with the total."""
    rows = collectives(program)
    if not rows:
        return "none"
    total = {"kind": "total", "axes": (), **{key: sum(row[key] for row in rows) for key in _AMOUNTS}}
    lines = [
        [row["kind"], ",".join(row["axes"]), round(row["count"], 4), *(show_bytes(row[key]) for key in _AMOUNTS[1:])]
        for row in [*rows, total]
    ]
    return table(["kind", "axes", "count", "bytes", "sent by a device"], lines, "<<>>>", indent=0)


_AMOUNTS = ("count", "bytes", "wire_bytes")


def chart(curves: Mapping[str, Sequence[float]], *, width: int = 64, height: int = 12) -> str:
    """A text chart of curves over the same steps. A digit is the number of curves that share a cell.

    >>> print(chart({"a": [3, 2, 1], "b": [3, 2, 2]}, width=3, height=3))
     3.00 │2
     2.00 │ 2b
     1.00 │  a
          └───
    """
    points = len(next(iter(curves.values())))
    width = min(width, points)
    low, high = _round_levels(min(map(min, curves.values())), max(map(max, curves.values())), height)
    grid: list[list[set[str]]] = [[set() for _ in range(width)] for _ in range(height)]
    for name, values in curves.items():
        for column in range(width):
            value = values[round(column * (points - 1) / max(width - 1, 1))]
            row = round((high - value) / ((high - low) or 1) * (height - 1))
            grid[row][column].add(name)
    marks = ["".join(_mark(names) for names in row).rstrip() for row in grid]
    levels = (high - (high - low) * i / max(height - 1, 1) for i in range(height))
    lines = [f"{level:5.2f} │{mark}" for level, mark in zip(levels, marks, strict=True)]
    return "\n".join([*lines, "      └" + "─" * width])


def _round_levels(low: float, high: float, height: int) -> tuple[float, float]:
    """The least and the greatest of `height` equally spaced round numbers that hold all values.

    >>> _round_levels(1.13, 1.44, height=5), _round_levels(-3.2, -1.1, height=4)
    ((1.1, 1.5), (-4.0, -1.0))
    """
    if not low < high or height < 3:
        return low, high
    power = 10.0 ** math.floor(math.log10((high - low) / (height - 1)))
    steps = (power * n for n in (1, 2, 5, 10, 20))  # the last spans twice the values
    spans = ((first := math.floor(low / step + 1e-9) * step, first + (height - 1) * step) for step in steps)
    return next((first, last) for first, last in spans if last >= high - 1e-12 * abs(high))


def _mark(names: set[str]) -> str:
    if len(names) == 1:
        return next(iter(names))[0]
    return str(len(names)) if names else " "
