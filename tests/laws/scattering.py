"""Rows of scatters, sums of segments, and indexing by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.trace import Tensor

from .operands import INTS, REAL, V, W, X
from .row import INDEX, In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def _written(f: Any, x: Any, i: Any, u: Any) -> Any:
    """f of the rows of x [b c] at the indices i [t] and of those of u [t c], one after the other."""
    out = np.array(x)
    for at, row in zip(i, u, strict=True):
        if 0 <= at < len(x):
            out[at] = f(out[at], row)
    return out


def _tied(f: Any, x: Any, i: Any, u: Any) -> Any:
    """The gradients of sum(x * result) for an extreme: ties share them."""
    out, inside = _written(f, x, i, u), (i >= 0) & (i < len(x))
    at = np.where(inside, i, 0)
    kept, won = (x == out) * 1.0, ((u == out[at]) & inside[:, None]) * 1.0 if len(x) else u * 0.0
    share = x / _written(np.add, kept, i, won)
    return share * kept, (won * share[at] if len(x) else won), out * 1.0


def _others(f: Any, x: Any, i: Any, u: Any) -> Any:
    """The gradients of sum(x * result) for a product: that of the other factors."""
    dx, du, inside = np.array(x), np.zeros(u.shape, x.dtype), (i >= 0) & (i < len(x))
    for k, at in enumerate(i):
        if inside[k]:
            dx[at] *= u[k]
            same = [j for j in range(len(i)) if i[j] == at and j != k]
            du[k] = x[at] * x[at] * np.prod(u[same], 0)
    return dx, du, _written(f, x, i, u)


def scatters() -> Iterator[Row]:
    every = (*REAL, *INTS)
    for how, f, slopes in [("max", np.maximum, _tied), ("min", np.minimum, _tied), ("mul", np.multiply, _others)]:
        scatter = lambda x, i, u, how=how: getattr(md, f"scatter_{how}")(x, i, u, "b", drop=True)
        three = (W, In("t", "place:b", INDEX), In("t c"))
        yield Row(f"scatter_{how}", scatter, three, lambda x, i, u, f=f: _written(f, x, i, u), every, differentiable=False, by_hand=True)

        def both(x: Tensor, i: Tensor, u: Tensor, scatter: Any = scatter) -> Any:
            slope = md.grad(lambda x, u, y: md.sum(y * scatter(x, i, u)), argnums=(0, 1))
            return *slope(x, u, x), scatter(x, i, u)

        yield Row(f"slopes_of_scatter_{how}", both, three, lambda x, i, u, f=f, s=slopes: s(f, x, i, u), ("float32",), differentiable=False, exact=False)
    last_wins = lambda x, i, u: md.scatter_set(x, i, u, "b", drop=True)
    replaced = lambda x, i, u: _written(lambda old, new: new, x, i, u)
    yield Row("scatter_set", last_wins, (W, In("t", "place:b", INDEX), In("t c")), replaced, every)
    by_row = lambda x, i, u: np.stack([replaced(x[k], i[:, k], u[k]) for k in range(len(x))]) if len(x) else x
    yield Row("scatter_set_paired", last_wins, (In("a b c"), In("t a", "place:b", INDEX), In("a t c")), by_row, composed=True)
    yield Row("scatter_set_order", last_wins, (W, In("b", "place:b", INDEX), In("b c")), replaced, ("float32",), composed=True)
    ones = (X, In("t", "inside:a", INDEX), In("t", "inside:b", INDEX))

    def pointed(x: Any, i: Any, j: Any, u: Any, f: Any) -> Any:
        out = np.array(x)
        for a, b, value in zip(i, j, u, strict=True):
            out[a, b] = f(out[a, b], value)
        return out

    yield Row("index_points", lambda x, i, j: x["a", i, "b", j], ones, lambda x, i, j: x[i, j], every, empty=False)
    points = lambda how, f, **more: Row(f"at_points_{how}", lambda x, i, j, u: getattr(x.at["a", i, "b", j], how)(u), (*ones, In("t")), lambda x, i, j, u: pointed(x, i, j, u, f), empty=False, **more)
    yield points("set", lambda old, new: new, composed=True)
    yield points("add", lambda old, new: old + new)
    yield points("max", np.maximum, differentiable=False, composed=True)
    outer = lambda x, i, j: x["c", i, "b", -1, "a", j]
    yield Row("index_outer", outer, (In("a b c"), In("t", "inside:c", INDEX), In("d", "inside:a", INDEX)), lambda x, i, j: x[:, -1][j[None], i[:, None]], empty=False, composed=True)
    yield Row("index_slice", lambda x: x["b", ::-2, "a", 1:], (X,), lambda x: x[1:, ::-2], composed=True)
    yield Row("at_slice", lambda x, u: x.at["a", ::2].mul(u), (X, V), lambda x, u: np.where(np.arange(len(x))[:, None] % 2, x, x * u), every, composed=True)
    yield Row("at_number", lambda x, u: x.at["b", 0].set(u), (X, In("a")), lambda x, u: np.concatenate([u[:, None], x[:, 1:]], 1), every, empty=False, composed=True)
    into = In("t", "inside:a=3", INDEX)
    empty = {"sum": 0, "max": -np.inf, "min": np.inf}
    for how, f in [("sum", np.add), ("max", np.maximum), ("min", np.minimum)]:
        start = lambda x, how=how: np.full((3, x.shape[1]), empty[how])
        yield Row(f"segment_{how}", lambda x, i, how=how: getattr(md, f"segment_{how}")(x, i, "a:3"), (In("t b"), into), lambda x, i, f=f, s=start: _written(f, s(x), i, x), ("float32",), differentiable=how == "sum", by_hand=how != "sum", composed=True)
