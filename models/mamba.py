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
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal, mamba_names

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
    """The layer, which replaces attention in models/causal.py: its cache is what conv and the scan keep."""

    config: Config

    def __call__(self, x: md.Tensor, cache: Any = None, position: Any = 0) -> tuple[md.Tensor, Any]:
        """The layer's result, and the cache after x, which is [batch, length, model] or one position of it."""
        dims = x.dims if "length" in [d.name for d in x.dims] else [*x.dims[:-1], md.Dim("length", 1), x.dims[-1]]
        with md.scope("mixer"):
            y, new = self._mixed(md.reshape(x, dims), cache or {"inputs": None, "state": None})
        return md.reshape(y, x.dims), new if cache else None

    def _mixed(self, x: md.Tensor, cache: Any) -> tuple[md.Tensor, Any]:
        config, precision = self.config, self.config.precision
        _, model, inner, state, _ = config.dims()
        rank, parts = md.Dim("rank", config.rank), md.Dim("parts", config.rank + 2 * config.state)
        linear = partial(causal.linear, precision=precision)

        u, z = linear(x, "w_x", [model], [inner]), linear(x, "w_z", [model], [inner])
        u, inputs = md.nn.causal_conv(u, config.kernel, inner, state=cache["inputs"], precision=precision)
        u = md.silu(u)
        rbc = linear(u, "w_u", [inner], [parts])
        starts = {0: rank, config.rank: state, config.rank + config.state: state}
        r, b, c = (md.rename(md.slice(rbc, parts, at, d.size), parts=d.name) for at, d in starts.items())
        steps = md.softplus(linear(r, "w_s", [rank], [inner], bias="b_s"))
        log_a = md.param("log_a", [inner, state], init=_rates, dtype=precision.param)
        d = md.param("d", [inner], init=md.init.ones(), dtype=precision.param)
        a = -md.exp(md.cast(log_a, precision.reduce))
        y, h = md.nn.selective_scan(u, steps, a, b, c, cache["state"], over=inner, precision=precision)
        y = (y + md.cast(d, u.dtype) * u) * md.silu(z)
        return linear(y, "w_out", [inner], [model]), {"inputs": inputs, "state": h}

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
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=config.precision)

    def block(x: md.Tensor, mix: causal.Attend) -> md.Tensor:
        return x + mix(norm(x, name="norm_1"))

    return causal.stacked(config, Mixer(config), block, norm, tied=config.tied)


mamba = causal.workload("mamba", Config(), network, layouts=LAYOUTS, hugging_face=mamba_names.HUGGING_FACE)
mamba_130m = mamba.replace(length=2048, vocab=50280, layers=24, d_model=768, inner=1536, state=16, rank=48)
mamba_1b = mamba_130m.replace(layers=48, d_model=2048, inner=4096, rank=128)
mamba_3b = mamba_130m.replace(layers=64, d_model=2560, inner=5120, rank=160)
