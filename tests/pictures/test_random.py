"""Pictures of random tensors and programs: labels are inside and apart, and every drawn device has its own elements."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import Program
from meshdsl.tools.pictures.picture import Picture
from tests.lowering.programs import draw
from tests.pictures.test_show import PICTURES

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = {"big": 8.3, "small": 5.7, "mono": 6.7}  # pixels of a character, by class
NAMES = ["batch", "io", "hidden", "expert_capacity_slot", "x"]
AXES = ["rows", "cols", "a_long_axis_name", "z"]
CASES = range(40)


def tensor(rng: random.Random) -> tuple[Picture, Any, md.Sharding, md.Mesh]:
    """A random tensor under a random sharding, which may be partial."""
    mesh = md.Mesh({axis: rng.choice([1, 2, 3, 4, 5, 9]) for axis in rng.sample(AXES, rng.randint(1, 4))})
    dims = [md.Dim(name, rng.choice([1, 2, 7, 64, 4096])) for name in rng.sample(NAMES, rng.randint(0, 5))]
    split: dict[str, list[str]] = {}
    partial: list[str] = []
    for axis in mesh.axes:
        place = rng.choice([*dims, "copies", "partial"])
        if isinstance(place, md.Dim):
            split.setdefault(place.name, []).append(axis)
        elif place == "partial":
            partial.append(axis)
    sharding = md.Sharding.of(split, partial, rng.choice(["sum", "max"]))
    spec = md.spec(dims)
    return md.show(spec, sharding, mesh), spec, sharding, mesh


def program(seed: int) -> Program | None:
    case = draw(seed)
    compiled, arguments = case.compiled()
    try:
        return compiled.program(*arguments)
    except md.MeshdslError:  # some layouts are illegal
        return None


def labels(picture: Picture) -> list[tuple[float, float, float, float, str]]:
    """The boxes of the upright labels."""
    svg = ET.fromstring(picture.svg)
    turned = {each for group in svg.iter(f"{SVG}g") if "rotate" in group.attrib["transform"] for each in group}
    boxes: list[tuple[float, float, float, float, str]] = []
    for each in svg.iter(f"{SVG}text"):
        words = "".join(each.itertext())
        size = next((px for cls, px in WIDTH.items() if cls in each.attrib.get("class", "").split()), 6.4)
        wide = size * len(words)
        x, y = float(each.attrib["x"]), float(each.attrib["y"])
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[each.attrib.get("text-anchor", "start")]
        if each not in turned:
            boxes.append((left, left + wide, y - 8, y + 2, words))
    return boxes


def check_labels(picture: Picture) -> None:
    svg = ET.fromstring(picture.svg)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    boxes = labels(picture)
    for i, (left, right, top, bottom, words) in enumerate(boxes):
        assert left >= -2 and right <= width + 4 and top >= 0 and bottom <= height, f"{words!r} leaves {picture}"
        for a, b, c, d, other in boxes[i + 1 :]:
            assert right <= a + 4 or b <= left + 4 or bottom <= c + 1 or d <= top + 1, f"{words!r}, {other!r} overlap"


@pytest.mark.parametrize("name", PICTURES)
def test_labels_of_the_examples(name: str):
    check_labels(PICTURES[name]())


@pytest.mark.parametrize("seed", CASES)
def test_random_tensors(seed: int):
    picture, spec, sharding, mesh = tensor(random.Random(seed))
    check_labels(picture)
    tips = {each.text or "" for each in ET.fromstring(picture.svg).iter(f"{SVG}title")} - {"padding"}
    devices = [tip for tip in tips if tip.startswith("device ")]
    stored = {tip.partition(": ")[2] for tip in devices}
    drawn = [min(size, 8 if sum(s > 1 for s in mesh.axes.values()) == 1 else 4) for size in mesh.axes.values()]
    different = mesh.count([axis for axis in mesh.axes if axis in sharding.varying])
    assert len(devices) <= mesh.size and len(devices) >= np.prod(sorted(drawn)[-1:])
    if len(devices) == mesh.size and "padding" not in picture.svg:
        assert len(stored) == different, "as many kinds of contents as the axes that vary have devices"
    assert spec.dims == () or str(spec.dims[0]) in picture.svg


@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_random_programs(seed: int):
    found = program(seed)
    if found is None:
        return
    picture = md.show(found, most=10_000)
    check_labels(picture)
    records = found.collectives
    assert picture.title.endswith(f": {len(records)} collective{'' if len(records) == 1 else 's'}")
    assert "not drawn" not in picture.svg
