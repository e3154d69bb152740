"""Text bars, tables and charts, readable without colour and within 100 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from . import Where

WIDTH = 100
T = TypeVar("T")
K = TypeVar("K")


def bar(part: float, whole: float, width: int = 30) -> str:
    """A bar whose length is the share; any share above 0 is visible.

    >>> bar(1, 4, 8), bar(1, 1000, 8), bar(0, 4, 8)
    ('██', '▏', '')
    """
    eighths = round(8 * width * min(part / whole, 1.0)) if whole > 0 and part > 0 else 0
    if part > 0 and not eighths:
        return "▏"
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def cut(text: str, width: int) -> str:
    """Cut text to at most `width` columns; an ellipsis marks the cut.

    >>> cut("models/transformer.py", 10)
    'models/tr…'
    """
    return text if len(text) <= width else text[: width - 1] + "…"


def line_of(where: Where, width: int = 30) -> str:
    """A source line in at most `width` columns; a long path keeps its end.

    >>> line_of(Where("/somewhere/very/far/away/transformer.py", 77), 20)
    '…y/transformer.py:77'
    """
    text = str(where) if where.file else ""
    return text if len(text) <= width else "…" + text[1 - width :]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, for a row each.

    >>> grouped(["sum", "max", "min"], lambda word: word[0])
    {'s': ['sum'], 'm': ['max', 'min']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    align: str,
    *,
    shrink: int = -1,
    indent: int = 2,
    width: int = WIDTH,
) -> str:
    """A table with columns two spaces apart, aligned `<` or `>` each; column `shrink` is cut if lines exceed the width.
    A column without any text is left out.

    >>> print(table(["kind", "time", "where"], [["all_reduce", "2 us", "model.py:7"]], "<><"))
      kind        time  where
      all_reduce  2 us  model.py:7
    """
    names, *texts = [list(map(str, row)) for row in [header, *rows]]
    shrink %= len(names)
    full = [i for i in range(len(names)) if not texts or i == shrink or any(row[i] for row in texts)]
    cells = [[row[i] for i in full] for row in (names, *texts)]
    header, align, shrink = [header[i] for i in full], "".join(align[i] for i in full), full.index(shrink)
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    others = indent + sum(widths) - widths[shrink] + 2 * (len(widths) - 1)
    widths[shrink] = max(len(header[shrink]), min(widths[shrink], width - others))
    lines = []
    for row in cells:
        row[shrink] = cut(row[shrink], widths[shrink])
        padded = (f"{cell:{side}{n}}" for cell, side, n in zip(row, align, widths, strict=True))
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def wrapped(words: Iterable[str], first: str, indent: int, width: int = WIDTH) -> str:
    """Wrap words over as many lines as needed; later lines are indented.

    >>> print(wrapped("one two three".split(), "say ", 4, 12))
    say one two
        three
    """
    lines = [first]
    fresh = True
    for word in words:
        if not fresh and len(lines[-1]) + 1 + len(word) > width:
            lines.append(" " * indent)
            fresh = True
        lines[-1] += word if fresh else f" {word}"
        fresh = False
    return "\n".join(lines)


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
