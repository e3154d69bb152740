"""The residuals of loops: the cheapest choice, and what it stores of common layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.control.residuals import again, choose, stored
from meshdsl.ir import Eqn, Graph, Scan, Var
from meshdsl.trace import trace

WIDE, NARROW = md.spec("a:16 b:16"), md.spec("a:16")
STEPS = {
    "exp": lambda x, y: md.exp(x),
    "sum": lambda x, y: md.sum(x, "b") if len(x.dims) > 1 else md.square(x),
    "cast": lambda x, y: md.cast(md.cast(x, "bfloat16"), "float32"),
    "add": lambda x, y: x + y if len(x.dims) >= len(y.dims) else y + x,
    "divide": lambda x, y: x / y if len(x.dims) >= len(y.dims) else y / x,
    "product": lambda x, y: md.einsum(x, y, out="a") if len(x.dims) > 1 else md.sin(x),
}
STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7), st.integers(0, 7))


def graph_of(steps: list[tuple[str, int, int]]) -> Graph:
    """A graph of two inputs, whose equations take earlier values."""

    def f(x: md.Tensor, y: md.Tensor) -> list[md.Tensor]:
        values = [x, y]
        for step, i, j in steps:
            values.append(STEPS[step](values[i % len(values)], values[j % len(values)]))
        return values

    return trace(f, [md.spec("a:16 b:16"), md.spec("a:16")])[0]


def cost(makers: dict[Var, Eqn], used: set[Var], free: set[Var], made: set[Eqn]) -> int | None:
    """The cost of computing these equations again and storing all else that is read; None if one of them cannot be."""
    costs = [again(eqn) for eqn in made]
    needed = (used | {v for eqn in made for v in eqn.ins}) - free
    if any(n is None for n in costs):
        return None
    return sum(n for n in costs if n is not None) + sum(stored(v) for v in needed if makers.get(v) not in made)


@given(st.lists(STEP, min_size=1, max_size=5), st.sets(st.integers(0, 20), min_size=1, max_size=4), st.booleans())
def test_choose_finds_the_cheapest_choice(steps: list[tuple[str, int, int]], read: set[int], rows: bool) -> None:
    graph = graph_of(steps)
    makers = {v: eqn for eqn in graph.eqns for v in eqn.outs}
    values = [*graph.ins, *makers]
    used, free = {values[i % len(values)] for i in read}, {graph.ins[1]} if rows else set[Var]()
    residuals, recomputed = choose(graph.eqns, used, free, set())
    made = {makers[v] for v in recomputed}
    every = chain.from_iterable(combinations(graph.eqns, n) for n in range(len(graph.eqns) + 1))
    costs = [n for subset in every if (n := cost(makers, used, free, set(subset))) is not None]
    assert cost(makers, used, free, made) == min(costs)
    assert residuals == (used | {v for eqn in made for v in eqn.ins}) - free - recomputed


def stacked(f: Callable[..., Any], *specs: Any) -> list[str]:
    """The types of the residuals of the only loop of a gradient."""
    graph = md.compile(md.grad(f), "rows:2").graph(*specs)
    loop = next(eqn for eqn in graph.eqns if isinstance(eqn.control, Scan))
    assert isinstance(loop.control, Scan)
    return [str(v.type) for v in loop.control.results(loop.outs)[1]]


def test_a_norm_keeps_its_narrow_operand_and_its_scale_not_the_wide_result() -> None:
    def deep(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, None]:
            y = md.cast(x, "float32")
            y = y * md.rsqrt(md.mean(md.square(y), "io"))
            return md.rename(md.einsum(md.cast(y, "bfloat16"), w, out="batch out"), out="io"), None

        return md.sum(md.cast(md.scan(layer, x, w, over="layer")[0], "float32"))

    found = stacked(deep, md.spec("layer:4 io:8 out:8", "bfloat16"), md.spec("batch:16 io:8", "bfloat16"))
    assert found == ["bfloat16[layer=4 batch=16 io=8]", "float32[layer=4 batch=16]"]


def test_an_activation_is_computed_again_from_its_operand() -> None:
    def deep(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, None]:
            return md.rename(md.silu(md.einsum(x, w, out="batch out")), out="io"), None

        return md.sum(md.scan(layer, x, w, over="layer")[0])

    found = stacked(deep, md.spec("layer:4 io:8 out:8"), md.spec("batch:16 io:8"))
    assert len(found) == 2  # the layer's operand and the product; not the sigmoid


@pytest.mark.parametrize("reduce", [None, "bfloat16"])
def test_a_narrow_copy_of_a_weight_is_made_again(reduce: str | None) -> None:
    """Whatever dtype devices add its gradient in: a copy that is stored is one for each micro-batch of a pipeline."""

    def deep(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, None]:
            return md.rename(md.einsum(x, md.cast(w, "bfloat16", reduce=reduce), out="batch out"), out="io"), None

        return md.sum(md.cast(md.scan(layer, x, w, over="layer")[0], "float32"))

    found = stacked(deep, md.spec("layer:4 io:8 out:8"), md.spec("batch:16 io:8", "bfloat16"))
    assert found == ["bfloat16[layer=4 batch=16 io=8]"]


def test_loops_over_dims_of_one_name_may_be_nested_under_a_gradient() -> None:
    """The residuals of the inner loop have its dim, and are stacked along the outer one."""
    x, w = md.tensor([0.5, -1.0], "ch"), md.tensor([[0.3, 2.0], [1.0, -1.0], [0.2, 0.4]], "step ch")

    def total(x: md.Tensor, w: md.Tensor, outer: str) -> md.Tensor:
        def inner(c: md.Tensor, t: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            return md.tanh(c * t) * t + md.sin(c), md.sin(c)

        def trip(c: md.Tensor, t: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            c, ys = md.scan(inner, c, w, over="step")
            return c * t + md.sum(ys, "step"), md.sum(ys)

        c, ys = md.scan(trip, x, md.tensor([0.3, 0.7], f"{outer}:2"), over=outer)
        return md.sum(c) + md.sum(ys)

    def products(x: md.Tensor, w: md.Tensor, outer: str) -> list[md.Tensor]:
        gradient = md.grad(lambda x, w: total(x, w, outer), argnums=(0, 1))
        return [*gradient(x, w), *md.jvp(gradient, (x, w), (x, w))[1]]

    expected = products(x, w, "trip")
    for layout in ("", "ch:r", "step:r"):
        program = md.compile(lambda x, w: products(x, w, "step"), "r:2", layout).program(x, w)
        for a, b in zip(md.simulate(program, x, w), expected, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-6)


@pytest.mark.parametrize("policy", ["products", "collectives"])
@pytest.mark.parametrize("read_twice", [False, True])
def test_products_are_stored_in_the_dtype_in_which_they_are_read(policy: str, read_twice: bool) -> None:
    """A sum in float32 that is cast to bfloat16 is stored in bfloat16, unless something else reads it."""
    x = md.tensor(np.arange(6, dtype=np.float32).reshape(2, 3) / 4, "batch io").astype("bfloat16")
    weights = md.tensor(np.arange(18, dtype=np.float32).reshape(2, 3, 3) / 8, "layer io out").astype("bfloat16")

    def layer(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        wide = md.prefer(md.einsum(x, w, out="batch out", dtype="float32"), "batch")
        y = md.cast(wide, "bfloat16")
        return md.rename(md.tanh(y) * (md.cast(md.sin(wide), "bfloat16") if read_twice else y), out="io")

    def loss(weights: md.Tensor, remat: bool) -> md.Tensor:
        f = md.checkpoint(layer, policy) if remat else layer
        return md.sum(md.scan(lambda h, w: (f(h, w), None), x, weights, over="layer")[0])

    gradient = md.grad(lambda weights: loss(weights, True))
    split = md.compile(gradient, "cols:3", "io:cols")  # sums are pending where they are stored
    forward = next(eqn for eqn in split.program(weights).eqns if eqn.scan is not None)
    products = {v.dtype.name for v in forward.outs if "out" in [d.name for d in v.dims]}
    assert products == {"float32" if read_twice else "bfloat16"}
    plain = md.grad(lambda weights: loss(weights, False))(weights)
    np.testing.assert_array_equal(gradient(weights).numpy(), plain.numpy())
