"""No plan changes the width of a sum; at length: `python -m tests.compile.widths_law`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import walk
from meshdsl.models.transformer import lm
from tests.compile.steps import Model
from tests.compile.steps_law import Case, Plan
from tests.compile.widths_law import judge, law

STEPS, BLOCKS = 60, 6
IO = md.dims("batch:16 i:4 o:4")


@pytest.mark.parametrize("block", range(BLOCKS))
def test_widths_are_those_of_the_dtypes_under_random_plans(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts, verdicts, failures = law(1 + block, STEPS // BLOCKS, most=8)
    with capsys.disabled():
        print(f"widths law: {dict(counts)}, {dict(verdicts)}")
    assert not failures, "\n".join(failures)
    assert counts["micro-batches"] >= 2
    assert counts["sends"] >= 5


def test_widths_hold_for_512_micro_batches() -> None:
    model = Model(
        7, ("dense",), "project", "sum", "sgd", True, "float32/bfloat16", "step", "grads", 512, "", "bfloat16"
    )
    plan = Plan("x:1 y:2 z:1", {"batch": "y"}, {"mode": "sharded"}, parts=256)
    assert judge(Case(model, plan), Counter()) == "ok"


def step(precision: md.nn.Precision, parts: int) -> Any:
    def gradient(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.grad(lambda w: md.sum(md.square(precision.einsum(x, w, out="batch o"))))(w)

    def run(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        total = md.accumulate(lambda x: gradient(w, x), x, parts) if parts > 1 else gradient(w, x)
        return w - 0.1 * total

    return run


REDUCED = {"float32": 64, "bfloat16": 32}


@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_widths_of_the_sum_over_devices_are_those_that_precision_says(reduce: str, parts: int, update: str) -> None:
    precision = md.nn.Precision(compute="bfloat16", reduce=reduce)
    compiled = md.compile(step(precision, parts), "c:4", "batch:c", weight_update=update)
    program = compiled.program(md.spec("i:4 o:4"), md.spec("batch:16 i:4"))
    sums = [c for c in program.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert [(c.dtype.name, c.bytes) for c in sums] == [(reduce, REDUCED[reduce])]


@pytest.mark.parametrize("parts", [1, 2])
def test_widths_of_a_language_model_halve_the_bytes_of_its_gradients(parts: int) -> None:
    def sent(reduce: str) -> dict[str, float]:
        workload = lm.replace(compute_dtype="bfloat16", reduce_dtype=reduce, layers=2, d_model=64, d_ff=128, batch=8)
        plan = md.Plan("rows:4", "batch:rows", microbatches=parts)
        records = md.compile(workload.train_step(), plan=plan).program(*workload.specs()).collectives
        dtypes = ("float32", "bfloat16")
        return {name: sum(c.bytes * c.count for c in records if c.dtype.name == name) for name in dtypes}

    wide, narrow = sent("float32"), sent("bfloat16")
    assert wide["bfloat16"] == 0
    assert narrow["bfloat16"] * 2 == wide["float32"] - narrow["float32"]
    assert narrow["float32"] == 4  # the loss


ONES = md.tensor(np.ones((512, 1), "float32"), "batch i")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["", "batch:c"])
def test_widths_of_totals_are_at_least_32_bits(dtype: str, layout: str) -> None:
    """The sum of 512 ones is 256 if it is added in bfloat16."""
    w = md.cast(md.ones("i:1"), dtype)

    def gradient(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.grad(lambda w: md.cast(md.sum(md.einsum(md.cast(x, dtype), w, out="batch")), "float32"))(w)

    def accumulated(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.accumulate(lambda x: gradient(w, x), x, 128)

    def captured(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def total_of(w: md.Tensor) -> md.Tensor:
            def trip(total: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, None]:
                return total + md.cast(md.sum(md.cast(row, dtype) * w), "float32"), None

            return md.scan(trip, md.tensor(0.0), x, over="batch")[0]

        return md.grad(total_of)(w)

    def looked_up(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        rows = md.cast(x, "int32") * 0
        return md.grad(lambda w: md.sum(md.cast(md.take(w, rows, "i"), "float32")))(w)

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.accumulate(lambda x: md.sum(md.cast(x, dtype) * w), x, 128)

    for f in (accumulated, captured, looked_up, loss):
        program = md.compile(f, "c:4", layout).program(w, ONES)
        (total,) = md.simulate(program, w.numpy(), ONES.numpy())
        assert total.dtype == w.dtype
        assert np.all(total.astype("float64") == 512), f.__name__


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widths_of_totals_of_pipelines_are_32_bits(dtype: str) -> None:
    """The weights' gradients, over 8 micro-batches of two stages, are added up in float32 and sent in their dtype."""
    sizes = {"layers": 2, "batch": 16, "length": 4, "d_model": 8, "d_ff": 16, "vocab": 16, "heads": 2, "d_head": 4}
    workload = lm.replace(**sizes, param_dtype=dtype, compute_dtype="bfloat16")
    loss = workload.loss(workload.config)

    def gradients(params: Any, batch: Any) -> Any:
        return md.accumulate(lambda part: md.grad(lambda p: loss(p, part))(params), batch, 8)

    params, _, batch = workload.specs()
    program = md.compile(gradients, "stages:2 rows:2", "layer:stages; batch:rows").program(params, batch)
    loops = [eqn.scan for eqn, _ in walk(program) if eqn.scan is not None]
    carried = [v for scan in loops for v in scan.body.outs[: scan.carries]]
    totals = [v for v in carried if v.dtype.kind != "i" and "batch" not in {d.name for d in v.dims} and len(v.dims) > 1]
    assert len(totals) >= 8
    assert {v.dtype.name for v in totals} == {"float32"}
    sums = {c.dtype.name for c in program.collectives if c.kind == "all_reduce" and c.bytes > 8}
    assert sums == {dtype}


To = Callable[[md.Tensor], md.Tensor]
EYE = md.tensor(np.eye(4, dtype="float32"), "i o")
COPIES: dict[str, Callable[[To, md.Tensor, md.Tensor], md.Tensor]] = {
    "cast": lambda to, w, v: to(w),
    "twice": lambda to, w, v: to(md.cast(to(w), "float32")),
    "transposed": lambda to, w, v: md.transpose(to(w), "o i"),
    "renamed": lambda to, w, v: md.rename(md.rename(to(w), o="p"), p="o"),
    "reshaped": lambda to, w, v: md.flatten(md.unflatten(to(w), "o", "a:2 b:2"), "a b", "o"),
    "scaled": lambda to, w, v: to(w) * 2,
    "added": lambda to, w, v: to(w) + to(v),
    "joined": lambda to, w, v: md.slice(md.concat([to(w), to(v)], "i"), "i", 0, 4),
    "masked": lambda to, w, v: to(w) * to(EYE),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widths_of_copies_of_weights_do_not_round_gradients(name: str, dtype: str) -> None:
    """Casts, moves, joins and scales between a weight and the product that reads it."""
    rng = np.random.default_rng(0)
    w, v, x = (rng.integers(-2, 3, shape).astype("float32") for shape in ((4, 4), (4, 4), (512, 4)))
    tensors = md.tensor(w, "i o"), md.tensor(v, "i o")

    def gradients(to: To, *weights: md.Tensor) -> Any:
        def loss(w: md.Tensor, v: md.Tensor) -> md.Tensor:
            x_narrow = to(md.tensor(x, "batch i"))
            dtype = "float32" if x_narrow.dtype.itemsize < 8 else "float64"
            return md.sum(md.square(md.einsum(x_narrow, COPIES[name](to, w, v), out="batch o", dtype=dtype)))

        return md.grad(loss, (0, 1))(*weights)

    ours = gradients(lambda x: md.cast(x, dtype), *tensors)
    exact = gradients(lambda x: md.cast(x, "float64"), *(md.cast(x, "float64") for x in tensors))
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == "float32"
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_gathers_of_data_share_no_bucket() -> None:
    model = Model(
        301000936, (), "project", "targets", "sgd", True, "float64/float16", "step", "grads", 64, "uint8", "bfloat16"
    )
    update = {"mode": "sharded", "bucket_bytes": 1e9, "regather": True}
    plan = Plan("x:3 y:2", {"batch": "y,x"}, update, recompute="nothing", parts=64, donate=(0, 1))
    assert judge(Case(model, plan), Counter()) == "ok"


def test_parts_of_values_in_the_hosts_memory_are_joined_before():
    model = Model(
        212000639, ("layers", "layers"), "project", "targets", "sgd", exact=True, dtype="float32/bfloat16",
        extra="grads", batch=512, data="bfloat16", loss="float32",
    )  # fmt: skip
    plan = Plan(
        "x:2 y:1 z:3", {"batch": "x", "model2": "z"}, {"mode": "auto", "regather": True}, {"mode": "skew"}, "tpu-v5e",
        "offload", parts=2, donate=(0, 1),
    )  # fmt: skip
    assert judge(Case(model, plan), Counter()) == "ok"
