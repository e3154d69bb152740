"""Attention in JAX, block by block: memory is linear in the number of queries and of keys.

The softmax is computed online: for each block of queries, a loop over blocks of keys keeps the largest score, the sum
of exponentials and the sum of weighted values so far (Milakov and Gimelshein, 2018; Rabe and Staats, 2021). The
gradient computes the weights again from the logarithm of that sum (Dao et al., "FlashAttention", 2022, algorithm 4).
Blocks of which no query sees a key are skipped.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (jax is only partly typed)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...backend import Jax
from ...backend.varying import alike, varying, varying_axes
from .arrays import Arrays, Span


def _alike(x: Arrays, *more: Any) -> tuple[Arrays, tuple[Any, ...]]:
    """The operands cast to vary over the same mesh axes: the carries of the loops start as zeros of this type."""
    leaves, structure = jax.tree.flatten(
        (x.q, x.k, x.v, x.offset, x.bias, x.mask, x.segments, [s.start for s in (*x.queries, *x.keys)], more)
    )
    q, k, v, offset, bias, mask, segments, starts, more = jax.tree.unflatten(structure, alike(leaves))
    spans = [Span(start, s.size) for start, s in zip(starts, (*x.queries, *x.keys), strict=True)]
    n = len(x.queries)
    spans = {"queries": tuple(spans[:n]), "keys": tuple(spans[n:])}
    x = dataclasses.replace(x, q=q, k=k, v=v, offset=offset, bias=bias, mask=mask, segments=segments, **spans)
    return x, more


def _zeros(x: Arrays, shape: tuple[int, ...], fill: float = 0.0) -> Any:
    """An array of one number that varies over the axes that q varies over."""
    return varying(jnp.full(shape, fill, x.wide), varying_axes(x.q))


def _positions(spans: tuple[Span, ...], size: int, offset: Any = None) -> Any:
    """The position of each element, int32; those after the spans are beyond every key. NumPy where all are known."""
    end = np.iinfo(np.int32).max // 2
    total = sum(s.size for s in spans)
    if offset is None and all(s.known for s in spans):
        parts = [np.arange(s.start, s.start + s.size, dtype=np.int32) for s in spans]
        return np.concatenate([*parts, np.full(size - total, end, np.int32)])
    parts = [jnp.arange(s.size, dtype=np.int32) + jnp.asarray(s.start, np.int32) for s in spans]
    at = jnp.concatenate(parts) + (0 if offset is None else offset.astype(np.int32))
    return jnp.concatenate([at, jnp.full(size - total, end, np.int32)]) if size > total else at


def _width(n: int, parts: int, most: int) -> int:
    """The size of blocks that `parts` equal parts of n elements are cut into: equal ones, of at most `most`."""
    part = max(1, -(-n // parts))
    return -(-part // -(-part // most))


def _padded(x: Any, axis: int, size: int) -> Any:
    """The array with zeros up to this size; unchanged if it has one element there, which is broadcast."""
    missing = size - x.shape[axis]
    if missing <= 0 or x.shape[axis] == 1:
        return x
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def _block(x: Any, i: Any, size: int, count: int, axis: int) -> Any:
    """Block i of `count` along an axis; all of it if there is one block, or one element, which is broadcast."""
    if count == 1 or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size, x.ndim + axis)


class _Tiles:
    """The operands cut into blocks of queries and of keys; `scores` computes those of one pair of blocks."""

    def __init__(self, x: Arrays):
        n, m = x.q.shape[-2], x.k.shape[-2]
        self.x = x
        self.bq, self.bk = _width(n, len(x.queries), x.how.block), _width(m, len(x.keys), x.how.block)
        self.nq, self.nk = -(-n // self.bq), -(-m // self.bk)
        size_q, size_k = self.nq * self.bq, self.nk * self.bk
        self.q, self.k, self.v = _padded(x.q, -2, size_q), _padded(x.k, -2, size_k), _padded(x.v, -2, size_k)
        self.at_q, self.at_k = _positions(x.queries, size_q, x.offset), _positions(x.keys, size_k)
        self.bias = None if x.bias is None else self.fitted(x.bias, size_q, size_k)
        self.mask = None if x.mask is None else self.fitted(x.mask, size_q, size_k)
        self.segments = None if x.segments is None else tuple(self.fitted(s, size_q, size_k) for s in x.segments)

    def fitted(self, x: Any, size_q: int, size_k: int) -> Any:
        return _padded(_padded(x, -2, size_q), -1, size_k)

    def rows(self, x: Any, i: Any) -> Any:
        """Block i of the queries, on the last axis but one."""
        return _block(x, i, self.bq, self.nq, -2)

    def cols(self, x: Any, j: Any, axis: int = -2) -> Any:
        """Block j of the keys, on the last axis but one."""
        return _block(x, j, self.bk, self.nk, axis)

    def pair(self, x: Any, i: Any, j: Any) -> Any:
        """The scores' array at a pair of blocks; an axis of size 1 is broadcast over queries or keys."""
        return self.cols(self.rows(x, i), j, -1)

    def places(self, i: Any, j: Any) -> tuple[Any, Any]:
        return _block(self.at_q, i, self.bq, self.nq, -1), self.cols(self.at_k, j, -1)

    def scores(self, q: Any, k: Any, i: Any, j: Any) -> tuple[Any, Any]:
        """The scores of a pair of blocks, -inf where a query does not see a key, and the derivative of their cap."""
        s, slope = self.x.scores(Jax, q, k)
        s = s if self.bias is None else s + self.pair(self.bias, i, j).astype(self.x.wide)
        seen = self.x.how.sees.pairs(jnp, *self.places(i, j), self.x.count)
        if self.mask is not None:
            seen = seen & self.pair(self.mask, i, j)
        if self.segments is not None:
            seen = seen & (self.pair(self.segments[0], i, j) == self.pair(self.segments[1], i, j))
        return jnp.where(seen, s, -jnp.inf), slope

    def where_seen(self, i: Any, j: Any, compute: Callable[[Any], Any], carry: Any) -> Any:
        """`compute(carry)` if a query of block i may see a key of block j, else the carry."""
        some = self.x.how.sees.any(*self.places(i, j), self.x.count) if self.nk and self.nq else False
        if isinstance(some, bool | np.bool_):
            return compute(carry) if some else carry
        if not self.x.how.sees.compares:
            return compute(carry)
        return lax.cond(some, compute, lambda carry: carry, carry)


def _loop(n: int, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    """`lax.scan` over 0 ... n - 1; without a loop for one step. The stacked results have a first axis of size n."""
    if n == 1:
        carry, ys = step(carry, 0)
        return carry, jax.tree.map(lambda y: y[None], ys)
    return lax.scan(step, carry, jnp.arange(n, dtype=np.int32))


def _unstacked(x: Any, axis: int, n: int) -> Any:
    """Blocks stacked along the first axis as one array; without the padding after element n."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, n, axis=axis)


def forward(x: Arrays) -> tuple[Any, Any]:
    """(out, the logarithm of the sum of exponentials of each query's scores), in the wide dtype.

    A query that sees no key gets zeros and -inf.
    """
    x, _ = _alike(x)
    tiles, rows, n = _Tiles(x), x.q.shape[:-2], x.q.shape[-2]
    if 0 in (*x.q.shape[:-1], *x.k.shape[:-1]):
        return _zeros(x, (*rows, n, x.v.shape[-1])), _zeros(x, (*rows, n), -np.inf)

    def block_of_queries(_: Any, i: Any) -> tuple[Any, Any]:
        q = tiles.rows(tiles.q, i)

        def block_of_keys(carry: Any, j: Any) -> tuple[Any, None]:
            def attend(carry: Any) -> Any:
                top, total, acc = carry
                v = tiles.cols(tiles.v, j)
                s, _ = tiles.scores(q, tiles.cols(tiles.k, j), i, j)
                new = jnp.maximum(top, jnp.max(lax.stop_gradient(s), -1))  # no result depends on the shift
                safe = jnp.where(new == -jnp.inf, 0, new)
                p, old = jnp.exp(s - safe[..., None]), jnp.exp(top - safe)
                more = x.einsum(Jax, "scores v -> out", p.astype(v.dtype), v)
                return new, total * old + jnp.sum(p, -1), acc * old[..., None] + more

            return tiles.where_seen(i, j, attend, carry), None

        size = (*rows, tiles.bq)
        start = (_zeros(x, size, -np.inf), _zeros(x, size), _zeros(x, (*size, x.v.shape[-1])))
        (top, total, acc), _ = _loop(tiles.nk, block_of_keys, start)
        some = jnp.where(total == 0, 1, total)
        lse = jnp.where(total == 0, -jnp.inf, jnp.where(top == -jnp.inf, 0, top) + jnp.log(some))
        return None, (acc / some[..., None], lse)

    _, (out, lse) = _loop(tiles.nq, block_of_queries, None)
    return _unstacked(out, len(rows), n), _unstacked(lse, len(rows), n)


def backward(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> tuple[Any, Any, Any, Any]:
    """Cotangents of q, k, v and the bias (None without one), in the wide dtype."""
    x, (out, lse, ct, lse_ct) = _alike(x, out, lse, ct, lse_ct)
    delta = jnp.sum(ct.astype(x.wide) * out.astype(x.wide), -1)
    delta = delta if lse_ct is None else delta - lse_ct
    if 0 in (*x.q.shape[:-1], *x.k.shape[:-1]):
        return _zeros(x, x.q.shape), _zeros(x, x.k.shape), _zeros(x, x.v.shape), _bias_zeros(x)
    tiles, n, m = _Tiles(x), x.q.shape[-2], x.k.shape[-2]
    safe = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    padded_ct = _padded(ct, -2, tiles.nq * tiles.bq)
    safe, delta = (_padded(y, -2, tiles.nq * tiles.bq) for y in (safe, delta[..., None]))

    def block_of_queries(sums: Any, i: Any) -> tuple[Any, Any]:
        q, ct = tiles.rows(tiles.q, i), tiles.rows(padded_ct, i)
        low, mean = tiles.rows(safe, i), tiles.rows(delta, i)

        def block_of_keys(carry: Any, j: Any) -> tuple[Any, None]:
            def add(carry: Any) -> Any:
                dq, dk, dv, db = carry
                k, v = tiles.cols(tiles.k, j), tiles.cols(tiles.v, j)
                s, slope = tiles.scores(q, k, i, j)
                p = jnp.exp(s - low)
                ds = p * (x.einsum(Jax, "out v -> scores", ct, v) - mean)
                small = (ds if slope is None else ds * slope).astype(q.dtype)
                dq = dq + x.einsum(Jax, "scores k -> q", small, k) * x.how.scale
                dk = _added(tiles, dk, x.einsum(Jax, "scores q -> k", small, q) * x.how.scale, j)
                dv = _added(tiles, dv, x.einsum(Jax, "scores out -> v", p.astype(ct.dtype), ct), j)
                return dq, dk, dv, None if db is None else _bias_added(tiles, db, ds, i, j)

            return tiles.where_seen(i, j, add, carry), None

        (dq, *sums), _ = _loop(tiles.nk, block_of_keys, (_zeros(x, q.shape), *sums))
        return tuple(sums), dq

    first = (_zeros(x, tiles.k.shape), _zeros(x, tiles.v.shape), _bias_zeros(x, tiles.bias))
    (dk, dv, db), dq = _loop(tiles.nq, block_of_queries, first)
    dk, dv = (lax.slice_in_dim(y, 0, m, axis=y.ndim - 2) for y in (dk, dv))
    return _unstacked(dq, x.q.ndim - 2, n), dk, dv, None if db is None else db[tuple(map(slice, x.bias.shape))]


def _bias_zeros(x: Arrays, bias: Any = None) -> Any:
    bias = x.bias if bias is None else bias
    return None if bias is None else _zeros(x, bias.shape)


def _added(tiles: _Tiles, total: Any, part: Any, j: Any) -> Any:
    """The sum with `part` added at block j of the keys."""
    if tiles.nk == 1:
        return total + part
    return lax.dynamic_update_slice_in_dim(total, tiles.cols(total, j) + part, j * tiles.bk, total.ndim - 2)


def _bias_added(tiles: _Tiles, total: Any, ds: Any, i: Any, j: Any) -> Any:
    """The bias's cotangent with that of a pair of blocks added, summed over the axes that the bias lacks."""
    part = jnp.sum(ds, [a for a, n in enumerate(total.shape) if n == 1], keepdims=True)
    row = i * tiles.bq if tiles.nq > 1 and total.shape[-2] > 1 else 0
    col = j * tiles.bk if tiles.nk > 1 and total.shape[-1] > 1 else 0
    start = [jnp.asarray(n, np.int32) for n in (*(0,) * (total.ndim - 2), row, col)]
    return lax.dynamic_update_slice(total, tiles.pair(total, i, j) + part, start)
