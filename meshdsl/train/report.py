"""Text output: tables, curves, and the collectives of a program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["chart", "collective_table", "collectives", "size", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A table with two spaces between columns; the first `left` columns are left-aligned, the others right-aligned.

    >>> print(table(["kind", "count"], [["all_reduce", 21]]))
    kind        count
    all_reduce     21
    """
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = (
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def size(n: float) -> str:
    """A number of bytes as text, with decimal units.

    >>> size(33_554_432), size(4)
    ('33.55 MB', '4 B')
    """
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= one:
            return f"{n / one:.2f} {unit}"
    return f"{n:.0f} B"


def collectives(program: Any) -> list[dict[str, Any]]:
    """The collectives of a program by kind, axes and dtype: counts and bytes per device, with loop trips included."""
    rows: dict[tuple[str, tuple[str, ...], str], dict[str, Any]] = {}
    for record in program.collectives:
        kind, axes, dtype = record.kind, record.axes, record.dtype.name
        fresh = {"kind": kind, "axes": list(axes), "dtype": dtype, "count": 0, "bytes": 0, "wire_bytes": 0}
        row = rows.setdefault((kind, axes, dtype), fresh)
        row["count"] += record.count
        row["bytes"] += record.count * record.bytes
        row["wire_bytes"] += record.count * record.wire_bytes
    return [rows[key] for key in sorted(rows)]


def collective_table(program: Any) -> str:
    """`collectives` as a table, with the total."""
    rows = collectives(program)
    if not rows:
        return "none"
    total: Mapping[str, int] = {key: sum(row[key] for row in rows) for key in ("count", "bytes", "wire_bytes")}
    lines = [[row["kind"], ",".join(row["axes"]), row["dtype"], *_sizes(row)] for row in rows]
    header = ["kind", "axes", "dtype", "count", "bytes", "sent by a device"]
    return table(header, [*lines, ["total", "", "", *_sizes(total)]], left=3)


def _sizes(row: Mapping[str, Any]) -> list[str]:
    return [str(round(row["count"], 4)), size(row["bytes"]), size(row["wire_bytes"])]


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
