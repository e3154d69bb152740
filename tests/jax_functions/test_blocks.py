"""JAX functions on blocks obey the layout law: values and gradients are those of the function on whole arrays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import meshdsl as md
from tests.joined import calls
from tests.stablehlo import cost_law


class Case(NamedTuple):
    """A JAX function, the dims of its operands and results, and the dims that may be split and summed."""

    f: Callable[..., Any]
    ins: tuple[str, ...]
    out: Any
    split: str = ""
    contract: str = ""
    tolerance: float = 1e-9


def scale(x: Any) -> Any:
    """A Pallas kernel with a grid over the batch: every row divided by one plus its squared norm."""

    def kernel(x_ref: Any, y_ref: Any) -> None:
        x = x_ref[...]
        y_ref[...] = x / (1 + jnp.sum(x * x, axis=1, keepdims=True))

    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, shape, grid=(x.shape[0],), in_specs=[spec], out_specs=spec, interpret=True)(x)


@jax.custom_vjp
def kernel(x: Any) -> Any:
    return scale(x)


def _backward(x: Any, ct: Any) -> Any:
    n = 1 + jnp.sum(x * x, axis=1, keepdims=True)
    return (ct / n - 2 * x * jnp.sum(ct * x, axis=1, keepdims=True) / n**2,)


kernel.defvjp(lambda x: (scale(x), x), _backward)


@jax.custom_vjp
def clipped(x: Any, w: Any) -> Any:
    return x * w


clipped.defvjp(
    lambda x, w: (x * w, (x, w)), lambda r, ct: (jnp.clip(ct, -0.1, 0.1) * r[1], jnp.einsum("bc,bc->c", ct, r[0]))
)


def convolution(x: Any, w: Any) -> Any:
    n = 2 * x.shape[-1]
    return jnp.fft.irfft(jnp.fft.rfft(x, n) * jnp.fft.rfft(w, n), n)[..., : x.shape[-1]]


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def recurrence(x: Any, w: Any) -> Any:
    """A state per batch and channel, from zeros; a loop inside a block."""

    def step(h: Any, row: Any) -> Any:
        h = jnp.tanh(h * w + row)
        return h, h

    first = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    return jnp.moveaxis(jax.lax.scan(step, first, jnp.moveaxis(x, 1, 0))[1], 0, 1)


CASES = {
    "fft": Case(lambda x: jnp.abs(jnp.fft.rfft(x, axis=1) + 3), ("batch:8 time:6",), "batch frequency", "batch"),
    "fft convolution": Case(convolution, ("batch:4 channel:8 time:6", "channel:8 time:6"), "batch channel time",
                            "batch channel"),
    "qr": Case(jnp.linalg.qr, ("batch:8 row:5 column:3",), ("batch row rank", "batch rank column"), "batch"),
    "attention": Case(attention, ("batch:4 query:4 head:8 key:6", *["batch:4 memory:4 head:8 key:6"] * 2),
                      "batch query head key", "batch head", tolerance=1e-5),  # JAX computes this softmax in float32
    "kernel": Case(kernel, ("batch:8 channel:6",), "batch channel", "batch"),
    "custom gradient": Case(clipped, ("batch:8 channel:6", "channel:6"), "batch channel", "batch channel"),
    "loop": Case(recurrence, ("batch:4 time:6 channel:8", "channel:8"), "batch time channel", "batch channel"),
    "contraction": Case(lambda x, w: jnp.einsum("bik,kj->bij", x, w) * 2, ("batch:4 i:6 k:8", "k:8 j:6"), "batch i j",
                        "batch i j", "k"),
}  # fmt: skip


def layouts(dims: set[str], rng: random.Random) -> tuple[str, str]:
    """A mesh of at most eight devices, and a layout of some dims, which need not divide."""
    mesh = {"r": rng.choice([2, 3, 4]), "s": rng.choice([1, 2])}
    rules: dict[str, list[str]] = {}
    for axis in mesh:
        rules.setdefault(rng.choice(sorted(dims)), []).append(axis)
    return " ".join(f"{a}:{n}" for a, n in mesh.items()), "; ".join(
        f"{d}:{','.join(axes)}" for d, axes in rules.items()
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_jax_functions_obey_the_layout_law_with_gradients(name: str, count: int) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = [rng.normal(size=[d.size for d in md.dims(dims)]) for dims in case.ins]
    tensors = [md.tensor(x, md.dims(dims)) for x, dims in zip(arrays, case.ins, strict=True)]
    numbers = tuple(range(len(arrays)))

    def loss(*xs: md.Tensor) -> md.Tensor:
        ys = md.local(case.f, *xs, out=case.out, split=case.split, contract=case.contract)
        return sum((md.sum(md.sin(y)) for y in jax.tree.leaves(ys)), md.sum(xs[0]))

    def reference(*xs: Any) -> Any:
        return sum((jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(case.f(*xs))), jnp.sum(xs[0]))

    wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(reference, argnums=numbers))(*arrays))
    dims = {d.name for x in tensors for d in x.dims}
    draw = random.Random(name)
    for mesh, layout in [layouts(dims, draw) for _ in range(count)]:
        step = md.compile(md.value_and_grad(loss, argnums=numbers), mesh, layout)
        program = step.program(*tensors)
        assert cost_law(program, step.lower(*tensors).as_text()) == len(program.collectives), (mesh, layout)
        for got in (md.simulate(program, *tensors), [y.numpy() for y in jax.tree.leaves(step(*tensors))]):
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=case.tolerance, atol=case.tolerance, err_msg=f"{mesh} {layout}")


def test_a_gradient_that_mixes_places_is_refused() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct - ct.mean(0),))
    x = md.tensor(np.ones((4, 3)), "batch channel")
    md.local(f, x, out="batch channel", split="batch")
    with pytest.raises(md.ShapeError, match=r"d_f does not treat blocks like the whole: reduce_sum .* batch"):
        md.grad(lambda x: md.sum(md.local(f, x, out="batch channel", split="batch")))(x)


def test_second_gradients_of_a_jax_function() -> None:
    def twice(x: md.Tensor) -> md.Tensor:
        y = lambda x: md.sum(md.local(lambda x: jnp.cumsum(x**3, 1), x, out="b t", split="b"))  # noqa: E731 - short
        return md.grad(lambda x: md.sum(md.square(md.grad(y)(x))))(x)

    x = md.tensor(np.random.default_rng(0).normal(size=(4, 3)), "b t")
    y = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.cumsum(x**3, 1)))(x) ** 2)))(x.array)
    layouts = ("b:r", "t:s", "b:r; t:s")
    for layout, found in zip(layouts, calls(*((md.compile(twice, "r:2 s:3", at), [x]) for at in layouts)), strict=True):
        np.testing.assert_allclose(found.numpy(), y, rtol=1e-12, err_msg=layout)
