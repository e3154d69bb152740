"""Rows of placement and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.control import BARRIER, KEEP
from meshdsl.ops.masking import MASK
from meshdsl.ops.random.whole import DRAW
from meshdsl.trace import bind1

from .operands import INTS, KEY, REAL, V, X
from .row import In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def placements() -> Iterator[Row]:
    yield Row("prefer", lambda x: md.prefer(x * 2, "b", "a"), (X,), lambda x: x * 2)
    summed = lambda x, y: md.prefer(md.einsum(x, y, out="a c"), "c")
    yield Row("prefer_sum", summed, (In("a b"), In("b c")), lambda x, y: x @ y, ("float32",))
    yield Row("replicate", lambda x: md.replicate(x * 2), (X,), lambda x: x * 2)
    some = lambda x, n: md.ragged(md.where(md.broadcast(md.iota(x.dims[-1], n.dtype), x.dims) < n, x, 0), n, "b")
    yield Row("ragged", some, (X, In("a", "inside:b", "int32")), lambda x, n: np.where(np.arange(x.shape[1]) < n[:, None], x, 0))
    mask = lambda x: bind1(MASK, x, over=x.dims[:1], fill=7)
    yield Row("mask", mask, (X,), np.asarray, (*REAL, *INTS), differentiable=False)
    yield Row("barrier", lambda x: bind1(BARRIER, x), (X,), np.asarray)
    near, wide = In("a=24*a b"), In("a=24*a b=24*b")  # blocks that few meshes divide unevenly
    by_row = lambda x, y: md.local(lambda x, y: x * x * y - md.sum(x, "b"), x, y, out="b a", whole="b")
    yield Row("local", by_row, (near, V), lambda x, y: (x * x * y - x.sum(1, keepdims=True)).T, ("float32",))
    added = lambda x, y: md.local(lambda x, y: md.sum(md.sign(y) * x * x, "a"), x, y, out="b")
    yield Row("local_sum", added, (wide, In("b=24*b")), lambda x, y: (np.sign(y) * x * x).sum(0), ("float32",), smooth=False)
    whole_b = lambda x, y: md.local(lambda x, y: jnp.cumsum(x * y, 1), x, y, out="a b", split="a")
    yield Row("local_jax", whole_b, (near, V), lambda x, y: np.cumsum(x * y, 1), ("float32",))
    over_a = lambda x, y: md.local(lambda x, y: jnp.einsum("ab,b->b", x, y != 0), x, y, out="b", split="b", contract="a")
    yield Row("local_jax_sum", over_a, (wide, In("b=24*b")), lambda x, y: (x * (y != 0)).sum(0), ("float32",), smooth=False)
    square = lambda x: md.local(lambda m: m + 2 * m.T, x, out="a e", split=())
    yield Row("local_jax_square", square, (In("a e=a"),), lambda x: x + 2 * x.T, ("float32",))
    swapped = lambda x: md.local(lambda x: x + 2 * md.rename(x, a="e", e="a"), x, out="a e", whole="a e")
    yield Row("local_square", swapped, (In("a e=a"),), lambda x: x + 2 * x.T, ("float32",))
    yield Row("callback", lambda x: md.callback(x, lambda block, part: None) * 2, (X,), lambda x: x * 2)
    yield Row("print", lambda x: md.print(x, "x") * 2, (X,), lambda x: x * 2)
    yield Row("name", lambda x: md.name(x, "y") * 2, (X,), lambda x: x * 2)
    yield Row("keep", lambda x: bind1(KEEP, x, md.transpose(x, "a b")), (X,), np.asarray)


def randoms() -> Iterator[Row]:
    fixed: dict[str, Any] = {"dtypes": ("float32",), "differentiable": False}

    def wrap(key: Any) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(key))

    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        yield Row(f"bits_{dtype}", lambda k, x, d=dtype: md.random.bits(k, x.dims, d), (KEY, In("a b c")), lambda k, x, d=dtype: jax.random.bits(wrap(k), x.shape, d), **fixed)
    yield Row("fold_in", lambda k, i: md.random.fold_in(k, i), (KEY, In("a", "inside:b", "int32")), lambda k, i: jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(wrap(k), i)))(i), **fixed)
    yield Row("split", lambda k: md.random.split(k, 3)[1], (KEY,), lambda k: jax.random.key_data(jax.random.split(wrap(k), 3)[1]), **fixed)
    yield Row("uniform", lambda k, x: md.random.uniform(k, x.dims), (KEY, X), lambda k, x: jax.random.uniform(wrap(k), x.shape, "float32"), **fixed)
    yield Row("normal", lambda k, x: md.random.normal(k, x.dims), (KEY, X), lambda k, x: jax.random.normal(wrap(k), x.shape, "float32"), exact=False, **fixed)
    yield Row("bernoulli", lambda k, p, x: md.random.bernoulli(k, 0.5 + p / 2, x.dims), (KEY, In("b", "unit", "float32"), X), lambda k, p, x: jax.random.bernoulli(wrap(k), 0.5 + p / 2, x.shape), **fixed)
    yield Row("permutation", lambda k, x: md.random.permutation(k, x, "a"), (KEY, X), lambda k, x: jax.random.permutation(wrap(k), x), **fixed)
    yield Row("randint", lambda k, x: md.random.randint(k, x.dims, -2, 7), (KEY, X), lambda k, x: jax.random.randint(wrap(k), x.shape, -2, 7, "int32"), **fixed)
    positive = In("a b", "positive")
    scaled = lambda key, a: a * jax.random.uniform(jax.random.wrap_key_data(key), a.shape, a.dtype)
    yield Row("draw", lambda k, a: bind1(DRAW, k, a, f=scaled, shape=a.dims, dtype=a.dtype), (KEY, X), scaled, ("float32",), exact=False, odd=False)
    drawn = jax.random
    composed: Any = {"exact": False, "odd": False, "composed": True, **fixed}
    for name in ("exponential", "laplace", "rademacher"):
        f, g = getattr(md.random, name), getattr(drawn, name)
        yield Row(name, lambda k, x, f=f: f(k, x.dims), (KEY, X), lambda k, x, g=g: g(wrap(k), x.shape, None if g is drawn.rademacher else "float32"), **composed)
    yield Row("gamma", lambda k, x: md.random.gamma(k, x), (KEY, positive), lambda k, x: drawn.gamma(wrap(k), x, dtype="float32"), **composed)
    yield Row("poisson", lambda k, x: md.random.poisson(k, x), (KEY, positive), lambda k, x: drawn.poisson(wrap(k), x), **composed)
    yield Row("t_student", lambda k, x: md.random.t(k, x), (KEY, positive), lambda k, x: drawn.t(wrap(k), x, dtype="float32"), **composed)
    yield Row("beta", lambda k, x: md.random.beta(k, x, 2.0), (KEY, positive), lambda k, x: drawn.beta(wrap(k), x, 2.0, dtype="float32"), **composed)
    yield Row("dirichlet", lambda k, x: md.random.dirichlet(k, x, "b"), (KEY, positive), lambda k, x: drawn.dirichlet(wrap(k), x, dtype="float32"), empty=False, **composed)
    yield Row("categorical", lambda k, x: md.random.categorical(k, x, "b"), (KEY, X), lambda k, x: drawn.categorical(wrap(k), x), empty=False, **composed)
    for name, replace, weighted in (("choice", True, False), ("choice_apart", False, False), ("choice_weighted", True, True), ("choice_apart_weighted", False, True)):
        picked = lambda k, x, p, r=replace, w=weighted: md.random.choice(k, x, "a", "e:2", p / md.sum(p) if w else None, r)
        theirs = lambda k, x, p, r=replace, w=weighted: drawn.choice(wrap(k), x, (2,), r, p / p.sum() if w else None)
        yield Row(name, picked, (KEY, In("a=a+1 b"), In("a=a+1", "positive")), theirs, empty=False, **composed)
