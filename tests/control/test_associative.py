"""`md.associative_scan`, `md.cumprod`, `md.switch` and bounded loops: JAX's values and gradients, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from tests.laws import run

SIZES = [0, 1, 2, 5, 8]


def by_numpy(f: Callable[..., Any], *xs: Any) -> list[np.ndarray]:
    """The results by NumPy's kernels: nothing to compile."""
    graph = md.compile(f, "", "").graph(*xs)
    return run(graph, [x.numpy() for x in jax.tree.leaves(xs)], backend.NumPy)


def by_jax(f: Callable[..., Any], *xs: Any) -> list[Any]:
    return jax.tree.leaves(jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*xs))


def then(p: Any, q: Any) -> Any:
    return p[0] * q[0], q[0] * p[1] + q[1]


@pytest.mark.parametrize("n", SIZES)
def test_cumprod_and_its_gradient_are_jaxs_for_zeros_too(n: int) -> None:
    x = np.random.default_rng(n).normal(size=(n, 2))
    if n > 2:
        x[[n // 2, -1], 0] = 0
    for flip in (False, True):
        there = lambda x, flip=flip: jnp.cumprod(x[::-1], 0)[::-1] if flip else jnp.cumprod(x, 0)  # noqa: E731
        here = lambda x, flip=flip: md.cumprod(x, "t", reverse=flip)  # noqa: E731
        loss = lambda x, f=here: (md.sum(md.sin(y := f(x))), y)  # noqa: E731
        (_, value, ours) = by_numpy(md.value_and_grad(loss, has_aux=True), md.tensor(x, "t a"))
        (theirs,) = by_jax(jax.grad(lambda x, f=there: jnp.sum(jnp.sin(f(x)))), x)
        np.testing.assert_allclose(value, there(x), rtol=1e-12)
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def gradients_agree(ours: Callable[..., Any], theirs: Callable[..., Any], arrays: Any, dims: str) -> None:
    a = by_numpy(md.grad(lambda xs: md.sum(md.sin(ours(xs)))), [md.tensor(x, dims) for x in arrays])
    b = by_jax(jax.grad(lambda xs: jnp.sum(jnp.sin(theirs(xs)))), list(arrays))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


def test_gradients_of_recurrences_and_products_are_jaxs() -> None:
    rng = np.random.default_rng(0)
    pair = rng.normal(size=(2, 7, 3))
    gradients_agree(
        lambda xs: md.associative_scan(then, tuple(xs), over="t")[1],
        lambda xs: jax.lax.associative_scan(then, tuple(xs))[1],
        pair,
        "t a",
    )
    largest = lambda f: lambda xs: f(xs[0], xs[1])  # noqa: E731
    gradients_agree(
        largest(lambda x, y: md.associative_scan(md.maximum, x * y, over="t")),
        largest(lambda x, y: jax.lax.cummax(x * y)),
        pair,
        "t a",
    )

    def product(p: md.Tensor, q: md.Tensor) -> md.Tensor:
        return md.rename(md.einsum(md.rename(p, j="k"), md.rename(q, i="k"), out="i j"), i="i")

    gradients_agree(
        lambda xs: md.associative_scan(product, xs[0], over="t"),
        lambda xs: jax.lax.associative_scan(jnp.matmul, xs[0]),
        rng.normal(size=(1, 5, 2, 2)),
        "t i j",
    )


def test_the_gradient_can_be_differentiated_again() -> None:
    x = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]])
    inner = lambda x: md.grad(lambda x: md.sum(md.cumprod(x, "t")))(x)  # noqa: E731
    (ours,) = by_numpy(md.grad(lambda x: md.sum(md.square(inner(x)))), md.tensor(x, "t a"))
    (theirs,) = by_jax(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.cumprod(x, 0)))(x) ** 2)), x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_one_element_per_device_is_sent() -> None:
    specs = md.spec("t:1024 a:6"), md.spec("t:1024 a:6")
    scan = md.compile(lambda x, y: md.associative_scan(then, (x, y), over="t"), "x:8", "t:x")
    assert [(c.kind, c.bytes) for c in scan.program(*specs).collectives] == [("all_gather", 8 * 6 * 4)] * 2
    loss = lambda x, y: md.sum(md.associative_scan(then, (x, y), over="t")[1])  # noqa: E731
    backward = md.compile(md.grad(loss, argnums=(0, 1)), "x:8", "t:x").program(*specs)
    assert max(c.bytes for c in backward.collectives) == 8 * 6 * 4
    assert not md.compile(loss, "x:2", "a:x").program(*specs).collectives[:-1]  # the loss's own sum


def test_dims_that_the_function_sums_are_gathered() -> None:
    def product(p: md.Tensor, q: md.Tensor) -> md.Tensor:
        return md.einsum(md.rename(p, j="k"), md.rename(q, i="k"), out="n i j")

    f = lambda x: md.associative_scan(product, x, over="t")  # noqa: E731
    x = np.random.default_rng(0).integers(-1, 2, (5, 4, 2, 2)).astype(np.float32)
    for layout in ("i:x", "j:x", "n:x", "t:x; n:y"):
        program = md.compile(f, "x:2 y:2", layout).program(md.tensor(x, "t n i j"))
        np.testing.assert_array_equal(md.simulate(program, x)[0], f(md.tensor(x, "t n i j")).numpy())
        assert bool(program.collectives) == (layout != "n:x")


def test_bounded_loops_have_jaxs_gradient() -> None:
    ours = md.grad(lambda x: md.sum(md.while_loop(lambda c: md.max(c) > 1, lambda c: c * c / 4, x, max_trips=8)))

    def theirs(x: Any) -> Any:
        while x.max() > 1:
            x = x * x / 4
        return jnp.sum(x)

    for x in ([3.0, 1.0], [0.5, 0.25], [3.9, -2.0]):
        wanted = jax.grad(theirs)(jnp.array(x))
        np.testing.assert_allclose(by_numpy(ours, md.tensor(x, "a"))[0], wanted, rtol=1e-6)
    assert md.while_loop(lambda c: c > 0, lambda c: c + 1, md.tensor(1), max_trips=5).item() == 6
    assert md.while_loop(lambda c: c > 0, lambda c: c + 1, md.tensor(1), max_trips=0).item() == 1


def test_switch_clips_its_index() -> None:
    powers = [lambda x, k=k: x * k for k in range(5)]
    for dtype in ("int8", "uint8", "int64"):
        found = [md.switch(md.tensor(np.array(i, dtype)), powers, md.tensor(2.0)).item() for i in (0, 3, 4, 100)]
        assert found == [0, 6, 8, 8]
    assert md.switch(md.tensor(-3), powers, md.tensor(2.0)).item() == 0
    assert md.grad(lambda x: md.switch(md.tensor(3), powers, x))(md.tensor(2.0)).item() == 3


def test_mistakes() -> None:
    x, m = md.tensor([1.0, 2.0], "t"), md.tensor([[1.0], [2.0]], "t a")
    outside = lambda y: md.associative_scan(lambda p, q: p * q * y, x, over="t")  # noqa: E731
    looping = lambda p, q: md.while_loop(lambda c: c < 3, lambda c: c * q, p)  # noqa: E731
    for wrong, text in [
        (lambda: md.associative_scan(lambda p, q: md.sum(p + q), m, over="t"), "an element like those it takes"),
        (lambda: md.associative_scan(lambda p, q: p, x, over="u"), "no dim 'u'"),
        (lambda: md.associative_scan(lambda p, q: p, [], over="t"), "xs has none"),
        (lambda: md.grad(outside)(md.tensor(1.0)), "a tensor from outside"),
        (lambda: md.associative_scan(looping, x, over="t"), "no loops or branches"),
        (lambda: md.switch(md.tensor(1.0), [md.sin], x), "one integer without dims"),
        (lambda: md.switch(md.tensor(1), [], x), "at least one function"),
        (lambda: md.switch(md.tensor(1), [md.sin, md.sum], x), "differ"),
        (lambda: md.while_loop(lambda c: c > 0, lambda c: c, 1.0, max_trips=-1), "number of trips"),
    ]:
        with pytest.raises(md.MeshdslError, match=text):
            wrong()
