"""Attention. The weights' last dim is the memory: the places that are read, under a name of its own.

One tensor holds queries' and keys' places together, so they need two names; a layout that splits `length` leaves
`memory` whole unless it names that too.
"""

from __future__ import annotations

import math
from typing import Any

import meshdsl as md

from .dropout import dropout as drop
from .linear import weight
from .precision import FLOAT32, Precision, dim_of

__all__ = ["multi_head_attention", "rotary"]

FORBIDDEN = -1e30  # exp of it is zero beside any score; a query that may read nothing reads all, and nothing is NaN


def multi_head_attention(
    x: md.Tensor,
    heads: md.Dim,
    head: md.Dim,
    *,
    memory: md.Tensor | None = None,
    over: str | md.Dim = "model",
    length: str | md.Dim = "length",
    memory_length: str = "memory",
    causal: bool = False,
    mask: md.Tensor | None = None,
    group: md.Dim | None = None,
    positions: str = "none",
    dropout: float = 0.0,
    key: md.Tensor | None = None,
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Multi-head attention of x to itself, or to `memory` [..., memory, model] (Vaswani et al., 2017, section 3.2).

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> model = md.model(lambda x: md.nn.multi_head_attention(x, heads, head, causal=True))
    >>> specs = model.specs(md.spec("batch:2 length:5 model:32"))
    >>> specs["attention/wq"], specs["attention/wo"]
    (float32[model=32 heads=4 head=8], float32[heads=4 head=8 model=32])

    `causal` lets each place read itself and those before it; `mask` is a boolean tensor of dims among batch, heads,
    length and memory, true where reading is allowed. With `group`, so many queries share each of the `heads` keys and
    values (grouped-query attention, Ainslie et al., 2023; one head: multi-query). `positions` is "none" or "rotary".
    Queries, keys and values are split by heads where their dims compete for an axis.
    Raises `ShapeError` for other positions, and for causal attention to a memory.
    """
    if positions not in ("none", "rotary"):
        raise md.ShapeError(
            f"positions of attention are 'none' or 'rotary', got {positions!r}\n"
            "  learned positions are added to the input, with md.nn.learned_positions"
        )
    if causal and memory is not None:
        raise md.ShapeError("causal attention is to the input itself; give a mask for a memory")
    wide, at = dim_of(x, over), dim_of(x, length)
    outer = [d for d in x.dims if d not in (wide, at)]
    groups = [] if group is None else [group]

    def project(y: md.Tensor, name: str, made: list[md.Dim]) -> md.Tensor:
        w = weight(name, (wide,), tuple(made), init, precision)
        y = precision.einsum(y, w, out=[*(d for d in y.dims if d != wide), *made])
        return md.cast(md.prefer(y, heads), precision.compute)

    with md.scope(name):
        q = project(x, "wq", [heads, *groups, head])
        k = project(x if memory is None else memory, "wk", [heads, head])
        v = project(x if memory is None else memory, "wv", [heads, head])
        if positions == "rotary":
            q = rotary(q, at, head)
            k = rotary(k, at if memory is None else memory_length, head)
        if memory is None:
            k, v = (md.rename(y, **{at.name: memory_length}) for y in (k, v))
        read = dim_of(k, memory_length)
        scores = precision.einsum(q, k, out=[*outer, heads, *groups, at, read]) * (1 / math.sqrt(head.size))
        if causal:
            allowed = md.broadcast(md.iota(at), [heads, at, read]) >= md.iota(read)
            scores = md.where(md.prefer(allowed, heads), scores, FORBIDDEN)
        if mask is not None:
            scores = md.where(mask, scores, FORBIDDEN)
        weights = drop(md.cast(attention_weights(scores, read), precision.compute), dropout, key)
        mixed = md.prefer(precision.einsum(weights, v, out=[*outer, at, heads, *groups, head]), heads)
        mixed = md.cast(mixed, precision.compute)
        w = weight("wo", (heads, *groups, head), (wide,), init, precision)
        return md.cast(precision.einsum(mixed, w, out=x.dims), precision.compute)


def rotary(x: md.Tensor, over: str | md.Dim, head: str | md.Dim, base: float = 10000.0) -> md.Tensor:
    """x turned by an angle that grows with the place along `over`; products of two such tensors see only distances.

    >>> import meshdsl as md
    >>> md.nn.rotary(md.tensor([[1.0, 0.0], [1.0, 0.0]], "length head"), "length", "head")
    tensor(float32[length=2 head=2], [[1.     0.    ]
     [0.5403 0.8415]])

    Element i of the first half of `head` turns with element i of the second, by base ** (-i / half) a place (Su et
    al., "RoFormer", 2021, section 3.2.2, with the halves of GPT-NeoX). Requires that `head` is even.
    """
    at, whole = dim_of(x, over), dim_of(x, head)
    if whole.size % 2:
        raise md.ShapeError(f"rotary positions turn pairs, and {whole!r} is odd")
    half = md.Dim(whole.name, whole.size // 2)
    wide = x.dtype if x.dtype.itemsize > 4 else "float32"  # a narrow float cannot tell far places apart
    speed = md.exp(md.iota(half, wide) * (-math.log(base) / half.size))
    angle = md.einsum(md.iota(at, wide), speed, out=[at, half])
    cos, sin = md.cast(md.cos(angle), x.dtype), md.cast(md.sin(angle), x.dtype)
    a, b = md.slice(x, whole, 0, half.size), md.slice(x, whole, half.size, half.size)
    return md.concat([a * cos - b * sin, a * sin + b * cos], whole.name)


def attention_weights(scores: md.Tensor, over: md.Dim) -> md.Tensor:
    """Softmax, whose backward keeps only its result: p (ct - sum(ct p))."""

    def forward(x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        e = md.exp(x - md.stop_gradient(md.max(x, over)))
        p = e / md.sum(e, over)
        return p, p

    def backward(p: md.Tensor, ct: md.Tensor) -> tuple[md.Tensor]:
        return (p * (ct - md.sum(ct * p, over)),)

    return md.custom_vjp(lambda x: forward(x)[0], forward, backward)(scores)
