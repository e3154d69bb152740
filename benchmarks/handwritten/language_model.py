"""A training step of a decoder-only language model, hand-written in Megatron style for a mesh of 2 x 4.

Batch is sharded over rows; vocab, heads and d_ff over cols. The model, with unsharded shapes:

    x = embed[tokens] + positions                     embed [vocab, model]   positions [length, model]
    for each of the layers (a scan over stacked weights):
        h = layer_norm(x) scale_1 + bias_1
        q, k, v = h wq, h wk, h wv                    [layer, model, heads, head]
        p = softmax over keys of (q k' / sqrt(head)), causal
        x = x + (p v) wo                              [layer, heads, head, model]
        h = layer_norm(x) scale_2 + bias_2
        x = x + relu(h w_in) w_out                    [layer, model, d_ff], [layer, d_ff, model]
    logits = (layer_norm(x) scale + bias) unembed     [model, vocab]
    loss = mean over the targets that are not -100 of (logsumexp(logits) - logits[target])

layer_norm is (x - mean) / sqrt(variance + 1e-5), where variance is the mean squared deviation. Products have no
bias. The update is Adam with bias correction. Everything is float32.

The backward pass is derived by hand. Each weight gradient is one product in the parameter's dim order. The
normalised x, q, k, v, p, p v and the relu of each layer are saved for it. Gradients are all-reduced over rows once,
after the loop. All-reduces per device and step, counting trips: 1 embedding + 8 forward + 1 maximum + 1 stacked (sum
of exponentials, target logit) + 1 number of targets + 1 unembedding backward + 8 backward + 1 of all gradients and the
loss = 22.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = Sequence[jax.Device] | None  # None: those of this machine

BATCH, LENGTH, MODEL, HEADS, HEAD, D_FF, LAYERS, VOCAB = 16, 128, 256, 8, 32, 1024, 4, 8192
EPSILON = 1e-5
LEARNING_RATE, BETA_1, BETA_2, ADAM_EPSILON = 1e-3, 0.9, 0.999, 1e-8
SIZES = {
    "batch": BATCH,
    "length": LENGTH,
    "model": MODEL,
    "heads": HEADS,
    "head": HEAD,
    "d_ff": D_FF,
    "layer": LAYERS,
    "vocab": VOCAB,
}
RULES = {"batch": "rows", "vocab": "cols", "heads": "cols", "d_ff": "cols"}
LAYER = {
    "scale_1": ("layer", "model"),
    "bias_1": ("layer", "model"),
    "wq": ("layer", "model", "heads", "head"),
    "wk": ("layer", "model", "heads", "head"),
    "wv": ("layer", "model", "heads", "head"),
    "wo": ("layer", "heads", "head", "model"),
    "scale_2": ("layer", "model"),
    "bias_2": ("layer", "model"),
    "w_in": ("layer", "model", "d_ff"),
    "w_out": ("layer", "d_ff", "model"),
}
DIMS = {
    "embed": ("vocab", "model"),
    "positions": ("length", "model"),
    **LAYER,
    "scale": ("model",),
    "bias": ("model",),
    "unembed": ("model", "vocab"),
}
TOKENS = ("batch", "length")


def spec(dims: tuple[str, ...]) -> P:
    return P(*(RULES.get(dim) for dim in dims))


def make_mesh(devices: Devices = None) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters, tokens and targets as unsharded host arrays, equal for every candidate.

    Matrices are normal with standard deviation 0.02, scales are one, biases zero.
    """
    rng = np.random.default_rng(seed)
    whole = {}
    for name, dims in DIMS.items():
        sizes = tuple(SIZES[dim] for dim in dims)
        if name.startswith("scale"):
            whole[name] = np.ones(sizes, np.float32)
        elif name.startswith("bias"):
            whole[name] = np.zeros(sizes, np.float32)
        else:
            whole[name] = (0.02 * rng.standard_normal(sizes)).astype(np.float32)
    text = rng.integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32)
    return whole | {"tokens": text[:, :-1].copy(), "targets": text[:, 1:].copy()}


def initial_state(params: dict) -> dict:
    """Adam's initial state: first and second moments, and the number of steps done."""
    zeros = {name: np.zeros_like(p) for name, p in params.items()}
    return {"params": params, "m": zeros, "v": zeros, "step": np.zeros((), np.int32)}


def adam(state: dict, grads: dict) -> dict:
    step = state["step"] + 1
    count = step.astype(jnp.float32)
    correction_1, correction_2 = 1 - BETA_1**count, 1 - BETA_2**count
    m = {n: BETA_1 * state["m"][n] + (1 - BETA_1) * g for n, g in grads.items()}
    v = {n: BETA_2 * state["v"][n] + (1 - BETA_2) * (g * g) for n, g in grads.items()}
    params = {
        n: p - LEARNING_RATE * (m[n] / correction_1) / (jnp.sqrt(v[n] / correction_2) + ADAM_EPSILON)
        for n, p in state["params"].items()
    }
    return {"params": params, "m": m, "v": v, "step": step}


# The functions of one device. Each forward function returns the values that its backward needs.


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple]:
    centred = x - jnp.mean(x, -1, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + EPSILON)
    normal = centred * rstd
    return normal * scale + bias, (normal, rstd)


def layer_norm_backward(ct: jax.Array, saved: tuple, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of x, scale and bias."""
    normal, rstd = saved
    d = ct * scale
    dx = rstd * (d - jnp.mean(d, -1, keepdims=True) - normal * jnp.mean(d * normal, -1, keepdims=True))
    return dx, jnp.sum(ct * normal, (0, 1)), jnp.sum(ct, (0, 1))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention output and the weights; q, k, v are [batch, length, heads, head]."""
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (1 / math.sqrt(HEAD))
    p = jax.nn.softmax(jnp.where(causal(), scores, -jnp.inf), -1)
    return jnp.einsum("bhlm,bmhd->blhd", p, v), p


def attention_backward(ct: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, p: jax.Array) -> tuple:
    dp = jnp.einsum("blhd,bmhd->bhlm", ct, v)
    dv = jnp.einsum("bhlm,blhd->bmhd", p, ct)
    # p is zero at masked positions, so no mask is needed here.
    ds = p * (dp - jnp.sum(dp * p, -1, keepdims=True)) * (1 / math.sqrt(HEAD))
    return jnp.einsum("bhlm,bmhd->blhd", ds, k), jnp.einsum("bhlm,blhd->bmhd", ds, q), dv


def causal() -> jax.Array:
    """The causal mask: the keys (last dim) that each query may attend to."""
    shape = (LENGTH, LENGTH)
    return lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)


def layer(x: jax.Array, w: dict) -> tuple[jax.Array, dict]:
    """One layer on one device; heads and d_ff are sharded over cols, so the products with wo and w_out are reduced."""
    h, norm_1 = layer_norm(x, w["scale_1"], w["bias_1"])
    q, k, v = (jnp.einsum("blm,mhd->blhd", h, w[n]) for n in ("wq", "wk", "wv"))
    mixed, p = attention(q, k, v)
    x = x + lax.psum(jnp.einsum("blhd,hdm->blm", mixed, w["wo"]), "cols")
    h, norm_2 = layer_norm(x, w["scale_2"], w["bias_2"])
    act = jax.nn.relu(jnp.einsum("blm,mf->blf", h, w["w_in"]))
    x = x + lax.psum(jnp.einsum("blf,fm->blm", act, w["w_out"]), "cols")
    return x, {"norm_1": norm_1, "q": q, "k": k, "v": v, "p": p, "mixed": mixed, "norm_2": norm_2, "act": act}


def layer_backward(ct: jax.Array, w: dict, saved: dict) -> tuple[jax.Array, dict]:
    """The cotangent of x, and this device's partial gradients, each in its parameter's dim order."""
    g = {}
    act, norm = saved["act"], saved["norm_2"]
    h = norm[0] * w["scale_2"] + w["bias_2"]
    g["w_out"] = jnp.einsum("blf,blm->fm", act, ct)
    d_act = jnp.where(act > 0, jnp.einsum("blm,fm->blf", ct, w["w_out"]), 0)
    g["w_in"] = jnp.einsum("blm,blf->mf", h, d_act)
    dh = lax.psum(jnp.einsum("blf,mf->blm", d_act, w["w_in"]), "cols")
    dx, g["scale_2"], g["bias_2"] = layer_norm_backward(dh, norm, w["scale_2"])
    ct = ct + dx
    q, k, v, norm = saved["q"], saved["k"], saved["v"], saved["norm_1"]
    h = norm[0] * w["scale_1"] + w["bias_1"]
    g["wo"] = jnp.einsum("blhd,blm->hdm", saved["mixed"], ct)
    d_mixed = jnp.einsum("blm,hdm->blhd", ct, w["wo"])
    dq, dk, dv = attention_backward(d_mixed, q, k, v, saved["p"])
    dh = jnp.zeros_like(ct)
    for name, d in (("wq", dq), ("wk", dk), ("wv", dv)):
        g[name] = jnp.einsum("blm,blhd->mhd", h, d)
        dh = dh + jnp.einsum("blhd,mhd->blm", d, w[name])
    dx, g["scale_1"], g["bias_1"] = layer_norm_backward(lax.psum(dh, "cols"), norm, w["scale_1"])
    return ct + dx, g


def cross_entropy(logits: jax.Array, targets: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss summed over this device's targets, their number on all devices, and the cotangent of the logits.

    Logits are sharded over vocab, from the word `first` on.
    """
    local_targets, real = targets - first, targets != -100
    count = lax.psum(jnp.sum(real), "rows").astype(logits.dtype)
    is_target = local_targets[..., None] == lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    shift = lax.pmax(jnp.max(logits, -1), "cols")
    shifted = logits - shift[..., None]
    e = jnp.exp(shifted)
    target = jnp.sum(jnp.where(is_target, shifted, 0), -1)
    total, target = lax.psum(jnp.stack([jnp.sum(e, -1), target]), "cols")
    d_logits = jnp.where(real[..., None], (e / total[..., None] - is_target) / count, 0)
    return jnp.sum(jnp.where(real, jnp.log(total) - target, 0)), count, d_logits


def handwritten_step(state: dict, tokens: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
    """The step of one device of the 2 x 4 mesh."""
    params = state["params"]
    layers = {name: params[name] for name in LAYER}
    rows_of_table = VOCAB // lax.axis_size("cols")
    first = lax.axis_index("cols") * rows_of_table

    local, is_local = rows_here(tokens - first, rows_of_table)
    x = jnp.where(is_local, params["embed"][local], 0)
    x = lax.psum(x, "cols") + params["positions"]
    x, saved = lax.scan(layer, x, layers)
    h, norm = layer_norm(x, params["scale"], params["bias"])
    logits = jnp.einsum("blm,mv->blv", h, params["unembed"])
    loss, count, d_logits = cross_entropy(logits, targets, first)

    g = {"unembed": jnp.einsum("blm,blv->mv", h, d_logits)}
    dh = lax.psum(jnp.einsum("blv,mv->blm", d_logits, params["unembed"]), "cols")
    ct, g["scale"], g["bias"] = layer_norm_backward(dh, norm, params["scale"])
    ct, layer_grads = lax.scan(lambda ct, x: layer_backward(ct, *x), ct, (layers, saved), reverse=True)
    g |= layer_grads
    g["positions"] = jnp.sum(ct, 0)
    g["embed"] = jnp.zeros_like(params["embed"]).at[local].add(jnp.where(is_local, ct, 0))
    g, loss = lax.psum((g, loss), "rows")
    return adam(state, g), loss / count


def rows_here(local: jax.Array, rows_of_table: int) -> tuple[jax.Array, jax.Array]:
    """For each token, its row in this device's shard of the table (0 if in another shard), and whether it is here."""
    is_local = (local >= 0) & (local < rows_of_table)
    return jnp.where(is_local, local, 0), is_local[..., None]


def jax_grad_step(state: dict, tokens: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
    """The same step with `jax.grad` inside, as Megatron style is usually written in JAX.

    Parameters are cast to varying over rows before differentiation, so that gradients are not all-reduced over rows in
    the loop; `spread` is Megatron's f, the identity whose transpose is an all-reduce over cols.
    """
    params = {name: lax.pcast(p, "rows", to="varying") for name, p in state["params"].items()}
    rows_of_table = VOCAB // lax.axis_size("cols")
    first = lax.axis_index("cols") * rows_of_table

    def spread(x: jax.Array) -> jax.Array:
        return lax.pcast(x, "cols", to="varying")

    def one(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        h = spread(layer_norm(x, w["scale_1"], w["bias_1"])[0])
        q, k, v = (jnp.einsum("blm,mhd->blhd", h, w[n]) for n in ("wq", "wk", "wv"))
        x = x + lax.psum(jnp.einsum("blhd,hdm->blm", attention(q, k, v)[0], w["wo"]), "cols")
        h = spread(layer_norm(x, w["scale_2"], w["bias_2"])[0])
        return x + lax.psum(jax.nn.relu(h @ w["w_in"]) @ w["w_out"], "cols"), None

    def loss_of(params: dict) -> jax.Array:
        local, is_local = rows_here(tokens - first, rows_of_table)
        x = lax.psum(jnp.where(is_local, params["embed"][local], 0), "cols") + params["positions"]
        x, _ = lax.scan(one, x, {name: params[name] for name in LAYER})
        logits = spread(layer_norm(x, params["scale"], params["bias"])[0]) @ params["unembed"]
        shift = lax.pmax(lax.stop_gradient(jnp.max(logits, -1)), "cols")
        shifted = logits - shift[..., None]
        is_target = (targets - first)[..., None] == lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        target = jnp.sum(jnp.where(is_target, shifted, 0), -1)
        total, target = lax.psum(jnp.stack([jnp.sum(jnp.exp(shifted), -1), target]), "cols")
        return jnp.sum(jnp.log(total) - target) / (BATCH * LENGTH)

    loss, grads = jax.value_and_grad(loss_of)(params)
    grads, loss = lax.psum((grads, loss), "rows")
    return adam(state, grads), loss


def whole_loss(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The model on unsharded arrays."""
    x = params["embed"][tokens] + params["positions"]

    def one(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        h = layer_norm(x, w["scale_1"], w["bias_1"])[0]
        q, k, v = (jnp.einsum("blm,mhd->blhd", h, w[n]) for n in ("wq", "wk", "wv"))
        x = x + jnp.einsum("blhd,hdm->blm", attention(q, k, v)[0], w["wo"])
        h = layer_norm(x, w["scale_2"], w["bias_2"])[0]
        return x + jax.nn.relu(h @ w["w_in"]) @ w["w_out"], None

    x, _ = lax.scan(one, x, {name: params[name] for name in LAYER})
    logits = layer_norm(x, params["scale"], params["bias"])[0] @ params["unembed"]
    log_p = jax.nn.log_softmax(logits, -1)
    return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1))


def whole_step(state: dict, tokens: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
    """The step on unsharded arrays, differentiated by JAX, for GSPMD to partition."""
    loss, grads = jax.value_and_grad(whole_loss)(state["params"], tokens, targets)
    return adam(state, grads), loss


def handwritten(
    one_device: Callable = handwritten_step, devices: Devices = None
) -> tuple[jax.stages.Compiled, dict, NamedSharding]:
    """The compiled step, the shardings of its state, and the sharding of tokens and targets."""
    specs = _state_specs()
    step = jax.shard_map(
        one_device,
        mesh=make_mesh(devices),
        in_specs=(specs, spec(TOKENS), spec(TOKENS)),
        out_specs=(specs, P()),
        check_vma=True,
    )
    return _compile(step, devices)


def gspmd(devices: Devices = None) -> tuple[jax.stages.Compiled, dict, NamedSharding]:
    """The same, partitioned by GSPMD."""
    return _compile(whole_step, devices)


def _state_specs() -> dict:
    specs = {name: spec(dims) for name, dims in DIMS.items()}
    return {"params": specs, "m": specs, "v": specs, "step": P()}


def _compile(step: Callable, devices: Devices) -> tuple[jax.stages.Compiled, dict, NamedSharding]:
    mesh = make_mesh(devices)
    state = jax.tree.map(lambda s: NamedSharding(mesh, s), _state_specs(), is_leaf=lambda s: isinstance(s, P))
    tokens = NamedSharding(mesh, spec(TOKENS))
    jitted = jax.jit(
        step,
        in_shardings=(state, tokens, tokens),
        out_shardings=(state, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    whole = arrays()
    start = initial_state({name: whole[name] for name in DIMS})
    abstract = jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), start, state)
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=tokens)
    return jitted.lower(abstract, batch, batch).compile(), state, tokens
