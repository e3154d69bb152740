"""`Picture`: a finished SVG, and the style that all pictures share. Light and dark follow the reader's system."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ...cost.report.svg import element
from ...errors.markup import AXIS_COLOURS, GROUND, INK, RULE, SOFT, style

# tints of blocks; equal blocks on several devices have equal tints
BLOCKS = (
    ("#a9cdf0", "#2c5b8c"),
    ("#fbcfa4", "#8a5526"),
    ("#cfbfe9", "#5d4791"),
    ("#b2dfc2", "#2c6b48"),
    ("#f5bfd0", "#88405a"),
    ("#e4dc92", "#69631f"),
    ("#a9dfe0", "#256a6e"),
    ("#dcc8b2", "#6c563d"),
)
FONT = "font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace"
STYLE = style(
    ".md-picture",
    [
        (".ground", "fill", GROUND),
        ("text", "fill", INK),
        (".soft", "fill", SOFT),
        (".outline", "stroke", SOFT),
        (".empty", "fill", ("#f3f5f7", "#1d232b")),
        (".rule", "stroke", RULE),
        (".hatch", "stroke", SOFT),
        (".halo", "stroke", GROUND),
        (".forward", "fill", ("#c9d3dd", "#3a444f")),
        (".backward", "fill", ("#8593a2", "#77848f")),
        (".dot", "fill", GROUND),
        *((f".block-{i}", "fill", pair) for i, pair in enumerate(BLOCKS)),
        *((f".axis-{i}", "fill", pair) for i, pair in enumerate(AXIS_COLOURS)),
        *((f".line-{i}", "stroke", pair) for i, pair in enumerate(AXIS_COLOURS)),
    ],
    f".md-picture text{{{FONT};font-size:12px}}.md-picture .small{{font-size:10.5px}}"
    f".md-picture .mono{{{MONO};font-size:11px}}.md-picture .strong{{font-weight:600}}"
    ".md-picture .big{font-size:14px;font-weight:600}.md-picture .sign{font-size:17px;font-weight:600}"
    ".md-picture .outline,.md-picture .band{fill:none}.md-picture .band{stroke-width:1.6}"
    ".md-picture .faint{fill-opacity:.22}.md-picture .hatch{stroke-width:1.1}"
    ".md-picture .halo{paint-order:stroke;stroke-width:4px}",
)


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing that notebooks show; `svg` is its text, `save` writes it. It contains no scripts and loads nothing.

    >>> import meshdsl as md
    >>> md.show(md.spec("batch:8"), "batch:rows", "rows:2")
    Picture('float32[batch=4/rows] on rows:2')
    """

    title: str
    svg: str

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="max-width:960px">{self.svg}</div>'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file."""
        Path(path).write_text(self.svg + "\n", encoding="utf-8")


def drawing(title: str, width: float, height: float, *content: str) -> Picture:
    """A complete picture on its own ground, so that it is legible on every page."""
    width, height = math.ceil(width), math.ceil(height)
    ground = element("rect", x=0, y=0, width=width, height=height, rx=8, cls="ground")
    svg = element(
        "svg",
        element("style", STYLE),
        ground,
        "\n".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        style="max-width:100%;height:auto",
        cls="md-picture",
        role="img",
        aria_label=title,
    )
    return Picture(title, svg)
