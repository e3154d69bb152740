"""Plain JAX twins of bundled models, which know nothing of meshdsl: losses, their arguments, and names of some axes.

A loss finds all sizes in the shapes of its arguments, but for the size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(1)
TEXT = {"tokens": "batch length", "targets": "batch length"}
PREFER = "batch heads d_ff vocab"


class Sizes(NamedTuple):
    """`groups` are the heads of keys and values, where queries share them."""

    batch: int = 8
    length: int = 16
    vocab: int = 48
    layers: int = 2
    d_model: int = 32
    d_ff: int = 64
    heads: int = 4
    groups: int = 2
    d_head: int = 8


TINY = Sizes()


def normal(*shape: int, mean: float = 0.0) -> Any:
    return jnp.asarray(mean + 0.3 * RNG.standard_normal(shape), jnp.float32)


def spec(*shape: int, mean: float = 0.0) -> Any:
    """The type of what `normal` draws."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def text(sizes: Sizes = TINY) -> list[Any]:
    """Tokens and targets."""
    return [jnp.asarray(RNG.integers(0, sizes.vocab, (sizes.batch, sizes.length)), jnp.int32) for _ in range(2)]


# --- Llama: rotary positions, grouped queries, RMS norms, SwiGLU, a scan over stacked layers with jax.checkpoint


def rms(x: Any, g: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g


def rope(x: Any) -> Any:
    n, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(n)[:, None] * 10000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama_block(x: Any, p: Any, d_head: int) -> Any:
    b, n, _ = x.shape
    h = rms(x, p["norm1"])
    q, k, v = ((h @ p[w]).reshape(b, n, -1, d_head) for w in ("wq", "wk", "wv"))
    q = rope(q).reshape(b, n, k.shape[2], -1, d_head)
    scores = jnp.einsum("blgqk,bmgk->bgqlm", q, rope(k)) / d_head**0.5
    causal = jnp.arange(n)[:, None] >= jnp.arange(n)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bgqlm,bmgk->blgqk", weights, v).reshape(b, n, -1)
    x = x + y @ p["wo"]
    h = rms(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama(params: Any, tokens: Any, targets: Any, d_head: int = TINY.d_head) -> Any:
    x = jnp.take(params["embed"], tokens, axis=0)
    block = jax.checkpoint(partial(llama_block, d_head=d_head))
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
    logits = rms(x, params["norm"]) @ params["unembed"]
    targets = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * targets, -1))


def llama_params(sizes: Sizes = TINY, draw: Callable[..., Any] = normal) -> Any:
    _, _, v, n, d, f, h, g, k = sizes
    return {
        "embed": draw(v, d), "unembed": draw(d, v), "norm": draw(d, mean=1),
        "layers": {
            "wq": draw(n, d, h * k), "wk": draw(n, d, g * k), "wv": draw(n, d, g * k), "wo": draw(n, h * k, d),
            "gate": draw(n, d, f), "up": draw(n, d, f), "down": draw(n, f, d), "norm1": draw(n, d, mean=1),
            "norm2": draw(n, d, mean=1),
        },
    }  # fmt: skip


LLAMA_NAMES = {
    **TEXT, "*/embed": "vocab model", "*/unembed": "model vocab", "*/wk": "layer model heads*head",
    "*/gate": "layer model d_ff",
}  # fmt: skip


# --- GPT-2: one product for queries, keys and values, a mask by tril, a Python loop over layers


def layer_norm(x: Any, p: Any) -> Any:
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["g"] + p["b"]


def gpt2(params: Any, tokens: Any, targets: Any, d_head: int = TINY.d_head) -> Any:
    def attention(x: Any, p: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = (
            y.reshape(b, n, -1, d_head).transpose(0, 2, 1, 3) for y in jnp.split(x @ p["qkv"] + p["qkv_b"], 3, -1)
        )
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), q @ k.transpose(0, 1, 3, 2) / d_head**0.5, -1e9)
        return (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, n, -1) @ p["out"]

    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["layers"]:
        x = x + attention(layer_norm(x, p["ln1"]), p)
        x = x + jax.nn.gelu(layer_norm(x, p["ln2"]) @ p["w1"] + p["b1"]) @ p["w2"]
    logits = jax.nn.log_softmax(layer_norm(x, params["ln"]) @ params["wte"].T)
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))


def gpt2_params(sizes: Sizes = TINY, draw: Callable[..., Any] = normal) -> Any:
    _, length, v, n, d, f, h, _, k = sizes
    norm = lambda: {"g": draw(d, mean=1), "b": draw(d)}  # noqa: E731
    layer = lambda: {  # noqa: E731
        "qkv": draw(d, 3 * h * k), "qkv_b": draw(3 * h * k), "out": draw(h * k, d), "w1": draw(d, f), "b1": draw(f),
        "w2": draw(f, d), "ln1": norm(), "ln2": norm(),
    }  # fmt: skip
    return {"wte": draw(v, d), "wpe": draw(length, d), "ln": norm(), "layers": [layer() for _ in range(n)]}


GPT2_NAMES = {**TEXT, "*/wte": "vocab model", "*/out": "heads*head model", "*/w1": "model d_ff"}
