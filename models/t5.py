"""T5: an encoder and a decoder with relative positions, RMS norm and unscaled scores (Raffel et al., 2020).

    x = embed[source];  for each layer of the encoder:  x = x + attention(norm(x));  x = x + feed(norm(x))
    y = embed[tokens];  for each layer of the decoder:  y = y + attention(norm(y));
                        y = y + attention(norm(y), to norm(x));  y = y + feed(norm(y))
    logits = norm(y) embed / sqrt(model);  loss = mean over batch and length of the cross entropy

feed is relu(x w_in) w_out, or if `gated` (gelu(x w_gate) * (x w_up)) w_out, as in T5 1.1 and Flan-T5, whose results are
not divided, and whose output layer is its own. The layouts are those of models/llama.py, for both sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from models import causal, t5_names

__all__ = ["LAYOUTS", "Config", "t5", "t5_11_base", "t5_11_xl", "t5_base", "t5_small"]

Cache = dict[str, md.Tensor]
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


def network(config: Config) -> tuple[Callable[..., Any], ...]:
    """The table of the embedding, the encoder, its keys and values for each layer of the decoder, and the decoder."""
    (vocab, wide, heads, d_ff, layer), precision = config.dims(), config.precision
    head, decoder_layer = md.Dim("head", config.d_head), md.Dim("decoder_layer", config.decoder_layers)
    linear = functools.partial(causal.linear, precision=precision)
    norm = functools.partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=precision)
    positions = functools.partial(
        md.nn.relative_bias, heads, buckets=config.buckets, distance=config.distance, precision=precision
    )

    def table() -> md.Tensor:
        return md.param("embed", [vocab, wide], init=md.init.normal(1.0), dtype=precision.param)

    def rows(table: md.Tensor, ids: md.Tensor) -> md.Tensor:
        return md.prefer(md.cast(md.take(table, ids, vocab), precision.compute), "batch")

    def keys(x: md.Tensor) -> Cache:
        return {kind: linear(x, f"w{kind}", [wide], [heads, head]) for kind in ("k", "v")}

    def attend(x: md.Tensor, kept: Cache, **options: Any) -> md.Tensor:
        y = md.attention(linear(x, "wq", [wide], [heads, head]), **kept, scale=1.0, **options)
        return linear(md.prefer(y, "batch", heads), "wo", [heads, head], [wide])

    def feed(x: md.Tensor) -> md.Tensor:
        y = norm(x, name="norm_3")
        with md.scope("feed_forward"):
            if config.gated:
                h = md.gelu(linear(y, "w_gate", [wide], [d_ff])) * linear(y, "w_up", [wide], [d_ff])
            else:
                h = md.relu(linear(y, "w_in", [wide], [d_ff]))
            return x + linear(h, "w_out", [d_ff], [wide])

    def encode(table: md.Tensor, ids: md.Tensor) -> md.Tensor:
        def one(x: md.Tensor) -> md.Tensor:
            y = norm(x, name="norm_1")
            with md.scope("attention"):
                x = x + attend(y, keys(y), length="source", bias=bias)
            return feed(x)

        with md.scope("encoder"):
            bias = positions(f"memory:{ids.dims[1].size}", ids.dims[1])
            with md.scope("layer"):
                x = md.layers(one, rows(table, ids), over=layer, remat=config.remat)
            return norm(x)

    def cross(x: md.Tensor) -> Cache:
        with md.scope("decoder/layer/cross"):
            return md.layers(lambda x: (x, keys(x)), x, over=decoder_layer, collect=True)[1]

    def decode(table: md.Tensor, ids: md.Tensor, states: Any, cache: Any = None, position: Any = 0) -> Any:
        def one(x: md.Tensor, old: Any = None) -> tuple[md.Tensor, Any]:
            y = norm(x, name="norm_1")
            with md.scope("attention"):
                kept = keys(y)
                if old is not None:
                    kept = {name: md.nn.write_cache(old[name], new, position) for name, new in kept.items()}
                x = x + attend(y, kept, causal=True, offset=position, bias=bias)
            y = norm(x, name="norm_2")
            with md.scope("cross"):
                to = keys(states) if old is None else {"k": old["cross_k"], "v": old["cross_v"]}
                x = x + attend(y, to, memory="source")
            return feed(x), None if old is None else {**old, **kept}

        length = next((d for d in ids.dims if d.name == "length"), None)
        memory = next(d for d in cache["k"].dims if d.name == "memory") if cache else f"memory:{ids.dims[1].size}"
        with md.scope("decoder"):
            bias = positions(memory, length, causal=True, offset=position)
            with md.scope("layer"):
                x, cache = md.layers(
                    one, rows(table, ids), over=decoder_layer, xs=cache, remat=config.remat, collect=True
                )
            x = norm(x) * (config.d_model**-0.5 if config.scaled else 1.0)
        if not config.tied:
            return linear(x, "unembed", [wide], [vocab]), cache
        return md.prefer(precision.einsum(x, table, out=[*ids.dims, vocab]), "batch", vocab), cache

    return table, encode, cross, decode


def model(config: Config) -> md.Model:
    """A model that computes the logits [batch, length, vocab]."""
    table, encode, _, decode = network(config)

    def logits(batch: Cache) -> md.Tensor:
        embed = table()
        return decode(embed, batch["tokens"], encode(embed, batch["source"]))[0]

    return md.model(logits)


def decoder(config: Config, search: Callable[..., Any]) -> Callable[..., md.Tensor]:
    """The function `(params, prompt[, key])`: the decoder's tokens for prompts [batch, length] of the encoder."""
    table, encode, cross, decode = network(config)
    once = md.model(lambda ids: cross(encode(table(), ids)))
    step = md.model(lambda ids, cache, position: decode(table(), ids, None, cache, position))

    def run(params: Cache, prompt: md.Tensor, *key: md.Tensor) -> md.Tensor:
        early = [p for p in params if p.startswith("encoder/") or p.endswith(("cross/wk", "cross/wv"))]
        source = md.rename(prompt, length="source")
        other = once({p: params[p] for p in ["embed", *early]}, source)
        late = {p: x for p, x in params.items() if p not in early}

        def empty(dims: tuple[md.Dim, ...]) -> Cache:
            zeros = {x: md.zeros([other[x].dims[0], *dims, *other[x].dims[-2:]], other[x].dtype) for x in other}
            return zeros | {f"cross_{name}": x for name, x in other.items()}

        start = md.zeros([prompt.dims[0], md.Dim("length", 1)], "int32")  # the padding token comes first
        return search(functools.partial(step, late), empty, start, *key)

    return run


def inputs(config: Config) -> dict[str, object]:
    """The specs of a batch: source [batch, source], tokens and the tokens that follow them [batch, length]."""
    source = md.spec([md.Dim("batch", config.batch), md.Dim("source", config.source)], "int32")
    return {"source": source, **causal.inputs(config)}


t5 = md.Workload(
    "t5", Config(), model=model, inputs=inputs, loss=lambda config: causal.loss(model(config)), decoder=decoder,
    optimizer=lambda config: md.optim.adam(config.learning_rate), mean_over=lambda config: "batch", layouts=LAYOUTS,
    hugging_face=t5_names.HUGGING_FACE,
)  # fmt: skip
t5_small = t5.replace(
    length=512, source=512, vocab=32128, layers=6, decoder_layers=6, d_model=512, heads=8, d_head=64, d_ff=2048
)
t5_base = t5_small.replace(layers=12, decoder_layers=12, d_model=768, heads=12, d_ff=3072)
t5_11_base = t5_base.replace(d_ff=2048, gated=True, tied=False, scaled=False)
t5_11_xl = t5_11_base.replace(layers=24, decoder_layers=24, d_model=2048, heads=32, d_ff=5120)
