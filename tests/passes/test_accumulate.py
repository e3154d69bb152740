"""Gradients of microbatches are summed on each device and reduced once, however the sum begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

MICRO = md.Dim("micro", 2)
ZEROS: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "a constant": lambda p: md.broadcast(md.cast(0.0, p.dtype), p.dims),
    "times zero": lambda p: p * 0,
    "zero times": lambda p: 0.0 * p,
    "itself less itself": lambda p: p - p,
    "NumPy's": lambda p: md.tensor(np.zeros(p.shape), p.dims),
    "chosen": lambda p: md.where(p == p, 0.0, md.cast(0, p.dtype)),
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


@pytest.mark.parametrize(("zeros", "mode"), [("times zero", "replicated"), *((zeros, "sharded") for zeros in ZEROS)])
def test_one_reduction_for_each_weight(zeros: str, mode: str):
    compiled = md.compile(step_from(ZEROS[zeros]), "x:4", "batch:x", weight_update=mode)
    records = compiled.program(*arguments()).collectives
    kind = "all_reduce" if mode == "replicated" else "reduce_scatter"
    found = Counter(r.count for r in records if r.kind == kind and r.bytes > 16)  # not the two losses
    assert found == {1: 2}, records
    if mode == "sharded":
        assert all(d.sharded and d.weight.startswith("params/") for d in compiled.weight_update.decisions)
    right, got = (jax.tree.leaves(f(*arguments())) for f in (step_from(ZEROS[zeros]), compiled))
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
