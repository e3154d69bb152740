"""Attention and its gradient written with einsum and exponentials: the array of all scores is a value."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...dims import Dim, Shape, find, fresh_dim, names
from ...trace import Tensor, as_tensor
from ..contraction import einsum
from ..dtypes import cast
from ..elementwise import exp, stop_gradient, tanh, where
from ..indexing import iota
from ..reductions import broadcast, max, sum
from ..reshape import rename, transpose
from .spec import AttentionSpec, value_dim


def plain_attention(q: Tensor, k: Tensor, v: Tensor, how: AttentionSpec, extras: Mapping[str, Tensor]) -> Tensor:
    """The formula with all scores at once."""
    value = value_dim(k.dims, v.dims, how)
    out = tuple(value if d.name == how.over else d for d in q.dims)
    keys = _keys(how, q, k, v)
    k, v = (_renamed(x, how.keys, keys.name) for x in (k, v))
    rest = tuple(d for d in q.dims if d.name != how.over)
    wide = "float64" if q.dtype.itemsize > 4 else "float32"
    scores, _ = _capped(einsum(q, k, out=[*rest, keys], dtype=wide) * how.scale, how)
    scores = scores + cast(extras["bias"], wide) if "bias" in extras else scores
    if keys.size == 0:  # no maximum to subtract; a sum of no values is 0
        return einsum(cast(scores, v.dtype), v, out=out)
    seen = _seen(rest, keys, how, extras)
    if seen is None and "bias" not in extras:
        p = exp(scores - stop_gradient(max(scores, keys)))
        return einsum(cast(p / sum(p, keys), v.dtype), v, out=out)
    seen = scores > -math.inf if seen is None else broadcast(seen, scores.dims) & (scores > -math.inf)
    low = where(seen, scores, -1e30)
    p = where(seen, exp(low - stop_gradient(max(low, keys))), 0)
    total = sum(p, keys)
    return einsum(cast(p / where(total > 0, total, 1), v.dtype), v, out=out)


def _capped(s: Tensor, how: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """The scores after the soft cap, and its derivative; None without a cap."""
    if how.soft_cap is None:
        return s, None
    share = tanh(s / how.soft_cap)
    return share * how.soft_cap, 1 - share * share


def _keys(how: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Dim:
    """The dim of keys in an array of scores; its name differs from that of the queries' positions."""
    keys = Dim(how.memory, find(how.keys, k.dims).size)
    return (
        fresh_dim(Dim(f"{how.memory}__keys", keys.size), q.dims, k.dims, v.dims) if how.memory == how.length else keys
    )


def _renamed(x: Tensor, old: str, new: str) -> Tensor:
    return x if old == new or old not in names(x.dims) else rename(x, **{old: new})


def _seen(rest: Shape, keys: Dim, how: AttentionSpec, extras: Mapping[str, Tensor]) -> Tensor | None:
    """The mask of keys that each query sees, with dims among `rest` and the keys; None if queries see all keys."""
    length = tuple(d for d in rest if d.name == how.length)
    pair = (*length, keys)
    conditions: list[Tensor] = [extras["mask"]] if "mask" in extras else []
    if how.sees.compares:
        start = extras.get("offset", as_tensor(0, "int32"))
        at, key = broadcast(iota(length[0]) + start if length else start, pair), broadcast(iota(keys), pair)
        conditions += how.sees.limits(at, at, key, key)
    if "segments" in extras:
        ids, other = extras["segments"], extras["memory_segments"]
        other = _renamed(other, how.keys, keys.name)
        dims = [d for d in (*rest, keys) if d in (*ids.dims, *other.dims)]
        conditions.append(broadcast(ids, dims) == broadcast(other, dims))
    seen: Tensor | None = None
    for condition in conditions:
        if seen is None:
            seen = condition
            continue
        dims = [d for d in (*rest, keys) if d in (*seen.dims, *condition.dims)]
        seen = broadcast(seen, dims) & broadcast(condition, dims)
    return seen


def plain_gradient(*ins: Tensor, how: AttentionSpec) -> tuple[Tensor, ...]:
    """The cotangents of q, k, v and the bias by the formula; second derivatives are those of these operations."""
    roles = how.roles(ins)
    q, k, v, ct = (roles[r] for r in ("q", "k", "v", "ct"))
    keys = _keys(how, q, k, v)
    k, v = (_renamed(x, how.keys, keys.name) for x in (k, v))
    rest = tuple(d for d in q.dims if d.name != how.over)
    scores = (*rest, keys)
    wide = roles["lse"].dtype
    s, slope = _capped(einsum(q, k, out=scores, dtype=wide) * how.scale, how)
    s = s + cast(roles["bias"], wide) if "bias" in roles else s
    seen = _seen(rest, keys, how, roles)
    finite = s > -math.inf
    seen = finite if seen is None else broadcast(seen, scores) & finite
    lse = where(roles["lse"] > -math.inf, roles["lse"], 0)
    p = where(seen, exp(where(seen, s - lse, 0)), 0)
    value = next(d for d in ct.dims if d not in rest)
    ct = cast(ct, wide)
    delta = sum(ct * cast(roles["out"], wide), value)
    delta = delta - roles["lse_ct"] if "lse_ct" in roles else delta
    ds = p * (einsum(ct, cast(v, wide), out=scores) - delta)
    product_ct = ds if slope is None else ds * slope
    gradients = {
        "q": einsum(product_ct, cast(k, wide), out=q.dims) * how.scale,
        "k": einsum(product_ct, cast(q, wide), out=k.dims) * how.scale,
        "v": einsum(p, ct, out=v.dims),
    }
    gradients |= {role: _renamed(gradients[role], keys.name, how.keys) for role in ("k", "v")}
    if "bias" in roles:
        lacking = [d for d in scores if d not in roles["bias"].dims]
        gradients["bias"] = transpose(sum(ds, lacking) if lacking else ds, roles["bias"].dims)
    return tuple(cast(x, how.dtype(roles[role].dtype)) for role, x in gradients.items())
