"""Rows of loops, branches and scans of associative functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.trace import Tensor

from .operands import V, W, X
from .row import INDEX, In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def controls() -> Iterator[Row]:
    series = In("t a")

    def recur(w: Tensor, c: Tensor, x: Tensor) -> Any:
        def step(c: Tensor, x: Tensor) -> Any:
            return md.rename(md.einsum(c, w, out="b") + x, b="a"), (md.rename(c, a="b") * x, md.sum(x))

        return md.scan(step, c, x, over="t")

    def ran(w: Any, c: Any, x: Any) -> Any:
        first, second = [], []
        for row in x:
            first, second, c = [*first, c * row], [*second, row.sum()], c @ w + row
        return c, np.array(first), np.array(second)

    square_in = (In("a=b b", "unit"), In("a=b"), In("t b"))
    yield Row("scan", recur, square_in, ran, ("float32",))
    total = lambda c, x: md.scan(lambda c, x: (c + x, c), c, x, over="t", reverse=True)
    back = lambda c, x: (c + x.sum(0), c + np.cumsum(x[::-1], 0)[::-1] - x)
    yield Row("scan_reverse", total, (In("a"), series), back)
    inner = lambda x: md.scan(lambda c, x: (c, x * x), 0.0, x, over="t")[1]
    yield Row("scan_inner_dim", inner, (In("a t b"),), lambda x: np.moveaxis(x * x, 1, 0))
    count = lambda c: md.scan(lambda c, _: (c * 2, c), c, None, over=Dim("t", 3))
    yield Row("scan_no_xs", count, (In("a"),), lambda c: (8 * c, np.stack([c, 2 * c, 4 * c])))

    def nested(c: Tensor, x: Tensor) -> Any:
        def outer(c: Tensor, x: Tensor) -> Any:
            return md.scan(lambda s, y: (s * 0.5 + y * c, s), c, x, over="d")

        return md.scan(outer, c, x, over="t")

    def unnested(c: Any, x: Any) -> Any:
        rows = []
        for one in x:
            s, row = c, []
            for y in one:
                row.append(s)
                s = s * 0.5 + y * c
            rows.append(row)
            c = s
        return c, np.array(rows)

    yield Row("scan_nested", nested, (In(""), In("t d", "unit")), unnested, ("float32",), exact=False)

    def doubled(x: Tensor, y: Tensor) -> Any:
        more = lambda c: (c[1] < 5) & (md.sum(c[0] * c[0]) < 1000)
        return md.while_loop(more, lambda c: (2 * c[0] - y, c[1] + 1), (x, 0))

    def ran_on(x: Any, y: Any) -> Any:
        n = 0
        while n < 5 and (x * x).sum() < 1000:
            x, n = 2 * x - y, n + 1
        return x, np.int32(n)

    def added(x: Tensor) -> Any:  # the sum can stay partial until the loop ends
        start = (md.broadcast(md.cast(0, x.dtype), [d for d in x.dims if d.name == "b"]), 0)
        return md.while_loop(lambda c: c[1] < 3, lambda c: (c[0] + md.sum(x * md.cast(c[1], x.dtype), "a"), c[1] + 1), start)[0]

    yield Row("while_loop", doubled, (X, V), ran_on, ("float32",), differentiable=False)
    yield Row("while_pending", added, (X,), lambda x: 3 * x.sum(0), ("float32",), differentiable=False)
    held = lambda p, x, y: md.cond(p, lambda x: x * y, lambda x: x + 1, x)
    yield Row("cond", held, (In("", dtype="bool"), X, V), lambda p, x, y: x * y if p else x + 1)
    both = lambda x: md.cond(md.sum(x) > 0, lambda x: (x, 2 * x), lambda x: (3 * x, x * x), x)
    yield Row("cond_inside", both, (X,), lambda x: (x, 2 * x) if x.sum() > 0 else (3 * x, x * x))
    again = lambda x, w: md.checkpoint(lambda x: md.square(md.einsum(x, w, out="a c")) * 2)(x)
    yield Row("checkpoint", again, (X, W), lambda x, w: 2 * np.square(x @ w))
    two = lambda x, w: md.square(md.rename(md.name(md.einsum(md.square(x), w, out="a c"), "y"), c="d") + md.max(x, "b"))
    two_of = lambda x, w: np.square(np.square(x) @ w + x.max(1, keepdims=True))
    for policy in ("collectives", "names:y", "offload"):
        kept = lambda x, w, p=policy: md.checkpoint(two, p)(x, w) * 2
        yield Row(f"checkpoint_{policy.partition(':')[0]}", kept, (X, W), lambda x, w: 2 * two_of(x, w), ("float32",), exact=False, smooth=False, empty=False)  # ties share the gradient
        run_on = lambda c, x, w, p=policy: md.scan(md.checkpoint(lambda c, x: (md.sum(md.sign(two(c, w)), "d") * c - md.sum(c) + x, c), p), c, x, over="t")
        yield Row(f"scan_checkpoint_{policy.partition(':')[0]}", run_on, (X, In("t a b"), W), None, ("float32",), exact=False, empty=False)
    layers = lambda x, w: md.scan(md.checkpoint(lambda x, w: (x * w + x, {})), x, w, over="t")[0]
    yield Row("scan_checkpoint", layers, (In("a"), series), lambda x, w: x * np.prod(1 + w, axis=0), ("float32",))

    def own(x: Tensor, y: Tensor) -> Any:
        def forward(x: Tensor, y: Tensor) -> Any:
            return x * y, (x, y)

        return md.custom_vjp(lambda x, y: x * y, forward, lambda r, ct: (ct * r[1], md.sum(ct * r[0], "a")))(x, y)

    yield Row("custom_vjp", own, (X, V), lambda x, y: x * y)


def associatives() -> Iterator[Row]:
    def recurrence(a: Tensor, b: Tensor, reverse: bool = False) -> Any:
        then = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
        return md.associative_scan(then, (md.sign(a), b), over="t", reverse=reverse)

    def recurred(a: Any, b: Any) -> Any:
        product, total, rows = np.ones_like(a[:1].sum(0)), np.zeros_like(b[:1].sum(0)), []
        for one, more in zip(np.sign(a), b, strict=True):
            product, total = product * one, one * total + more
            rows.append((product, total))
        return [np.array([row[k] for row in rows]).reshape(a.shape) for k in (0, 1)]

    back = lambda a, b: [x[::-1] for x in recurred(a[::-1], b[::-1])]
    yield Row("associative_scan", recurrence, (In("t a", "nonzero"), In("t a")), recurred, ("float32",), odd=False)
    reverse = lambda a, b: recurrence(a, md.transpose(b, "t a"), True)
    yield Row("associative_scan_reverse", reverse, (In("t a", "nonzero"), In("a t")), lambda a, b: back(a, b.T), ("float32",), odd=False)
    turned = lambda p, q: md.rename(md.einsum(md.rename(p, d="k"), md.rename(q, c="k"), out="c d"), c="c")
    products = lambda x: md.associative_scan(turned, x, over="t")

    def powers(x: Any) -> Any:
        total, found = np.eye(x.shape[1]), []
        for one in x:
            total = total @ one
            found.append(total)
        return np.array(found).reshape(x.shape)

    yield Row("associative_scan_products", products, (In("t c=d d", "unit"),), powers, ("float32",), exact=False, odd=False)
    yield Row("cumprod", lambda x: md.cumprod(x, "a"), (In("a b", "unit"),), lambda x: np.cumprod(x, 0), ("float32",), exact=False, odd=False)
    last = lambda x: md.cumprod(x, "b", exclusive=True, reverse=True)
    ends = lambda x: np.cumprod(np.concatenate([x[:, 1:], np.ones_like(x[:, :1])], 1)[:, ::-1], 1)[:, ::-1]
    yield Row("cumprod_last", last, (In("a b", "unit"),), ends, ("float32",), exact=False, odd=False)


def choices() -> Iterator[Row]:
    bounded = lambda x: md.while_loop(lambda c: md.sum(md.abs(c)) < 40, lambda c: c + c, x + md.sign(x) + 1, max_trips=3)

    def ran_three(x: Any) -> Any:
        x, n = x + np.sign(x) + 1, 0
        while n < 3 and np.abs(x).sum() < 40:
            x, n = x + x, n + 1
        return x

    yield Row("while_bounded", bounded, (X,), ran_three, ("float32",))
    three = [lambda x: x * x, lambda x: -x, lambda x: x + x]
    chosen = lambda i, x: md.switch(i, three, x)
    picked = lambda i, x: (x * x, -x, x + x)[min(max(int(i), 0), 2)]
    yield Row("switch", chosen, (In("", "place:t", INDEX), X), picked, smooth=False)
