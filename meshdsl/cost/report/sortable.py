"""Tables of an HTML report that a click on a heading sorts. Without scripts they read the same and stay in their order.

The script is part of the page and asks for nothing: the page's policy allows this one script, by its hash, and no
network at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass

from .svg import element

__all__ = ["POLICY", "SCRIPT", "STYLE", "Cell", "sortable"]

# no "<" and "&", so that the page stays well-formed XML; a heading becomes a button, so that keys work too
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
  const key = (row, i) => row.cells[i].dataset.sort ?? row.cells[i].textContent;
  const order = (a, b) => isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b)) : a - b;
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows).sort((a, b) => (down ? -1 : 1) * order(key(a, i), key(b, i)));
      body.append(...rows);
    });
  });
}
"""

STYLE = """
th button { all: unset; cursor: pointer } th button:hover { color: var(--ink) }
th button:focus-visible { outline: 2px solid var(--part-0) }
th[aria-sort=ascending] button::after { content: " \\25b2" }
th[aria-sort=descending] button::after { content: " \\25bc" }
"""

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which it sorts; None: by its text. Cells of class "words" wrap."""

    text: str
    amount: float | None = None
    cls: str = ""


def sortable(header: Sequence[str], rows: Sequence[Sequence[Cell]], classes: Sequence[str] = ()) -> str:
    """A table that scrolls on a narrow screen; `classes` are those of the rows.

    >>> print(sortable(["layout", "step"], [[Cell("a & b"), Cell("2.0 ms", 0.002)]]))
    <div class="scroll"><table class="sortable"><thead><tr><th>layout</th><th>step</th></tr></thead><tbody><tr><td>a \
&amp; b</td><td data-sort="0.002">2.0 ms</td></tr></tbody></table></div>
    """
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
