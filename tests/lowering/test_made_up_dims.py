"""Dims that layers, passes and the partitioner make up have names that the model does not use, whatever these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from tests.laws import run

Call = Callable[..., Any]

K = md.Dim("k", 3)
MIXED = lambda x, name: md.concat([x, md.reverse(x, "a")], "a")  # noqa: E731
# the name of a dim that an operation along a split dim `a` makes up, and the operation
OPERATIONS: list[tuple[str, Call]] = [
    ("a__parts", lambda x, name: md.cumsum(x, "a")),
    ("a__parts", lambda x, name: md.cumprod(x, "a")),
    ("a__parts", lambda x, name: md.prod(x, "a")),
    ("a__parts", lambda x, name: md.prod(x, ["a", name])),
    ("a__parts", lambda x, name: md.top_k(x, "a", K)[0]),
    ("a__parts", lambda x, name: md.associative_scan(lambda p, q: p + q, x, over="a")),
    ("a__run0", lambda x, name: md.unflatten(x, "a", "b:2 c:7")),
    ("a__run1", lambda x, name: md.unflatten(x, "a", "b:2 c:7")),
    ("b__run1", lambda x, name: md.unflatten(x, "a", "b:2 c:7")),
    ("a__rows", lambda x, name: md.roll(x, "a", 3)),
    ("a__joined", MIXED),
    ("a__rows", MIXED),
    ("a__window", lambda x, name: md.max_pool(x, {"a": 3}, stride=1)),
    ("a__window", lambda x, name: md.avg_pool(x, {"a": 3}, stride=2)),
    ("micro", lambda x, name: md.accumulate(lambda x: md.sum(x * x, "a"), x, steps=2, over="a")),
    ("trip", lambda x, name: md.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x), max_trips=5)[1]),
    ("a__inner", lambda x, name: md.scan(lambda c, row: (c + row, c * row), md.sum(x, "a") * 0, x, over="a")[1]),
    ("key_number", lambda x, name: x + md.random.split(md.random.key(0), 2)[1].sum() * 0),
]  # fmt: skip


def same(f: Call, x: md.Tensor, layout: str) -> None:
    both = lambda x: (f(x), md.grad(lambda x: md.sum(md.square(f(x))))(x))  # noqa: E731
    step = md.compile(both, "r:4", layout)
    simulated = md.simulate(step.program(x), x)
    for got, want in zip(simulated, run(step.graph(x), [x.numpy()], backend.NumPy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize(("name", "operation"), OPERATIONS)
def test_an_operation_takes_a_dim_with_the_name_that_its_lowering_makes_up(name: str, operation: Call) -> None:
    x = md.tensor(np.random.default_rng(0).integers(1, 4, (14, 3)).astype(np.float64), f"a {name}")
    for layout in ("a:r", f"{name}:r"):
        same(lambda x: operation(x, name), x, layout)


@pytest.mark.parametrize("name", ["io__r", "io__r_"])
def test_a_sharded_update_takes_a_dim_with_the_name_of_its_parts(name: str) -> None:
    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        loss = lambda w: md.sum(md.square(md.einsum(x, w, out=f"batch {name}")))  # noqa: E731
        return w - 0.25 * md.grad(loss)(w)

    rng = np.random.default_rng(0)
    w, x = (
        md.tensor(rng.integers(-2, 3, shape).astype(np.float64), dims)
        for shape, dims in (((16, 3), f"io {name}"), ((8, 16), "batch io"))
    )
    compiled = md.compile(step, "r:4", "batch:r", weight_update="sharded")
    assert {"reduce_scatter", "all_gather"} == {c.kind for c in compiled.program(w, x).collectives}
    np.testing.assert_array_equal(md.simulate(compiled.program(w, x), w, x)[0], step(w, x).numpy())


def test_ring_attention_takes_dims_with_the_names_of_its_turns() -> None:
    rng = np.random.default_rng(0)
    for group in ("turn", "length__half", "length__parts", "query__position", "length__keys"):
        q, k, v = (md.tensor(rng.normal(size=(8, 2, 4)), f"length {group} head") for _ in range(3))
        f = lambda q, k, v: md.attention(q, k, v, causal=True)  # noqa: E731
        want = f(q, k, v).numpy()
        for layout in ("length:r", f"{group}:r"):
            mesh = "r:4" if layout == "length:r" else "r:2"
            (got,) = md.simulate(md.compile(f, mesh, layout).program(q, k, v), q, k, v)
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


LAYERS: list[tuple[str, Call]] = [
    ("gate", lambda x: md.nn.lstm(x, "hidden:4")[0]),
    ("hidden_before", lambda x: md.nn.gru(x, "hidden:4")[0]),
    ("recent", lambda x: md.nn.causal_conv(x, 2, over="model")[0]),
    ("model_group", lambda x: md.nn.group_norm(x, 2, "model", along="length")),
    ("model_member", lambda x: md.nn.group_norm(x, 2, "model", along="length")),
    ("gate", lambda x: md.nn.moe_layer(x, "expert:2", "hidden:4")[0]),
    ("slot", lambda x: md.nn.moe_layer(x, "expert:2", "hidden:4", dispatch="index")[0]),
    ("gate_slot", lambda x: md.nn.moe_layer(x, "expert:2", "hidden:4", dispatch="index")[0]),
    ("gate_slot", lambda x: md.nn.moe_layer(x, "expert:2", "hidden:4", dispatch="einsum")[0]),
    ("choice", lambda x: md.nn.moe_layer(x, "expert:2", "hidden:4", dispatch="grouped")[0]),
    ("gate_node", lambda x: md.nn.moe_layer(x, "expert:4", "hidden:4", nodes="node:2", dispatch="index")[0]),
    ("node_slot", lambda x: md.nn.moe_layer(x, "expert:4", "hidden:4", nodes="node:2", dispatch="index")[0]),
    ("node_expert", lambda x: md.nn.moe_layer(x, "expert:4", "hidden:4", nodes="node:2", dispatch="einsum")[0]),
    ("bucket", lambda x: x + md.sum(md.nn.relative_bias("bucket:2", "memory:5", "length:5"))),
]


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_takes_a_dim_with_the_name_that_it_makes_up(name: str, layer: Call) -> None:
    model = md.model(layer)
    usual, odd = (md.tensor(np.ones((2, 5, 4), np.float32), f"{batch} length model") for batch in ("batch", name))
    for x in (usual, odd):
        md.compile(model.init, "").program(md.random.key(0), x)
    params, shaped = (model.init(md.random.key(0), x) for x in (usual, odd))
    assert [x.shape for x in params.values()] == [x.shape for x in shaped.values()]
    (wanted,), (found,) = (
        md.simulate(md.compile(model, "").program(weights, x), *jax.tree.leaves((weights, x)))
        for weights, x in ((params, usual), (shaped, odd))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_optimizers_take_dims_with_the_names_that_they_make_up() -> None:
    for dims in ("magnitude__parts:2 io:3", "io_row:2 io:3", "io_column:2 io:3", "io_middle:2 io:3"):
        w = {"w": md.ones(dims)}
        for optimizer in (md.optim.muon(0.1), md.optim.lamb(0.1), md.optim.with_clipping(md.optim.sgd(0.1), 1.0)):
            program = md.compile(lambda w, by=optimizer: by.update(w, by.init(w), w)[0], "").program(w)
            (changed,) = md.simulate(program, w["w"])
            assert np.isfinite(changed).all()
