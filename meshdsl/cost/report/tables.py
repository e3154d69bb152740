"""Text bars and tables, readable without colour and within 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import Where

WIDTH = 100


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
