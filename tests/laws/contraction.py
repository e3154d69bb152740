"""Rows of products and reductions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.special

import meshdsl as md

from .operands import INTS, REAL, V, W, X
from .row import In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def contractions() -> Iterator[Row]:
    sums = (*REAL, "int32")
    yield Row("matmul", lambda x, w: md.einsum(x, w, out="a c"), (X, W), lambda x, w: x @ w, dtypes=sums)
    yield Row("matmul_order", lambda x, w: md.einsum(x, w, out="c a"), (X, In("c b")), lambda x, w: w @ x.T, dtypes=sums)
    yield Row("outer", lambda x, y: md.einsum(x, y, out="b a"), (In("a"), V), lambda x, y: np.outer(y, x))
    yield Row("batched", lambda x, y: md.einsum(x, y, out="a b d"), (In("a b c"), In("a c d")), lambda x, y: x @ y)
    yield Row("three", lambda x, y, z: md.einsum(x, y, z, out="a d"), (X, W, In("c d")), lambda x, y, z: x @ y @ z)
    yield Row("einsum_alone", lambda x, y: md.einsum(x, y, out="a"), (In("a b"), In("a c")), lambda x, y: x.sum(1) * y.sum(1))
    yield Row("einsum_one", lambda x: md.einsum(x, out="b"), (X,), lambda x: x.sum(0))
    yield Row("einsum_scalar", lambda x, y: md.einsum(x, y, out=""), (X, X), lambda x, y: np.sum(x * y))
    wide = lambda x, w: md.einsum(x, w, out="a c", dtype="float32")
    yield Row("einsum_dtype", wide, (X, W), lambda x, w: x @ w, dtypes=("bfloat16",))
    yield Row("dot", lambda x, w: md.dot(x, w, "b"), (X, W), lambda x, w: x @ w)
    yield Row("dot_two", lambda x, w: md.dot(x, w, "b c"), (In("a b c"), In("c b d")), lambda x, w: np.einsum("abc,cbd->ad", x, w))
    for name, exact, empty, dtypes in [
        ("sum", True, True, sums),
        ("mean", False, True, REAL),
        ("max", True, False, sums),
        ("min", True, False, sums),
        ("prod", True, True, sums),
        ("var", False, True, ("float32",)),
    ]:
        f = getattr(md, name)
        g = getattr(np, name)
        yield Row(name, lambda x, f=f: f(x, "b"), (X,), lambda x, g=g: g(x, axis=1), dtypes, exact=exact, empty=empty)
        yield Row(f"{name}_two", lambda x, f=f: f(x, "c a"), (In("a b c"),), lambda x, g=g: g(x, axis=(0, 2)), dtypes[:1], exact=exact, empty=empty)
        yield Row(f"{name}_all", lambda x, f=f: f(x), (X,), lambda x, g=g: g(x), dtypes[:1], exact=exact, empty=empty)
    mask, chosen = In("a b", dtype="bool"), {"max": -np.inf, "min": np.inf}
    for name in ("sum", "mean", "max", "min", "prod", "var"):
        f, g = getattr(md, name), getattr(np, name)
        more = {"initial": chosen[name]} if name in chosen else {}
        some = lambda x, m, g=g, more=more: g(x, axis=1, where=m | (np.arange(m.shape[1]) == 0), **more)
        first = lambda m: m | (md.iota(m.dims[1]) == 0)
        yield Row(f"{name}_where", lambda x, m, f=f, first=first: f(x, "b", where=first(m)), (X, mask), some, ("float32",), exact=name in ("sum", "max", "min", "prod"), empty=False, smooth=name != "prod", odd=name in ("sum", "max", "min"), composed=True)
    yield Row("std", lambda x: md.std(x * x + md.iota(x.dims[1], x.dtype), "b", ddof=1), (In("a b"),), lambda x: np.std(x * x + np.arange(x.shape[1]), axis=1, ddof=1), ("float32",), exact=False, empty=False, smooth=False, odd=False, composed=True)
    for name in ("sum", "mean", "max"):
        f = lambda x, name=name: getattr(md, f"nan{name}")(md.where(x > 1, float("nan"), x), "b")
        g = lambda x, name=name: np.ma.filled(getattr(np.ma.masked_where(x > 1, x), name)(axis=1), 0 if name == "sum" else np.nan)
        yield Row(f"nan{name}", f, (X,), g, ("float32",), exact=name != "mean", empty=False, composed=True)
    for name, q in (("quantile", 0.3), ("median", 0.5)):
        f = (lambda x: md.median(x, "b")) if name == "median" else (lambda x: md.quantile(x, 0.3, "b"))
        yield Row(name, f, (X,), lambda x, q=q: np.quantile(x, q, axis=1), exact=False, empty=False, smooth=False, composed=True)
    for name, like in (("cummax", np.maximum), ("cummin", np.minimum), ("cumlogsumexp", np.logaddexp)):
        yield Row(name, lambda x, name=name: getattr(md, name)(x, "a"), (X,), lambda x, f=like: f.accumulate(x, 0), ("float32",), exact=name != "cumlogsumexp", empty=False, composed=True)
    yield Row("sum_bool", lambda x: md.sum(x > 0, "a"), (X,), lambda x: np.sum(x > 0, axis=0), differentiable=False)
    yield Row("any", lambda x: md.any(x > 0, "b"), (X,), lambda x: np.any(x > 0, axis=1), differentiable=False)
    yield Row("all", lambda x: md.all(x > 0, "b"), (X,), lambda x: np.all(x > 0, axis=1), differentiable=False)
    soft = scipy.special
    yield Row("logsumexp", lambda x: md.logsumexp(x, "b"), (X,), lambda x: soft.logsumexp(x, axis=1), exact=False, empty=False)
    yield Row("softmax", lambda x: md.softmax(x, "a"), (X,), lambda x: soft.softmax(x, axis=0), exact=False, empty=False)
    yield Row("log_softmax", lambda x: md.log_softmax(x, "b"), (X,), lambda x: soft.log_softmax(x, axis=1), exact=False, empty=False)
    for name in ("argmax", "argmin"):
        f, g = getattr(md, name), getattr(np, name)
        yield Row(name, lambda x, f=f: f(x, "a"), (X,), lambda x, g=g: g(x, axis=0), sums, differentiable=False, empty=False)
    for name, order, exact in [("norm", 2, False), ("norm_one", 1, True), ("norm_most", np.inf, True)]:
        f, g = (lambda x, order=order: md.norm(x, "b", order)), (lambda x, order=order: np.linalg.norm(x, order, axis=1))
        yield Row(name, f, (In("a b", "nonzero"),), g, exact=exact, empty=name != "norm_most", smooth=False)
    yield Row("broadcast", lambda x: md.broadcast(x, "c:3 b a"), (X,), lambda x: np.broadcast_to(x.T, (3, *x.T.shape)), (*REAL, *INTS))
