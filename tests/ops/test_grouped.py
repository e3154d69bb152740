"""md.grouped_dot: many blocks of rows, both forms of its products, second derivatives, what it sends, and its errors.

The tables of tests/laws have it too, with few rows.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from meshdsl.backend import grouped
from meshdsl.targets.tpu.emission import dot_ragged

SIZES = {  # of groups; the rows after them belong to none
    "even": [128, 128, 128],
    "uneven": [1, 300, 0, 0, 77],
    "tail": [40, 2, 90],
    "none": [0, 0],
    "one_row": [0, 1, 0],
    "large": [700, 600],  # blocks of 256
}


def rows_of(name: str, dtype: str = "float64") -> tuple[Any, Any, Any, Any]:
    """Sorted rows x and y, matrices w, and the group of each row."""
    rng, sizes = np.random.default_rng(0), SIZES[name]
    group = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    group = np.concatenate([group, np.full(3 if name != "even" else 0, len(sizes), np.int32)])
    x, y = (rng.normal(size=(len(group), n)).astype(dtype) for n in (5, 4))
    return x, y, rng.normal(size=(len(sizes), 5, 4)).astype(dtype), group


@pytest.mark.parametrize("name", SIZES)
def test_grouped_products_by_blocks_and_by_ragged_dot_are_those_of_numpy(name: str) -> None:
    x, y, w, group = rows_of(name)
    sizes = np.asarray(SIZES[name], np.int32)
    dot = backend.NumPy.grouped_dot(x, w, group, x.dtype)
    outer = backend.NumPy.grouped_outer(x, y, group, len(sizes), x.dtype)
    for form in (grouped.dot_blocks, dot_ragged):
        np.testing.assert_allclose(form(x, w, sizes, x.dtype), dot, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grouped.outer_blocks(x, y, sizes, x.dtype), outer, rtol=1e-12, atol=1e-12)
    shuffled = np.random.default_rng(1).permutation(len(group))
    ours = jax.jit(lambda x, w, g: backend.Jax.grouped_dot(x, w, g, x.dtype))(x[shuffled], w, group[shuffled])
    np.testing.assert_allclose(ours, dot[shuffled], rtol=1e-12, atol=1e-12)


def test_values_of_other_groups_do_not_reach_a_row() -> None:
    x, y, w, group = rows_of("tail")
    w[1], x[group == 3] = np.nan, np.inf
    sizes = np.asarray(SIZES["tail"], np.int32)
    dot, outer = grouped.dot_blocks(x, w, sizes, x.dtype), grouped.outer_blocks(x, y, sizes, x.dtype)
    assert np.isnan(dot[group == 1]).all() and np.isfinite(dot[group != 1]).all() and np.isfinite(outer).all()


def by_take(x: md.Tensor, w: md.Tensor, i: md.Tensor) -> md.Tensor:
    return md.einsum(x, md.take(w, i, "expert", drop=True), out=[*i.dims, "hidden"])


def by_groups(x: md.Tensor, w: md.Tensor, i: md.Tensor) -> md.Tensor:
    return md.grouped_dot(x, w, i, by="expert", over="model")


def operands() -> tuple[md.Tensor, md.Tensor, md.Tensor]:
    rng = np.random.default_rng(0)
    x = md.tensor(rng.normal(size=(4, 50, 6)), "batch length model")
    w = md.tensor(rng.normal(size=(3, 6, 8)), "expert model hidden")
    return x, w, md.tensor(rng.integers(-1, 4, (4, 50, 2), np.int32), "batch length choice")


@pytest.mark.parametrize("layout", ["batch:r; hidden:s", "length:r,s; expert:s", "model:s; batch:r"])
def test_grouped_dot_is_take_and_a_product_to_the_second_derivative(layout: str) -> None:
    x, w, i = operands()

    def slopes(f: Any) -> Any:
        first = md.grad(lambda x, w: md.sum(md.sin(f(x, w, i))), (0, 1))
        second = md.grad(lambda x, w: sum(md.sum(md.cos(g)) for g in first(x, w)), (0, 1))
        return lambda x, w: (f(x, w, i), *first(x, w), *second(x, w))

    for ours, theirs in zip(md.compile(slopes(by_groups), "r:2 s:2", layout)(x, w), slopes(by_take)(x, w), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-11, atol=1e-11)


def test_grouped_dot_sends_a_partial_sum_and_gathers_matrices() -> None:
    specs = [md.spec(x.dims, x.dtype) for x in operands()]
    sent = lambda layout: [c.kind for c in md.compile(by_groups, "r:2", layout).program(*specs).collectives]  # noqa: E731
    assert sent("batch:r") == sent("hidden:r") == sent("length:r") == []
    assert sent("model:r") == ["all_reduce"] and sent("expert:r") == ["all_gather"]
    cost = md.compile(by_groups, "r:2", "batch:r").cost(*specs).to_dict()
    assert cost["flops"] == 2 * (2 * 50 * 2) * 6 * 8


@pytest.mark.parametrize(
    ("x", "w", "i", "message"),
    [
        ("token io", "expert io out", "token", None),
        ("token io", "expert io", "token", "needs three dims"),
        ("token other io", "expert io out", "token", "has .other=2., which i .token=2. lacks"),
        ("token io out", "expert io out", "token out", "of w is also a dim of x or i"),
        ("token io", "expert other out", "token", "no dim of w to sum over 'io'"),
    ],
)
def test_grouped_dot_says_what_is_wrong(x: str, w: str, i: str, message: str | None) -> None:
    sized = [" ".join(f"{name}:2" for name in dims.split()) for dims in (x, w, i)]

    def call() -> md.Tensor:
        x, w, i = md.ones(sized[0]), md.ones(sized[1]), md.zeros(sized[2], "int32")
        return md.grouped_dot(x, w, i, by="expert", over="io")

    if message is None:
        assert call().dims == md.dims("token:2 out:2")
        return
    with pytest.raises(md.ShapeError, match=message):
        call()


def test_grouped_dot_takes_integer_indices_and_floats() -> None:
    x, w, i = operands()
    with pytest.raises(md.ShapeError, match="integer indices"):
        by_groups(x, w, md.cast(i, "float32"))
    with pytest.raises(md.ShapeError, match="multiplies floats, got int32"):
        by_groups(md.cast(x, "int32"), md.cast(w, "int32"), i)


@pytest.mark.parametrize(("weight", "row"), [("expert:3 io:4 hidden:0", "io:4"), ("expert:3 io:0 hidden:4", "io:0")])
def test_grouped_dot_of_empty_weights_under_vmap(weight: str, row: str) -> None:
    x, w, i = md.zeros(f"own:2 token:5 {row}"), md.zeros(f"own:2 {weight}"), md.zeros("own:2 token:5", "int32")
    out = md.vmap(lambda x, w, i: md.grouped_dot(x, w, i, by="expert", over="io"), over="own")(x, w, i)
    assert out.numpy().shape == (2, 5, int(weight[-1])) and not out.numpy().any()
