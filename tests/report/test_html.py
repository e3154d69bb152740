"""The page is well-formed, self-contained, and nothing in it overlaps or leaves its drawing."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.cost.report import charts
from meshdsl.cost.report.html import SCRIPT, page
from meshdsl.cost.report.report import Report
from meshdsl.cost.report.svg import CHARACTER
from meshdsl.tools.commands.costing import pictures_of

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
    assert not re.search(r"https?://|<link|<img|@import|url\(", text)
    assert text.count("<svg") == 2 + 3 * len(reports)
    assert "prefers-color-scheme: dark" in text
    for name in reports:
        assert name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_the_page_has_one_script_which_its_policy_allows_and_which_asks_for_nothing():
    text = page(ONE)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert text.count("<script") == 1 and not re.search(
        r"fetch|http|import|eval|innerHTML|src|Function|storage", script
    )
    assert not re.search(r"\son\w+=", text)  # no handlers in attributes, which the policy would refuse


def test_the_tables_of_the_page_have_headings_and_numbers_to_sort_by():
    text = page(FIVE)
    tables = [ET.fromstring(each) for each in re.findall(r"<table.*?</table>", text, re.DOTALL)]
    assert len(tables) == 1 + len(FIVE)
    for table in tables:
        heads, rows = table.findall("thead/tr/th"), table.findall("tbody/tr")
        assert heads and rows and {len(row) for row in rows} == {len(heads)}
        for row in rows:
            assert all(cell.text or "".join(cell.itertext()) == "" for cell in row)
            amounts = [float(cell.attrib["data-sort"]) for cell in row if "data-sort" in cell.attrib]
            assert len(amounts) >= 5 and min(amounts) >= 0


FAKE_TABLE = """
const clicks = [], rows = [["b", "2 ms", "0.002"], ["a", "10 us", "0.00001"], ["c", "1 s", "1"]].map(
  ([name, text, sort]) => ({cells: [{textContent: name, dataset: {}}, {textContent: text, dataset: {sort}}]}));
const heads = ["name", "time"].map((textContent) => ({textContent, at: {},
  replaceChildren(button) { clicks.push(button) },
  getAttribute(k) { return this.at[k] ?? null }, setAttribute(k, v) { this.at[k] = v },
  removeAttribute(k) { delete this.at[k] }}));
const body = {rows, append(...sorted) { this.rows = sorted }};
const table = {tHead: {rows: [{cells: heads}]}, tBodies: [body]};
globalThis.document = {querySelectorAll: () => [table],
  createElement: () => ({addEventListener(event, run) { this.click = run }})};
"""
CLICKS = """
const names = () => body.rows.map((row) => row.cells[0].textContent).join("");
for (const i of [0, 0, 1, 1]) { clicks[i].click(); console.log(names(), heads[i].at["aria-sort"]) }
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script of the page")
def test_the_script_of_the_page_sorts_by_text_and_by_amounts():
    run = subprocess.run(["node", "-e", FAKE_TABLE + SCRIPT + CLICKS], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["abc ascending", "cba descending", "abc ascending", "cba descending"]


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


def test_files_that_are_not_python_are_package_data():
    root = Path(md.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = {
        file for pattern in project["tool"]["setuptools"]["package-data"]["meshdsl"] for file in root.glob(pattern)
    }
    others = {file for file in root.rglob("*.*") if file.suffix not in (".py", ".pyc")}
    assert others <= packaged, sorted(map(str, others - packaged))
