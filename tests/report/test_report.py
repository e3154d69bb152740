"""A report adds nothing of its own: its parts are the program's and add up to the whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.comm_groups import dims_of
from meshdsl.cost.report.evaluate import cost
from meshdsl.cost.report.report import PARTS, Report
from meshdsl.cost.report.schema import SCHEMA_VERSION
from meshdsl.cost.report.show import analysis
from meshdsl.errors.tables import WIDTH
from meshdsl.tools.compilers.aot import tpu_program
from meshdsl.train import load, mesh_and_layout, stages

ROOT = Path(__file__).parent.parent.parent
LM = str(ROOT / "models/transformer.py") + ":lm"


def report(layout: str, machine: str = "tpu-v5e", limit: float | None = None) -> Report:
    workload = load(LM)
    compiled, arguments = stages(workload, md.Plan(*mesh_and_layout(workload, layout, None)))
    return compiled.cost(*arguments, machine=machine, limit=limit)


@pytest.fixture(scope="module")
def found() -> Report:
    return report("data_model")


def test_the_parts_add_up_to_the_step(found: Report):
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert sum(found.waits.values()) == pytest.approx(found.seconds)
    assert sum(sent.exposed for sent in found.collectives) == pytest.approx(found.parts["exposed communication"])
    assert found.lower_bound <= found.interval[0] <= found.seconds <= found.interval[1]


def test_what_is_sent_is_what_the_program_sends(found: Report):
    records = found.program.collectives
    assert sum(sent.count for sent in found.collectives) == sum(r.count for r in records)
    assert sum(sent.bytes for sent in found.collectives) == sum(r.bytes * r.count for r in records)
    assert sum(sent.wire_bytes for sent in found.collectives) == sum(r.wire_bytes * r.count for r in records)
    assert found.wire_bytes == sum(r.wire_bytes * r.count for r in records)


def test_every_collective_belongs_to_dims_of_the_model():
    for layout in ("data", "model", "data_model", "sequence"):
        for sent in report(layout).collectives:
            assert sent.dims, sent
            assert set(sent.dims) <= {"batch", "length", "vocab", "heads", "d_ff", "model"}, sent


def test_dims_of_a_cause():
    step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2", "io:rows")
    program = step.program(md.spec("batch:8 io:4"), md.spec("io:4 hidden:8"))
    line = cost(program).ledger.lines[-1]
    assert (str(line.cause), dims_of(line)) == ("sum over 'io' of einsum", ("io",))


def test_the_text(found: Report):
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)
    assert re.search("heads +cols +all_reduce", str(found))
    assert "sum over 'heads' of einsum on cols" in str(found)
    assert len(analysis(found, top=3).splitlines()) < len(lines)


def test_one_device_sends_nothing():
    alone = md.compile(lambda x: md.sum(x), md.Mesh("all:1")).cost(md.spec("batch:8"))
    assert (alone.collectives, alone.exposed, alone.wire_bytes) == ((), 0.0, 0)
    assert "nothing is sent" in str(alone)


def test_a_loop_of_unknown_length_is_noted():
    def f(x: md.Tensor) -> md.Tensor:
        return md.while_loop(lambda y: md.sum(y) < 10.0, lambda y: y * 2, x)

    found = md.compile(f, "rows:2", "batch:rows").cost(md.spec("batch:8"))
    assert "in while loops, whose trip counts are unknown: one trip is counted" in " ".join(str(found).split())


def test_over_memory_says_what_the_peak_is_made_of():
    tight = report("data_model", limit=1e6)
    assert not tight.fits and tight.constraint == "memory"
    (problem,) = tight.problems()
    assert "saved activations" in problem and "only 1.00 MB is available" in problem
    assert "DOES NOT FIT" in str(tight)
    assert report("data_model").problems() == []


def test_json(found: Report):
    record = found.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["schema_version"] == SCHEMA_VERSION
    assert len(record["instructions"]) == len(found.ledger.lines)
    assert sum(line["blocking"] for line in record["instructions"]) == pytest.approx(record["seconds"])
    assert sum(record["memory"]["by_category"].values()) == record["peak_bytes"]


def test_at_a_prompt_it_is_short(found: Report):
    assert re.fullmatch(r"<Report of 'train_step' on rows:2 cols:4, tpu-v5e: \S+ ms, peak \S+ MB>", repr(found))


def test_a_notebook_shows_the_text(found: Report):
    pre = ET.fromstring(found._repr_html_()).find(".//pre")
    assert pre is not None and "".join(pre.itertext()) == str(found)


def test_no_devices_and_no_arrays():
    script = (
        "import meshdsl as md, jax\n"
        "step = md.compile(lambda x, w: md.dot(x, w, 'io'), 'rows:64 cols:32', 'batch:rows io:cols')\n"
        "big = md.spec('batch:65536 io:65536'), md.spec('io:65536 hidden:65536')\n"
        "print(step.cost(*big, machine='tpu-v5p').seconds > 0, len(jax.live_arrays()))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.split() == ["True", "0"]


def test_under_traces_once():
    calls: list[int] = []

    def f(x: md.Tensor) -> md.Tensor:
        calls.append(1)
        return md.sum(x * 2, "batch")

    step = md.compile(f, "rows:4", "batch:rows")
    x = md.spec("batch:8 io:8")
    other = step.under("rows:2 cols:2", "io:cols")
    assert len(step.program(x).collectives) == 1
    assert len(other.program(x).collectives) == 0
    assert len(calls) == 1
    assert str(other.layout) == "io:cols" and str(step.layout) == "batch:rows"
    with pytest.raises(md.LayoutError, match="a layout rule is written"):
        step.under("rows:2", "io=cols")


def test_what_a_loop_stacks_is_named_by_what_makes_it(found: Report):
    saved = {(held.name, held.where.line) for held in found.memory.by_tensor if held.category == "saved activations"}
    assert saved and "scan" not in {name for name, _ in saved}
    assert len({line for _, line in saved}) > 1, "each by its own line of the model"


def test_cost_reads_the_program_of_the_machine() -> None:
    """On TPUs the large rows of a loop are read from its stack, whichever computer makes the report."""

    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            k = md.rename(h * row, length="memory")
            weights = md.cast(md.softmax(md.einsum(k, h, out="batch memory length"), "memory"), "bfloat16")
            return md.cast(md.einsum(weights, k, out="batch length io"), "float32"), weights

        return md.scan(body, x, w, over="t")

    compiled = md.compile(f, "x:1", "")
    types = md.spec("batch:2 length:4096 io:4"), md.spec("t:2 io:4")
    on_tpu, on_gpu = (compiled.cost(*types, machine=name) for name in ("tpu-v5e", "h100"))
    assert [str(r.program).count(" = barrier ") for r in (on_tpu, on_gpu)] == [1, 0]
    assert on_gpu.program is compiled.program(*types)
    assert on_tpu.peak_bytes == md.memory(tpu_program(on_gpu.program)).peak < on_gpu.peak_bytes


@pytest.mark.parametrize(
    ("machine", "said"), [("h100:eager", True), ("h100:eager,flash", True), ("h100", False), ("tpu-v5e", False)]
)
def test_times_of_pytorch_say_so_and_name_those_of_xla(machine: str, said: bool):
    text = " ".join(report("data", machine).__str__().split())
    assert ("the machine without the mode eager has its times" in text) == said
