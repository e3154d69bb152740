"""Colours and HTML of what notebooks show. Mesh axes have the same colours in text and in the pictures of `md.show`.

A colour is a pair: for light and for dark pages. An axis has the colour of its position in the mesh.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

GROUND, INK = ("#ffffff", "#14181e"), ("#1b2430", "#e4e9ef")
SOFT, RULE = ("#5b6675", "#9aa6b4"), ("#d5dbe2", "#39424e")
AXIS_COLOURS = (
    ("#2463ab", "#6aa9ef"),
    ("#b8500f", "#f09a5e"),
    ("#7247a8", "#b698e6"),
    ("#25774a", "#73c791"),
    ("#a8275c", "#f08cb4"),
    ("#1d7480", "#67c6d2"),
)
Colour = tuple[str, str]


def axis_number(axes: Iterable[str], axis: str) -> int:
    """The number of a mesh axis's colour."""
    return list(axes).index(axis) % len(AXIS_COLOURS)


def axis_class(axes: Iterable[str], axis: str) -> str:
    """The CSS class of a mesh axis.

    >>> axis_class(["rows", "cols"], "cols")
    'axis-1'
    """
    return f"axis-{axis_number(axes, axis)}"


def style(scope: str, rules: Sequence[tuple[str, str, Colour]], fixed: str = "") -> str:
    """A style sheet for elements inside `scope`; each rule is a selector, a property, and its two colours.

    >>> print(style(".m", [("text", "fill", ("#000", "#fff"))]))
    .m text{fill:#000}
    @media (prefers-color-scheme:dark){.m text{fill:#fff}}
    """
    light, dark = ("".join(f"{scope} {name}{{{key}:{pair[i]}}}" for name, key, pair in rules) for i in (0, 1))
    return f"{fixed}{light}\n@media (prefers-color-scheme:dark){{{dark}}}"


_STYLE = style(
    ".meshdsl",
    [(f".axis-{i}", "color", pair) for i, pair in enumerate(AXIS_COLOURS)] + [(".soft", "color", SOFT)],
    ".meshdsl,.meshdsl pre{font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace}"
    ".meshdsl pre{margin:2px 0 6px;overflow-x:auto;white-space:pre;background:none}"
    ".meshdsl summary{cursor:pointer}.meshdsl table{border-collapse:collapse}"
    ".meshdsl td,.meshdsl th{padding:1px 12px 1px 0;text-align:left;font-weight:normal}"
    ".meshdsl b[class]{font-weight:600}",
)


def coloured(text: str, axes: Iterable[str] = ()) -> str:
    """Text as HTML: escaped, with the names of mesh axes in their colours.

    An axis name is coloured where programs, layouts and meshes write axes: after `/`, `:`, `,`, `+` or `over`, and
    before `:` and a size. A dim of the same name is not.

    >>> coloured("[batch=2/rows] <x>", ["rows"])
    '[batch=2/<b class="axis-0">rows</b>] &lt;x&gt;'
    """
    axes = list(axes)
    escaped = html.escape(text, quote=False)
    if not axes:
        return escaped

    def mark(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return f'<b class="{axis_class(axes, name)}">{name}</b>'

    return re.sub(axis_pattern(axes), mark, escaped)


def axis_pattern(axes: Sequence[str]) -> str:
    """A regular expression for names of axes where programs, layouts and meshes write them; see `coloured`."""
    names = "|".join(sorted(map(re.escape, axes), key=len, reverse=True))
    return rf"(?:(?<=[/,:+])|(?<=\bover ))({names})(?![\w=])|\b({names})(?=:\d)"


def page_part(title: str, text: str = "", axes: Iterable[str] = (), *, opened: bool = True) -> str:
    """The `_repr_html_` of an object: a title line, below it monospace text that a click opens or closes.

    >>> print(page_part("a < b").partition("</style>")[2])
    <div>a &lt; b</div></div>
    """
    axes = list(axes)
    head, body = coloured(title, axes), f"<pre>{coloured(text, axes)}</pre>" if text else ""
    if body:
        state = ' open=""' if opened else ""
        inner = f"<details{state}><summary>{head}</summary>{body}</details>"
    else:
        inner = f"<div>{head}</div>"
    return f'<div class="meshdsl"><style>{_STYLE}</style>{inner}</div>'


def titled(text: str, axes: Iterable[str] = ()) -> str:
    """The `_repr_html_` of an object whose printed text starts with a title line.

    >>> print(titled("title\\n  row").partition("</style>")[2])
    <details open=""><summary>title</summary><pre>  row</pre></details></div>
    """
    title, _, rest = text.partition("\n")
    return page_part(title, rest.strip("\n"), axes)


def table(rows: Mapping[str, str], axes: Iterable[str] = ()) -> str:
    """Names and texts as a table of two columns, in HTML; axes have their colours.

    >>> table({"mesh": "rows:2"})
    '<table><tr><th class="soft">mesh</th><td>rows:2</td></tr></table>'
    """
    axes = list(axes)
    cells = (f'<tr><th class="soft">{html.escape(k)}</th><td>{coloured(v, axes)}</td></tr>' for k, v in rows.items())
    return f"<table>{''.join(cells)}</table>"
