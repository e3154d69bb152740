"""Pictures are well-formed, self-contained and repeatable, and draw what the program stores and sends."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.lowering import Program
from meshdsl.lowering.permute import coordinates, index_along
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm
from meshdsl.tools.pictures.picture import Picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return ["".join(each.itertext()) for each in ET.fromstring(picture.svg).iter(f"{SVG}text")]


def program(layout: str, mesh: str = "rows:2 cols:4") -> Program:
    return md.compile(mlp.train_step(), mesh, layout).program(*mlp.specs())


def layers(mesh: str, layout: str) -> Program:
    return md.compile(lm.train_step(), mesh, layout).program(*lm.specs())


def step(f: Callable[..., Any], mesh: str, layout: str, *specs: Any) -> Picture:
    return md.show(md.compile(f, mesh, layout).program(*specs))


@functools.cache  # plans of one process may differ by an operation
def overlapped() -> Program:
    compiled = md.compile(lm.train_step(), "all:8", "batch:all", overlap="list", machine="a100-p4de")
    return compiled.program(*lm.specs())


SPEC = md.spec("batch:64 io:32")
PICTURES = {
    "both": lambda: md.show(SPEC, "batch:rows; io:cols", "rows:2 cols:4"),
    "partial": lambda: md.show(SPEC, md.Sharding.of({"batch": ("rows",)}, partial=("cols",)), "rows:2 cols:4"),
    "padded": lambda: md.show(md.spec("batch:10 io:5"), "batch:rows; io:cols", "rows:4 cols:2"),
    "deep": lambda: md.show(md.spec("a:4 b:8 c:6 d:3"), "a:x; b:y; c:z", "x:2 y:2 z:2"),
    "deeper": lambda: md.show(md.spec("a:4 b:8 c:6 d:4"), "a:w; b:x; c:y; d:z", "w:2 x:2 y:2 z:2"),
    "large": lambda: md.show(md.spec("batch:40960 io:8"), "batch:rows,cols", "rows:64 cols:64"),
    "one": lambda: md.show(md.spec("batch:5"), "", "rows:1"),
    "scalar": lambda: md.show(md.tensor(1.0, ""), "", "rows:4"),
    "one axis": lambda: md.show(md.spec("batch:30"), "batch:all", "all:8"),
    "maximum": lambda: md.show(SPEC, md.Sharding.of({}, ("rows",), "max"), "rows:3"),
    "program": lambda: md.show(program("batch:rows; hidden:cols")),
    "three axes": lambda: md.show(program("batch:rows; hidden:cols; io:planes", "rows:2 cols:2 planes:2")),
    "loops": lambda: md.show(layers("rows:2 cols:4", "batch:rows; heads:cols")),
    "permute": lambda: step(lambda x: md.roll(md.sort(x, "n"), "n", 1), "rows:8", "n:rows", md.spec("n:64")),
    "nothing": lambda: step(lambda x: x * 2, "rows:2", "n:rows", md.spec("n:4")),
    "starts": lambda: md.show(overlapped()),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_well_formed_self_contained_and_repeatable(name: str):
    picture = PICTURES[name]()
    svg = ET.fromstring(picture.svg)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    assert picture.svg == PICTURES[name]().svg
    assert not re.search(
        r"<script|<image|@import|url\(|nan|inf[^o]", picture.svg.replace("http://www.w3.org/2000/svg", "")
    )
    assert "prefers-color-scheme:dark" in picture.svg and svg.attrib["aria-label"] == picture.title
    for each in svg.iter(f"{SVG}rect"):
        x, y, w, h = (float(each.attrib.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= -0.1 and y >= -0.1 and x + w <= width + 0.1 and y + h <= height + 0.1


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in ("large",)])
def test_colours_are_classes_that_the_style_has(name: str):
    svg = ET.fromstring(PICTURES[name]().svg)
    style = svg[0].text or ""
    used = {cls for each in svg.iter() for cls in each.attrib.get("class", "").split()} - {"md-picture"}
    assert {cls for cls in used if f".{cls}{{" not in style} == set()
    assert not any("#" in value for each in svg.iter() if each is not svg[0] for value in each.attrib.values())


def test_every_device_has_the_range_that_it_stores():
    spec = md.spec("batch:10 io:32")
    picture = md.show(spec, "batch:rows; io:cols", "rows:4 cols:2")
    found = md.compile(lambda x: x, "rows:4 cols:2", "batch:rows; io:cols").program(spec)
    (var,) = found.ins
    tips = [each.text or "" for each in ET.fromstring(picture.svg).iter(f"{SVG}title")]
    for device, coords in enumerate(coordinates(found.mesh)):
        words: list[str] = []
        for dim, size in zip(var.dims, found.local_shape(var), strict=True):
            start = index_along(found.mesh, coords, var.sharding.axes(dim)) * size
            end = min(start + size, dim.size) - 1
            words.append(f"{dim.name} {start}…{end}" if end > start else f"{dim.name} {start}")
        assert f"device {device}: {', '.join(words)}" in tips


def test_signs_say_how_blocks_relate():
    words = texts(md.show(SPEC, md.Sharding.of({"batch": ("rows",)}, partial=("cols",)), "rows:2 cols:4 planes:2"))
    assert "terms of one sum along cols" in words and "copies along planes" in words
    assert words.count("=") == 8 + 1 and "term 4 of 4" in words  # eight pairs of planes, and the legend
    assert "different blocks along rows" in words


def test_padding_is_hatched_only_where_it_is_stored():
    padded = md.show(md.spec("batch:10"), "batch:rows", "rows:4")
    assert padded.svg.count('class="hatch"') == 3  # in the tensor, on the last device, in the legend
    assert 'class="hatch"' not in md.show(md.spec("batch:12"), "batch:rows", "rows:4").svg


def test_a_programs_picture_has_each_collective():
    found = program("batch:rows; hidden:cols")
    words = texts(md.show(found))
    for record in found.collectives:
        assert str(record.cause) in words and str(record.op) in words
    total = sum(record.wire_bytes * record.count for record in found.collectives)
    assert any(
        line.startswith(f"{len(found.collectives)} collectives; each device sends {total / 1e6:.2f} MB")
        for line in words
    )


def test_a_picture_says_what_it_leaves_out():
    found = program("batch:rows; hidden:cols")
    assert any("3 of them are not drawn" in line for line in texts(md.show(found, most=2)))
    cut = md.show(layers("rows:2 cols:4", "batch:rows; heads:cols"), most=1)  # inside a loop: its bracket is closed
    assert any("are not drawn" in line for line in texts(cut))
    assert any("16 of 4096 devices are drawn" in line for line in texts(PICTURES["large"]()))


def test_alike_collectives_are_one_row_that_says_how_many():
    found = layers("all:8", "batch:all")
    words = texts(md.show(found))
    more = [int(m[1]) for line in words if (m := re.match(r"and (\d+) more like it", line))]
    heads = sum(line.endswith(" over all") and line.startswith("all_reduce") for line in words)
    assert sum(more) + heads == len(found.collectives)


def test_device_order_names_the_devices():
    mesh = md.Mesh("rows:4", device_order=[3, 1, 0, 2])
    words = texts(md.show(md.spec("batch:8"), "batch:rows", mesh))
    assert [line for line in words if line.startswith("device")] == ["device 3", "device 1", "device 0", "device 2"]


def test_rules_for_other_tensors_are_ignored_and_unknown_axes_are_not():
    assert "batch=32/rows" in md.show(SPEC, "batch:rows; hidden:cols", "rows:2 cols:4").title
    with pytest.raises(md.LayoutError, match="no axis 'colums'"):
        md.show(SPEC, "batch:rows; hidden:colums", "rows:2 cols:4")


def test_mistakes_are_explained():
    with pytest.raises(md.LayoutError, match="a tensor can use an axis once"):
        md.show(SPEC, "batch:rows; io:rows", "rows:2")
    with pytest.raises(md.LayoutError, match="one of them is missing"):
        md.show(SPEC, "batch:rows")
    with pytest.raises(md.LayoutError, match="names dim 'bach'"):
        md.show(SPEC, md.Sharding.of({"bach": ("rows",)}), "rows:2")
    with pytest.raises(md.LayoutError, match="a program has its layout"):
        md.show(program(""), "batch:rows")
    with pytest.raises(md.ShapeError, match=r"compiled\.program"):
        md.show(md.compile(lambda x: x, "rows:2", ""))  # pyright: ignore[reportArgumentType]


def test_names_are_escaped():
    mesh, name = "rows:2", "<b>&"
    picture = md.show(md.compile(lambda x: md.sum(x[name]), mesh, "n:rows").program({name: md.spec("n:4")}))
    assert "<b>" not in picture.svg
    ET.fromstring(picture.svg)


def test_save_writes_the_svg(tmp_path: Path):
    picture = PICTURES["both"]()
    picture.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == picture.svg + "\n" == picture._repr_svg_() + "\n"
    assert picture.svg in picture._repr_html_()


def test_golden_pictures(golden: Callable[[str, str], None]):
    golden("picture_partial", PICTURES["partial"]().svg)
    found = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "batch:rows; io:cols")
    svg = md.show(found.program(SPEC, md.spec("io:32 hidden:16"))).svg
    golden("picture_program", re.sub(r"test_show\.py:\d+", "test_show.py:LINE", svg))
