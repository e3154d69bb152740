"""`md.attention`: queries weigh values by the softmax of their products with keys, without an array of scores."""

from __future__ import annotations

import math
from typing import Any

from ...dims import Dim, DimLike, find, name_of, names, show
from ...errors import ShapeError
from ...trace import Tensor, as_tensor, bind
from ..dtypes import kind
from .plain import plain_attention
from .records import ATTENTION
from .sees import Sees
from .spec import AttentionSpec

METHODS = ("auto", "ring", "all_to_all", "gather", "plain")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    over: DimLike = "head",
    length: DimLike = "length",
    memory: DimLike = "memory",
    causal: bool = False,
    window: int | None = None,
    offset: Any = None,
    bias: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    memory_segment_ids: Any = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    method: str = "auto",
    block: int = 512,
) -> Tensor:
    """softmax(scale * q k + bias) v, where queries see keys; memory is linear in the number of queries and of keys.

    >>> import meshdsl as md
    >>> q, k, v = (md.random.normal(md.random.key(i), "heads:2 length:6 head:4") for i in range(3))
    >>> md.attention(q, k, v, causal=True).dims
    (heads=2, length=6, head=4)

    The names of dims set their roles. `over` is summed over. `length` is the position of queries, and `memory` that of
    keys and values; in self-attention they may be called `length` too, so that a layout that splits `length` splits all
    three. Other dims of keys and values are shared with the queries (batch, heads). Dims that only the queries have
    share keys and values (the groups of grouped-query attention, Ainslie et al., 2023). The result has the dims of q,
    with the values' own dim, if that has another name, in the place of `over`.

    A query sees a key unless one of these excludes it: `causal` (keys at later positions), `window` (keys `window` or
    more positions away), `mask` (boolean, true where a key is seen), and segment ids (queries see keys of equal ids).
    Positions count from 0 along both dims; `offset`, a number or an integer tensor without dims, is added to those of
    the queries. `bias` and `mask` have dims among those of q and `memory`. `memory_segment_ids` are the ids of keys;
    where their positions are called `length`, they are `segment_ids` by default. A query that sees no key gives zeros,
    and its gradient is zero. `scale` is 1/sqrt(size of `over`) by default. With `soft_cap`, a score s = scale * q k
    becomes soft_cap * tanh(s / soft_cap), before the bias is added (Gemma 2, 2024). Scores and sums have at least
    float32.

    `method` says what devices send if a layout splits the positions of queries and keys over the same axes: "ring"
    (keys and values go around), "all_to_all" (the positions are gathered and another shared dim is split instead),
    "gather" (of keys and values), or "auto", which sends the fewest bytes. "plain" writes the formula with md.einsum
    and exponentials, with an array of scores of length x memory; second derivatives (md.jvp too) do so by every method.
    `block` is the number of queries, and of keys, whose scores are stored at once.

    Raises `ShapeError` for dims that do not fit these roles, and for dtypes other than one floating dtype.
    """
    q, k, v = (as_tensor(x) for x in (q, k, v))
    extras = {
        "bias": bias,
        "mask": mask,
        "segments": segment_ids,
        "memory_segments": memory_segment_ids,
        "offset": offset,
    }
    inputs = {role: as_tensor(x) for role, x in extras.items() if x is not None}

    how = _names(q, k, v, name_of(over), name_of(length), name_of(memory))
    if how.keys == how.length and "segments" in inputs:
        inputs.setdefault("memory_segments", inputs["segments"])
    _check_options(window, soft_cap, method, block)
    sees = Sees(causal, None if window is None else min(window, 1 << 30))  # positions are 32-bit integers
    _check_positions(how, sees, inputs)
    _check_keys(how, q, k, v)
    _check_values(how, q, k, v)
    _check_extras(how, q, k, inputs)

    factor = 1 / math.sqrt(find(how.over, q.dims).size or 1) if scale is None else float(scale)
    order = tuple(role for role in extras if role in inputs)
    cap = None if soft_cap is None else float(soft_cap)
    how = AttentionSpec(how.over, how.length, how.keys, how.memory, order, factor, block, method, cap, sees)
    if method == "plain":
        return plain_attention(q, k, v, how, inputs)
    return bind(ATTENTION, q, k, v, *(inputs[role] for role in order), how=how)[0]


def _names(q: Tensor, k: Tensor, v: Tensor, over: str, length: str, memory: str) -> AttentionSpec:
    """The roles of the dims, and an error if keys have no dim of positions or two."""
    key_dims = [name for name in dict.fromkeys((length, memory)) if name in names(k.dims)]
    if len(key_dims) != 1:
        problem = "no dim of positions" if not key_dims else "two dims of positions"
        raise ShapeError(
            f"md.attention: k {show(k.dims)} has {problem}\n"
            f"  the positions of keys are called {memory!r}, or {length!r} as those of queries; "
            "say so with memory= and length=, or rename with md.rename"
        )
    find(over, q.dims, "dim of q to sum over")
    has_length = length in names(q.dims)
    if key_dims == [length] != [memory] and not has_length:
        raise ShapeError(
            f"md.attention: k {show(k.dims)} has the positions {length!r}, and q {show(q.dims)} does not\n"
            f"  rename those of k and v: md.rename(k, {length}={memory!r})"
        )
    if key_dims == [memory] != [length] and memory in names(q.dims):
        raise ShapeError(
            f"md.attention: q {show(q.dims)} has {memory!r}, the positions of keys\n"
            "  rename its positions, or call those of queries and keys length="
        )
    return AttentionSpec(over, length if has_length else "", key_dims[0], memory)


def _check_options(window: int | None, soft_cap: float | None, method: str, block: int) -> None:
    if method not in METHODS:
        raise ShapeError(f"md.attention: method is one of {', '.join(METHODS)}; got {method!r}")
    for name, value in (("block", block), ("window", window)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ShapeError(f"md.attention: {name} is a number of positions of at least 1; got {value!r}")
    if soft_cap is not None and not (isinstance(soft_cap, int | float) and 0 < soft_cap < math.inf):
        raise ShapeError(f"md.attention: soft_cap is a positive number; got {soft_cap!r}")


def _check_positions(how: AttentionSpec, sees: Sees, inputs: dict[str, Tensor]) -> None:
    if sees.compares and not how.length and "offset" not in inputs:
        raise ShapeError(
            "md.attention: causal= and window= compare positions, and the queries have none\n"
            "  give the query's position with offset=, or the queries a dim length="
        )
    if "offset" in inputs and not sees.compares:
        raise ShapeError("md.attention: offset= has an effect only with causal= or window=; leave it out")
    if how.memory == how.keys == how.length and not {"bias", "mask"}.isdisjoint(inputs):
        raise ShapeError("md.attention: bias and mask need two names; give the keys' one with memory=")


def _check_keys(how: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or any(kind(dtype) != "f" for dtype in dtypes):
        raise ShapeError(
            f"md.attention takes q, k and v of one floating dtype; got {q.dtype.name}, {k.dtype.name}, {v.dtype.name}\n"
            "  cast them with md.cast"
        )
    find(how.over, k.dims, "dim of k to sum over")
    known = {d.name: d for d in q.dims}
    for d in k.dims:
        if d.name not in known and d.name != how.keys:
            raise ShapeError(
                f"md.attention: k {show(k.dims)} has {d.name!r}, which q {show(q.dims)} lacks\n"
                f"  its dims are {how.over!r}, {how.keys!r}, and dims of q; sum over it, or give q the dim with "
                "md.broadcast"
            )
        if d != known.get(d.name, d):
            raise ShapeError(f"md.attention: {d.name!r} has size {known[d.name].size} in q and {d.size} in k")


def _check_values(how: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    batch = how.batch(k.dims)
    own = [d for d in v.dims if d.name != how.keys and d not in batch]
    keys = find(how.keys, k.dims)
    if keys not in v.dims or len(own) != 1 or len(v.dims) != len(k.dims):
        raise ShapeError(
            f"md.attention: v {show(v.dims)} must have the dims {show((*batch, keys))} of k, and one dim of its own"
        )
    if own[0].name != how.over and own[0].name in names(q.dims):
        raise ShapeError(
            f"md.attention: {own[0].name!r} of v {show(v.dims)} is a dim of q {show(q.dims)}, but not of k\n"
            "  rename it with md.rename, or give k the dim with md.broadcast"
        )


def _check_extras(how: AttentionSpec, q: Tensor, k: Tensor, inputs: dict[str, Tensor]) -> None:
    keys = find(how.keys, k.dims)
    shared = [d for d in q.dims if d.name != how.over]
    scores = [*shared, Dim(how.memory, keys.size)]
    allowed = {
        "bias": (scores, "f"),
        "mask": (scores, "b"),
        "segments": ([*shared], "ib"),
        "memory_segments": ([*how.batch(k.dims), keys], "ib"),
        "offset": ([], "i"),
    }
    said = {"segments": "segment_ids", "memory_segments": "memory_segment_ids"}
    kinds = {"f": "floating", "b": "boolean", "ib": "integer or boolean", "i": "integer"}
    for role, x in inputs.items():
        dims, dtype = allowed[role]
        if kind(x.dtype) not in dtype:
            raise ShapeError(f"md.attention: {said.get(role, role)} is {kinds[dtype]}; got {x.dtype.name}")
        strange = [d for d in x.dims if d not in dims]
        if strange:
            raise ShapeError(
                f"md.attention: {said.get(role, role)} {show(x.dims)} has {show(strange)}\n"
                f"  its dims are among {show(dims)}"
            )
    if ("segments" in inputs) != ("memory_segments" in inputs):
        missing = "memory_segment_ids" if "segments" in inputs else "segment_ids"
        raise ShapeError(
            f"md.attention: queries have {how.length or 'no positions'!r} and keys {how.keys!r}, so both need segment "
            f"ids; {missing}= is missing"
        )
