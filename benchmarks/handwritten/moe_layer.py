"""A mixture-of-experts layer, forward, backward and update, hand-written for groups and experts on one axis.

    p = softmax(x gate)             x [group, token, model]   gate [model, expert]
    each token: its two best experts, weights p1 / (p1 + p2), p2 / (p1 + p2), while they have slots (GShard, top 2)
    h = relu(slots wi)              wi [expert, model, hidden]
    y = sum of weight * (h wo)      wo [expert, hidden, model]
    loss = mean (y - target)^2 + 0.01 * expert * mean over groups of sum_e f_e mean p_e

Each device stores one group and one expert. Slots are sent by four all_to_alls of [1, 8, 32, 256] float32 (262 kB
each); one all-reduce sums the gradient of `gate` (8 kB) and the loss. Slots are filled and read by index, without mask
products. The backward pass is derived by hand; weight gradients are products in the parameter's dim order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = Sequence[jax.Device] | None  # None: those of this machine

GROUPS, TOKENS, MODEL, HIDDEN, EXPERTS, CAPACITY = 8, 128, 256, 1024, 8, 32
LEARNING_RATE, AUX = 0.1, 0.01
N = GROUPS * TOKENS * MODEL

DIMS = {
    "gate": ("model", "gate"),
    "wi": ("expert", "model", "hidden"),
    "wo": ("expert", "hidden", "model"),
    "x": ("group", "token", "model"),
    "target": ("group", "token", "model"),
}
STATE = ("gate", "wi", "wo", "x")  # includes x, because in a model the layer below needs its gradient
SPECS = {"gate": P(), "wi": P("rows"), "wo": P("rows"), "x": P("rows"), "target": P("rows")}


def make_mesh(devices: Devices = None) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,), devices=devices)


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters and batch as unsharded float32 host arrays, equal for every candidate."""
    rng = np.random.default_rng(seed)
    sizes = {"model": MODEL, "gate": EXPERTS, "expert": EXPERTS, "hidden": HIDDEN, "group": GROUPS, "token": TOKENS}
    values = {name: rng.standard_normal([sizes[d] for d in dims]).astype(np.float32) for name, dims in DIMS.items()}
    for name in ("gate", "wi"):
        values[name] *= np.float32(MODEL**-0.5)
    values["wo"] *= np.float32(HIDDEN**-0.5)
    return values


def _at(mask: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, values, 0), -1)


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """The rows of each group's x at these indices; zeros for an index past the end."""
    group = jnp.arange(x.shape[0]).reshape(-1, *[1] * (at.ndim - 1))
    inside = at < x.shape[1]
    return jnp.where(inside[..., None], x[group, jnp.where(inside, at, 0)], 0)


def _placed(places: list[jax.Array], values: list[Any], dtype: Any) -> jax.Array:
    """The value of each slot's choice [group, expert * slot]; 0 for an empty slot."""
    groups = places[0].shape[0]
    slots, group = jnp.zeros((groups, EXPERTS * CAPACITY), dtype), jnp.arange(groups)[:, None]
    for at, value in zip(places, values, strict=True):
        slots = slots.at[group, at].add(value, mode="drop")
    return slots


def device(state: dict, target: jax.Array) -> tuple[dict, jax.Array]:
    """The step of one device."""
    gate, wi, wo, x = (state[name] for name in STATE)

    # gate: two choices per token, and their slots
    p = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate), -1)
    first = jnp.argmax(p, -1)
    mask1 = first[..., None] == jnp.arange(EXPERTS)
    second = jnp.argmax(jnp.where(mask1, -jnp.inf, p), -1)
    mask2 = second[..., None] == jnp.arange(EXPERTS)
    p1, p2 = _at(mask1, p), _at(mask2, p)
    both = p1 + p2
    weights = [p1 / both, p2 / both]
    count = jnp.sum(mask1, 1, dtype=jnp.int32, keepdims=True)
    slot1 = _at(mask1, jnp.cumsum(mask1, 1, dtype=jnp.int32) - 1)
    slot2 = _at(mask2, jnp.cumsum(mask2, 1, dtype=jnp.int32) - 1 + count)
    none = EXPERTS * CAPACITY
    places = [jnp.where(s < CAPACITY, e * CAPACITY + s, none) for e, s in ((first, slot1), (second, slot2))]
    tokens = jnp.arange(1, TOKENS + 1, dtype=jnp.int32)
    holder = _placed(places, [tokens, tokens], jnp.int32) - 1
    holder = jnp.where(holder < 0, TOKENS, holder)

    # to the experts, through them, and back
    sent = _there(_rows(x, holder))
    hidden = jax.nn.relu(jnp.einsum("gecm,emh->gech", sent, wi))
    back = _back(jnp.einsum("gech,ehm->gecm", hidden, wo))
    reads = [_rows(back, at) for at in places]
    y = sum(w[..., None] * read for w, read in zip(weights, reads, strict=True))
    error = y - target
    share, mean = jnp.mean(mask1, 1, dtype=p.dtype), jnp.mean(p, 1)
    loss = jnp.sum(error * error) / N + AUX * EXPERTS / GROUPS * jnp.sum(share * mean)

    # backward
    dy = error * (2 / N)
    dw1, dw2 = (jnp.sum(read * dy, -1) for read in reads)
    dback = _there(_rows(dy, holder) * _placed(places, weights, p.dtype)[..., None])
    dhidden = jnp.where(hidden > 0, jnp.einsum("gecm,ehm->gech", dback, wo), 0)
    dwo = jnp.einsum("gech,gecm->ehm", hidden, dback)
    dwi = jnp.einsum("gecm,gech->emh", sent, dhidden)
    dsent = _back(jnp.einsum("gech,emh->gecm", dhidden, wi))
    difference = (dw1 - dw2) / (both * both)
    dp = jnp.where(mask1, (difference * p2)[..., None], 0) - jnp.where(mask2, (difference * p1)[..., None], 0)
    dp = dp + (AUX * EXPERTS / (GROUPS * TOKENS)) * share[:, None]
    dlogits = p * (dp - jnp.sum(p * dp, -1, keepdims=True))
    dx = sum(_rows(dsent, at) for at in places) + jnp.einsum("gse,me->gsm", dlogits, gate)
    dgate, loss = lax.psum((jnp.einsum("gsm,gse->me", x, dlogits), loss), "rows")
    grads = {"gate": dgate, "wi": dwi, "wo": dwo, "x": dx}
    return {name: state[name] - LEARNING_RATE * grads[name] for name in STATE}, loss


def _there(slots: jax.Array) -> jax.Array:
    """Exchanges [group, expert * slot, model]: from one group and all experts to all groups and one expert."""
    slots = slots.reshape(-1, EXPERTS, CAPACITY, MODEL)
    return lax.all_to_all(slots, "rows", split_axis=1, concat_axis=0, tiled=True)


def _back(slots: jax.Array) -> jax.Array:
    slots = lax.all_to_all(slots, "rows", split_axis=0, concat_axis=1, tiled=True)
    return slots.reshape(-1, EXPERTS * CAPACITY, MODEL)


def whole(state: dict, target: jax.Array, annotated: bool) -> tuple[dict, jax.Array]:
    """The step on unsharded arrays as in GShard's Algorithm 2, differentiated by JAX, for GSPMD to partition.

    Its three annotations shard the slots by group when filled, by expert at the experts, and by group when returned.
    """

    def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, P(*axes)) if annotated else x

    def loss_of(state: dict) -> jax.Array:
        gate, wi, wo, x = (state[name] for name in STATE)
        p = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate), -1)
        mask1 = jnp.argmax(p, -1)[..., None] == jnp.arange(EXPERTS)
        mask2 = jnp.argmax(jnp.where(mask1, -jnp.inf, p), -1)[..., None] == jnp.arange(EXPERTS)
        p1, p2 = _at(mask1, p), _at(mask2, p)
        slot1 = jnp.cumsum(mask1, 1, dtype=jnp.int32) - 1
        slot2 = jnp.cumsum(mask2, 1, dtype=jnp.int32) - 1 + jnp.sum(mask1, 1, dtype=jnp.int32, keepdims=True)
        combine: Any = 0
        for mask, slot, weight in ((mask1, slot1, p1), (mask2, slot2, p2)):
            in_slot = mask[..., None] & (slot[..., None] == jnp.arange(CAPACITY))
            combine = combine + jnp.where(in_slot, (weight / (p1 + p2))[..., None, None], 0)
        dispatch = (combine > 0).astype(x.dtype)
        sent = constrain(constrain(jnp.einsum("gsec,gsm->egcm", dispatch, x), None, "rows"), "rows")
        h = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, wi))
        out = constrain(jnp.einsum("egch,ehm->egcm", h, wo), None, "rows")
        y = jnp.einsum("gsec,egcm->gsm", combine, out)
        balance = jnp.sum(jnp.mean(mask1, 1, dtype=p.dtype) * jnp.mean(p, 1), -1)
        return jnp.mean(jnp.square(y - target)) + AUX * EXPERTS * jnp.mean(balance)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return {name: state[name] - LEARNING_RATE * grads[name] for name in STATE}, loss


def handwritten(devices: Devices = None) -> tuple[jax.stages.Compiled, dict]:
    """The compiled step, and the sharding of each array by name."""
    mesh = make_mesh(devices)
    state = {name: SPECS[name] for name in STATE}
    step = jax.shard_map(device, mesh=mesh, in_specs=(state, SPECS["target"]), out_specs=(state, P()))
    return _compile(step, mesh)


def gspmd(annotated: bool, devices: Devices = None) -> tuple[jax.stages.Compiled, dict]:
    """The same, partitioned by GSPMD, with or without the three annotations."""
    mesh = make_mesh(devices)
    with jax.set_mesh(mesh):
        return _compile(lambda state, target: whole(state, target, annotated), mesh)


def _compile(step: Callable, mesh: jax.sharding.Mesh) -> tuple[jax.stages.Compiled, dict]:
    at = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    state = {name: at[name] for name in STATE}
    jitted = jax.jit(
        step,
        in_shardings=(state, at["target"]),
        out_shardings=(state, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    specs = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at[n]) for n, a in arrays().items()}
    return jitted.lower({name: specs[name] for name in STATE}, specs["target"]).compile(), at
