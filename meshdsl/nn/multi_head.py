"""Multi-head attention and rotary positions.

Short sequences use the plain formula: its scores have one dim for query positions (`length`) and one for key positions
(`memory`), so the two need different names, and a layout that shards `length` does not shard `memory` unless it names
`memory` too. Long ones use `md.attention`, which stores no scores; keys are called `length` there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import meshdsl as md

from .dropout import dropout as drop
from .linear import weight
from .precision import FLOAT32, DimLike, Precision, dim_of, name_of, new_dim

MASKED_SCORE = -1e30  # finite, so that a query whose keys are all masked attends to all of them instead of giving NaN
LONG = 4096  # keys; the float32 scores of one head then take 64 MB
Cache = dict[str, md.Tensor]  # "k" and "v", both [..., memory, heads, head]


class Heads(NamedTuple):
    """The projections of an attention layer, from the dim `over` to heads and back."""

    over: DimLike
    heads: md.Dim
    head: md.Dim
    groups: tuple[md.Dim, ...]  # of queries, for each of the heads
    init: Any
    precision: Precision

    @classmethod
    def of(
        cls, over: DimLike, heads: DimLike, head: DimLike, group: DimLike | None, init: Any, precision: Precision
    ) -> Heads:
        """Raises `ShapeError` for a dim without a size."""
        groups = () if group is None else (new_dim(group, "the group"),)
        return cls(over, new_dim(heads, "the heads"), new_dim(head, "the head"), groups, init, precision)

    def queries(self, x: md.Tensor) -> md.Tensor:
        """The queries of x: [..., heads, groups, head]."""
        return self._projected(x, "wq", (self.heads, *self.groups, self.head))

    def keys_and_values(self, x: md.Tensor) -> Cache:
        """The keys and values of x: [..., heads, head]."""
        return {kind: self._projected(x, f"w{kind}", (self.heads, self.head)) for kind in ("k", "v")}

    def _projected(self, x: md.Tensor, name: str, new_dims: tuple[md.Dim, ...]) -> md.Tensor:
        model_dim = dim_of(x, self.over)
        w = weight(name, (model_dim,), new_dims, self.init, self.precision)
        y = self.precision.einsum(x, w, out=[*(d for d in x.dims if d != model_dim), *new_dims])
        return md.cast(md.prefer(y, self.heads), self.precision.compute)

    def output(self, values: md.Tensor, x: md.Tensor) -> md.Tensor:
        """The result of the layer, with the dims of x, from what each head read: [..., heads, groups, head]."""
        values = md.cast(md.prefer(values, self.heads), self.precision.compute)
        w = weight("wo", (self.heads, *self.groups, self.head), (dim_of(x, self.over),), self.init, self.precision)
        return md.cast(self.precision.einsum(values, w, out=x.dims), self.precision.compute)


def multi_head_attention(
    x: md.Tensor,
    heads: DimLike,
    head: DimLike,
    *,
    memory: md.Tensor | None = None,
    over: DimLike = "model",
    length: DimLike = "length",
    memory_length: DimLike = "memory",
    causal: bool = False,
    mask: md.Tensor | None = None,
    group: DimLike | None = None,
    positions: str = "none",
    dropout: float = 0.0,
    key: md.Tensor | None = None,
    method: str | None = None,
    name: str = "attention",
    init: Any = None,
    precision: Precision = FLOAT32,
) -> md.Tensor:
    """Multi-head attention from x to itself, or to `memory` [..., memory, model] (Vaswani et al., 2017, section 3.2).

    >>> import meshdsl as md
    >>> heads, head = md.dims("heads:4 head:8")
    >>> model = md.model(lambda x: md.nn.multi_head_attention(x, heads, head, causal=True))
    >>> specs = model.specs(md.spec("batch:2 length:5 model:32"))
    >>> specs["attention/wq"], specs["attention/wo"]
    (float32[model=32 heads=4 head=8], float32[heads=4 head=8 model=32])

    `memory_length` is the dim of the positions of keys and values in the scores, and that of `memory`. `dropout` is the
    rate at which weights are dropped; it needs a `key`.
    With `causal`, each position attends to itself and to earlier positions. `mask` is a boolean tensor with dims among
    batch, heads, length and memory; it is true where attention is allowed. With `group`, `group.size` query heads
    share each of the `heads` key and value heads (grouped-query attention, Ainslie et al., 2023; with one head,
    multi-query attention). `positions` is "none" or "rotary". If several dims of queries, keys or values map to the
    same mesh axis, `heads` is sharded.

    `method` is that of `md.attention`: "plain" writes the formula with all scores, the others store none, and send what
    they say if a layout splits the positions. By default, it is "plain" with dropout on the weights or fewer than
    4096 keys, else "auto". A query that sees no key attends to all of them by "plain", and gives zeros by the others.
    Raises `ShapeError` for other `positions`, for `causal` with a `memory`, and for dropout without the plain formula.
    """
    check_positions(positions)
    layer, memory_length = Heads.of(over, heads, head, group, init, precision), name_of(memory_length)
    if causal and memory is not None:
        raise md.ShapeError("causal=True is only for self-attention, and memory= was given; pass mask= instead")
    model_dim, length_dim = dim_of(x, over), dim_of(x, length)
    keys = length_dim if memory is None else dim_of(memory, memory_length)
    method = _method(method, dropout, keys)
    outer = [d for d in x.dims if d not in (model_dim, length_dim)]
    _, heads, head, groups, *_ = layer
    with md.scope(name):
        q = layer.queries(x)
        k, v = layer.keys_and_values(x if memory is None else memory).values()
        if positions == "rotary":
            q = rotary(q, length_dim, head)
            k = rotary(k, length_dim if memory is None else memory_length, head)
        if method == "plain":
            if memory is None:
                k, v = (md.rename(y, **{length_dim.name: memory_length}) for y in (k, v))
            weights = _weights(
                q, k, [*outer, heads, *groups], (length_dim, head), memory_length, causal, mask, precision
            )
            weights = drop(weights, dropout, key)
            values = precision.einsum(weights, v, out=[*outer, length_dim, heads, *groups, head])
        else:
            values = md.attention(
                q, k, v, over=head, length=length_dim, memory=memory_length, causal=causal, mask=mask, method=method
            )
        return layer.output(values, x)


def check_positions(positions: str) -> None:
    """Raise `ShapeError` for positions other than "none" and "rotary"."""
    if positions not in ("none", "rotary"):
        raise md.ShapeError(
            f"positions must be 'none' or 'rotary', got {positions!r}\n"
            "  for learned positions, add them to the input with md.nn.learned_positions"
        )


def _method(method: str | None, dropout: float, keys: md.Dim) -> str:
    """The method of attention: the caller's, or the formula for short sequences and for dropout on the weights."""
    if method is None:
        return "plain" if dropout or keys.size < LONG else "auto"
    if dropout and method != "plain":
        raise md.ShapeError(
            f"dropout on the weights of attention needs all weights, and method={method!r} stores none\n"
            "  use method='plain', or drop elements of the layer's result with md.nn.dropout"
        )
    return method


def _weights(
    q: md.Tensor,
    k: md.Tensor,
    outer: list[md.Dim],
    dims: tuple[md.Dim, md.Dim],
    memory_length: str,
    causal: bool,
    mask: md.Tensor | None,
    precision: Precision,
) -> md.Tensor:
    """The softmax of all scores [*outer, memory, length]; `dims` are the dim of queries and the summed one."""
    (length_dim, head), memory_dim = dims, dim_of(k, memory_length)
    # TPUs store products of queries and keys with the queries innermost; in this order of dims a loop over layers saves
    # and reads the weights without a copy
    scores = precision.einsum(k, scaled(q, head, precision), out=[*outer, memory_dim, length_dim])
    if causal:
        scores = _causal(scores, length_dim, memory_dim, gradient_is_masked=mask is not None)
    if mask is not None:
        scores = md.where(mask, scores, MASKED_SCORE)
    return md.softmax(scores, memory_dim, precision.compute)


def scaled(q: md.Tensor, head: md.Dim, precision: Precision) -> md.Tensor:
    """The queries over the root of their size, rounded once.

    Scaling the scores costs a pass over them, and in the backward loop a TPU stores the factor as an array beside them.
    """
    return md.cast(md.cast(q, precision.reduce) * (1 / math.sqrt(head.size)), precision.compute)


def rotary(
    x: md.Tensor,
    over: DimLike | None,
    head: DimLike,
    base: float = 10000.0,
    offset: int | md.Tensor = 0,
    *,
    speeds: Sequence[float] | None = None,
    interleaved: bool = False,
) -> md.Tensor:
    """Rotary position embedding: rotates pairs of elements of x by an angle proportional to the position along `over`.

    >>> import meshdsl as md
    >>> md.nn.rotary(md.tensor([[1.0, 0.0], [1.0, 0.0]], "length head"), "length", "head")
    tensor(float32[length=2 head=2], [[1.     0.    ]
     [0.5403 0.8415]])

    The product of two rotated tensors depends only on the distance between their positions. Element i of the first
    half of `head` is paired with element i of the second half, and rotates by base ** (-i / half) radians per position
    (Su et al., "RoFormer", 2021, section 3.2.2; pairs as in GPT-NeoX), or by speeds[i], for scaled positions. If
    `interleaved`, elements 2 i and 2 i + 1 are a pair, as in RoFormer; in the result, they are i and i + half. `offset`
    is the position of the first element, a number or an integer tensor with dims of x; with `over` None, it is the
    position of all of x, as in decoding. Raises `ShapeError` if `head` is odd, or has another number of pairs than
    there are speeds.
    """
    length_dim, head_dim = None if over is None else dim_of(x, over), dim_of(x, head)
    if head_dim.size % 2:
        raise md.ShapeError(f"rotary positions rotate pairs of elements, and the size of {head_dim!r} is odd")
    half = md.Dim(head_dim.name, head_dim.size // 2)
    dtype = x.dtype if x.dtype.itemsize > 4 else "float32"  # bfloat16 cannot represent large positions exactly
    if speeds is not None and len(speeds) != half.size:
        raise md.ShapeError(f"{head_dim!r} has {half.size} pairs to rotate, and {len(speeds)} speeds were given")
    exponent = -math.log(base) / half.size
    speed = md.exp(md.iota(half, dtype) * exponent) if speeds is None else md.tensor(np.asarray(speeds, dtype), [half])
    at = _positions(length_dim, offset, dtype)
    angle = md.einsum(at, speed, out=[*at.dims, half])
    cos, sin = md.cast(md.cos(angle), x.dtype), md.cast(md.sin(angle), x.dtype)
    a, b = (
        md.slice(x, head_dim, i if interleaved else i * half.size, half.size, 2 if interleaved else 1) for i in (0, 1)
    )
    return md.concat([a * cos - b * sin, a * sin + b * cos], head_dim.name)


def _positions(length: md.Dim | None, offset: int | md.Tensor, dtype: Any) -> md.Tensor:
    """The positions along a dim, counted from `offset`; without a dim, `offset` itself."""
    if length is not None and isinstance(offset, int) and not offset:
        return md.iota(length, dtype)
    start = md.cast(offset, dtype) if isinstance(offset, md.Tensor) else md.tensor(np.asarray(offset, dtype), "")
    return start if length is None else md.broadcast(md.iota(length, dtype), [*start.dims, length]) + start


def _causal(scores: md.Tensor, length: md.Dim, memory: md.Dim, gradient_is_masked: bool) -> md.Tensor:
    """The scores, masked where a key follows its query.

    The softmax of a row with an allowed key is zero where it is masked, and so is its gradient. Masking the gradient
    again costs a pass over the scores on TPUs; `gradient_is_masked` is for rows that another mask may empty.
    """

    def masked(x: md.Tensor) -> md.Tensor:
        allowed = md.broadcast(md.iota(length), [length, memory]) >= md.iota(memory)
        return md.where(allowed, x, MASKED_SCORE)

    if gradient_is_masked:
        return masked(scores)
    return md.custom_vjp(masked, lambda x: (masked(x), None), lambda _, ct: (ct,))(scores)
