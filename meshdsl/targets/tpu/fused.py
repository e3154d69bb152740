"""The attention kernels for TPUs: the cases that they take, the sizes of their blocks, and `flash` on one device.

Dims are flattened, long keys are in parts, and types vary over mesh axes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (jax is only partly typed)

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...backend.jaxprs import call_outside
from ...ops.attention.arrays import Arrays, Span
from ...ops.attention.kernels import Case, FusedKernel
from .tiling import LANES, Tiling

VMEM = 8 * 2**20  # bytes of the cotangents of keys and values (sums, and results twice), of a core's 16 MiB
HEAD = 16  # sizes of heads are multiples of this
LARGEST_HEAD, LARGEST_BLOCK = 256, 512  # whose arrays fit a core's 16 MiB of vector memory


def forward(x: Arrays) -> tuple[Any, Any]:
    """(out, lse) like `blockwise.forward`; out has the dtype of results."""
    from . import flash  # Pallas is imported when it is used: it takes half a second

    t = _tiling(x)
    out, lse = call_outside(functools.partial(flash.forward, t), _operands(x, t))
    return _unflattened(x, out), _unflattened(x, lse)


def backward(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> tuple[Any, Any, Any, None]:
    """The cotangents of q, k and v, like `blockwise.backward`, with the dtype of results; there is no bias."""
    t = _tiling(x)
    delta = jnp.sum(ct.astype(x.wide) * out.astype(x.wide), -1)
    delta = delta if lse_ct is None else delta - lse_ct
    safe = jnp.where(lse == -jnp.inf, 0, lse)
    at_q, at_k, q, k, v, *ids = _operands(x, t)
    residuals = (_flattened(x, y) for y in (ct.astype(q.dtype), safe.astype(x.wide), delta.astype(x.wide)))
    dq, dk, dv = call_outside(functools.partial(_in_parts, t), [at_q, at_k, q, k, v, *residuals, *ids])
    return _unflattened(x, dq), dk.reshape(x.k.shape), dv.reshape(x.v.shape), None


def _in_parts(t: Tiling, at_q: Any, at_k: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any, Any]:
    """The gradient, for as many keys at a time as fit into vector memory with their cotangents."""
    from . import flash

    row, blocks = (k.shape[2] + v.shape[2]) * t.keys, k.shape[1] // t.keys
    residuals, ids = rest[:3], rest[3:]
    if row * blocks * (t.wide.itemsize + 2 * t.out.itemsize) <= VMEM:
        return flash.backward(t, at_q, at_k, q, k, v, *residuals, *ids)
    most = VMEM // (row * 3 * t.wide.itemsize)
    each = max(n for n in range(1, blocks + 1) if blocks % n == 0 and n <= max(1, most))
    wide = dataclasses.replace(t, out=t.wide)
    size = each * t.keys

    def part(sums: Any, n: Any) -> Any:
        dq, dk, dv = sums
        own = [lax.dynamic_slice_in_dim(x, n * size, size, 1) for x in (k, v, *ids[1:])]
        starts = lax.dynamic_slice_in_dim(at_k, n * each, each, 0)
        more, *key_parts = flash.backward(wide, at_q, starts, q, *own[:2], *residuals, *ids[:1], *own[2:])
        dk, dv = (
            lax.dynamic_update_slice_in_dim(whole, y.astype(t.out), n * size, 1)
            for whole, y in zip((dk, dv), key_parts, strict=True)
        )
        return (dq + more, dk, dv), None

    first = (jnp.zeros(q.shape, t.wide), jnp.zeros(k.shape, t.out), jnp.zeros(v.shape, t.out))
    (dq, dk, dv), _ = lax.scan(part, first, jnp.arange(blocks // each, dtype=np.int32))
    return dq.astype(t.out), dk, dv


def _tiling(x: Arrays) -> Tiling:
    interpret = x.kernel.name == "pallas_interpret"
    return Tiling(x.kernel.queries, x.kernel.keys, x.count, x.padded, x.how, x.wide, x.how.dtype(x.v.dtype), interpret)


def _operands(x: Arrays, t: Tiling) -> list[Any]:
    """The first positions of all blocks, then queries, keys and values with one batch dim and one group dim."""
    at_q, at_k = _starts(x.queries, t.queries), _starts(x.keys, t.keys)
    at_q = at_q if x.offset is None else at_q + x.offset.astype(np.int32)
    k, v = (y.reshape(math.prod(y.shape[:-2]), *y.shape[-2:]) for y in (x.k, x.v))
    flattened = [at_q, at_k, _flattened(x, x.q), k, v]
    if x.segments is None:
        return flattened
    query, key = x.segments
    batch = x.q.shape[: x.batch]
    query = jnp.broadcast_to(query[..., 0], x.q.shape[:-1])
    key = key.reshape(*key.shape[: x.batch], key.shape[-1])  # keys have no group dims
    return [*flattened, _flattened(x, query.astype(np.int32)),
            jnp.broadcast_to(key, (*batch, key.shape[-1])).reshape(-1, key.shape[-1]).astype(np.int32)]  # fmt: skip


def _starts(spans: tuple[Span, ...], size: int) -> Any:
    """The first position of each block of consecutive positions, int32."""
    parts = [jnp.asarray(s.start, np.int32) + np.arange(0, s.size, size, dtype=np.int32) for s in spans]
    return jnp.concatenate(parts)


def _flattened(x: Arrays, y: Any) -> Any:
    """[*batch, *group, ...] as [batch, group, ...]."""
    own = y.shape[x.q.ndim - 2 :]
    return y.reshape(math.prod(x.q.shape[: x.batch]), math.prod(x.q.shape[x.batch : -2]), *own)


def _unflattened(x: Arrays, y: Any) -> Any:
    return y.reshape(*x.q.shape[:-2], *y.shape[2:])


def _refusal(case: Case, capability: float, *, interpreted: bool) -> str:
    unknown = [role for role in case.how.extras if role in ("bias", "mask")]
    if unknown:
        return f"takes no {unknown[0]}="
    if not case.queries:
        return "takes queries with positions"
    if case.dtype.name not in ("bfloat16", "float32") and not interpreted:
        return f"takes bfloat16 and float32, not {case.dtype.name}"
    for what, n in (("queries", case.queries), ("keys", case.keys)):
        if n % LANES or not n:
            return f"takes multiples of {LANES} {what}, not {n}"
    for size in (case.head, case.value):
        if (size % HEAD or size > LARGEST_HEAD) and not interpreted:
            return f"takes heads of multiples of {HEAD} up to {LARGEST_HEAD}, not {size}"
    return ""


def _block(n: int, most: int) -> int:
    """The largest part of n that is a multiple of 128 and at most `most`, or 128."""
    parts, most = n // LANES, min(most, LARGEST_BLOCK)
    size = max(d for d in range(1, parts + 1) if parts % d == 0 and (d == 1 or d * LANES <= most))
    return size * LANES


PALLAS = FusedKernel(
    "pallas", functools.partial(_refusal, interpreted=False), forward, backward, platform="tpu", block=_block
)
INTERPRETED = FusedKernel(
    "pallas_interpret", functools.partial(_refusal, interpreted=True), forward, backward, block=_block
)
