"""Attention of one place at a time, to keys and values that are kept from the places before.

What is kept has dims batch, perhaps beam, and the memory: the places that are read. The einsum goes by names, so one
step serves greedy search and both forms of beam search: where the memory has the dim of the beams, each beam reads its
own; where it has not, all beams are laid in one memory, and the mask says which places are whose.
"""

from __future__ import annotations

import math
from typing import Any

import meshdsl as md

from .attention import FORBIDDEN, attention_weights
from .linear import weight
from .precision import FLOAT32, Precision, dim_of

__all__ = ["attention_to", "cached_attention", "keys_and_values"]

Kept = dict[str, md.Tensor]  # "k" and "v", each [..., memory, heads, head]


def keys_and_values(
    x: md.Tensor,
    heads: md.Dim,
    head: md.Dim,
    *,
    over: str | md.Dim = "model",
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> Kept:
    """Keys and values {"k", "v"} of all places of x, [..., heads, head]: what attention to x reads.

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> model = md.model(lambda x: md.nn.keys_and_values(x, heads, head, name="cross"))
    >>> model.specs(md.spec("batch:2 memory:5 model:32"))
    {'cross/wk': float32[model=32 heads=4 head=8], 'cross/wv': float32[model=32 heads=4 head=8]}

    The parameters are those of `multi_head_attention`.
    """
    with md.scope(name):
        return {kind: _projected(x, f"w{kind}", (heads, head), over, init, precision) for kind in ("k", "v")}


def attention_to(
    x: md.Tensor,
    kept: Kept,
    heads: md.Dim,
    head: md.Dim,
    *,
    mask: md.Tensor | None = None,
    over: str | md.Dim = "model",
    memory: str | md.Dim = "memory",
    group: md.Dim | None = None,
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Attention of x to keys and values made before; dims of x that the memory lacks read the same memory.

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> kept = {kind: md.spec("batch:2 memory:5 heads:4 head:8") for kind in ("k", "v")}
    >>> model = md.model(lambda x, kept: md.nn.attention_to(x, kept, heads, head))
    >>> sorted(model.specs(md.spec("batch:2 beam:3 model:32"), kept))
    ['attention/wo', 'attention/wq']

    `mask` is boolean, of dims among those of x and the memory: true where reading is allowed. With `group`, so many
    queries share each key, as in `multi_head_attention`.
    """
    with md.scope(name):
        return _read(x, kept, heads, head, mask, over, memory, group, init, precision)


def cached_attention(
    x: md.Tensor,
    cache: Kept,
    heads: md.Dim,
    head: md.Dim,
    *,
    position: md.Tensor,
    mask: md.Tensor,
    over: str | md.Dim = "model",
    memory: str | md.Dim = "memory",
    group: md.Dim | None = None,
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, Kept]:
    """Attention of x, which is one place, to itself and the places in the cache: (y, the cache with x's keys).

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> def step(x, cache, position):
    ...     mask = md.iota("memory:6") <= position
    ...     return md.nn.cached_attention(x, cache, heads, head, position=position, mask=mask)
    >>> cache = {kind: md.spec("batch:2 memory:6 heads:4 head:8") for kind in ("k", "v")}
    >>> specs = md.model(step).specs(md.spec("batch:2 model:32"), cache, md.spec("", "int32"))
    >>> sorted(specs)
    ['attention/wk', 'attention/wo', 'attention/wq', 'attention/wv']

    The key is written at `position` along the memory. A dim of x that the cache lacks, a beam, is interleaved in the
    memory: its keys are written from position * beam on. The parameters are those of `multi_head_attention` without
    rotary positions. Raises `ShapeError` where x has two dims that the cache lacks.
    """
    wide = dim_of(x, over)
    lacking = [d for d in x.dims if d != wide and d not in cache["k"].dims]
    if len(lacking) > 1:
        raise md.ShapeError(
            f"the cache {cache['k'].type} lacks the dims {lacking} of {x.type}\n"
            "  one of them can be laid along the memory; give the cache the others"
        )
    at = dim_of(cache["k"], memory)
    width = lacking[0].size if lacking else 1

    def written(kept: md.Tensor, new: md.Tensor) -> md.Tensor:
        new = md.rename(new, **{lacking[0].name: at.name}) if lacking else _one_place(new, at.name)
        return md.dynamic_update_slice(kept, md.cast(new, kept.dtype), at.name, position * width)

    with md.scope(name):
        new = {kind: _projected(x, f"w{kind}", (heads, head), over, init, precision) for kind in ("k", "v")}
        cache = {kind: written(cache[kind], new[kind]) for kind in cache}
        return _read(x, cache, heads, head, mask, over, memory, group, init, precision), cache


def _one_place(x: md.Tensor, name: str) -> md.Tensor:
    return md.reshape(x, [md.Dim(name, 1), *x.dims])


def _projected(
    x: md.Tensor, name: str, made: tuple[md.Dim, ...], over: str | md.Dim, init: Any, precision: Precision
) -> md.Tensor:
    wide = dim_of(x, over)
    y = precision.einsum(
        x, weight(name, (wide,), made, init, precision), out=[*(d for d in x.dims if d != wide), *made]
    )
    return md.cast(md.prefer(y, made[0]), precision.compute)


def _read(
    x: md.Tensor,
    kept: Kept,
    heads: md.Dim,
    head: md.Dim,
    mask: md.Tensor | None,
    over: str | md.Dim,
    memory: str | md.Dim,
    group: md.Dim | None,
    init: Any,
    precision: Precision,
) -> md.Tensor:
    """The query, what it reads, and the output projection."""
    outer, read = [d for d in x.dims if d != dim_of(x, over)], dim_of(kept["k"], memory)
    groups = () if group is None else (group,)
    q = _projected(x, "wq", (heads, *groups, head), over, init, precision)
    scores = precision.einsum(q, kept["k"], out=[*outer, heads, *groups, read]) * (1 / math.sqrt(head.size))
    if mask is not None:
        scores = md.where(mask, scores, FORBIDDEN)
    weights = md.cast(attention_weights(scores, read), precision.compute)
    mixed = md.prefer(precision.einsum(weights, kept["v"], out=[*outer, heads, *groups, head]), heads)
    w = weight("wo", (heads, *groups, head), (dim_of(x, over),), init, precision)
    return md.cast(precision.einsum(md.cast(mixed, precision.compute), w, out=x.dims), precision.compute)
