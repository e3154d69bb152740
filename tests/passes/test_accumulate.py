"""Gradients of microbatches are summed on each device and reduced once, however the sum begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.models.transformer import lm
from tests.joined import calls_in_groups

MICRO = md.Dim("micro", 2)
ZEROS: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "a constant": lambda p: md.broadcast(md.cast(0.0, p.dtype), p.dims),
    "times zero": lambda p: p * 0,
    "zero times": lambda p: 0.0 * p,
    "itself less itself": lambda p: p - p,
    "NumPy's": lambda p: md.tensor(np.zeros(p.shape), p.dims),
    "chosen": lambda p: md.where(p == p, 0.0, md.cast(0, p.dtype)),
    "a whole number": lambda p: md.broadcast(md.cast(0, p.dtype), p.dims),
    "cast from another dtype": lambda p: md.cast(md.broadcast(md.cast(0, "bfloat16"), p.dims), p.dtype),
    "a cast": lambda p: md.cast(md.cast(p, "float32") * 0, p.dtype),
}


def step_from(zeros: Callable[[md.Tensor], md.Tensor]) -> Callable[..., Any]:
    def step(params: dict[str, md.Tensor], x: md.Tensor) -> Any:
        def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
            return md.mean(
                md.square(md.einsum(md.tanh(md.einsum(x, params["w"], out="batch h")), params["v"], out="batch"))
            )

        def one(total: Any, x: md.Tensor) -> Any:
            value, grads = md.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda a, b: a + b, total, grads), value

        parts = md.unflatten(x, "batch", [MICRO, md.Dim("batch", 8)])
        grads, values = md.scan(one, jax.tree.map(zeros, params), parts, over=MICRO)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values

    return step


def arguments(bad: float = 0.5) -> Any:
    draw = np.random.RandomState(0)
    params = {"w": md.tensor(draw.randn(4, 8), "io h"), "v": md.tensor(np.append(draw.randn(7), bad), "h")}
    return params, md.tensor(draw.randn(16, 4), "batch io")


MODES = [("times zero", "replicated"), *((zeros, "sharded") for zeros in ZEROS)]
COMPILED = {case: md.compile(step_from(ZEROS[case[0]]), "x:4", "batch:x", weight_update=case[1]) for case in MODES}
ON_DEVICES = calls_in_groups({case: lambda f=f: (f, arguments()) for case, f in COMPILED.items()})


@pytest.mark.parametrize(("zeros", "mode"), MODES)
def test_one_reduction_for_each_weight(zeros: str, mode: str):
    compiled = COMPILED[zeros, mode]
    records = compiled.program(*arguments()).collectives
    kind = "all_reduce" if mode == "replicated" else "reduce_scatter"
    found = Counter(r.count for r in records if r.kind == kind and r.bytes > 16)  # not the two losses
    assert found == {1: 2}, records
    if mode == "sharded":
        assert all(d.sharded and d.weight.startswith("params/") for d in compiled.weight_update.decisions)
    right, got = map(jax.tree.leaves, (step_from(ZEROS[zeros])(*arguments()), ON_DEVICES((zeros, mode))))
    for a, b in zip(right, got, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12, atol=1e-12)


def test_zero_times_what_is_not_finite_stays_that():
    step = step_from(ZEROS["times zero"])
    right, got = (f(*arguments(np.inf))[0]["v"].numpy() for f in (step, md.compile(step, "x:4", "batch:x")))
    assert np.isnan(right[-1]) and np.isnan(got[-1])


def test_a_sum_that_is_read_on_the_way_stays_as_it_is():
    def running(x: md.Tensor) -> Any:
        return md.scan(lambda c, row: (c + row, c), x * 0, md.stack([x, x], MICRO), over=MICRO)

    x = md.tensor(np.arange(4.0), "io")
    compiled = md.compile(running, "x:2", "io:x")
    assert "full" not in str(compiled.graph(x))
    assert compiled(x)[0].numpy().tolist() == [0.0, 2.0, 4.0, 6.0]


def twice(params: dict[str, md.Tensor], x: md.Tensor) -> Any:
    """A weight that is used twice, and microbatches written out: four sums for one gradient."""

    def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        hidden = md.tanh(md.einsum(x, params["w"], out="batch h") * params["v"])
        return md.mean(md.square(md.einsum(hidden, params["w"], out="batch io") - x))

    parts = [md.slice(x, "batch", start, 8) for start in (0, 8)]
    grads = [md.grad(loss)(params, part) for part in parts]
    return jax.tree.map(lambda p, a, b: p - 0.1 * (a + b), params, *grads)


def test_a_weight_that_is_used_twice_is_reduced_once():
    compiled = md.compile(twice, "x:4", "batch:x", weight_update="sharded")
    records = compiled.program(*arguments()).collectives
    assert Counter(r.kind for r in records if r.kind != "permute") == {"reduce_scatter": 2, "all_gather": 2}
    right, got = (jax.tree.leaves(f(*arguments())) for f in (twice, compiled))
    for a, b in zip(right, got, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12, atol=1e-12)


def test_a_sum_that_begins_with_something_is_no_weight():
    step = step_from(lambda p: md.square(p))
    with pytest.raises(md.LayoutError, match="has nothing to shard") as error:
        md.compile(step, "x:4", "batch:x", weight_update="sharded").program(*arguments())
    assert "its gradient is not a sum over devices" in str(error.value)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_accumulate_in_bfloat16_reduces_each_weight_once(mode: str, reduce: str) -> None:
    workload = lm.replace(
        layers=3, batch=16, length=8, d_model=16, d_ff=32, vocab=64, heads=4, d_head=4, compute_dtype="bfloat16",
        reduce_dtype=reduce,
    )  # fmt: skip
    logits_of, adam = workload.model(workload.config), md.optim.adam(1e-3)

    def loss(params: Any, batch: Any) -> md.Tensor:  # of as many targets in each part
        return md.mean(md.nn.softmax_cross_entropy(logits_of(params, batch), batch["targets"], ignore=None))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = md.accumulate(lambda part: md.value_and_grad(loss)(params, part), batch, steps=4)
        return *adam.update(jax.tree.map(lambda g: g / 4, grads), state, params), value / 4

    compiled = md.compile(step, "rows:4", "batch:rows", weight_update=mode)
    specs = workload.specs()
    records = compiled.program(*specs).collectives
    # each part divides the sum of its losses by the number of its targets, which are complete then
    assert all(r.count == 1 for r in records if r.shape), [r for r in records if r.count > 1]
    records = [r for r in records if r.shape]
    kinds = Counter(r.kind for r in records)
    weights = len(jax.tree.leaves(specs[0]))
    if mode == "replicated":
        assert kinds == {"all_reduce": weights}
    else:
        assert kinds == {"reduce_scatter": weights, "all_gather": weights}
        assert all(d.sharded for d in compiled.weight_update.decisions)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["x:1", "x:2", "x:4", "x:2 y:2", "x:3"]), st.booleans())
def test_accumulate_is_the_sum_over_the_batch_and_sends_no_more(steps: int, mesh: str, both: bool) -> None:
    def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.einsum(md.tanh(md.einsum(x, params["w"], out="batch h")), params["v"], out="batch")))

    def parts(params: Any, x: md.Tensor) -> Any:
        return md.accumulate(lambda part: md.value_and_grad(loss)(params, part), x, steps)

    layout = "batch:x,y" if both and "y" in mesh else "batch:x"
    whole, accumulated = (md.compile(f, mesh, layout).program(*arguments()) for f in (md.value_and_grad(loss), parts))
    arrays = [x.numpy() for x in jax.tree.leaves(arguments())]
    for a, b in zip(*(md.simulate(program, *arrays) for program in (whole, accumulated)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11)
    if (16 // steps) % md.Mesh(mesh).count(tuple(layout.removeprefix("batch:").split(","))) == 0:
        sent = [sorted((r.kind, r.bytes, r.count) for r in program.collectives) for program in (whole, accumulated)]
        assert sent[0] == sent[1]


def test_accumulate_of_what_it_cannot_cut_says_so() -> None:
    x = md.tensor(np.ones((6, 2)), "batch io")
    with pytest.raises(md.ShapeError, match="batch=6 into 4 equal parts\n  give a number of steps that divides 6"):
        md.accumulate(lambda part: md.sum(part), x, steps=4)
    with pytest.raises(md.ShapeError, match="no dim 'rows'"):
        md.accumulate(lambda part: md.sum(part), x, steps=2, over="rows")
    with pytest.raises(md.ShapeError, match="booleans have no sum"):
        md.accumulate(lambda part: md.any(part > 0), x, steps=2)


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_accumulate_numbers_its_parts(steps: int) -> None:
    x = np.random.default_rng(0).integers(0, 9, (6, 2)).astype("float64")

    def weighted(x: md.Tensor) -> Any:
        return md.accumulate(lambda part, number: (part.sum("batch") * (number + 1), number), x, steps, numbered=True)

    total, numbers = md.compile(weighted, "r:2", "batch:r")(md.tensor(x, "batch io"))
    np.testing.assert_array_equal(total.numpy(), sum((i + 1) * x[i::steps].sum(0) for i in range(steps)))
    assert numbers.item() == steps * (steps - 1) // 2
