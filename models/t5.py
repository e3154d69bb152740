"""T5: an encoder and a decoder with relative positions, RMS norm and unscaled scores (Raffel et al., 2020).

    x = embed[source];  for each layer of the encoder:  x = x + attention(norm(x));  x = x + feed(norm(x))
    y = embed[tokens];  for each layer of the decoder:  y = y + attention(norm(y));
                        y = y + attention(norm(y), to norm(x));  y = y + feed(norm(y))
    logits = norm(y) embed / sqrt(model);  loss = mean over batch and length of the cross entropy

feed is relu(x w_in) w_out, or if `gated` (gelu(x w_gate) * (x w_up)) w_out, as in T5 1.1 and Flan-T5, whose results are
not divided, and whose output layer is its own. The layouts are those of models/llama.py, for both sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal, t5_names, text_to_text

__all__ = ["LAYOUTS", "Config", "t5", "t5_11_base", "t5_11_xl", "t5_base", "t5_small"]

_DATA, _MODEL = "batch:rows", "vocab:cols; d_ff:cols; heads:cols"
_ZERO, _RING = "vocab:rows; d_ff:rows; heads:rows", "length:ring; source:ring"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", _DATA),
    "zero": ("rows:8", f"{_DATA}; {_ZERO}"),
    "model": ("cols:2", _MODEL),
    "data_model": ("rows:4 cols:2", f"{_DATA}; {_MODEL}"),
    "sequence": ("rows:4 cols:2", f"{_DATA}; length:cols; source:cols; {_MODEL}"),
    "context": ("rows:2 ring:4", f"{_DATA}; {_RING}"),
    "zero_context": ("rows:2 ring:4", f"{_DATA}; {_RING}; {_ZERO}"),
}


@dataclass(frozen=True)
class Config(causal.Config):
    """Sizes and options; the defaults fit a laptop. `layers` are those of the encoder."""

    source: int = 64
    decoder_layers: int = 2
    d_head: int = 16
    eps: float = 1e-6
    buckets: int = 32  # of relative positions
    distance: int = 128  # longer ones share a bucket
    gated: bool = False
    tied: bool = True  # the output layer uses the embedding table
    scaled: bool = True  # the decoder's result is divided by sqrt(model)


def network(config: Config) -> text_to_text.Network:
    """The network of models/text_to_text.py."""
    (vocab, wide, heads, d_ff, layer), precision = config.dims(), config.precision
    head, decoder_layer = md.Dim("head", config.d_head), md.Dim("decoder_layer", config.decoder_layers)
    attention = causal.Attention(wide, heads, head, precision, scale=1.0)
    source_attention, cross = replace(attention, length="source", causal=False), replace(attention, name="cross")
    linear = partial(causal.linear, precision=precision)
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=precision)
    buckets = partial(md.nn.relative_bias, buckets=config.buckets, distance=config.distance, precision=precision)

    def table() -> md.Tensor:
        return md.param("embed", [vocab, wide], init=md.init.normal(1.0), dtype=precision.param)

    def rows(table: md.Tensor, ids: md.Tensor) -> md.Tensor:
        return md.prefer(md.cast(md.take(table, ids, vocab), precision.compute), "batch")

    def feed(x: md.Tensor) -> md.Tensor:
        with md.scope("feed_forward"):
            if config.gated:
                h = md.gelu(linear(x, "w_gate", [wide], [d_ff])) * linear(x, "w_up", [wide], [d_ff])
            else:
                h = md.relu(linear(x, "w_in", [wide], [d_ff]))
            return linear(h, "w_out", [d_ff], [wide])

    def encode(table: md.Tensor, ids: md.Tensor) -> md.Tensor:
        def block(x: md.Tensor) -> md.Tensor:
            x = x + source_attention(norm(x, name="norm_1"), bias=bias)[0]
            return x + feed(norm(x, name="norm_3"))

        with md.scope("encoder"):
            bias = buckets(heads, f"memory:{ids.dims[1].size}", ids.dims[1])
            with md.scope("layer"):
                x = md.layers(block, rows(table, ids), over=layer, remat=config.remat)
            return norm(x)

    def keys(encoded: md.Tensor) -> text_to_text.Cache:
        with md.scope("decoder/layer"):
            return md.layers(lambda x: (x, cross.keys(x)), encoded, over=decoder_layer, collect=True)[1]

    def decode(table: md.Tensor, ids: md.Tensor, encoded: Any, cache: Any = None, position: Any = 0) -> Any:
        def block(x: md.Tensor, cache: Any = None) -> tuple[md.Tensor, Any]:
            y, kept = attention(norm(x, name="norm_1"), cache, position, bias)
            x = x + y
            q = cross.queries(norm(x, name="norm_2"))
            memory = {"k": cache["cross_k"], "v": cache["cross_v"]} if cache else cross.keys(encoded)
            x = x + cross.attend(q, memory, memory="source")
            return x + feed(norm(x, name="norm_3")), kept

        length = next((d for d in ids.dims if d.name == "length"), None)
        memory = next(d for d in cache["k"].dims if d.name == "memory") if cache else f"memory:{ids.dims[1].size}"
        with md.scope("decoder"):
            bias = buckets(heads, memory, length, causal=True, offset=position)
            with md.scope("layer"):
                x = rows(table, ids)
                x, cache = md.layers(block, x, over=decoder_layer, xs=cache, remat=config.remat, collect=True)
            x = norm(x) * (config.d_model**-0.5 if config.scaled else 1.0)
        return causal.logits(x, table, wide, vocab, precision, config.tied), cache

    return text_to_text.Network(table, encode, keys, decode)


t5 = text_to_text.workload("t5", Config(), network, layouts=LAYOUTS, hugging_face=t5_names.HUGGING_FACE)
t5_small = t5.replace(
    length=512, source=512, vocab=32128, layers=6, decoder_layers=6, d_model=512, heads=8, d_head=64, d_ff=2048
)
t5_base = t5_small.replace(layers=12, decoder_layers=12, d_model=768, heads=12, d_ff=3072)
t5_11_base = t5_base.replace(d_ff=2048, gated=True, tied=False, scaled=False)
t5_11_xl = t5_11_base.replace(layers=24, decoder_layers=24, d_model=2048, heads=32, d_ff=5120)
