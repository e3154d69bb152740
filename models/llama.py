"""Llama 2 and 3: RMS norm, rotary positions, grouped queries, SwiGLU (Touvron et al., 2023; Grattafiori et al., 2024).

    x = embed[tokens]
    for each layer:  x = x + attention(norm(x));  x = x + (silu(norm(x) w_gate) * (norm(x) w_in)) w_out
    logits = norm(x) unembed;  loss = mean over batch and length of the cross entropy

`heads` are the key and value heads. The layouts: `zero` stores each weight sharded over the data axis and gathers it
for use (ZeRO stage 3, or FSDP); `model` and `data_model` are Megatron's; `sequence` shards positions too between
Megatron's layers; `context` shards positions everywhere, for long sequences: attention goes around a ring, or by an
all_to_all if that sends less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import meshdsl as md
from meshdsl.models import causal, rotary
from meshdsl.models.rotary import Rotary

__all__ = [
    "HUGGING_FACE", "LAYOUTS", "TENSORS", "Config", "llama", "llama2_7b", "llama31_8b", "llama32_1b", "llama3_8b",
    "llama3_70b", "llama3_405b", "network",
]  # fmt: skip


@dataclass(frozen=True)
class Config(causal.Config):
    """Sizes and options; the defaults fit a laptop. `heads` are those of keys and values."""

    query_heads: int = 4
    heads: int = 2
    d_head: int = 16
    rotary: Rotary = Rotary()  # noqa: RUF009 - a frozen value
    tied: bool = False  # the output layer uses the embedding table
    norms: bool = False  # RMS norms of queries and keys, as in models/qwen3.py


_MODEL = "vocab:cols; d_ff:cols; heads:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "zero": ("rows:8", "batch:rows; vocab:rows; d_ff:rows; heads:rows"),
    "model": ("cols:2", _MODEL),
    "data_model": ("rows:4 cols:2", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:4 cols:2", f"batch:rows; length:cols; {_MODEL}"),
    "context": ("rows:2 ring:4", "batch:rows; length:ring"),
    "zero_context": ("rows:2 ring:4", "batch:rows; length:ring; vocab:rows; d_ff:rows; heads:rows"),
}


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    (_, wide, heads, d_ff, _), precision = config.dims(), config.precision
    head, group = md.Dim("head", config.d_head), md.Dim("group", config.query_heads // config.heads)
    speeds, eps = config.rotary.speeds(head), config.eps if config.norms else None
    attention = causal.Attention(wide, heads, head, precision, group, speeds=speeds, eps=eps)
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=precision)

    def block(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + attend(norm(x, name="norm_1"))
        return x + causal.gated(norm(x, name="norm_2"), d_ff, precision)

    return causal.stacked(config, attention, block, norm, tied=config.tied)


TENSORS = {
    "embed": ("model.embed_tokens.weight", "vocab, model"),
    "layer/norm_1/scale": ("model.layers.{layer}.input_layernorm.weight", "model"),
    "layer/attention/wq": ("model.layers.{layer}.self_attn.q_proj.weight", "heads group head, model"),
    "layer/attention/wk": ("model.layers.{layer}.self_attn.k_proj.weight", "heads head, model"),
    "layer/attention/wv": ("model.layers.{layer}.self_attn.v_proj.weight", "heads head, model"),
    "layer/attention/wo": ("model.layers.{layer}.self_attn.o_proj.weight", "model, heads group head"),
    "layer/norm_2/scale": ("model.layers.{layer}.post_attention_layernorm.weight", "model"),
    "layer/feed_forward/w_gate": ("model.layers.{layer}.mlp.gate_proj.weight", "d_ff, model"),
    "layer/feed_forward/w_in": ("model.layers.{layer}.mlp.up_proj.weight", "d_ff, model"),
    "layer/feed_forward/w_out": ("model.layers.{layer}.mlp.down_proj.weight", "model, d_ff"),
    "norm/scale": ("model.norm.weight", "model"),
    "unembed": ("lm_head.weight", "vocab, model"),
}


HUGGING_FACE = md.HuggingFace(
    TENSORS,
    {
        "vocab_size": "vocab", "num_hidden_layers": "layers", "hidden_size": "d_model", "head_dim": "d_head",
        "num_attention_heads": "query_heads", "num_key_value_heads": "heads", "intermediate_size": "d_ff",
        "rms_norm_eps": "eps", "tie_word_embeddings": "tied",
    },
    fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "head_dim": lambda hub: hub.size("hidden_size") // hub.size("num_attention_heads"),
        "num_key_value_heads": lambda hub: hub.size("num_attention_heads"),
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    settings=rotary.settings,
    config=rotary.to_hub,
    base="model",
    ignored=("*.rotary_emb.inv_freq",),
    architecture="LlamaForCausalLM",
)  # fmt: skip
llama = causal.workload("llama", Config(), network, layouts=LAYOUTS, hugging_face=HUGGING_FACE)
llama2_7b = llama.replace(
    length=4096, vocab=32000, layers=32, d_model=4096, query_heads=32, heads=32, d_head=128, d_ff=11008
)
llama31_8b = llama.replace(
    length=8192, vocab=128256, layers=32, d_model=4096, query_heads=32, heads=8, d_head=128, d_ff=14336,
    rotary=Rotary(500000.0, 8.0, "llama3"),
)  # fmt: skip
llama32_1b = llama31_8b.replace(
    layers=16, d_model=2048, d_head=64, d_ff=8192, tied=True, rotary=Rotary(500000.0, 32.0, "llama3")
)
# As they were trained: bfloat16 products, float32 weights and sums (Grattafiori et al., 2024, tables 3 and 4).
llama3_8b = llama31_8b.replace(batch=512, rotary=Rotary(500000.0), compute_dtype="bfloat16")
llama3_70b = llama3_8b.replace(layers=80, d_model=8192, query_heads=64, d_ff=28672)
llama3_405b = llama3_8b.replace(batch=2048, layers=126, d_model=16384, query_heads=128, d_ff=53248)
