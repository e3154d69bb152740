"""GPipe by a scan over ticks, hand-written with `shard_map` and differentiated by `jax.grad`: a Llama's training step.

The form of praxis (LayerwiseShardablePipelined) and MaxText: stage s of S computes micro-batch t - s in tick t and
sends the result to stage s + 1, for M+S-1 ticks. JAX differentiates the scan, so the backward ticks run after all
forward ticks, and each tick saves the inputs of a stage's layers. The head is computed after the scan, one micro-batch
at a time, and its logits are recomputed.

Parameters have the paths and dims of models/llama.py; those of `layer/...` are sharded over the stages by layers, the
others replicated. The update is Adam with bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

EPSILON, BASE = 1e-5, 10000.0
LEARNING_RATE, BETA_1, BETA_2, ADAM_EPSILON = 3e-4, 0.9, 0.999, 1e-8
Params = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def product(x: jax.Array, w: jax.Array, dims: int = 1) -> jax.Array:
    """x times w over the last dims of x, accumulated in float32."""
    return jnp.tensordot(x, w, dims, preferred_element_type=jnp.float32).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """x [batch, length, heads, ..., head], rotated."""
    half = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1]), BASE ** (-jnp.arange(half) / half)).astype(jnp.float32)
    angle = angle.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; q is [batch, length, heads, group, head], k and v have no group."""
    scores = jnp.einsum("blngh,bmnh->bnglm", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1).astype(v.dtype)
    return jnp.einsum("bnglm,bmnh->blngh", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


def layer(x: jax.Array, w: Params, attend: Attend) -> tuple[jax.Array, None]:
    h = rms_norm(x, w["norm_1/scale"])
    q, k, v = (product(h, w[f"attention/w{name}"]) for name in "qkv")
    x = x + product(attend(rotary(q), rotary(k), v), w["attention/wo"], 3)
    h = rms_norm(x, w["norm_2/scale"])
    gate = jax.nn.silu(product(h, w["feed_forward/w_gate"])) * product(h, w["feed_forward/w_in"])
    return x + product(gate, w["feed_forward/w_out"]), None


def loss_of(params: Params, tokens: jax.Array, targets: jax.Array, attend: Attend) -> jax.Array:
    """The loss on the last stage, 0 on the others; tokens and targets are [micro, batch, length]."""
    stages, stage, microbatches = lax.axis_size("stages"), lax.axis_index("stages"), len(tokens)
    layers = {name.removeprefix("layer/"): w for name, w in params.items() if name.startswith("layer/")}
    one = jax.checkpoint(partial(layer, attend=attend))

    def tick(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        entering = params["embed"][tokens[jnp.minimum(t, microbatches - 1)]]
        x, _ = lax.scan(one, jnp.where(stage == 0, entering, received), layers)
        return lax.ppermute(x, "stages", [(s, s + 1) for s in range(stages - 1)]), x

    @jax.checkpoint
    def head(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, target = row
        logits = product(rms_norm(x, params["norm/scale"]), params["unembed"]).astype(jnp.float32)
        shifted = logits - lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
        at_target = jnp.sum(jnp.where(target[..., None] == jnp.arange(logits.shape[-1]), shifted, 0), -1)
        return total + jnp.sum(jnp.log(jnp.sum(jnp.exp(shifted), -1)) - at_target), None

    start = jnp.zeros((*tokens.shape[1:], params["embed"].shape[1]), params["embed"].dtype)
    _, results = lax.scan(tick, start, jnp.arange(microbatches + stages - 1))
    total, _ = lax.scan(head, jnp.float32(0), (results[stages - 1 :], targets))
    return jnp.where(stage == stages - 1, total, 0) / targets.size


def adam(params: Params, state: dict[str, Any], grads: Params) -> tuple[Params, dict[str, Any]]:
    count = (state["step"] + 1).astype(jnp.float32)
    m = {n: BETA_1 * state["m"][n] + (1 - BETA_1) * g for n, g in grads.items()}
    v = {n: BETA_2 * state["v"][n] + (1 - BETA_2) * (g * g) for n, g in grads.items()}

    def moved(n: str) -> jax.Array:
        step = m[n].astype(jnp.float32) / (1 - BETA_1**count)
        scale = jnp.sqrt(v[n].astype(jnp.float32) / (1 - BETA_2**count)) + ADAM_EPSILON
        return (params[n].astype(jnp.float32) - LEARNING_RATE * step / scale).astype(params[n].dtype)

    return {n: moved(n) for n in params}, {"m": m, "step": state["step"] + 1, "v": v}


def step(state: Any, tokens: jax.Array, targets: jax.Array, *, microbatches: int, attend: Attend) -> Any:
    """The step of one stage: (parameters, Adam's state), and the loss."""
    params, moments = state
    parts = [x.reshape(microbatches, -1, x.shape[-1]) for x in (tokens, targets)]
    loss, grads = jax.value_and_grad(loss_of)(params, *parts, attend)
    replicated = {n: g for n, g in grads.items() if not n.startswith("layer/")}
    replicated, loss = lax.psum((replicated, loss), "stages")
    return adam(params, moments, grads | replicated), loss


def compiled(
    state: Any, batch: tuple[Any, Any], mesh: jax.sharding.Mesh, microbatches: int, attend: Attend = attention
) -> tuple[jax.stages.Compiled, Any]:
    """The compiled step for arrays or shapes of (parameters, Adam's state) and of tokens and targets, and the
    shardings of the state."""

    def spec(path: Any, _: Any) -> P:
        return P("stages") if "layer/" in jax.tree_util.keystr(path) else P()

    specs = jax.tree_util.tree_map_with_path(spec, state)
    # JAX's fused attention has no types that vary over mesh axes, so they are not checked
    mapped = jax.shard_map(
        partial(step, microbatches=microbatches, attend=attend),
        mesh=mesh,
        in_specs=(specs, P(), P()),
        out_specs=(specs, P()),
        check_vma=False,
    )
    at = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(mapped, in_shardings=(at, whole, whole), out_shardings=(at, whole), donate_argnums=0)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, at)
    return jitted.lower(shapes, *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in batch)).compile(), at
