"""Fused attention as Pallas kernels for TPUs: the scores of a pair of blocks stay in the chip's vector memory.

The arithmetic is that of `blockwise`. Blocks of which no query sees a key are neither computed nor fetched, and blocks
in which every query sees every key are not masked; both follow from the first positions of the blocks, which the
kernels read as scalars.

The gradient is one kernel: cotangents of keys and values stay in vector memory while all queries pass, so the scores
are computed once (five products; a kernel for queries and another one for keys compute seven). It has the scores as
[keys, queries], so that only one of its products reads them transposed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false
# (jax is only partly typed)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiling import LANES, Tiling

SUBLANES = 8  # of a register of a TPU
LOG2E = 1 / math.log(2)
UNSEEN = -1e30  # the score of a key that is not seen
LOWEST = -0.5e30  # where the largest score starts: an unseen key has the weight exp2(-0.5e30) = 0, in every row
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
FIRST = np.int32(0)  # block numbers of 64 bits, which a Python 0 becomes under jax_enable_x64, do not compile


def _scores(
    t: Tiling, q: Any, k: Any, at: tuple[Any, Any], ids: Sequence[Any], masked: bool, queries: int
) -> tuple[Any, Any]:
    """The scores of a pair of blocks in units of log2(e), UNSEEN where a query does not see a key.

    The second result is the derivative of their soft cap, None without one. Queries are on the axis `queries` of the
    results. `ids` are the segments of its rows, as lanes, and of its columns.
    """
    left, right = (q, k) if queries == 0 else (k, q)
    s, slope = lax.dot_general(left, right, NT, preferred_element_type=t.wide), None
    if t.how.soft_cap is None:
        s = s * np.asarray(t.how.scale * LOG2E, t.wide)
    else:
        share = jnp.tanh(s * np.asarray(t.how.scale / t.how.soft_cap, t.wide))
        s, slope = share * np.asarray(t.how.soft_cap * LOG2E, t.wide), np.asarray(1, t.wide) - share * share
    seen = None
    if masked:
        query, key = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (queries, 1 - queries))
        seen = t.pairs(*at, key, query)
    if ids:
        rows, columns = ids
        same = jnp.tile(rows, (1, s.shape[1] // LANES)) == columns[:1]
        seen = same if seen is None else seen & same
    return (s if seen is None else jnp.where(seen, s, np.asarray(UNSEEN, t.wide))), slope


def _visit(t: Tiling, at: tuple[Any, Any], compute: Callable[[bool], None]) -> None:
    """`compute(masked)` if a query of the block may see a key of the block."""
    if not t.masks:
        compute(False)
        return
    some, every = t.some(*at), t.every(*at)
    pl.when(every)(lambda: compute(False))
    pl.when(some & ~every)(lambda: compute(True))


def _lanes(x: Any, size: int) -> Any:
    """An array of equal lanes with this many of them."""
    return x[:, :size] if size <= LANES else jnp.tile(x, (1, -(-size // LANES)))[:, :size]


def _forward_kernel(t: Tiling, steps: int, at_q: Any, at_k: Any, *refs: Any) -> None:
    q, k, v, *ids, out, lse, top, total, acc = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, LOWEST, t.wide)
        total[...] = jnp.zeros(total.shape, t.wide)
        acc[...] = jnp.zeros(acc.shape, t.wide)

    at = at_q[i], at_k[j]

    def attend(masked: bool) -> None:
        s, _ = _scores(t, q[...], k[...], at, [x[...] for x in ids], masked, 0)
        new = jnp.maximum(top[...], jnp.max(s, 1, keepdims=True))
        p, old = jnp.exp2(s - _lanes(new, t.keys)), jnp.exp2(top[...] - new)
        top[...] = new
        total[...] = total[...] * old + jnp.sum(p, 1, keepdims=True)
        more = lax.dot_general(p.astype(v.dtype), v[...], NN, preferred_element_type=t.wide)
        acc[...] = acc[...] * _lanes(old, acc.shape[1]) + more

    _visit(t, at, attend)

    @pl.when(j == steps - 1)
    def _() -> None:
        none = total[...] == 0
        some = jnp.where(none, np.asarray(1, t.wide), total[...])
        out[...] = (acc[...] * _lanes(1 / some, acc.shape[1])).astype(out.dtype)
        log = jnp.where(none, np.asarray(-np.inf, t.wide), (top[...] + jnp.log2(some)) * np.asarray(1 / LOG2E, t.wide))
        lse[...] = log.T[:1]


def _backward_kernel(t: Tiling, steps: tuple[int, int, int], at_q: Any, at_k: Any, *refs: Any) -> None:
    q, k, v, ct, lse, delta, *ids, dq, dk, dv, dq_sum, dk_sum, dv_sum = refs
    g, i, j = (pl.program_id(axis) for axis in (1, 2, 3))

    @pl.when((g == 0) & (i == 0) & (j == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros(dk_sum.shape, t.wide)
        dv_sum[...] = jnp.zeros(dv_sum.shape, t.wide)

    @pl.when(j == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros(dq_sum.shape, t.wide)

    at = at_q[i], at_k[j]
    rows = pl.ds(j * t.keys, t.keys)
    dot = functools.partial(lax.dot_general, preferred_element_type=t.wide)

    def add(masked: bool) -> None:
        own_q, own_k, own_ct = q[...], k[...], ct[...]
        s, slope = _scores(t, own_q, own_k, at, [x[...] for x in ids], masked, 1)
        p = jnp.exp2(s - lse[...])
        ds = p * (dot(v[...], own_ct, NT) - delta[...])
        small = (ds if slope is None else ds * slope).astype(own_q.dtype)
        dv_sum[rows, :] += dot(p.astype(own_ct.dtype), own_ct, NN)
        dk_sum[rows, :] += dot(small, own_q, NN)
        dq_sum[...] += dot(small, own_k, TN)

    _visit(t, at, add)
    scale = np.asarray(t.how.scale, t.wide)

    @pl.when(j == steps[2] - 1)
    def _() -> None:
        dq[...] = (dq_sum[...] * scale).astype(dq.dtype)

    @pl.when((g == steps[0] - 1) & (i == steps[1] - 1) & (j == steps[2] - 1))
    def _() -> None:
        dk[...] = (dk_sum[...] * scale).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


class _Blocks:
    """The blocks that step (batch b, group g, queries i, keys j) of the grid reads and writes."""

    def __init__(self, t: Tiling, q: Any, k: Any):
        (b, g, n, _), m = q.shape, k.shape[1]
        self.t, self.grid = t, (b, g, n // t.queries, m // t.keys)

    def _key(self, i: Any, j: Any, at: Sequence[Any]) -> Any:
        """Block j of the keys; if it is skipped the first one, which the next block of queries often begins with."""
        return jnp.where(self.t.some(at[0][i], at[1][j]), j, FIRST) if self.t.masks else j

    def queries(self, size: int) -> Any:
        return pl.BlockSpec((None, None, self.t.queries, size), lambda b, g, i, j, *_: (b, g, i, FIRST))

    def keys(self, size: int) -> Any:
        return pl.BlockSpec((None, self.t.keys, size), lambda b, g, i, j, *at: (b, self._key(i, j, at), FIRST))

    def query_row(self) -> Any:
        return pl.BlockSpec((None, None, 1, self.t.queries), lambda b, g, i, j, *_: (b, g, FIRST, i))

    def key_row(self) -> Any:
        return pl.BlockSpec((None, SUBLANES, self.t.keys), lambda b, g, i, j, *at: (b, FIRST, self._key(i, j, at)))

    def all_keys(self, n: int, size: int) -> Any:
        return pl.BlockSpec((None, n, size), lambda b, g, i, j, *_: (b, FIRST, FIRST))

    def call(self, kernel: Any, name: str, parallel: int, out_shape: Any, **specs: Any) -> Any:
        """The kernel over this grid, whose first `parallel` axes are independent."""
        semantics = (pltpu.PARALLEL,) * parallel + (pltpu.ARBITRARY,) * (len(self.grid) - parallel)
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, grid=self.grid, **specs),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            interpret=self.t.interpret,
            name=name,
        )


def _result(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result of a kernel, which is traced outside the mesh: it varies over no axis."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType())


def _as_lanes(x: Any) -> Any:
    """Numbers as columns of equal lanes, the form in which a kernel compares them with a row."""
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def forward(t: Tiling, at_q: Any, at_k: Any, q: Any, k: Any, v: Any, *ids: Any) -> tuple[Any, Any]:
    """(out [batch, group, queries, value], lse [batch, group, queries]) of queries [batch, group, queries, head], keys
    [batch, keys, head] and values [batch, keys, value].

    `at_q` and `at_k` are the first position of each block, int32. `ids`, if any, are the segments of queries [batch,
    group, queries] and of keys [batch, keys].
    """
    (b, g, n, d), e = q.shape, v.shape[2]
    blocks = _Blocks(t, q, k)
    call = blocks.call(
        functools.partial(_forward_kernel, t, blocks.grid[3]),
        "attention_forward",
        3,
        [_result((b, g, n, e), t.out), _result((b, g, 1, n), t.wide)],
        in_specs=[
            *(blocks.queries(d), blocks.keys(d), blocks.keys(e)),
            *([blocks.queries(LANES), blocks.key_row()] if ids else []),
        ],
        out_specs=[blocks.queries(e), blocks.query_row()],
        scratch_shapes=[pltpu.VMEM((t.queries, size), t.wide) for size in (LANES, LANES, e)],
    )
    if ids:
        query, key = ids
        ids = _as_lanes(query), jnp.broadcast_to(key[:, None], (b, SUBLANES, key.shape[1]))
    out, lse = call(at_q, at_k, q, k, v, *ids)
    return out, lse[:, :, 0]


def backward(
    t: Tiling, at_q: Any, at_k: Any, q: Any, k: Any, v: Any, ct: Any, lse: Any, delta: Any, *ids: Any
) -> tuple[Any, Any, Any]:
    """Cotangents of q, k and v. `lse` and `delta` [batch, group, queries] have the wide dtype, and lse is finite."""
    d, (m, e) = q.shape[3], v.shape[1:]
    blocks = _Blocks(t, q, k)
    row = blocks.query_row()
    call = blocks.call(
        functools.partial(_backward_kernel, t, blocks.grid[1:]),
        "attention_backward",
        1,
        [_result(x.shape, t.out) for x in (q, k, v)],
        in_specs=[
            *(blocks.queries(d), blocks.keys(d), blocks.keys(e), blocks.queries(e), row, row),
            *([blocks.keys(LANES), row] if ids else []),
        ],
        out_specs=[blocks.queries(d), blocks.all_keys(m, d), blocks.all_keys(m, e)],
        scratch_shapes=[pltpu.VMEM(shape, t.wide) for shape in ((t.queries, d), (m, d), (m, e))],
    )
    if ids:
        query, key = ids
        ids = _as_lanes(key), query[:, :, None]
    return call(at_q, at_k, q, k, v, ct, (lse * LOG2E)[:, :, None], delta[:, :, None], *ids)
