"""Plain JAX twins of bundled models, which know nothing of meshdsl: functions, arguments, and names of some axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {"batch": 8, "length": 16, "vocab": 48, "layers": 2, "d_model": 32, "d_ff": 64}
B, L, V, N, D, F = SIZES.values()
H, G, K = 4, 2, 8  # heads of queries, heads of keys and values, size of a head
RNG = np.random.default_rng(1)
TEXT = {"tokens": "batch length", "targets": "batch length"}
tokens, targets = (jnp.asarray(RNG.integers(0, V, (B, L)), jnp.int32) for _ in range(2))


def normal(*shape: int, scale: float = 0.3) -> Any:
    return jnp.asarray(scale * RNG.standard_normal(shape), jnp.float32)


# --- Llama: rotary positions, grouped queries, RMS norms, SwiGLU, a scan over stacked layers with jax.checkpoint


def rms(x: Any, g: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g


def rope(x: Any) -> Any:
    n, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(n)[:, None] * 10000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama_block(x: Any, p: Any) -> Any:
    b, n, _ = x.shape
    h = rms(x, p["norm1"])
    q = rope((h @ p["wq"]).reshape(b, n, H, K)).reshape(b, n, G, H // G, K)
    k, v = rope((h @ p["wk"]).reshape(b, n, G, K)), (h @ p["wv"]).reshape(b, n, G, K)
    scores = jnp.einsum("blgqk,bmgk->bgqlm", q, k) / K**0.5
    causal = jnp.arange(n)[:, None] >= jnp.arange(n)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bgqlm,bmgk->blgqk", weights, v).reshape(b, n, H * K)
    x = x + y @ p["wo"]
    h = rms(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama(params: Any, tokens: Any, targets: Any) -> Any:
    x = jnp.take(params["embed"], tokens, axis=0)
    block = jax.checkpoint(llama_block)
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
    logits = rms(x, params["norm"]) @ params["unembed"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * jax.nn.one_hot(targets, V, dtype=logits.dtype), -1))


def llama_params() -> Any:
    return {
        "embed": normal(V, D), "unembed": normal(D, V), "norm": 1 + normal(D),
        "layers": {
            "wq": normal(N, D, H * K), "wk": normal(N, D, G * K), "wv": normal(N, D, G * K), "wo": normal(N, H * K, D),
            "gate": normal(N, D, F), "up": normal(N, D, F), "down": normal(N, F, D), "norm1": 1 + normal(N, D),
            "norm2": 1 + normal(N, D),
        },
    }  # fmt: skip


LLAMA = (llama, (llama_params(), tokens, targets))
LLAMA_NAMES = {
    **TEXT, "*/embed": "vocab model", "*/unembed": "model vocab", "*/wk": "layer model heads*head",
    "*/gate": "layer model d_ff",
}  # fmt: skip
PREFER = "batch heads d_ff vocab"


# --- GPT-2: one product for queries, keys and values, a mask by tril, a Python loop over layers


def layer_norm(x: Any, p: Any) -> Any:
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["g"] + p["b"]


def gpt2(params: Any, tokens: Any, targets: Any) -> Any:
    def attention(x: Any, p: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = (y.reshape(b, n, H, K).transpose(0, 2, 1, 3) for y in jnp.split(x @ p["qkv"] + p["qkv_b"], 3, -1))
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), q @ k.transpose(0, 1, 3, 2) / K**0.5, -1e9)
        return (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, n, H * K) @ p["out"]

    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["layers"]:
        x = x + attention(layer_norm(x, p["ln1"]), p)
        x = x + jax.nn.gelu(layer_norm(x, p["ln2"]) @ p["w1"] + p["b1"]) @ p["w2"]
    logits = jax.nn.log_softmax(layer_norm(x, params["ln"]) @ params["wte"].T)
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))


def gpt2_params() -> Any:
    norm = lambda: {"g": 1 + normal(D), "b": normal(D)}  # noqa: E731
    layer = lambda: {  # noqa: E731
        "qkv": normal(D, 3 * H * K), "qkv_b": normal(3 * H * K), "out": normal(H * K, D), "w1": normal(D, F),
        "b1": normal(F), "w2": normal(F, D), "ln1": norm(), "ln2": norm(),
    }  # fmt: skip
    return {"wte": normal(V, D), "wpe": normal(L, D), "ln": norm(), "layers": [layer() for _ in range(N)]}


GPT2 = (gpt2, (gpt2_params(), tokens, targets))
GPT2_NAMES = {**TEXT, "*/wte": "vocab model", "*/out": "heads*head model", "*/w1": "model d_ff"}
