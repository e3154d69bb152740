"""Attention by the plain formula: all scores at once. NumPy's form, independent of the blockwise one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...backend import NumPy
from .arrays import Arrays


def _positions(x: Arrays) -> tuple[Any, Any]:
    q = np.concatenate([np.arange(s.size) + int(s.start) for s in x.queries])
    k = np.concatenate([np.arange(s.size) + int(s.start) for s in x.keys])
    return q + (0 if x.offset is None else int(x.offset)), k


def _scores(x: Arrays) -> tuple[Any, Any]:
    """The scores [*batch, *group, queries, keys], -inf where a query does not see a key, and the cap's derivative."""
    s, slope = x.scores(NumPy, x.q, x.k)
    s = s if x.bias is None else s + x.bias.astype(x.wide)
    seen = x.how.sees.pairs(np, *_positions(x), x.count)
    if x.mask is not None:
        seen = seen & x.mask
    if x.segments is not None:
        seen = seen & (x.segments[0] == x.segments[1])
    return np.where(seen, s, -np.inf), slope


def forward(x: Arrays) -> tuple[Any, Any]:
    """(out, the logarithm of the sum of exponentials of each query's scores), in the wide dtype.

    A query that sees no key gets zeros and -inf.
    """
    s, _ = _scores(x)
    top = np.max(s, axis=-1, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    p = np.exp(s - top[..., None])
    total = p.sum(-1)
    p = p / np.where(total == 0, 1, total)[..., None]
    return x.einsum(NumPy, "scores v -> out", p, x.v), np.log(total) + top


def backward(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> tuple[Any, Any, Any, Any]:
    """Cotangents of q, k, v and the bias (None without one), in the wide dtype."""
    s, slope = _scores(x)
    p = np.exp(s - np.where(lse == -np.inf, 0, lse)[..., None])
    ct = ct.astype(x.wide)
    dp = x.einsum(NumPy, "out v -> scores", ct, x.v)
    delta = (ct * out.astype(x.wide)).sum(-1)
    delta = delta if lse_ct is None else delta - lse_ct
    ds = p * (dp - delta[..., None])
    product_ct = ds if slope is None else ds * slope
    dq = x.einsum(NumPy, "scores k -> q", product_ct, x.k) * x.how.scale
    dk = x.einsum(NumPy, "scores q -> k", product_ct, x.q) * x.how.scale
    dv = x.einsum(NumPy, "scores out -> v", p, ct)
    return dq, dk, dv, None if x.bias is None else _summed(ds, x.bias.shape)


def _summed(ds: Any, shape: tuple[int, ...]) -> Any:
    """The sum over the axes that the bias lacks."""
    return ds.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
