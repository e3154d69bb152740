"""Products in 8 bits, and quantised weights, which cross the network in their narrow form."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.llama import llama

E4M3 = "float8_e4m3fn"
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(64, 32)).astype("float32"), RNG.normal(size=(16, 64)).astype("float32")
WEIGHT, INPUT = md.tensor(W, "io hidden"), md.tensor(X, "batch io")
FLOAT8 = md.nn.Precision(products="float8")


def quantised(x: np.ndarray, dtype: Any) -> np.ndarray:
    scale = np.max(np.abs(x)) / float(jnp.finfo(dtype).max)
    return np.asarray(jnp.asarray(x / scale).astype(dtype)).astype("float32") * scale


def gradient(w: md.Tensor, x: md.Tensor, precision: md.nn.Precision = FLOAT8) -> md.Tensor:
    return md.grad(lambda w: md.sum(md.square(precision.einsum(x, w, out="batch hidden"))))(w)


def test_float8_products_round_both_operands_and_the_cotangent() -> None:
    x, w = quantised(X, jnp.float8_e4m3fn), quantised(W, jnp.float8_e4m3fn)
    wanted = x.T @ quantised(2 * x @ w, jnp.float8_e5m2)
    np.testing.assert_allclose(gradient(WEIGHT, INPUT).numpy(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", ["batch:r", "io:r", "batch:r hidden:c", "io:c batch:r"])
def test_float8_products_do_not_depend_on_the_layout(layout: str) -> None:
    compiled = md.compile(gradient, "r:3 c:2", layout)
    wanted = gradient(WEIGHT, INPUT).numpy()
    np.testing.assert_allclose(compiled(WEIGHT, INPUT).numpy(), wanted, rtol=1e-5, atol=1e-3)
    (simulated,) = md.simulate(compiled.program(WEIGHT, INPUT), W, X)
    np.testing.assert_allclose(simulated, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_float8_products_of_zeros_and_infinities_are_those_of_the_numbers(value: float) -> None:
    x = md.full("batch:2 io:3", value)
    y = FLOAT8.einsum(x, md.ones("io:3 o:2"), out="batch o").numpy()
    assert np.all(y == 0) if value == 0 else not np.any(np.isfinite(y) & (y != 0))


def test_float8_products_without_elements_and_of_dims_of_one_operand() -> None:
    assert FLOAT8.einsum(md.zeros("batch:0 io:3"), md.ones("io:3 o:2"), out="batch o").dims[0].size == 0
    x = md.ones("batch:2 io:3 extra:2")
    wanted = md.grad(lambda x: md.sum(md.einsum(x, md.ones("io:3 o:2"), out="batch o")))(x)
    ours = md.grad(lambda x: md.sum(FLOAT8.einsum(x, md.ones("io:3 o:2"), out="batch o")))(x)
    np.testing.assert_allclose(ours.numpy(), wanted.numpy(), rtol=0.1)


def test_float8_products_have_gradients_without_precision_too() -> None:
    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        y = md.einsum(md.cast(x, E4M3), md.cast(w, E4M3), out="batch hidden", dtype="float32")
        return md.sum(md.square(y))

    x, w = (np.asarray(jnp.asarray(a).astype(jnp.float8_e4m3fn)).astype("float32") for a in (X, W))
    to_w, to_x = md.grad(loss, (0, 1))(WEIGHT, INPUT)
    np.testing.assert_allclose(to_w.numpy(), x.T @ (2 * x @ w), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(to_x.numpy(), (2 * x @ w) @ w.T, rtol=1e-4, atol=1e-3)
    kernel, signal = md.ones("k:3 io:4 o:2"), md.ones("batch:2 t:6 io:4")

    def conv(kernel: md.Tensor) -> md.Tensor:
        y = md.conv(md.cast(signal, E4M3), md.cast(kernel, E4M3), {"t": "k"}, "batch t o", dtype="float32")
        return md.sum(y)

    assert md.grad(conv)(kernel).dtype == "float32"


def test_float8_of_two_formats_is_refused_with_a_way_out() -> None:
    with pytest.raises(md.ShapeError, match="no common dtype"):
        _ = md.cast(INPUT, E4M3) + md.cast(INPUT, "float8_e5m2")
    assert (md.cast(INPUT, E4M3) + INPUT).dtype == "float32"
    with pytest.raises(md.ShapeError, match="products of"):
        md.nn.Precision(products="float4")
    with pytest.raises(md.ShapeError, match="reduce"):
        md.cast(INPUT, "bfloat16", reduce="int8")


def _with_scale(w: md.Tensor, scale: md.Tensor, dtype: str = E4M3) -> md.Tensor:
    scaled = md.round(w * scale) if dtype == "int8" else w * scale
    return md.cast(md.cast(scaled, dtype), "bfloat16") / md.cast(scale, "bfloat16")


def _largest(w: md.Tensor, over: Any = None) -> md.Tensor:
    return md.max(md.abs(md.stop_gradient(w)), over)


def _blocks(w: md.Tensor) -> md.Tensor:
    b = md.unflatten(w, "io", "block:16 within:64")
    return md.transpose(md.flatten(_with_scale(b, 448.0 / _largest(b, "within")), "block within", "io"), w.dims)


QUANTISED: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "bare": lambda w: md.cast(md.cast(w, E4M3), "bfloat16"),
    "constant": lambda w: md.cast(md.cast(w * 16.0, E4M3), "bfloat16") / 16.0,
    "tensor": lambda w: _with_scale(w, 448.0 / _largest(w)),
    "channel": lambda w: _with_scale(w, 448.0 / _largest(w, "io")),
    "block": _blocks,
    "int8": lambda w: _with_scale(w, 127.0 / _largest(w), "int8"),
}
BIG = md.tensor(RNG.normal(size=(1024, 32)).astype("float32"), "io hidden")
ROWS = md.tensor(RNG.normal(size=(640, 1024)).astype("float32"), "batch io")


def loss_of(name: str, w: md.Tensor, x: md.Tensor) -> md.Tensor:
    y = md.einsum(md.cast(x, "bfloat16"), QUANTISED[name](w), out="batch hidden", dtype="float32")
    return md.sum(md.square(y))


def gathered(program: Any) -> set[tuple[str, int]]:
    return {(c.dtype.name, c.bytes) for c in program.collectives if c.kind == "all_gather" and c.bytes > 1024}


@pytest.mark.parametrize("name", QUANTISED)
def test_float8_weights_of_a_layout_are_gathered_narrow(name: str) -> None:
    layout = md.Layout("batch:r", overrides={"w": "io:r"})
    compiled = md.compile(lambda w, x: loss_of(name, w, x), "r:4", layout)
    program = compiled.program(BIG, ROWS)
    assert gathered(program) == {("int8" if name == "int8" else E4M3, BIG.numpy().size)}
    assert all(c.bytes <= 1024 for c in program.collectives if c.kind != "all_gather")
    wanted = float(loss_of(name, BIG, ROWS))
    assert float(compiled(BIG, ROWS)) == pytest.approx(wanted, rel=1e-5)
    assert float(md.simulate(program, BIG.numpy(), ROWS.numpy())[0]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in QUANTISED if name != "int8"])
def test_float8_weights_of_a_sharded_update_are_gathered_narrow(name: str) -> None:
    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return w - 1e-6 * md.grad(lambda w: loss_of(name, w, x))(w)

    compiled = md.compile(step, "r:4", "batch:r", weight_update="sharded")
    assert gathered(compiled.program(BIG, ROWS)) == {(E4M3, BIG.numpy().size)}
    np.testing.assert_allclose(compiled(BIG, ROWS).numpy(), step(BIG, ROWS).numpy(), rtol=1e-4, atol=1e-4)


@cache
def on_one_device(remat: bool) -> tuple[md.Workload, Any, list[np.ndarray]]:
    """A model with layers, the arguments of its step, and the results."""
    workload = llama.replace(products="float8", remat=remat, layers=3)
    params, state = workload.init(md.random.key(0))
    tokens = md.random.randint(md.random.key(1), "batch:8 length:64", 0, 256)
    args = params, state, {"tokens": tokens, "targets": tokens}
    plain = md.compile(workload.train_step(), "").program(*args)
    return workload, args, md.simulate(plain, *jax.tree.leaves(args))


@pytest.mark.parametrize(("remat", "regather"), [(False, False), (True, False), (True, True)])
def test_float8_weights_of_layers_are_gathered_narrow(remat: bool, regather: bool) -> None:
    workload, args, plain = on_one_device(remat)
    update = md.WeightUpdate("sharded", regather=regather)
    compiled = md.compile(workload.train_step(), "rows:4", "batch:rows", weight_update=update)
    program = compiled.program(*args)
    wide = [c for c in program.collectives if c.kind == "all_gather" and c.dtype == "float32" and "/w" in c.name]
    assert not wide
    assert any(c.dtype == E4M3 for c in program.collectives)
    for got, wanted in zip(md.simulate(program, *jax.tree.leaves(args)), plain, strict=True):
        assert np.max(np.abs(got - wanted)) <= 1e-3 * max(1, np.max(np.abs(wanted)))
