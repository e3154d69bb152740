"""md.map takes only functions in which every primitive works element by element, for every shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.jax_functions import mixing

TAKEN: dict[str, Callable[..., Any]] = {
    **{name: getattr(jax.nn, name) for name in ("celu", "elu", "gelu", "hard_swish", "mish", "relu", "selu", "silu")},
    **{name: getattr(jnp, name) for name in ("exp2", "log2", "nan_to_num", "rad2deg", "sinc", "sinh", "tanh")},
    **{name: getattr(special, name) for name in ("digamma", "erf", "expi", "gammaln", "i0", "logit", "ndtri")},
    "clip": lambda x: jnp.clip(x, -1, 1),
    "where": lambda x: jnp.where(x > 0, x, 0),
    "select": lambda x: jnp.select([x > 1, x < -1], [x, 2 * x], 0.5),
    "power": lambda x: jnp.abs(x) ** 2.5 + x**3,
    "remainder": lambda x: x % 3 + x // 2,
    "constants": lambda x: jnp.full(x.shape, 2.0) + jnp.zeros_like(x) + x + jnp.float32(1),
    "polynomial": lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x),
    "complex": lambda x: jnp.abs(x + 1j) + jnp.angle(x + 2j),
    "gamma": lambda x: special.gammainc(2.0, jnp.abs(x)),
    "jit": jax.jit(lambda x: jnp.tanh(x) + 1),
    "vmap": lambda x: jax.vmap(jax.vmap(jax.grad(lambda y: y**3)))(x),
    "vectorize": jnp.vectorize(lambda y: jnp.where(y > 0, y, 2.0)),
    "loop": lambda x: lax.fori_loop(0, 5, lambda i, y: 0.5 * (y + 2 / (y + 3)), x),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1],
    "rank": lambda x: x * x.ndim,
    "reshaped twice": lambda x: x.ravel().reshape(x.shape),
    "transposed twice": lambda x: x.T.T,
    "one number drawn": lambda x: x * jax.random.normal(jax.random.key(0)),
}
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "sum": (lambda x: x - x.sum(), "reduce_sum"),
    "mean kept": (lambda x: x - x.mean(0, keepdims=True), "reduce_sum"),
    "softmax": (jax.nn.softmax, "reduce_max"),
    "norm": (lambda x: x / jnp.linalg.norm(x), "reduce_sum"),
    "inside jit": (jax.jit(lambda x: x / jnp.max(x)), "reduce_max"),
    "inside a loop": (lambda x: lax.fori_loop(0, 3, lambda i, y: y / y.sum(), x), "reduce_sum"),
    "while of a maximum": (lambda x: lax.while_loop(lambda y: y.max() < 9, lambda y: y + 1, x), "reduce_max"),
    "over its own axis": (lambda x: lax.scan(lambda c, row: (c + row, c), 0 * x[0], x)[1], ""),
    "cumsum": (lambda x: jnp.cumsum(x, 1), "cumsum"),
    "reverse": (lambda x: jnp.flip(x, 0), "rev"),
    "roll": (lambda x: jnp.roll(x, 1, 0), "slice"),
    "sort": (lambda x: jnp.sort(x, 0), "sort"),
    "transpose": (lambda x: x.T, ""),
    "product": (lambda x: x @ x.T @ x, "dot_general"),
    "row": (lambda x: x - x[:1], ""),
    "size": (lambda x: x / x.size, "div"),
    "size as a float": (lambda x: x / float(x.shape[0]), ""),
    "places": (lambda x: x * jnp.arange(x.shape[0])[:, None], "iota"),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "random_bits"),
    "array": (lambda x: x + jnp.arange(12.0).reshape(4, 3), ""),
    "print": (lambda x: (jax.debug.print("{}", 1), x)[1], "debug_print"),
    "number": (lambda x: 3.0, ""),
}


@pytest.mark.parametrize("name", TAKEN)
def test_elementwise_functions_pass_and_keep_their_values(name: str) -> None:
    f, x = TAKEN[name], np.linspace(-2, 2.5, 12, dtype=np.float32).reshape(4, 3)
    assert mixing(f, ("a", "b"), (np.dtype("float32"),), (8, 6), (4, 3)) is None
    if name in ("gelu", "where", "elu"):  # some go all the way: under a layout, with their gradients
        g = md.compile(lambda x: md.value_and_grad(lambda x: md.sum(md.map(f, x)))(x), "p:3", "a:p")
        value, slope = g(md.tensor(x, "a b"))
        np.testing.assert_allclose(value.item(), f(x).sum(), rtol=1e-5)
        np.testing.assert_allclose(slope.numpy(), jax.grad(lambda x: f(x).sum())(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [4, 1])
def test_other_functions_are_refused_by_the_name_of_what_they_do(name: str, size: int) -> None:
    f, primitive = REFUSED[name]
    found = mixing(f, ("a", "b"), (np.dtype("float32"),), (8, 6), (4, 3))
    assert found is not None and (not primitive or found.primitive == primitive), found
    with pytest.raises((md.ShapeError, TypeError)) as error:  # TypeError: the function itself cannot, at this size
        md.map(f, md.tensor(np.ones((size, 3), np.float32), "a b"))
    if isinstance(error.value, md.ShapeError):
        assert "md.map needs an elementwise function" in str(error.value) and "test_elementwise.py" in str(error.value)


@pytest.mark.parametrize(("f", "returned"), [
    (lambda x: (x, x + 1), "tuple"), (lambda x: {"a": x}, "dict"), (lambda x: None, "NoneType")
])  # fmt: skip
def test_functions_of_other_than_one_result_are_refused(f: Any, returned: str) -> None:
    with pytest.raises(md.ShapeError, match=rf"(?s)with one result.* returns {returned}.*md.local.*test_elementwise"):
        md.map(f, md.ones("a:3 b:2"))


def test_numbers_have_no_shape_to_read() -> None:
    with pytest.raises(md.ShapeError, match=r"returns an array of shape \(1,\)"):
        md.map(lambda x: x[None], md.tensor(3.0))
    assert md.map(lambda x: x / x.size, md.tensor(3.0)).item() == 3


def test_the_gradient_of_a_choice_among_no_elements() -> None:
    """JAX leaves a call without results in it, which reads what no result depends on."""
    grad = md.grad(lambda x: md.sum(md.map(lambda a: jnp.where(a > 0, a, 2 * a), x)))
    assert md.compile(grad, "r:2", "a:r")(md.zeros("a:5 b:0")).shape == (5, 0)


def test_gradients_of_elementwise_functions_are_taken() -> None:
    x = md.tensor(np.linspace(-2, 2.5, 12, dtype=np.float32).reshape(4, 3), "a b")
    for name, f in TAKEN.items():
        if name != "while":  # JAX has no reverse derivative of it
            md.eval_shape(md.grad(lambda x, f=f: md.sum(md.map(f, x))), x)


@pytest.mark.parametrize("rule", [jax.custom_vjp, jax.custom_jvp])
def test_a_gradient_of_its_own_that_mixes_places_is_refused(rule: Any) -> None:
    @rule
    def f(x: Any) -> Any:
        return jnp.sin(x)

    if rule is jax.custom_vjp:
        f.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct - ct.mean(0),))
    else:
        f.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] - t[0].mean(0)))
    x = md.tensor(np.ones((4, 3), np.float32), "a b")
    md.map(f, x)
    with pytest.raises(md.ShapeError, match=r"elementwise function; in d_f_0, reduce_sum mixes places along a"):
        md.grad(lambda x: md.sum(md.map(f, x)))(x)


@pytest.mark.parametrize("f", [lambda x: x if x.shape[0] == 2 else -x, lambda x: x * (3 if x.shape[0] == 2 else 4)])
def test_a_function_that_reads_the_size_of_a_block(f: Callable[..., Any]) -> None:
    x = md.spec("a:8 b:3")
    step = md.compile(lambda x: md.map(f, x), "p:4", "a:p")
    with pytest.raises(md.ShapeError, match=r"it is another function on a block of \(2, 3\) than on \[a=8 b=3\]"):
        step.lower(x)
