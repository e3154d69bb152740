"""The check of JAX functions for md.local: 20 that map over a dim are accepted, and 21 that mix its places refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import meshdsl as md

F = Callable[..., Any]


@jax.custom_vjp
def straight_through(x: Any) -> Any:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


def doubling(x: Any, rows: int = 2) -> Any:
    """A kernel with a grid over the rows."""

    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] * jnp.max(x_ref[...], axis=1, keepdims=True)

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, shape, grid=(x.shape[0] // rows,), in_specs=[spec], out_specs=spec, interpret=True)(x)


def kernel_over(axis: int, reads_step: bool = False) -> F:
    """A kernel that mixes along an axis of its blocks of two rows, or uses the number of its block."""

    def kernel(x_ref: Any, y_ref: Any) -> None:
        x = x_ref[...]
        y_ref[...] = x * pl.program_id(0) if reads_step else x + x.sum(axis, keepdims=True)

    def f(x: Any) -> Any:
        spec = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, shape, grid=(x.shape[0] // 2,), in_specs=[spec], out_specs=spec, interpret=True)(
            x
        )

    return f


def attention(x: Any, **options: Any) -> Any:
    """Self-attention; x is (row, time, head, feature), of which `row` is split."""
    y = x.reshape(*x.shape[:1], 4, 2, 2)
    return jax.nn.dot_product_attention(y, y, y, **options).reshape(x.shape)


def carried(x: Any) -> Any:
    return lax.scan(lambda c, column: (c + jnp.tanh(column), c), jnp.zeros(x.shape[0], x.dtype), x.T)[1].T


def newton(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, 0.5 * (c[1] + x / c[1])), (0, jnp.ones_like(x)))[1]


def square(x: Any) -> Any:
    return x.reshape(-1, 4, 4) + 9 * jnp.eye(4, dtype=x.dtype)


# functions of an array [row, 16]: they map over `row`
SPLIT: dict[str, F] = {
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "normalise": lambda x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1),
    "fft": lambda x: jnp.fft.fft(x).real,
    "fft convolution": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(jnp.ones(16, x.dtype)), 16),
    "sort": lambda x: jnp.sort(x, 1),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "take along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "gather columns": lambda x: x[:, jnp.array([3, 1, 2] * 5 + [0])],
    "scatter columns": lambda x: x.at[:, 3].add(x[:, 0]),
    "matrix product": lambda x: x @ jnp.arange(256.0, dtype=x.dtype).reshape(16, 16),
    "convolution": lambda x: jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3, x.dtype), "same"))(x),
    "qr": lambda x: jnp.linalg.qr(square(x))[1].reshape(x.shape),
    "solve": lambda x: jnp.linalg.solve(square(x), square(x) * 2).reshape(x.shape),
    "cholesky": lambda x: jnp.linalg.cholesky(square(x) @ square(x).mT).reshape(x.shape),
    "attention": attention,
    "scan": carried,
    "while": newton,
    "custom gradient": straight_through,
    "kernel": doubling,
}
assert len(SPLIT) == 20

# functions of the same array: they mix its rows, and the primitive that does
MIXING: dict[str, tuple[F, str]] = {
    "mean": (lambda x: x - x.mean(0), "reduce_sum"),
    "softmax": (lambda x: jax.nn.softmax(x, 0), "reduce_max"),
    "fft": (lambda x: jnp.fft.fft(x, axis=0).real, "fft"),
    "sort": (lambda x: jnp.sort(x, 0), "sort"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), "cumsum"),
    "reverse": (lambda x: x[::-1], "rev"),
    "roll": (lambda x: jnp.roll(x, 1, 0), "slice"),
    "first row": (lambda x: x - x[:1], "slice"),
    "gather rows": (lambda x: x[jnp.zeros(x.shape[0], int)], "gather"),
    "transpose": (lambda x: x @ x.T @ x, "dot_general"),
    "transposing reshape": (lambda x: lax.reshape(x, x.shape, (1, 0)), "reshape"),
    "size": (lambda x: x / x.shape[0], ""),
    "places": (lambda x: x * jnp.arange(x.shape[0])[:, None], "iota"),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "random_bits"),
    "other rows": (lambda x: x.reshape(2, -1, 16)[::-1].reshape(x.shape), "reshape"),
    "across": (lambda x: x.reshape(16, -1).T, ""),
    "qr": (lambda x: jnp.linalg.qr(x)[1], "qr"),
    "scan": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0] * 0, x)[1], ""),
    "attention": (
        lambda x: jax.nn.dot_product_attention(*[x.reshape(1, -1, 4, 4)] * 3).reshape(x.shape),
        "dot_general",
    ),
    "kernel": (kernel_over(0), "pallas_call"),
    "kernel by number": (kernel_over(1, reads_step=True), "pallas_call"),
}
assert len(MIXING) == 21


def rows(n: int = 12) -> md.Tensor:
    return md.tensor(np.random.default_rng(0).normal(size=(n, 16)), "row column")


def blocks(f: F, x: Any, count: int = 3, axis: int = 0) -> np.ndarray:
    return np.concatenate([np.asarray(f(part)) for part in jnp.split(x, count, axis)], axis)


@pytest.mark.parametrize("name", SPLIT)
def test_functions_that_map_over_a_dim_run_on_blocks(name: str) -> None:
    f, x = SPLIT[name], rows()
    y = md.local(f, x, out="row column", split="row")
    jitted = jax.jit(f)  # one compilation instead of one for each primitive
    np.testing.assert_allclose(y.numpy(), jitted(x.array), rtol=1e-12)
    np.testing.assert_allclose(blocks(jitted, x.array), y.numpy(), rtol=1e-10, atol=1e-10)
    program = md.compile(lambda x: md.local(f, x, out="row column", split="row"), "r:3", "row:r").program(x)
    one = md.compile(lambda x: md.local(f, x, out="row column", split="row"), "r:12", "row:r")
    if name != "kernel":  # it has two rows in a grid step
        assert not one.program(x).collectives
    assert not program.collectives and program.eqns[0].ins[0].sharding.axes("row") == ("r",)


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_places_are_refused_by_the_name_of_the_primitive(name: str) -> None:
    f, primitive = MIXING[name]
    with pytest.raises(md.ShapeError, match="does not treat blocks like the whole") as error:
        md.local(f, rows(), out="row column", split="row")
    assert primitive in str(error.value) and "test_walk.py" in str(error.value), error.value
    x, jitted = rows().array, jax.jit(f)
    try:
        same = all(np.allclose(blocks(jitted, x, count), jitted(x)) for count in (3, 4))
    except (TypeError, ValueError):  # a block has a size that the function does not take
        same = False
    assert not same  # the refusal is not only caution


def test_unchecked_functions_say_so_in_the_program() -> None:
    f = md.compile(lambda x: md.local(jnp.sort, x, out="row column", split="column", unchecked=True), "r:2", "column:r")
    assert "local x f=sort split=column unchecked=True" in str(f.program(rows()))
    assert f(rows()).numpy().tolist() == blocks(jnp.sort, rows().array, 2, axis=1).tolist()


def test_a_function_that_changes_with_its_size_is_refused_at_that_size() -> None:
    def f(x: Any) -> Any:
        return x * 2 if x.shape[0] == 3 else x

    def g(x: Any) -> Any:
        return x * 2 if x.shape[0] == 1 else x

    for function, mesh in ((f, "r:4"), (g, "r:12")):
        local = lambda x, f=function: md.local(f, x, out="row column", split="row")  # noqa: E731 - short
        md.compile(local, "r:2", "row:r").program(rows())
        with pytest.raises(md.ShapeError, match="does something else on a block"):
            md.compile(local, mesh, "row:r").program(rows())


@pytest.mark.parametrize("name", ["size", "constant", "root"])
def test_sums_over_a_dim_are_partial_only_if_they_are_linear(name: str) -> None:
    def total(x: Any, w: Any) -> Any:
        return w * jnp.einsum("rc,c->c", x * x, w) + jnp.sum(x, 0)

    x, w = rows(), md.tensor(np.arange(16.0), "column")
    f = md.compile(
        lambda x, w: md.local(total, x, w, out="column", split="column", contract="row"), "r:3 c:2", "row:r; column:c"
    )
    np.testing.assert_allclose(f(x, w).numpy(), total(x.array, w.array), rtol=1e-12)
    nonlinear: F = {
        "size": lambda x: x.sum(0) / x.shape[0],
        "constant": lambda x: x.sum(0) + 1,
        "root": lambda x: jnp.sqrt(x.sum(0)),
    }[name]
    with pytest.raises(md.ShapeError, match=r"reads the size of a block|is not complete"):
        md.local(nonlinear, x, out="column", contract="row")


def test_the_cost_is_counted_in_the_jaxpr_or_given() -> None:
    def flops(**options: Any) -> float:
        product = md.compile(lambda x: md.local(lambda x: x @ x.mT, x, out="b n m", split="b", **options), "r:2", "b:r")
        return product.cost(md.spec("b:4 n:8 k:16")).to_dict()["flops"]

    assert flops() == 2 * 2 * 8 * 8 * 16
    assert flops(flops=1e6) == 5e5
