"""Ring attention and the all_to_all between heads and positions, written by hand with `jax.shard_map`.

The step: queries, keys and values [batch, length, heads, head] are the parameters; the loss is the mean square of the
attention's result. The local blocks are small, so scores of one block are computed at once, as by meshdsl.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

BATCH, LENGTH, HEADS, HEAD, DEVICES = 2, 512, 8, 64, 4
LEARNING_RATE = 100.0
DIMS = f"batch:{BATCH} length:{LENGTH} heads:{HEADS} head:{HEAD}"
SPLIT = PartitionSpec(None, "rows")
SCALE = HEAD**-0.5
ON = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((BATCH, LENGTH, HEADS, HEAD), np.float32) for name in "qkv"}


def _send(*xs: Any) -> list[Any]:
    return [lax.ppermute(x, "rows", ON) for x in xs]


def _scores(q: Any, k: Any) -> Any:
    return jnp.einsum("blhd,bmhd->bhlm", q, k) * SCALE


def _ring_forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The result and the logarithm of each query's sum of exponentials; keys and values go around."""

    def add(state: Any, k: Any, v: Any) -> Any:
        top, total, acc = state
        s = _scores(q, k)
        new = jnp.maximum(top, s.max(-1))
        p, old = jnp.exp(s - new[..., None]), jnp.exp(top - new)
        acc = acc * old.transpose(0, 2, 1)[..., None] + jnp.einsum("bhlm,bmhd->blhd", p, v)
        return new, total * old + p.sum(-1), acc

    def turn(carry: Any, _: None) -> Any:
        k, v, state = carry
        return (*_send(k, v), add(state, k, v)), None

    zero = lax.pcast(jnp.zeros((BATCH, HEADS, LENGTH // DEVICES)), "rows", to="varying")
    (k, v, state), _ = lax.scan(turn, (k, v, (zero - jnp.inf, zero, jnp.zeros_like(q))), length=DEVICES - 1)
    top, total, acc = add(state, k, v)
    return acc / total.transpose(0, 2, 1)[..., None], top + jnp.log(total)


@jax.custom_vjp
def ring(q: Any, k: Any, v: Any) -> Any:
    return _ring_forward(q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> Any:
    out, lse = _ring_forward(q, k, v)
    return out, (q, k, v, out, lse)


def _backward(saved: Any, ct: Any) -> Any:
    q, k, v, out, lse = saved
    delta = jnp.einsum("blhd,blhd->bhl", ct, out)

    def add(sums: Any, k: Any, v: Any) -> Any:
        dq, dk, dv = sums
        p = jnp.exp(_scores(q, k) - lse[..., None])
        ds = p * (jnp.einsum("blhd,bmhd->bhlm", ct, v) - delta[..., None]) * SCALE
        dq = dq + jnp.einsum("bhlm,bmhd->blhd", ds, k)
        return dq, dk + jnp.einsum("bhlm,blhd->bmhd", ds, q), dv + jnp.einsum("bhlm,blhd->bmhd", p, ct)

    def turn(carry: Any, _: None) -> Any:
        k, v, sums = carry
        dq, dk, dv = add(sums, k, v)
        return (*_send(k, v), (dq, *_send(dk, dv))), None

    zeros = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    (k, v, sums), _ = lax.scan(turn, (k, v, zeros), length=DEVICES - 1)
    dq, dk, dv = add(sums, k, v)
    return (dq, *_send(dk, dv))


ring.defvjp(_forward, _backward)


def exchange(q: Any, k: Any, v: Any) -> Any:
    """Causal attention with heads split instead of positions (DeepSpeed Ulysses)."""
    to_heads = functools.partial(lax.all_to_all, axis_name="rows", split_axis=2, concat_axis=1, tiled=True)
    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    allowed = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH)
    p = jax.nn.softmax(jnp.where(allowed, _scores(q, k), -jnp.inf), -1)
    out = jnp.einsum("bhlm,bmhd->blhd", p, v)
    return lax.all_to_all(out, "rows", split_axis=1, concat_axis=2, tiled=True)


METHODS: dict[str, Callable[..., Any]] = {"ring": ring, "all_to_all": exchange}


def handwritten(method: str) -> tuple[jax.stages.Compiled, NamedSharding]:
    """The compiled step (q, k, v) -> (q, k, v, loss), and the sharding of its operands."""
    mesh = jax.make_mesh(
        (DEVICES,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )
    attend = METHODS[method]

    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(*xs: Any) -> Any:
            return jnp.sum(jnp.square(attend(*xs))) / (BATCH * LENGTH * HEADS * HEAD)

        value, grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
        return (*(x - LEARNING_RATE * g for x, g in zip((q, k, v), grads, strict=True)), lax.psum(value, "rows"))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=(SPLIT, SPLIT, SPLIT, PartitionSpec()))
    at = NamedSharding(mesh, SPLIT)
    spec = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, HEAD), np.float32, sharding=at)
    return jax.jit(mapped, donate_argnums=(0, 1, 2)).lower(spec, spec, spec).compile(), at
