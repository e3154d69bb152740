"""The TPU compiler itself, without a TPU: collectives, planned windows, and recorded ratios of its cycles.

These tests need the extra `aot`; `make test-aot` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.models.transformer import LAYOUTS, lm

pytestmark = pytest.mark.aot

SPECS = md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")
STEP = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "io:cols batch:rows")
SUM = STEP.program(*SPECS)  # one all_reduce of float32[4, 32] over cols

# Largest cycles of meshdsl relative to the other candidate, as recorded by `python -m benchmarks.tpu_cycles`
RATIOS = {
    "two_layer": {"handwritten": 1.0},
    "convolution": {"handwritten": 1.0, "gspmd": 0.97},
    "moe_layer": {"handwritten": 0.72, "gspmd": 0.92},
    "language_model": {"handwritten": 1.002},
}


def test_compile_for_reports_memory_collectives_and_cycles() -> None:
    found = md.compile_for("tpu:v5e:2x4", SUM, effort="O1")
    assert found.fits and found.devices == 8 and found.memory is not None
    assert found.needed == found.memory.peak >= found.memory.argument >= 4 * (4 * 4 + 4 * 32)
    (change,) = found.changes
    assert (change.kind, change.axes, change.stated, change.performed, change.words) == ("all_reduce", "cols", 1, 1, "")
    assert found.cycles
    json.dumps(found.to_dict())


def test_compile_for_refuses_another_mesh_size_and_an_unknown_topology() -> None:
    with pytest.raises(md.LayoutError, match="tpu:v5e:4x4 has 16 devices, and the mesh 'rows:2 cols:4' has 8"):
        md.compile_for("tpu:v5e:4x4", SUM)
    with pytest.raises(md.CompilerError, match="Invalid TPU external name"):
        md.compile_for("tpu:v9:2x2", SUM)
    with pytest.raises(md.CompilerError, match=r"longer than 0\.01 s"):
        md.compile_for("tpu:v5e:2x4", SUM, timeout=0.01)


def test_offloaded_layer_inputs_are_in_the_hosts_memory() -> None:
    """The compiler copies each to the host while it computes, and its peak memory is the predicted one."""
    workload = lm.replace(layers=8, d_model=512, d_ff=2048, vocab=1024, batch=32, length=512, compute_dtype="bfloat16")
    step = md.compile(workload.train_step(), plan=md.Plan("rows:8", "batch:rows", remat="offload"), donate=(0, 1))
    specs = workload.specs()
    program = step.program(*specs)
    predicted = md.memory(program, donated=step.donated(*specs))
    found = md.compile_for("tpu:v5e:2x4", program, donated=step.donated(*specs), effort="O1")
    assert found.memory is not None
    assert found.memory.host == predicted.host == 8 * (32 // 8) * 512 * 512 * 2
    assert abs(found.memory.peak / predicted.peak - 1) < 0.08  # gradients of layers are stacked in float32


def test_compile_for_keeps_ragged_exchanges() -> None:
    def crossing(x: md.Tensor, n: md.Tensor) -> md.Tensor:
        there = md.rename(md.ragged(x, n, "slot"), group="expert_group", gate="expert")
        slots = md.prefer(md.relu(there), "expert")
        return md.ragged(md.rename(md.prefer(slots * 2, "expert"), expert_group="group", expert="gate"), n, "slot")

    specs = md.spec("group:8 gate:8 slot:4 model:128"), md.spec("group:8 gate:8", "int32")  # slots of 128 numbers
    program = md.compile(crossing, "a:8", "group:a expert:a").program(*specs)
    found = md.compile_for("tpu:v5e:2x4", program, effort="O1")
    kinds = {change.kind: (change.stated, change.performed, change.words) for change in found.changes}
    assert kinds == {"all_to_all": (1, 1, ""), "ragged_all_to_all": (2, 2, "")}
    assert [c.bytes for c in found.collectives if c.kind == "ragged_all_to_all"] == [8 * 4 * 128 * 4] * 2


def test_compile_for_keeps_planned_products_in_their_windows() -> None:
    def two_products(x: md.Tensor, a: md.Tensor, w: md.Tensor, v: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.dot(x, w, "io"), md.dot(md.shard(a, {}), v, "inner")  # `a` is gathered during the first

    specs = (
        md.spec("batch:8192 io:2048"),
        md.spec("m:2048 inner:2048"),
        md.spec("io:2048 hidden:2048"),
        md.spec("inner:2048 out:2048"),
    )
    compiled = md.compile(two_products, "rows:8", "batch:rows; inner:rows", overlap="list", machine="tpu-v5e")
    windows = md.compile_for("tpu:v5e:2x4", compiled.program(*specs)).windows
    assert windows and sum(window.planned for window in windows) > 0
    for window in windows:
        assert window.asynchronous and window.inside == window.planned, str(window)


def gathered(x: md.Tensor, w: md.Tensor, a: md.Tensor, b: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    return md.dot(x, w, "io"), md.shard(a, {})


def reduced(x: md.Tensor, w: md.Tensor, a: md.Tensor, b: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    return md.dot(x, w, "io"), md.shard(md.dot(a, b, "inner"), {})


def reduced_in_float32(x: md.Tensor, w: md.Tensor, a: md.Tensor, b: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    total = md.dot(md.cast(a, "float32"), md.cast(b, "float32"), "inner")
    return md.dot(x, w, "io"), md.cast(md.shard(total, {}), "bfloat16")


def scattered(x: md.Tensor, w: md.Tensor, a: md.Tensor, b: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    return md.dot(x, w, "io"), md.shard(md.dot(a, b, "inner"), {"m": "rows"})


@pytest.mark.parametrize(
    ("chip", "function", "kind"),
    [
        ("v6e:2x4", reduced, "all_reduce"),
        ("v6e:2x4", reduced_in_float32, "all_reduce"),
        ("v6e:2x4", scattered, "reduce_scatter"),
        ("v5p:2x2x2", gathered, "all_gather"),
        ("v5p:2x2x2", scattered, "reduce_scatter"),
        ("v4:2x2x1", gathered, "all_gather"),
    ],
)
def test_kinds_that_a_machine_file_lists_run_beside_a_product(chip: str, function: Any, kind: str) -> None:
    specs = (
        md.spec("batch:65536 io:2048", "bfloat16"),
        md.spec("io:2048 hidden:2048", "bfloat16"),
        md.spec("m:2048 inner:4096", "bfloat16"),
        md.spec("inner:4096 k:2048", "bfloat16"),
    )
    machine = f"tpu-{chip.partition(':')[0]}"
    compiled = md.compile(function, "rows:8", "batch:rows; inner:rows", overlap="list", machine=machine)
    windows = md.compile_for(f"tpu:{chip}", compiled.program(*specs)).windows
    beside = [window for window in windows if window.planned]
    assert beside and kind in beside[0].collective
    assert [str(window) for window in beside if not window.asynchronous or window.inside < window.planned] == []


def test_compile_for_keeps_every_product_of_experts_in_its_window() -> None:
    """Two layers of experts, forward in two parts: each part computes while the other one is exchanged."""
    expert, hidden = md.dims("expert:16 expert_hidden:2048")

    @md.model
    def layers(x: md.Tensor) -> md.Tensor:
        for name in ("first", "second"):
            options = {"router": "switch", "capacity_factor": 1.0, "precision": md.nn.Precision(compute="bfloat16")}
            y, _ = md.nn.moe_layer(x, expert, hidden, name=name, **options)
            x = x + y
        return x

    x = md.spec("batch:64 length:256 model:512", "bfloat16")
    where = "rows:8", "batch:rows; expert:rows"
    compiled = md.compile(layers, *where, overlap="halves", machine="tpu-v5e")
    windows = md.compile_for("tpu:v5e:2x4", compiled.program(layers.specs(x), x)).windows
    assert len(windows) == 8 and sum(window.planned for window in windows) >= 12
    assert [str(window) for window in windows if window.inside < window.planned or not window.asynchronous] == []


def test_compile_for_keeps_every_product_of_a_tensor_parallel_step_in_its_window() -> None:
    """One layer in two parts. Left to itself, the compiler starts five collectives after the products beside them."""
    sizes = {"batch": 16, "length": 256, "d_model": 512, "d_ff": 2048, "vocab": 1024, "compute_dtype": "bfloat16"}
    model = lm.replace(**sizes, layers=1)
    step = md.compile(model.train_step(), *LAYOUTS["sequence"], overlap="halves", machine="tpu-v5e")
    windows = md.compile_for("tpu:v5e:2x4", step.program(*model.specs())).windows
    assert sum(window.planned for window in windows) >= 20
    assert [str(window) for window in windows if window.planned and window.inside < window.planned] == []


@pytest.mark.parametrize("name", RATIOS)
def test_tpu_cycles_are_at_most_the_recorded_ratio(name: str) -> None:
    root = Path(__file__).parents[2]
    others = [word for other in RATIOS[name] for word in ("--candidate", other)]
    # a process of its own: types of 64 bits, which tests turn on, would change the programs
    command = [sys.executable, "-m", "benchmarks.tpu_cycles", name, *others]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"JAX_ENABLE_X64": "0"}, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    ratios = json.loads(done.stdout.splitlines()[-1])
    for other, recorded in RATIOS[name].items():
        assert ratios[f"cycles_to_{other}"] <= recorded, ratios
        assert ratios[f"sent_to_{other}"] <= 1, ratios
