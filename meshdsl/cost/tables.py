"""Text for people: units, bars and tables, readable without colour and within 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import Where

__all__ = ["WIDTH", "bar", "cut", "line_of", "number", "percent", "seconds", "table", "wrapped"]

WIDTH = 100


def seconds(t: float) -> str:
    """Time with three digits.

    >>> seconds(0.0412), seconds(2.5e-6), seconds(0.9998), seconds(0)
    ('41.2 ms', '2.50 us', '1.00 s', '0 s')
    """
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(t) >= 0.9995 * one:
            return f"{_digits(t / one)} {unit}"
    return "0 s"


def number(n: float, unit: str = "") -> str:
    """A count with three digits and a prefix in powers of ten.

    >>> number(3.2e12, "FLOP/s"), number(950), number(0, "FLOP")
    ('3.20 TFLOP/s', '950', '0 FLOP')
    """
    for prefix, one in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.9995 * one:
            return f"{_digits(n / one)} {prefix}{unit}".rstrip()
    return f"{n:.0f} {unit}".rstrip()


def _digits(x: float) -> str:
    return f"{x:.{2 if abs(x) < 9.995 else 1 if abs(x) < 99.95 else 0}f}"


def percent(part: float, whole: float) -> str:
    """A share; more than nothing never reads as 0.

    >>> percent(41, 100), percent(1, 1000), percent(1, 100_000), percent(0, 7)
    ('41 %', '0.1 %', '<0.1 %', '0 %')
    """
    share = 100 * part / whole if whole else 0.0
    if share == 0:
        return "0 %"
    if abs(share) < 0.05:
        return "<0.1 %"
    return f"{share:.0f} %" if abs(share) >= 9.95 else f"{share:.1f} %"


def bar(part: float, whole: float, width: int = 30) -> str:
    """A bar as long as its share; what is more than nothing shows.

    >>> bar(1, 4, 8), bar(1, 1000, 8), bar(0, 4, 8)
    ('██', '▏', '')
    """
    eighths = round(8 * width * min(part / whole, 1.0)) if whole > 0 and part > 0 else 0
    if part > 0 and not eighths:
        return "▏"
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def cut(text: str, width: int) -> str:
    """At most so many columns; what is left out shows as an ellipsis.

    >>> cut("models/transformer.py", 10)
    'models/tr…'
    """
    return text if len(text) <= width else text[: width - 1] + "…"


def line_of(where: Where, width: int = 30) -> str:
    """A line of the user's in at most so many columns: the end of its path is kept.

    >>> line_of(Where("/somewhere/very/far/away/transformer.py", 77), 20)
    '…y/transformer.py:77'
    """
    text = str(where) if where.file else ""
    return text if len(text) <= width else "…" + text[1 - width :]


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    align: str,
    *,
    shrink: int = -1,
    indent: int = 2,
    width: int = WIDTH,
) -> str:
    """Columns two spaces apart, aligned `<` or `>` each; `shrink` is the one cut where a line would pass the width.

    >>> print(table(["kind", "time", "where"], [["all_reduce", "2 us", "model.py:7"]], "<><"))
      kind        time  where
      all_reduce  2 us  model.py:7
    """
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    shrink %= len(widths)
    others = indent + sum(widths) - widths[shrink] + 2 * (len(widths) - 1)
    widths[shrink] = max(len(header[shrink]), min(widths[shrink], width - others))
    lines = []
    for row in cells:
        row[shrink] = cut(row[shrink], widths[shrink])
        padded = (f"{cell:{side}{n}}" for cell, side, n in zip(row, align, widths, strict=True))
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def wrapped(words: Iterable[str], first: str, indent: int, width: int = WIDTH) -> str:
    """Words over as many lines as they need, the later ones indented.

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
