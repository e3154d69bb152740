"""Mamba: layers of a gated selective state space, without attention (Gu and Dao, 2023).

    x = embed[tokens];  for each layer:  x = x + mixer(norm(x))
    mixer: u = silu(conv(x w_x));  (r, b, c) = u w_u;  s = softplus(r w_s + b_s);  h[t] = exp(s a) h[t-1] + s b u[t]
           result = ((c h + d u) * silu(x w_z)) w_out
    logits = norm(x) embed;  loss = mean over batch and length of the cross entropy

conv is causal, over few positions, for each of the `inner` channels alone. Decoding keeps the last inputs of conv and
the state h; their sizes do not depend on the length. `model` shards the channels, as Megatron does heads: a layer
reduces (r, b, c) and its result. `context` shards the positions: the scan sends a state of each channel, conv a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from models import causal

__all__ = ["LAYOUTS", "Config", "mamba", "mamba_1b", "mamba_3b", "mamba_130m", "network"]

_MODEL = "vocab:cols; inner:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "zero": ("rows:8", "batch:rows; vocab:rows; inner:rows"),
    "model": ("cols:2", _MODEL),
    "data_model": ("rows:4 cols:2", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:4 cols:2", f"batch:rows; length:cols; {_MODEL}"),
    "context": ("rows:2 ring:4", "batch:rows; length:ring"),
    "zero_context": ("rows:2 ring:4", "batch:rows; length:ring; vocab:rows; inner:rows"),
}


@dataclass(frozen=True)
class Config(causal.Options):
    """Sizes and options; the defaults fit a laptop."""

    length: int = 64
    vocab: int = 256
    inner: int = 128  # channels
    state: int = 8  # states of each channel
    rank: int = 4  # of the product that makes the steps
    kernel: int = 4  # positions of the convolution
    tied: bool = True  # the output layer uses the embedding table

    def dims(self) -> tuple[md.Dim, md.Dim, md.Dim, md.Dim, md.Dim]:
        """The dims vocab, model, inner, state and layer."""
        sizes = {"vocab": self.vocab, "model": self.d_model, "inner": self.inner, "state": self.state}
        vocab, model, inner, state = (md.Dim(name, size) for name, size in sizes.items())
        return vocab, model, inner, state, md.Dim("layer", self.layers)


@dataclass(frozen=True)
class Mixer:
    """The layer, which takes the place of attention in models/causal.py: its cache is the state."""

    config: Config

    def __call__(self, x: md.Tensor, cache: Any = None, position: Any = 0) -> tuple[md.Tensor, Any]:
        """The layer's result, and the cache after x."""
        dims = x.dims if "length" in [d.name for d in x.dims] else [*x.dims[:-1], md.Dim("length", 1), x.dims[-1]]
        with md.scope("mixer"):
            y, cache = self._mixed(md.reshape(x, dims), cache)
        return md.reshape(y, x.dims), cache

    def _mixed(self, x: md.Tensor, cache: Any) -> tuple[md.Tensor, Any]:
        config, precision = self.config, self.config.precision
        _, model, inner, state, _ = config.dims()
        rank, parts = md.Dim("rank", config.rank), md.Dim("parts", config.rank + 2 * config.state)

        def linear(x: md.Tensor, name: str, over: md.Dim, into: md.Dim, bias: str | None = None) -> md.Tensor:
            return causal.linear(x, name, [over], [into], precision, bias)

        def part(x: md.Tensor, start: int, into: md.Dim) -> md.Tensor:
            return md.rename(md.slice(x, parts, start, into.size), parts=into.name)

        padded = config.kernel - 1
        u, z, padding = linear(x, "w_x", model, inner), linear(x, "w_z", model, inner), (padded, 0)
        recent, old = None, None
        if cache is not None:
            u, padding = md.concat([md.rename(cache["inputs"], recent="length"), u], "length"), (0, 0)
            old = cache["state"]
            length = next(d for d in u.dims if d.name == "length")
            recent = md.rename(md.slice(u, length, length.size - padded, padded), length="recent")
        u = md.nn.conv(u, {"length": config.kernel}, inner, padding={"length": padding}, precision=precision)
        u = md.silu(u)
        found = linear(u, "w_u", inner, parts)
        r, b, c = part(found, 0, rank), part(found, rank.size, state), part(found, rank.size + state.size, state)
        steps = md.softplus(linear(r, "w_s", rank, inner, "b_s"))
        log_a = md.param("log_a", [inner, state], init=_rates, dtype=precision.param)
        d = md.param("d", [inner], init=md.init.ones(), dtype=precision.param)
        y, h = md.nn.selective_scan(
            u, steps, -md.exp(md.cast(log_a, precision.reduce)), b, c, old, over=inner, precision=precision
        )
        y = (y + md.cast(d, u.dtype) * u) * md.silu(z)
        return linear(y, "w_out", inner, model), None if recent is None else {"inputs": recent, "state": h}

    def cache(self, layer: md.Dim, dims: Sequence[md.Dim]) -> dict[str, md.Tensor]:
        """Zeros: the last inputs of the convolution, and the state; the memory's size does not matter."""
        rows, (_, _, inner, state, _), precision = dims[:-1], self.config.dims(), self.config.precision
        recent = md.Dim("recent", self.config.kernel - 1)
        inputs = md.zeros([layer, *rows, recent, inner], precision.compute)
        return {"inputs": inputs, "state": md.zeros([layer, *rows, inner, state], precision.reduce)}


def _rates(key: Any, dims: Any, dtype: Any) -> md.Tensor:
    """log(1), log(2), ... for the states of each channel."""
    return md.broadcast(md.log(md.cast(md.iota(dims[-1]), dtype) + 1), dims)


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    _, wide, *_ = config.dims()

    def norm(x: md.Tensor, name: str = "norm") -> md.Tensor:
        return md.nn.rms_norm(x, wide, name=name, eps=config.eps, precision=config.precision)

    def block(x: md.Tensor, mix: causal.Attend) -> md.Tensor:
        return x + mix(norm(x, "norm_1"))

    return causal.stacked(config, Mixer(config), block, norm, tied=config.tied)


_MIXER = "backbone.layers.{layer}.mixer"
TENSORS = {
    "embed": ("backbone.embeddings.weight", "vocab, model"),
    "layer/norm_1/scale": ("backbone.layers.{layer}.norm.weight", "model"),
    "layer/mixer/w_x": (f"{_MIXER}.in_proj.weight", "0/2 inner, model"),
    "layer/mixer/w_z": (f"{_MIXER}.in_proj.weight", "1/2 inner, model"),
    "layer/mixer/conv/w": (f"{_MIXER}.conv1d.weight", "inner, , length_window"),
    "layer/mixer/conv/b": (f"{_MIXER}.conv1d.bias", "inner"),
    "layer/mixer/w_u": (f"{_MIXER}.x_proj.weight", "parts, inner"),
    "layer/mixer/w_s": (f"{_MIXER}.dt_proj.weight", "inner, rank"),
    "layer/mixer/b_s": (f"{_MIXER}.dt_proj.bias", "inner"),
    "layer/mixer/log_a": (f"{_MIXER}.A_log", "inner, state"),
    "layer/mixer/d": (f"{_MIXER}.D", "inner"),
    "layer/mixer/w_out": (f"{_MIXER}.out_proj.weight", "model, inner"),
    "norm/scale": ("backbone.norm_f.weight", "model"),
    "unembed": ("lm_head.weight", "vocab, model"),
}
mamba = causal.workload(
    "mamba", Config(), network, layouts=LAYOUTS,
    hugging_face=md.HuggingFace(
        TENSORS,
        {
            "vocab_size": "vocab", "num_hidden_layers": "layers", "hidden_size": "d_model", "state_size": "state",
            "intermediate_size": "inner", "time_step_rank": "rank", "conv_kernel": "kernel",
            "layer_norm_epsilon": "eps", "tie_word_embeddings": "tied",
        },
        fixed={"model_type": "mamba", "hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
        defaults={
            "intermediate_size": lambda hub: hub.size("expand", 2) * hub.size("hidden_size"), "state_size": 16,
            "time_step_rank": lambda hub: -(-hub.size("hidden_size") // 16), "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        },
        base="backbone", architecture="MambaForCausalLM",
    ),
)  # fmt: skip
mamba_130m = mamba.replace(length=2048, vocab=50280, layers=24, d_model=768, inner=1536, state=16, rank=48)
mamba_1b = mamba_130m.replace(layers=48, d_model=2048, inner=4096, rank=128)
mamba_3b = mamba_130m.replace(layers=64, d_model=2560, inner=5120, rank=160)
