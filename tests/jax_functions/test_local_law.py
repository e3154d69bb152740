"""The check of md.local: accepted functions give the same on blocks as on the whole; wrong ones are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.jax_functions.local_law import draw, law

Function = Callable[..., Any]
FILLED = np.array([0, 2, 9])


def blocks_beside(x: Any, y: Any) -> Any:
    """The places of x once for each place of y, on one axis."""
    return jnp.broadcast_to(x, (y.shape[0], x.shape[0])).reshape(-1)


def shifted(x: Any) -> Any:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 1), (1, 1), ((1, -1), (0, 0)))


# name: function, operands, dims of the result, split, contract, the layout that would be wrong, and the primitive
WRONG: dict[str, tuple[Function, tuple[str, ...], str, str, str, str, str]] = {
    "values filled into a sum": (
        lambda x: x.sum(0).at[FILLED].get(mode="fill", fill_value=7.0), ("c n",), "k", "", "c", "c:r", "gather"),
    "division of integers": (
        lambda x: lax.div(x.astype("int64").sum(0), jnp.full(3, 2, "int64")), ("c n",), "n", "", "c", "c:r", "div"),
    "sum of copies": (
        lambda x, y: blocks_beside(x, y).sum() * y, ("c", "b"), "b", "b", "c", "b:r; c:s", "reduce_sum"),
    "product of copies": (
        lambda x, y: blocks_beside(x, y) @ jnp.ones(x.size * y.size) * y, ("c", "b"), "b", "b", "c", "b:r; c:s",
        "dot_general"),
    "barrier beside a sum": (
        lambda x, y: sum(lax.optimization_barrier((x.sum(0), y))), ("c n", "n"), "n", "", "c", "c:r", "add"),
    "barrier instead of a sum": (
        lambda x, y: lax.optimization_barrier((x.sum(0), y))[1], ("c n", "n"), "n", "", "c", "c:r", "no sum over c"),
    "window that moves": (shifted, ("b n",), "b n", "b", "", "b:r", "reduce_window_max"),
    "dtype by size": (
        lambda x: x.astype("float32" if x.shape[0] > 6 else "float16").astype("float64"), ("b n",), "b n", "b", "",
        "b:r", "new_dtype"),
    "squeezed block of one element": (
        lambda x: jnp.cumsum(jnp.squeeze(x), 1).reshape(x.shape), ("b n n2:3",), "b n n2", "b", "", "b:r,s",
        "one element"),
    "less on a block of one element": (
        lambda x: x if x.shape[0] == 1 else 2 * x, ("b n",), "b n", "b", "", "b:r,s", "one element"),
    "other operands on a block of one element": (
        lambda x, y: x - y if x.shape[0] == 1 else y - x, ("b n", "b n"), "b n", "b", "", "b:r,s", "one element"),
}  # fmt: skip


def tensors(shapes: tuple[str, ...]) -> list[md.Tensor]:
    sizes = {"b": "b:8", "c": "c:8", "n": "n:3"}
    numbers = np.random.default_rng(0)
    dims = [md.dims(" ".join(sizes.get(name, name) for name in shape.split())) for shape in shapes]
    dims = [d if isinstance(d, tuple) else (d,) for d in dims]
    return [md.tensor(numbers.normal(size=[d.size for d in own]), own) for own in dims]


@pytest.mark.parametrize("name", WRONG)
def test_local_refuses_functions_that_differ_on_blocks(name: str) -> None:
    f, shapes, out, split, contract, layout, what = WRONG[name]
    local = lambda *xs: md.local(f, *xs, out=out, split=split, contract=contract)  # noqa: E731 - short
    with pytest.raises(md.ShapeError, match="does not treat blocks like the whole") as error:
        md.compile(local, "r:4 s:2", layout).program(*tensors(shapes))
    assert what in str(error.value), error.value


# functions that do the same on a block of one element, where JAX leaves out batch dims, broadcasts and reshapes
SAME: dict[str, Function] = {
    "matrix product": lambda x: x @ x.mT,
    "product with a vector": lambda x: (x @ x.sum(1)[..., None]) * x,
    "gather": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 2), 2),
    "scatter": lambda x: x.at[:, 1].add(x[:, 0]),
    "negative axis": lambda x: jnp.cumsum(jnp.squeeze(x), -1).reshape(x.shape),
    "recomputed": lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ x))(x),
    "scan": lambda x: lax.scan(lambda c, t: (c + x * t, c @ x), jnp.zeros_like(x), jnp.arange(2.0))[0],
    "solve": lambda x: jnp.linalg.solve(x @ x.mT + jnp.eye(3), x),
    "transposed": lambda x: jnp.einsum("bij,bkj->bik", jnp.moveaxis(x, 0, 2).transpose(2, 1, 0), x),
}


@pytest.mark.parametrize("name", SAME)
def test_local_accepts_functions_that_do_the_same_on_a_block_of_one_element(name: str) -> None:
    (x,) = tensors(("b n n2:3",))
    f = SAME[name]
    compiled = md.compile(lambda x: md.local(f, x, out=("b p q",), split="b"), "r:8", "b:r")
    program = compiled.program(x)
    assert not program.collectives
    np.testing.assert_allclose(md.simulate(program, x)[0], f(x.array), rtol=1e-10)


@pytest.mark.parametrize("block", range(2))
def test_drawn_functions_obey_the_law(block: int) -> None:
    outcomes = [(seed, law(draw(random.Random(seed)), seed)) for seed in range(20 * block, 20 * block + 20)]
    assert not [(seed, outcome.wrong) for seed, outcome in outcomes if outcome is not None and outcome.wrong]
    assert any(outcome is not None and outcome.accepted for _, outcome in outcomes)
    assert any(outcome is not None and outcome.refused for _, outcome in outcomes)


def test_any_callable_is_a_function_of_local() -> None:
    @dataclass(frozen=True)
    class Scale:
        __slots__ = ("by",)  # JAX's jit takes no callable without weak references
        by: float

        def __call__(self, x: Any) -> Any:
            return x * self.by

    (x,) = tensors(("b n",))
    np.testing.assert_array_equal(md.local(Scale(2.0), x, out="b n", split="b").numpy(), 2 * x.numpy())
