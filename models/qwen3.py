"""Qwen 3: Llama's layers with RMS norms of queries and keys (Yang et al., 2025).

The formulas and the layouts are those of models/llama.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import meshdsl as md
from meshdsl.models import causal, llama, rotary
from meshdsl.models.rotary import Rotary

__all__ = ["Config", "qwen3", "qwen3_32b", "qwen3_8b"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and options; the defaults fit a laptop."""

    eps: float = 1e-6
    norms: bool = True


def settings(hub: md.HubConfig) -> dict[str, Any]:
    """The rotary positions. Where no layer has a window, keys that say which layers have one change nothing."""
    hub.only("layer_types", ["full_attention"] * hub.size("num_hidden_layers"))
    hub.size("max_window_layers", 1)
    return rotary.settings(hub)


_NORM = "model.layers.{layer}.self_attn"
HUGGING_FACE = replace(
    llama.HUGGING_FACE,
    tensors={
        **llama.TENSORS,
        "layer/attention/norm_q/scale": (f"{_NORM}.q_norm.weight", "head"),
        "layer/attention/norm_k/scale": (f"{_NORM}.k_norm.weight", "head"),
    },
    fixed={"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    settings=settings,
    architecture="Qwen3ForCausalLM",
)
qwen3 = causal.workload("qwen3", Config(), llama.network, layouts=llama.LAYOUTS, hugging_face=HUGGING_FACE)
qwen3_8b = qwen3.replace(
    batch=512, length=4096, vocab=151936, layers=36, d_model=4096, query_heads=32, heads=8, d_head=128, d_ff=12288,
    rotary=Rotary(1000000.0), compute_dtype="bfloat16",
)  # fmt: skip
qwen3_32b = qwen3_8b.replace(layers=64, d_model=5120, query_heads=64, d_ff=25600)
