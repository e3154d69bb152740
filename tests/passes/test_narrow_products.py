"""The dtypes of products: of gradients under mixed precision, and of copies of narrow values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import Graph, walk
from meshdsl.models.gpt_moe import gpt_moe
from meshdsl.models.transformer import lm


def products(graph: Graph, backward: bool = True) -> set[tuple[str, ...]]:
    """The dtypes of the operands of every product."""
    eqns = [eqn for eqn, _ in walk(graph) if str(eqn.op) == "einsum" and len(eqn.ins) > 1]
    return {tuple(v.dtype.name for v in eqn.ins) for eqn in eqns if eqn.backward == backward}


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_of_products_take_cotangents_in_the_compute_dtype(reduce: str) -> None:
    workload = lm.replace(layers=2, batch=4, length=8, d_model=16, compute_dtype="bfloat16", reduce_dtype=reduce)
    params, _, batch = workload.specs()
    graph = md.compile(md.grad(workload.loss(workload.config)), "", "").graph(params, batch)
    assert products(graph) == {("bfloat16", "bfloat16")}


def test_only_the_router_of_experts_multiplies_in_float32() -> None:
    workload = gpt_moe.replace(layers=2, batch=4, length=8, d_model=16, compute_dtype="bfloat16")
    params, _, batch = workload.specs()
    step = md.compile(md.grad(lambda p, b: workload.loss(workload.config)(p, b)[0]), "", "").graph(params, batch)
    backward = [e for e, _ in walk(step) if str(e.op) == "einsum" and len(e.ins) > 1 and e.backward]
    wide = [e for e in backward if e.ins[0].dtype == np.float32]
    assert all(any(d.name == "gate" for v in e.ins for d in v.dims) for e in wide) and len(wide) == 2, wide


def test_precision_can_keep_cotangents_in_float32() -> None:
    def grads(precision: md.nn.Precision) -> Any:
        def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
            return md.sum(md.square(precision.einsum(x, w, out=[x.dims[0], w.dims[1]])))

        return md.grad(loss)

    rng = np.random.default_rng(0)
    w, x = (md.tensor(rng.normal(size=n).astype("float32"), d) for n, d in (((8, 4), "io h"), ((16, 8), "batch io")))
    exact = grads(md.nn.Precision(compute="bfloat16", gradient="float32"))
    rounded = grads(md.nn.Precision(compute="bfloat16"))
    assert products(md.compile(exact, "", "").graph(w, x)) == {("float32", "float32")}
    assert products(md.compile(rounded, "", "").graph(w, x)) == {("bfloat16", "bfloat16")}
    right, close = exact(w, x).numpy(), rounded(w, x).numpy()
    assert 0 < np.max(np.abs(right - close)) <= 2**-7 * np.max(np.abs(right))


def test_a_product_of_copies_takes_what_they_are_copies_of_and_gives_the_same_bits() -> None:
    def f(x: md.Tensor, y: md.Tensor) -> md.Tensor:
        return md.einsum(md.cast(x, "float32"), md.cast(y, "float32"), out="a c")

    rng = np.random.default_rng(0)
    x, y = (md.cast(md.tensor(rng.normal(size=n), d), "bfloat16") for n, d in (((8, 4), "a b"), ((4, 8), "b c")))
    compiled = md.compile(f, "r:2", "b:r")
    assert products(compiled.graph(x, y), backward=False) == {("bfloat16", "bfloat16")}
    np.testing.assert_allclose(compiled(x, y).numpy(), f(x, y).numpy(), rtol=1e-6)
    mixed = md.compile(lambda x, y: md.einsum(md.cast(x, "float32"), y, out="a c"), "", "")
    assert products(mixed.graph(x, md.cast(y, "float32")), backward=False) == {("float32", "float32")}
