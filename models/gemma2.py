"""Gemma 2: Llama's layers with alternating windows, soft caps, and a norm after each part (Gemma Team, 2024).

    x = sqrt(model) embed[tokens]
    for each layer:  x = x + norm(attention(norm(x)));  x = x + norm((gelu(norm(x) w_gate) * (norm(x) w_in)) w_out)
    logits = cap(norm(x) embed);  cap(z) = c tanh(z / c), which the scores of attention get too

Norms multiply by 1 + scale. Of each `period` layers, all but the last one see a window of keys; a trip of the loop over
`layer` computes one period, as `sub_0`, `sub_1`, ..., and a loop over `rest` what remains. The layouts are those of
models/llama.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal, gemma_names, llama, rotary
from meshdsl.models.rotary import Rotary

__all__ = ["HUGGING_FACE", "Config", "gemma2", "gemma2_27b", "gemma2_2b", "gemma2_9b", "network"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and options; the defaults fit a laptop."""

    eps: float = 1e-6
    tied: bool = True
    period: int = 2
    window: int = 16  # keys that a query sees, including its own, in all layers of a period but the last one
    scalar: float = 16.0  # scores are divided by its root
    score_cap: float = 50.0  # 0: none
    logit_cap: float = 30.0
    local_rotary: Rotary | None = None  # of layers with a window; None: as all others

    @property
    def periods(self) -> tuple[int, int]:
        """The number of whole periods, and of layers after them, all with a window."""
        return divmod(self.layers, self.period)


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    (_, wide, heads, d_ff, _), precision = config.dims(), config.precision
    head, group = md.Dim("head", config.d_head), md.Dim("group", config.query_heads // config.heads)
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, scale_offset=1.0, precision=precision)

    def attention(window: int | None) -> causal.Attention:
        speeds = ((config.local_rotary if window else None) or config.rotary).speeds(head)
        return causal.Attention(
            wide, heads, head, precision, group, speeds=speeds, window=window, scale=1 / math.sqrt(config.scalar),
            soft_cap=config.score_cap or None, eps=config.eps if config.norms else None, scale_offset=1.0,
        )  # fmt: skip

    def block(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + norm(attend(norm(x, name="norm_1")), name="norm_2")
        return x + norm(causal.gated(norm(x, name="norm_3"), d_ff, precision, md.gelu), name="norm_4")

    whole, rest = config.periods
    local, last = (attention(config.window), block), (attention(None), block)
    stacks = [causal.Stack(md.Dim("layer", whole), [local] * (config.period - 1) + [last])] if whole else []
    stacks += [causal.Stack(md.Dim("rest", rest), [local])] if rest else []
    root = math.sqrt(config.d_model)
    run, empty = causal.network(config, stacks, norm, tied=config.tied, place=lambda x, _: x * root)

    def capped(*args: Any) -> tuple[md.Tensor, Any]:
        logits, cache = run(*args)
        return (md.tanh(logits / config.logit_cap) * config.logit_cap if config.logit_cap else logits), cache

    return capped, empty


def settings(hub: md.HubConfig) -> dict[str, Any]:
    """The rotary positions; the windows alternate in every file."""
    hub.only("layer_types", gemma_names.types(hub.size("num_hidden_layers"), 2))
    return rotary.settings(hub)


HUGGING_FACE = md.HuggingFace(
    gemma_names.tensors,
    {**gemma_names.KEYS, "attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"},
    fixed={
        "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "tie_word_embeddings": True,
    },
    defaults=llama.HUGGING_FACE.defaults,
    settings=settings,
    config=lambda config: {**rotary.to_hub(config), **gemma_names.written(config)},
    base="model",
    architecture="Gemma2ForCausalLM",
)  # fmt: skip
gemma2 = causal.workload("gemma2", Config(), network, layouts=llama.LAYOUTS, hugging_face=HUGGING_FACE)
gemma2_2b = gemma2.replace(
    batch=512, length=8192, vocab=256000, layers=26, d_model=2304, query_heads=8, heads=4, d_head=256, d_ff=9216,
    window=4096, scalar=256.0, compute_dtype="bfloat16",
)  # fmt: skip
gemma2_9b = gemma2_2b.replace(layers=42, d_model=3584, query_heads=16, heads=8, d_ff=14336)
gemma2_27b = gemma2_9b.replace(layers=46, d_model=4608, query_heads=32, heads=16, d_head=128, d_ff=36864, scalar=144.0)
