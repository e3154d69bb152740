"""Objects in notebooks: short text, and well-formed HTML that escapes names and colours axes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

import meshdsl as md

HOSTILE = "<script>&"


def total(x: Any) -> md.Tensor:
    return md.sum(x[HOSTILE] * 2)


COMPILED = md.compile(total, "rows:2 cols:4", md.Layout("n:rows", overrides={"*<script>&": "m:cols"}))
SPECS = {HOSTILE: md.spec("n:8 m:4")}
PROGRAM = COMPILED.program(SPECS)
REPORT = COMPILED.cost(SPECS)
DATA = md.spec("n:8 m:4"), md.spec("m:4 k:4")
FOUND = md.search(lambda x, w: md.dot(x, w, "m"), *DATA, mesh="rows:2", machine="tpu-v5e")
OVERLAPPED = md.compile(total, "rows:2 cols:4", "n:rows", overlap="auto")
OVERLAPPED.program(SPECS)
OBJECTS: dict[str, tuple[Any, str]] = {
    "Program": (PROGRAM, "<program on rows:2 cols:4: 3 operations, 1 collective, 7 B sent by each device>"),
    "Graph": (COMPILED.graph(SPECS), "<graph: 1 input, 2 operations, 1 result>"),
    "Compiled": (COMPILED, "<compiled total on rows:2 cols:4, layout n:rows>"),
    "new": (md.compile(total, "rows:2", ""), "<compiled total on rows:2, layout (empty)>"),
    "Model": (md.model(total), "<model total(x)>"),
    "Mesh": (md.Mesh("rows:2 cols:4"), "Mesh('rows:2 cols:4')"),
    "one": (md.Mesh(), "Mesh('')"),
    "Layout": (COMPILED.layout, "Layout('n:rows', overrides={'*<script>&': {'m': ('cols',)}})"),
    "empty": (md.Layout(), "Layout('')"),
    "Report": (REPORT, repr(REPORT)),
    "SearchResult": (FOUND, "<search on tpu-v5e: best (no sharding) on rows:2>"),
    "OverlapPlan": (OVERLAPPED.overlap, "<overlap auto: none, 0 windows>"),
    "no overlap": (COMPILED.overlap, "<overlap none: none, 0 windows>"),
    "Picture": (md.show(PROGRAM), "Picture('program on rows:2 cols:4: 1 collective')"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_have_a_short_text(name: str):
    value, text = OBJECTS[name]
    assert repr(value) == text and "\n" not in text and len(text) < 120


@pytest.mark.parametrize("name", OBJECTS)
def test_html_is_well_formed_and_escaped(name: str):
    text = OBJECTS[name][0]._repr_html_()
    root = ET.fromstring(text)
    assert not any(each.tag.endswith("script") for each in root.iter())
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)


@pytest.mark.parametrize("name", ["Program", "Graph", "Report"])
def test_html_has_the_whole_text(name: str):
    value, _ = OBJECTS[name]
    pre = ET.fromstring(value._repr_html_()).find(".//pre")
    assert pre is not None and "".join(pre.itertext()) == str(value)


def test_axes_have_the_colours_of_their_place_in_the_mesh():
    for name in ("Program", "Compiled", "Mesh", "Report"):
        bold = ET.fromstring(OBJECTS[name][0]._repr_html_()).iter("b")
        assert {(b.text, b.attrib["class"]) for b in bold} == {("rows", "axis-0"), ("cols", "axis-1")}


def test_long_programs_are_closed():
    def long(x: md.Tensor) -> md.Tensor:
        for _ in range(40):
            x = md.tanh(x)
        return x

    specs = md.spec("n:8")
    assert "<details open>" in PROGRAM._repr_html_().replace('<details open="">', "<details open>")
    assert "<details>" in md.compile(long, "rows:2", "n:rows").program(specs)._repr_html_()


def test_the_html_of_a_compiled_function_compiles_nothing():
    illegal = md.compile(lambda x: x, "rows:2", "n:nowhere")
    with pytest.raises(md.LayoutError):
        illegal.program(md.spec("n:4"))
    assert "no program yet" in illegal._repr_html_()
