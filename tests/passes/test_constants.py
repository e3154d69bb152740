"""Values made of nothing are never sent, and what loops take row by row is not split between them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.lowering.figures import mamba
from tests.lowering.programs import sent_though_constant

BATCH, LENGTH, MODEL, HEADS, HEAD = md.dims("batch:4 length:16 model:8 heads:4 head:2")
MEMORY = md.Dim("memory", 16)


def mask() -> md.Tensor:
    return md.broadcast(md.iota(LENGTH), [LENGTH, MEMORY]) >= md.iota(MEMORY)


def angles() -> md.Tensor:
    rates = md.exp(md.cast(md.iota(HEAD), "float32") * -0.1)
    return md.einsum(md.cast(md.iota(LENGTH), "float32"), rates, out=[LENGTH, HEAD])


def decoder(outside: bool) -> Any:
    """The gradient of attention layers that make a causal mask and rotary tables from iotas, inside or outside."""

    def step(weights: Any, x: md.Tensor) -> Any:
        def loss(weights: Any) -> md.Tensor:
            made = (mask(), angles()) if outside else None

            def layer(x: md.Tensor, ws: Any) -> Any:
                allowed, turn = made or (mask(), angles())
                heads = [BATCH, LENGTH, HEADS, HEAD]
                q, k, v = (md.prefer(md.einsum(x, w, out=heads), "heads") for w in ws[:3])
                q, k = q * md.cos(turn), k * md.sin(turn)
                k, v = (md.rename(t, length="memory") for t in (k, v))
                scores = md.where(allowed, md.einsum(q, k, out="batch heads length memory"), -1e9)
                y = md.einsum(md.softmax(md.prefer(scores, "heads"), "memory"), v, out="batch heads length head")
                return x + md.einsum(md.prefer(y, "heads"), ws[3], out=[BATCH, LENGTH, MODEL]), None

            return md.sum(md.square(md.scan(layer, x, weights, over="layer")[0]))

        return md.grad(loss)(weights)

    return step


def arguments() -> tuple[Any, md.Tensor]:
    rng = np.random.default_rng(1)
    into, out = "layer:3 model:8 heads:4 head:2", "layer:3 heads:4 head:2 model:8"
    weights = tuple(small(rng, md.dims(shape)) for shape in [into] * 3 + [out])
    return weights, small(rng, [BATCH, LENGTH, MODEL])


def small(rng: np.random.Generator, dims: Any) -> md.Tensor:
    return md.tensor(rng.normal(scale=0.3, size=[d.size for d in dims]).astype("float32"), dims)


@pytest.mark.parametrize("outside", [False, True])
def test_masks_and_rotary_tables_are_made_where_they_are_read(outside: bool) -> None:
    step = md.compile(decoder(outside), "rows:2 cols:4", "batch:rows; length:cols; heads:cols")
    program = step.program(*arguments())
    assert not sent_though_constant(program)
    assert not [r for r in program.collectives if r.kind == "all_gather" and len(r.shape) == 2]
    right, got = decoder(outside)(*arguments()), step(*arguments())
    for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=2e-5)


def test_moving_a_value_made_of_nothing_sends_nothing() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        return x + md.shift(md.square(md.iota(md.Dim("a", 16), "float32")), "a", 3)

    assert not md.compile(f, "r:4", "a:r").program(md.spec("a:16")).collectives


@pytest.mark.parametrize("layout", ["c:rows", "c:rows; col:cols"])
def test_a_loop_without_inputs_is_lowered_as_a_loop(layout: str) -> None:
    """Its stacked result is whole, whatever its reader needs."""

    def f(x: md.Tensor) -> md.Tensor:
        y = md.abs(md.reshape(x, "row:6 col:4"))
        _, ys = md.scan(lambda c, row: (c, md.cast(md.iota("col:4"), "float32")), (), y, over="row")
        return md.transpose(ys, ["col", "row"]) + y

    x = small(np.random.default_rng(2), md.dims("c:6 col:4"))
    step = md.compile(f, "rows:2 cols:2", layout)
    np.testing.assert_array_equal(md.simulate(step.program(x), x)[0], f(x).numpy())
    np.testing.assert_array_equal(step(x).numpy(), f(x).numpy())


def test_residuals_of_a_scan_over_a_split_dim_stay_as_the_scans_take_them() -> None:
    model = mamba(layers=2, width=16, state=4)
    tokens = md.spec("batch:4 length:16", "int32")

    def loss(params: Any, tokens: md.Tensor) -> md.Tensor:
        return md.mean(md.nn.softmax_cross_entropy(model(params, tokens), tokens))

    step = md.compile(md.grad(loss), "rows:2 cols:4", "batch:rows; length:cols; vocab:cols")
    program = step.program(model.specs(tokens), tokens)
    gathers = [r for r in program.collectives if r.kind == "all_gather" and r.count == 2]
    assert max(len(r.shape) for r in gathers) == 3, "a state of every step, [length batch inner state], is gathered"
