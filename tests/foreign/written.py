"""Sharded programs in the ways that people write them: FSDP and tensor parallelism by `jax.grad`, Megatron's f and g
with sequence parallelism, a ring of keys and values, a pipeline, experts, a convolution with halos, clipping by norms.

Each is written for axes of any size, so that one device can run it too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RATE = 0.1


# Fully sharded data parallel: weights are split over `data` and gathered where they are used.


def fsdp(params: Any, x: Any, target: Any) -> Any:
    def loss_of(params: Any) -> Any:
        h = x
        for w, b in params:
            whole = lax.all_gather(w, "data", axis=0, tiled=True)
            h = jnp.tanh(h @ whole + b)
        return jnp.mean((h - target) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    grads = [(gw / lax.axis_size("data"), lax.pmean(gb, "data")) for gw, gb in grads]
    loss = lax.pmean(loss, "data")
    return [(w - RATE * gw, b - RATE * gb) for (w, b), (gw, gb) in zip(params, grads, strict=True)], loss


# Megatron: columns, then rows; f is the identity whose transpose is a sum, g the sum whose transpose is the identity.
# Between the blocks, the sequence is split over the same axis.


@jax.custom_vjp
def enter(x: Any) -> Any:
    return lax.all_gather(x, "model", axis=1, tiled=True)


enter.defvjp(
    lambda x: (enter(x), None),
    lambda _, ct: (lax.psum_scatter(ct, "model", scatter_dimension=1, tiled=True),),
)


@jax.custom_vjp
def leave(x: Any) -> Any:
    return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


leave.defvjp(
    lambda x: (leave(x), None),
    lambda _, ct: (lax.all_gather(ct, "model", axis=1, tiled=True),),
)


def norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(w: Any, x: Any) -> Any:
    h = enter(norm(x, w["scale_1"]))
    q, k, v = (jnp.einsum("blm,mhd->blhd", h, w[n]) for n in "qkv")
    scores = jnp.einsum("blhd,bkhd->bhlk", q, k)
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
    x = x + leave(jnp.einsum("bhlk,bkhd,hdm->blm", p, v, w["o"]))
    h = enter(norm(x, w["scale_2"]))
    return x + leave(jax.nn.gelu(h @ w["up"]) @ w["down"])


def megatron(params: Any, x: Any, target: Any) -> Any:
    def loss_of(params: Any) -> Any:
        y = block(params, x)
        count = y.size * lax.axis_size("model") * lax.axis_size("data")
        return jnp.sum((y - target) ** 2) / count

    loss, grads = jax.value_and_grad(loss_of)(params)
    loss = lax.psum(loss, ("data", "model"))
    scales = {n: lax.psum(grads[n], "model") for n in ("scale_1", "scale_2")}
    grads = lax.psum({**grads, **scales}, "data")
    square = sum(jnp.sum(grads[n] ** 2) for n in ("q", "k", "v", "o", "up", "down"))
    total = lax.psum(square, "model") + sum(jnp.sum(g**2) for g in (grads["scale_1"], grads["scale_2"]))
    clip = jnp.minimum(1.0, 0.5 / jnp.sqrt(total))
    return {n: params[n] - RATE * clip * g for n, g in grads.items()}, loss


# A ring: keys and values go around, and each device adds its share by a running maximum.


def ring_attention(q: Any, k: Any, v: Any) -> Any:
    n, me = lax.axis_size("ring"), lax.axis_index("ring")
    on = [(i, (i + 1) % n) for i in range(n)]
    rows = me * q.shape[1] + jnp.arange(q.shape[1])

    def turn(carry: Any, step: Any) -> Any:
        k, v, top, total, acc = carry
        owner = (me - step) % n
        columns = owner * k.shape[1] + jnp.arange(k.shape[1])
        scores = jnp.einsum("blhd,bkhd->bhlk", q, k)
        scores = jnp.where(rows[:, None] >= columns, scores, -1e30)
        new = jnp.maximum(top, scores.max(-1))
        p, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        total = total * old + p.sum(-1)
        acc = acc * old[..., None] + jnp.einsum("bhlk,bkhd->bhld", p, v)
        k = lax.ppermute(k, "ring", on)
        v = lax.ppermute(v, "ring", on)
        return (k, v, new, total, acc), None

    b, length, h, d = q.shape
    start = (k, v, jnp.full((b, h, length), -1e30), jnp.zeros((b, h, length)), jnp.zeros((b, h, length, d)))
    (_, _, _, total, acc), _ = lax.scan(turn, start, jnp.arange(n))
    return jnp.swapaxes(acc / total[..., None], 1, 2)


# A pipeline by a scan over ticks; each stage has its layers, and the last one's results are what counts.


def pipeline(weights: Any, x: Any) -> Any:
    stages, stage = lax.axis_size("stage"), lax.axis_index("stage")
    on = [(i, (i + 1) % stages) for i in range(stages)]
    micro = x.shape[0]

    def tick(received: Any, t: Any) -> Any:
        entering = x[jnp.minimum(t, micro - 1)]
        h = jnp.where(stage == 0, entering, received)
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)
        return lax.ppermute(h, "stage", on), h

    _, out = lax.scan(tick, jnp.zeros(x.shape[1:]), jnp.arange(micro + stages - 1))
    y = out[stages - 1 :]
    return lax.psum(jnp.where(stage == stages - 1, y, 0), "stage")


# Experts: tokens go to the expert of their place, and come back.


def experts(gate: Any, up: Any, down: Any, x: Any) -> Any:
    n = lax.axis_size("expert")
    weight = jax.nn.softmax(x @ gate, -1)
    slots = jnp.einsum("te,tm->etm", weight, x)
    sent = lax.all_to_all(slots, "expert", split_axis=0, concat_axis=1, tiled=True)
    h = jax.nn.relu(jnp.einsum("etm,emf->etf", sent, up))
    back = lax.all_to_all(jnp.einsum("etf,efm->etm", h, down), "expert", split_axis=1, concat_axis=0, tiled=True)
    load = lax.pmean(jnp.mean(weight, 0), "expert")
    peak = lax.pmax(jnp.max(jnp.abs(x)), "expert")
    return back.sum(0) / peak, jnp.sum(load * load) * gate.shape[1] / n * n


# A table of words split over `model`, and the loss over a split vocabulary.


def vocabulary(table: Any, tokens: Any, targets: Any) -> Any:
    rows = table.shape[0]
    first = lax.axis_index("model") * rows
    local = tokens - first
    here = (local >= 0) & (local < rows)
    x = lax.psum(jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0), "model")
    logits = x @ table.T
    top = lax.pmax(jnp.max(logits, -1), "model")
    total = lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), -1), "model")
    own = targets - first
    mine = (own >= 0) & (own < rows)
    picked = jnp.take_along_axis(logits, jnp.where(mine, own, 0)[..., None], -1)[..., 0]
    picked = lax.psum(jnp.where(mine, picked, 0), "model")
    loss = jnp.mean(jnp.log(total) + top - picked)
    return lax.pmean(loss, "data")


# Statistics of a batch that is split, and products with a split inner axis, scattered.


def statistics(x: Any, w: Any) -> Any:
    mean = lax.pmean(jnp.mean(x, 0), "data")
    variance = lax.pmean(jnp.mean((x - mean) ** 2, 0), "data")
    h = (x - mean) * lax.rsqrt(variance + 1e-5)
    y = lax.psum_scatter(h @ w, "model", scatter_dimension=1, tiled=True)
    largest = lax.pmax(lax.pmax(jnp.max(jnp.abs(y)), "data"), "model")
    count = lax.psum(x.shape[0], "data")
    return y / largest, lax.psum(jnp.sum(y), ("data", "model")) / count


@partial(jax.checkpoint, static_argnums=())
def _cell(h: Any, w: Any) -> Any:
    return jnp.tanh(lax.psum(h @ w, "model"))


def recurrent(w: Any, x: Any) -> Any:
    def loss_of(w: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            first = lax.axis_index("model") * w.shape[0]
            part = lax.dynamic_slice_in_dim(h, first, w.shape[0], 1)
            h = _cell(part, w) + x
            return h, jnp.sum(h * h)

        _, squares = lax.scan(step, jnp.zeros_like(x[0]), x)
        return jnp.sum(squares)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return grad, lax.psum(loss, "data")  # the sum over data of a replicated weight's gradient is JAX's
