"""The names of T5's tensors and options in a Hugging Face directory."""

from __future__ import annotations

from typing import Any

import meshdsl as md

__all__ = ["HUGGING_FACE"]

Lines = dict[str, tuple[str, str]]


def _attention(path: str, name: str) -> Lines:
    into = {f"{path}/w{x}": (f"{name}.{x}.weight", "heads head, model") for x in ("q", "k", "v")}
    return {**into, f"{path}/wo": (f"{name}.o.weight", "model, heads head")}


def _stack(kind: str, layer: str, feed: int) -> Lines:
    """The lines of the encoder or the decoder; `feed` is the place of the feed-forward layer in a block."""
    block = f"{kind}.block.{{{layer}}}.layer"
    first = f"{kind}.block.0.layer.0.SelfAttention"
    dense = f"{block}.{feed}.DenseReluDense"
    return {
        f"{kind}/positions": (f"{first}.relative_attention_bias.weight", "bucket, heads"),
        f"{kind}/layer/norm_1/scale": (f"{block}.0.layer_norm.weight", "model"),
        **_attention(f"{kind}/layer/attention", f"{block}.0.SelfAttention"),
        f"{kind}/layer/norm_3/scale": (f"{block}.{feed}.layer_norm.weight", "model"),
        f"{kind}/layer/feed_forward/w_in": (f"{dense}.wi.weight", "d_ff, model"),
        f"{kind}/layer/feed_forward/w_gate": (f"{dense}.wi_0.weight", "d_ff, model"),
        f"{kind}/layer/feed_forward/w_up": (f"{dense}.wi_1.weight", "d_ff, model"),
        f"{kind}/layer/feed_forward/w_out": (f"{dense}.wo.weight", "model, d_ff"),
        f"{kind}/norm/scale": (f"{kind}.final_layer_norm.weight", "model"),
    }


def _tensors() -> Lines:
    block = "decoder.block.{decoder_layer}.layer.1"
    return {
        "embed": ("shared.weight", "vocab, model"),
        **_stack("encoder", "layer", 1),
        **_stack("decoder", "decoder_layer", 2),
        "decoder/layer/norm_2/scale": (f"{block}.layer_norm.weight", "model"),
        **_attention("decoder/layer/cross", f"{block}.EncDecAttention"),
        "unembed": ("lm_head.weight", "vocab, model"),
    }


def _settings(hub: md.HubConfig) -> dict[str, Any]:
    """The form of the feed-forward layer, and of the output layer: T5 1.1 is not scaled, and has one of its own.

    Older files say so by `tie_word_embeddings`; newer ones by `scale_decoder_outputs`, and always tie by name.
    """
    gated = hub.only("feed_forward_proj", "relu", "gated-gelu") == "gated-gelu"
    hub.only("dense_act_fn", "gelu_new" if gated else "relu")
    hub.only("is_gated_act", gated)
    hub.size("n_positions", 512)  # not used by relative positions
    scaled = hub.flag("scale_decoder_outputs", hub.flag("tie_word_embeddings", True))
    return {"gated": gated, "scaled": scaled, "tied": scaled or "lm_head.weight" not in hub.tensors}


def _to_hub(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "scale_decoder_outputs": config.scaled,
        "tie_word_embeddings": config.tied,
    }


HUGGING_FACE = md.HuggingFace(
    _tensors(),
    {
        "vocab_size": "vocab", "num_layers": "layers", "num_decoder_layers": "decoder_layers", "d_model": "d_model",
        "d_kv": "d_head", "num_heads": "heads", "d_ff": "d_ff", "layer_norm_epsilon": "eps",
        "relative_attention_num_buckets": "buckets", "relative_attention_max_distance": "distance",
    },
    fixed={"model_type": "t5", "is_encoder_decoder": True},
    defaults={
        "num_decoder_layers": lambda hub: hub.size("num_layers"), "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    },
    settings=_settings,
    config=_to_hub,
    ignored=("*.embed_tokens.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    architecture="T5ForConditionalGeneration",
)  # fmt: skip
