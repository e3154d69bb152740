"""Rows of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.trace import Tensor

from .row import In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def _weights(s: Any, seen: Any = True) -> Any:
    """The softmax over the last axis of the scores that are seen; zeros for a query that sees none."""
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True, initial=-1e30), -1e30))
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-30)


def attentions() -> Iterator[Row]:
    fixed: dict[str, Any] = {"exact": False, "odd": False, "dtypes": ("float32",)}
    q, k, v = In("a b c d"), In("a c b d"), In("a b c d")  # batch, length, heads, head
    ours = lambda **how: lambda q, k, v, *_, **more: md.attention(q, k, v, over="d", length="b", memory="t", **how)

    def reference(causal: bool = False, window: int = 1 << 20) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            s = np.einsum("albd,abmd->ablm", q, k) / np.sqrt(max(1, q.shape[-1]))
            at = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[2]))
            seen = (at < window) & ((at >= 0) if causal else (at > -window))
            return np.einsum("ablm,ambd->albd", _weights(s, seen), v)

        return attend

    yield Row("attention", ours(), (q, k, v), reference(), **{**fixed, "dtypes": ("float32", "bfloat16")})
    yield Row("attention_ring", ours(causal=True, method="ring", block=2), (q, k, v), reference(causal=True), **fixed)
    yield Row("attention_exchange", ours(causal=True, window=2, method="all_to_all"), (q, k, v), reference(True, 2), **fixed)
    yield Row("attention_window", ours(window=3, method="gather"), (q, k, v), reference(False, 3), **fixed)

    memory, value = In("a t d"), In("a t c")

    def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Any:
        return md.attention(q, k, v, over="d", length="b", memory="t", bias=bias, mask=mask)

    def masked_reference(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        s = np.einsum("abd,atd->abt", q, k) / np.sqrt(max(1, q.shape[-1])) + bias.T
        return np.einsum("abt,atc->abc", _weights(s, mask[:, None]), v)

    extras = (In("t b"), In("a t", dtype="bool"))
    yield Row("attention_memory", masked, (In("a b d"), memory, value, *extras), masked_reference, **fixed)

    def segmented(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        ids = md.cast(ids > 0, "int32")
        return md.attention(q, k, v, over="d", length="b", memory="t", segment_ids=ids, causal=True)

    def segmented_reference(q: Any, k: Any, v: Any, ids: Any) -> Any:
        s = np.einsum("lcd,md->clm", q, k) / np.sqrt(max(1, q.shape[-1]))
        seen = ((ids[:, None] > 0) == (ids[None] > 0)) & np.tri(len(k), dtype=bool)
        return np.einsum("clm,md->lcd", _weights(s, seen), v)

    yield Row("attention_segments", segmented, (In("b c d"), In("b d"), In("b d"), In("b")), segmented_reference, **fixed)

    def one(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Any:
        return md.attention(q, k, v, over="d", length="b", memory="t", causal=True, offset=at)

    def one_reference(q: Any, k: Any, v: Any, at: Any) -> Any:
        s = np.einsum("acd,atd->act", q, k) / np.sqrt(max(1, q.shape[-1]))
        return np.einsum("act,ate->ace", _weights(s, np.arange(k.shape[1]) <= at), v)

    yield Row("attention_one", one, (In("a c d"), memory, In("a t e=2"), In("", "inside:t", "int32")), one_reference, **fixed)
    cotangent = lambda q, k, v: md.grad(lambda q: md.sum(md.square(md.attention(q, k, v, over="d", length="b", memory="t"))))(q)
    yield Row("attention_grad", cotangent, (In("b d"), In("b d"), In("b d")), differentiable=False, **fixed)
