"""Attention for decoding: one position at a time, to cached keys and values of earlier positions.

The cache has the dims batch, memory and, in some searches, beam. The same step works for greedy search and for both
forms of beam search. If the cache has the beam dim, each beam attends to its own cache; if not, all beams share one
cache, and the mask selects each beam's positions.
"""

from __future__ import annotations

from typing import Any

import meshdsl as md

from .multi_head import MASKED_SCORE, Cache, Heads, check_positions, rotary, scaled
from .precision import FLOAT32, DimLike, Precision, dim_of, name_of


def keys_and_values(
    x: md.Tensor,
    heads: DimLike,
    head: DimLike,
    *,
    over: DimLike = "model",
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> Cache:
    """Keys and values of every position of x: {"k", "v"}, both [..., heads, head], for `attention_to`.

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> model = md.model(lambda x: md.nn.keys_and_values(x, heads, head, name="cross"))
    >>> model.specs(md.spec("batch:2 memory:5 model:32"))
    {'cross/wk': float32[model=32 heads=4 head=8], 'cross/wv': float32[model=32 heads=4 head=8]}

    Uses the same parameter names and shapes as `multi_head_attention`.
    """
    layer = Heads.of(over, heads, head, None, init, precision)
    with md.scope(name):
        return layer.keys_and_values(x)


def attention_to(
    x: md.Tensor,
    kept: Cache,
    heads: DimLike,
    head: DimLike,
    *,
    mask: md.Tensor | None = None,
    over: DimLike = "model",
    memory: DimLike = "memory",
    group: DimLike | None = None,
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Attention from x to cached keys and values; dims of x that the cache lacks, such as beam, share the cache.

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> kept = {kind: md.spec("batch:2 memory:5 heads:4 head:8") for kind in ("k", "v")}
    >>> model = md.model(lambda x, kept: md.nn.attention_to(x, kept, heads, head))
    >>> sorted(model.specs(md.spec("batch:2 beam:3 model:32"), kept))
    ['attention/wo', 'attention/wq']

    `mask` is a boolean tensor with dims among those of x and the memory; it is true where attention is allowed.
    `group` is as in `multi_head_attention`.
    """
    layer = Heads.of(over, heads, head, group, init, precision)
    with md.scope(name):
        return _read(layer, x, kept, memory, mask)


def cached_attention(
    x: md.Tensor,
    cache: Cache,
    heads: DimLike,
    head: DimLike,
    *,
    position: md.Tensor,
    mask: md.Tensor,
    over: DimLike = "model",
    memory: DimLike = "memory",
    group: DimLike | None = None,
    positions: str = "none",
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> tuple[md.Tensor, Cache]:
    """Attention from one position x to itself and the cached positions; returns y and the cache with x's key and value.

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> def step(x, cache, position):
    ...     mask = md.iota("memory:6") <= position
    ...     return md.nn.cached_attention(x, cache, heads, head, position=position, mask=mask)
    >>> cache = {kind: md.spec("batch:2 memory:6 heads:4 head:8") for kind in ("k", "v")}
    >>> specs = md.model(step).specs(md.spec("batch:2 model:32"), cache, md.spec("", "int32"))
    >>> sorted(specs)
    ['attention/wk', 'attention/wo', 'attention/wq', 'attention/wv']

    The key and value are written at index `position` of the memory dim. If x has a beam dim that the cache lacks, the
    beams are interleaved in the memory: they are written from index position * beam.size. Uses the same parameters as
    `multi_head_attention`; `group` and `positions` are as there, and with "rotary" the cache has rotated keys. Raises
    `ShapeError` if x has two dims that the cache lacks.
    """
    check_positions(positions)
    layer = Heads.of(over, heads, head, group, init, precision)
    model_dim = dim_of(x, over)
    beam_dims = [d for d in x.dims if d != model_dim and d not in cache["k"].dims]
    if len(beam_dims) > 1:
        raise md.ShapeError(
            f"the cache {cache['k'].type} lacks the dims {beam_dims} of {x.type}\n"
            "  at most one of them can be interleaved in the memory; add the others to the cache"
        )
    memory_dim = dim_of(cache["k"], memory)
    width = beam_dims[0].size if beam_dims else 1

    def with_key(old: md.Tensor, new: md.Tensor) -> md.Tensor:
        new = md.rename(new, **{beam_dims[0].name: memory_dim.name}) if beam_dims else _expand(new, memory_dim.name)
        return md.dynamic_update_slice(old, md.cast(new, old.dtype), memory_dim.name, position * width)

    with md.scope(name):
        new = layer.keys_and_values(x)
        at = position if positions == "rotary" else None
        new["k"] = new["k"] if at is None else rotary(new["k"], None, layer.head, offset=at)
        cache = {kind: with_key(cache[kind], new[kind]) for kind in cache}
        return _read(layer, x, cache, memory, mask, at), cache


def write_cache(
    old: md.Tensor, new: md.Tensor, position: md.Tensor | int, *, length: DimLike = "length", memory: DimLike = "memory"
) -> md.Tensor:
    """The cache `old` with `new` written along `memory`, from index `position` on; for keys or values.

    >>> import meshdsl as md
    >>> old = md.tensor([[0.0, 0.0, 0.0]], "head memory")
    >>> md.nn.write_cache(old, md.tensor([[1.0], [2.0]], "length head"), 0)
    tensor(float32[head=1 memory=3], [[1. 2. 0.]])
    >>> md.nn.write_cache(old, md.tensor([5.0], "head"), 2)
    tensor(float32[head=1 memory=3], [[0. 0. 5.]])

    If `new` has the dim `length`, it is written to as many positions, as for a prompt; otherwise to one. Requires that
    they fit: as in `md.dynamic_update_slice`, a position too close to the end is moved.
    """
    length, memory = name_of(length), dim_of(old, memory).name
    has_length = length in [d.name for d in new.dims]
    new = md.rename(new, **{length: memory}) if has_length else _expand(new, memory)
    return md.dynamic_update_slice(old, md.cast(new, old.dtype), memory, position)


def _expand(x: md.Tensor, name: str) -> md.Tensor:
    return md.reshape(x, [md.Dim(name, 1), *x.dims])


def _read(
    layer: Heads,
    x: md.Tensor,
    cache: Cache,
    memory: DimLike,
    mask: md.Tensor | None,
    position: md.Tensor | None = None,
) -> md.Tensor:
    """Query projection (rotated, if there is a position), attention to the cache, output projection."""
    precision, memory_dim = layer.precision, dim_of(cache["k"], memory)
    outer = [d for d in x.dims if d != dim_of(x, layer.over)]
    q = layer.queries(x)
    q = q if position is None else rotary(q, None, layer.head, offset=position)
    q = scaled(q, layer.head, precision)
    scores = precision.einsum(q, cache["k"], out=[*outer, layer.heads, *layer.groups, memory_dim])
    if mask is not None:
        scores = md.where(mask, scores, MASKED_SCORE)
    weights = md.cast(md.softmax(scores, memory_dim), precision.compute)
    values = precision.einsum(weights, cache["v"], out=[*outer, layer.heads, *layer.groups, layer.head])
    return layer.output(values, x)
