"""Rows of gathers, scatters, sorts and other operations with indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import scipy.special

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ops import indexing
from meshdsl.trace import Tensor, bind1

from .operands import INTS, REAL, V, W, X, size_of
from .row import INDEX, In, Row, widest

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def indices() -> Iterator[Row]:
    every = (*REAL, *INTS)
    yield Row("iota", lambda x: x + md.iota(x.dims[1], x.dtype), (X,), lambda x: x + np.arange(x.shape[1], dtype=x.dtype), every)
    place, soft = In("c", "place:b", INDEX), scipy.special
    hot = lambda i, x: md.one_hot(i, x.dims[1], x.dtype)
    yield Row("one_hot", hot, (place, X), lambda i, x: i[:, None] == np.arange(x.shape[1]), every, differentiable=False)

    def taken(x: Any, i: Any) -> Any:
        inside = (i >= 0) & (i < x.shape[1])
        rows = np.moveaxis(x, 1, 0)
        rows = rows[np.where(inside, i, 0)] if len(rows) else np.zeros((*i.shape, *rows.shape[1:]), x.dtype)
        return np.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), rows, 0)

    yield Row("take", lambda x, i: md.take(x, i, "b", drop=True), (X, place), taken, every)
    yield Row("take_two", lambda x, i: md.take(x, i, "b", drop=True), (In("a b d"), In("c t", "place:b", INDEX)), taken, every)

    def grouped(x: Any, w: Any, i: Any) -> Any:  # x [a b], w [d b c], i [a t]: each index selects a matrix
        inside = (i >= 0) & (i < len(w))
        matrices = np.where(inside[..., None, None], w[np.where(inside, i, 0)], 0) if len(w) else np.zeros((*i.shape, *w.shape[1:]), w.dtype)
        return np.einsum("ab,atbc->atc", x.astype(widest(x.dtype)), matrices.astype(widest(x.dtype))).astype(x.dtype)

    grouped_by = lambda x, w, i: md.grouped_dot(x, w, i, by="d", over="b")
    yield Row("grouped_dot", grouped_by, (X, In("d b c"), In("a t", "place:d", INDEX)), grouped)
    yield Row("grouped_dot_order", grouped_by, (In("b a"), In("c d b"), In("a", "place:d", INDEX)), lambda x, w, i: grouped(x.T, w.transpose(1, 2, 0), i[:, None])[:, 0])

    def grouped_outer(x: Any, y: Any, w: Any, i: Any) -> Any:  # the gradient for w of sum(y * grouped(x, w, i))
        chosen = (i[..., None] == np.arange(len(w))).astype(x.dtype)
        return np.einsum("ab,atc,atd->dbc", x, y, chosen)

    slope = lambda x, y, w, i: md.grad(lambda w: md.sum(y * grouped_by(x, w, i)))(w)
    yield Row("grouped_outer", slope, (X, In("a t c"), In("d b c"), In("a t", "place:d", INDEX)), grouped_outer, ("float32",))

    def paired(x: Any, i: Any) -> Any:  # each index of the shared dim has its own table and indices
        return np.stack([taken(x[:, :, k], i[:, k]) for k in range(x.shape[2])], 1) if x.shape[2] else np.zeros((*i.shape, len(x)), x.dtype)

    yield Row("take_paired", lambda x, i: md.take(x, i, "b", drop=True), (In("a b d"), In("c d", "place:b", INDEX)), paired, every)
    # indices with the dim name that `take` reads over, with the same size and with another
    for name, x, i, f in [
        ("take_order", X, "b", taken),
        ("take_renamed", X, "b=t c", taken),
        ("take_order_paired", In("a b d"), "b d", paired),
        ("take_renamed_paired", In("a b d"), "b=t d", paired),
    ]:
        yield Row(name, lambda x, i: md.take(x, i, "b", drop=True), (x, In(i, "place:b", INDEX)), f, every)
    fixed = lambda i, x: md.take(md.tensor(np.arange(1, size_of(x, "b") + 1), x.dims), i, "b", drop=True)
    yield Row("take_constant", fixed, (In("b a", "place:b", INDEX), V), lambda i, x: taken(np.arange(1, len(x) + 1)[None], i)[..., 0], differentiable=False)
    yield Row("take_scalar", lambda x, i: md.take(x, i, "b", drop=True), (X, In("", "place:b", INDEX)), taken, every)

    def inverse(x: Any) -> Any:  # the first slot is named by none, and the last index is out of range
        out = np.full((len(x), x.shape[1] // 2 + 1, 2), -1, np.int32)
        for row, order in zip(out.reshape(len(x), -1), np.argsort(x, 1, kind="stable") + 1, strict=True):
            row[order[order < row.size]] = np.nonzero(order < row.size)[0]
        return out

    def inverted(x: Tensor) -> Tensor:
        into = [Dim("s", size_of(x, "b") // 2 + 1), Dim("u", 2)]
        return md.inverse_index(md.argsort(x, "b") + 1, over="b", into=into)

    yield Row("inverse_index", inverted, (In("a b"),), inverse, differentiable=False)

    def added(x: Any, i: Any, u: Any) -> Any:
        out = np.array(x)
        for at, row in zip(i, u, strict=True):
            if 0 <= at < len(x):
                out[at] += row
        return out

    put = lambda x, i, u: md.put_add(x, i, u, "b", drop=True)
    yield Row("put_add", put, (W, In("t", "place:b", INDEX), In("t c")), added, every)
    flat = lambda x, i, u: added(x, i.reshape(-1), u.transpose(1, 2, 0).reshape(-1, u.shape[0]))
    rows = lambda x, i, u: np.stack([added(x[k], i[:, k], u[k]) for k in range(len(x))]) if len(x) else x
    yield Row("put_add_paired", put, (In("a b c"), In("t a", "place:b", INDEX), In("a t c")), rows, every)
    yield Row("put_add_order", put, (W, In("b", "place:b", INDEX), In("b c")), added, every)
    yield Row("put_add_renamed", put, (W, In("b=t", "place:b", INDEX), In("b=t c")), added, every)
    yield Row("put_add_order_paired", put, (In("a b c"), In("b a", "place:b", INDEX), In("a b c")), rows, every)
    one = lambda x, i: md.put_add(x, i, 1, "b", drop=True)
    count = lambda x, i: added(x, i, np.ones((len(i), x.shape[1])))
    yield Row("put_add_number", one, (W, In("t", "place:b", INDEX)), count, every)
    yield Row("put_add_two", put, (W, In("t d", "place:b", INDEX), In("c t d")), flat, every)
    # more table entries than a narrow index dtype can count
    many = In("c", "place:b=300", INDEX)
    yield Row("one_hot_many", hot, (many, In("a b=300")), lambda i, x: i[:, None] == np.arange(300), ("float32",), differentiable=False)
    yield Row("take_many", lambda x, i: md.take(x, i, "b", drop=True), (In("a b=300"), many), taken, ("float32",))
    yield Row("put_add_many", put, (In("b=300 c"), In("t", "place:b=300", INDEX), In("t c")), added, ("float32",))
    loss = lambda x, i: md.nn.softmax_cross_entropy(x, i, "b")
    chosen = lambda x, i: soft.logsumexp(x, axis=1) - np.take_along_axis(x, i[:, None], 1)[:, 0]
    yield Row("cross_entropy_many", loss, (In("a b=300"), In("a", "inside:b=300", INDEX)), chosen, ("float32",), exact=False)
    sent = lambda i: md.nn.moe.route(None, tokens="a", experts="expert:300", capacity="slot:2", router="random", ids=i).dispatch

    def slots(i: Any) -> Any:
        out = np.zeros((len(i), 300, 2), bool)
        for token, expert in enumerate(i):
            filled = int(out[:, expert].sum())
            out[token, expert, filled : filled + 1] = True
        return out

    yield Row("route_many", sent, (In("a", "inside:b=300", INDEX),), slots, ("float32",), differentiable=False)
    yield Row("cumsum", lambda x: md.cumsum(x, "a"), (X,), lambda x: np.cumsum(x, 0), ("float32", "bfloat16", "int32"))
    last = lambda x: md.cumsum(x, "a", exclusive=True, reverse=True)
    yield Row("cumsum_last", last, (X,), lambda x: np.cumsum(x[::-1], 0)[::-1] - x, ("float32", "int32"))
    yield Row("cumsum_exclusive", lambda x: md.cumsum(x, "b", exclusive=True), (X,), lambda x: np.cumsum(x, 1) - x)
    counted: Any = {"differentiable": False, "composed": True}
    sides = lambda x, v, side: md.searchsorted(md.sort(x, "b"), v, "b", side)
    both: list[Any] = ["left", "right"]
    for side in both:
        searched = lambda x, v, s=side: np.stack([np.searchsorted(np.sort(row), v, s) for row in x], 1)
        yield Row(f"searchsorted_{side}", lambda x, v, s=side: sides(x, v, s), (X, In("c")), searched, every, empty=False, **counted)
    bins = lambda x: md.histogram(x, "c:4", -2, 3, over="b")
    yield Row("histogram", bins, (X,), lambda x: np.stack([np.histogram(row, 4, (-2, 3))[0] for row in x]), empty=False, odd=False, **counted)
    yield Row("bincount", lambda i: md.bincount(i, "b:4"), (In("t", "inside:b", INDEX),), lambda i: np.bincount(i, minlength=4), **counted)
    yield Row("sort", lambda x: md.sort(x, "a"), (X,), lambda x: np.sort(x, 0), every)
    yield Row("argsort", lambda x: md.argsort(x, "b"), (X,), lambda x: np.argsort(x, 1, kind="stable"), every, differentiable=False)

    def best(x: Tensor) -> Any:
        return md.top_k(x, "b", Dim("k", (size_of(x, "b") + 1) // 2))

    def largest(x: Any) -> Any:
        return jax.lax.top_k(x, (x.shape[1] + 1) // 2)

    yield Row("top_k", best, (X,), largest, every)
    every_one = lambda x: jax.lax.top_k(x, x.shape[1])
    yield Row("top_k_same", lambda x: md.top_k(x, "b", x.dims[1]), (X,), every_one)
    yield Row("top_k_all", lambda x: md.top_k(x, "b", Dim("k", size_of(x, "b"))), (X,), every_one, every)


def alongs() -> Iterator[Row]:
    def picked(x: Tensor, i: Tensor) -> Tensor:
        return bind1(indexing.TAKE_ALONG, x, i, over=x.dims[1], to=i.dims[0])

    def chosen(x: Any, i: Any) -> Any:
        i = i.T
        inside = (i >= 0) & (i < x.shape[1])
        return np.where(inside, np.take_along_axis(x, np.where(inside, i, 0), 1), 0)

    yield Row("take_along", picked, (X, In("c a", "place:b", INDEX)), chosen)
    yield Row("take_along_order", picked, (X, In("b a", "place:b", INDEX)), chosen)
    yield Row("take_along_renamed", picked, (X, In("b=c a", "place:b", INDEX)), chosen)

    def put(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        return y + bind1(indexing.PUT_ALONG, x, i, over=y.dims[0], to=x.dims[1])

    def summed(x: Any, i: Any, y: Any) -> Any:
        out = np.array(y)
        for a, c in np.ndindex(x.shape):
            if i[c, a] in range(len(y)):
                out[i[c, a], a] += x[a, c]
        return out

    yield Row("put_along", put, (In("a c"), In("c a", "place:b", INDEX), In("b a")), summed)
    yield Row("put_along_order", put, (In("a b"), In("b a", "place:b", INDEX), In("b a")), summed)
    yield Row("put_along_renamed", put, (In("a b=c"), In("b=c a", "place:b", INDEX), In("b a")), summed)
