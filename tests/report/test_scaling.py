"""Scaling: every point costs what `analyze` costs, and points that cannot be are named with the reason."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from meshdsl.cost.report.scaling import WIDTH, _curve
from tests.cli.running import here

ROOT = Path(__file__).parent.parent.parent
MLP = [f"{ROOT}/models/mlp.py:mlp", "--set", "io=256", "--set", "hidden=512", "--set", "batch=4096"]
DATA = ["--mesh", "all:8", "--layout", "batch:all", "--machine", "tpu-v5e"]


def scaled(*options: str) -> dict:
    run = here("scale", *MLP, *DATA, "--json", *options)
    assert run.code == 0, run.err
    return json.loads(run.out)


def test_scaling_costs_what_analyze_costs():
    found = scaled("--to", "32")
    assert [each["devices"] for each in found["strong"]] == [8, 16, 32]
    for kind, batch in (("strong", 4096), ("weak", 8192)):
        second = found[kind][1]
        options = ["--mesh", "all:16", "--layout", "batch:all", "--set", f"batch={batch}"]
        alone = json.loads(here("analyze", *MLP, *options, "--json").out)
        assert (second["rates"]["seconds"], second["peak_bytes"]) == (alone["seconds"], alone["peak_bytes"])
        rate = [each["rates"]["per_second"] / each["devices"] for each in found[kind]]
        assert [each["efficiency"] for each in found[kind]] == pytest.approx([r / rate[0] for r in rate])


def test_scaling_page_is_well_formed_and_says_what_is_skipped(tmp_path: Path):
    page = tmp_path / "scaling.html"
    options = ["--mesh", "a:2 b:4", "--layout", "batch:a", "--from", "4", "--to", "16", "--set", "batch=5"]
    run = here("scale", *MLP, *options, "--html", str(page))
    assert run.code == 0 and "4 devices, weak: a batch of 5 on 8 devices has no equal on 4" in run.out, run.err
    text = page.read_text()
    body = ET.fromstring(re.sub(r"<meta[^>]*>", "", text.partition("\n")[2]))
    dots = list(body.iter("circle"))
    assert dots and all(0 <= float(c.attrib["cx"]) <= WIDTH for c in dots)


def test_scaling_lines_of_equal_growth_end_inside_the_drawing():
    lines = _curve([(8, 100.0), (4096, 60.0)], "kernel-matmul", lambda n: n, lambda rate: rate, high=150.0)
    assert 'd="M8.0 100.0L12.0 150.0"' in lines[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--axis", "rows"], "has no such axis"), (["--from", "100000"], "no mesh from 100000 to")],
)
def test_scaling_errors(options: list[str], says: str):
    run = here("scale", *MLP, *DATA, *options)
    assert run.code == 2 and says in run.err
