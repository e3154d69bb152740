"""The page is well-formed, self-contained, and nothing in it overlaps or leaves its drawing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

import meshdsl as md
from meshdsl.commands.costing import pictures_of
from meshdsl.report import charts
from meshdsl.report.html import page
from meshdsl.report.report import Report
from meshdsl.report.svg import CHARACTER

X, W = md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096")


def report(layout: str, mesh: str = "rows:2 cols:4", limit: float | None = None) -> Report:
    def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.sum(md.tanh(md.dot(x, w, "io")))

    return md.compile(product, mesh, layout).cost(X, W, limit=limit)


ONE = {"batch & <io>": report("batch:rows io:cols")}
FIVE = {
    "a layout with a name that goes on and on, longer than any drawing has room for": report("batch:rows"),
    "io": report("io:cols"),
    "tight": report("io:cols hidden:rows", limit=1e6),
    "near": report("io:cols hidden:rows", limit=1.1e8),
    "alone": report("", "all:1"),
}


@pytest.mark.parametrize("reports", [ONE, FIVE], ids=["one", "five"])
def test_the_page_is_well_formed_and_self_contained(reports: dict[str, Report]):
    text = page(reports)
    body = re.sub(r"<meta[^>]*>", "", text.partition("\n")[2])
    ET.fromstring(body)
    assert not re.search(r"https?://|<script|<link|<img|@import|url\(", text)
    assert text.count("<svg") == 2 + 3 * len(reports)
    assert "prefers-color-scheme: dark" in text
    for name in reports:
        assert name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_the_page_has_the_pictures_of_the_programs():
    pictures = pictures_of(ONE)
    text = page(ONE, pictures)
    ET.fromstring(re.sub(r"<meta[^>]*>", "", text.partition("\n")[2]))
    assert all(svg in text for svg in pictures.values()) and "batch &amp; &lt;io&gt;" in text


def drawings() -> list[tuple[str, str]]:
    found = [("bars", charts.time_bars(FIVE)), ("sends", charts.collective_bars(FIVE))]
    longest = max(each.seconds for each in FIVE.values())
    found += [(f"lanes {name[:5]}", charts.lanes(each, longest)) for name, each in FIVE.items()]
    for width in (460, 920):
        for name, each in FIVE.items():
            found += [(f"memory {name[:5]} {width}", charts.memory_over_time(each, width))]
            found += [(f"roofline {name[:5]} {width}", charts.roofline_scatter(each, width))]
    return found


@pytest.mark.parametrize(("name", "drawn"), drawings(), ids=[name for name, _ in drawings()])
def test_labels_stay_inside_and_apart(name: str, drawn: str):
    svg = ET.fromstring(drawn)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    boxes: list[tuple[float, float, float, float, str]] = []
    for each in svg.iter("text"):
        words, x, y = each.text or "", float(each.attrib["x"]), float(each.attrib["y"])
        wide = CHARACTER * 0.92 * len(words)  # the reserve is for the widest font
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[each.attrib["text-anchor"]]
        boxes.append((left, left + wide, y - 9, y + 2, words))
        assert left >= -2 and left + wide <= width + 2 and 0 <= y <= height, f"{words!r} leaves the drawing"
    for i, (a0, a1, b0, b1, one) in enumerate(boxes):
        for c0, c1, d0, d1, other in boxes[i + 1 :]:
            apart = a1 <= c0 or c1 <= a0 or b1 <= d0 or d1 <= b0
            assert apart, f"{one!r} and {other!r} overlap"


def test_bars_are_as_long_as_their_parts():
    svg = ET.fromstring(charts.time_bars(ONE))
    found = next(iter(ONE.values()))
    bars = [r for r in svg.iter("rect") if r.attrib["height"] == "26"]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [w / sum(widths) for w in widths] == pytest.approx(
        [t / found.seconds for t in found.parts.values()], abs=1e-3
    )


def test_no_colour_is_written_into_a_drawing():
    assert all("#" not in drawn and "fill=" not in drawn for _, drawn in drawings())
