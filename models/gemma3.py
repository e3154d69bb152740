"""Gemma 3, its text models: Gemma 2 with a layer in six without window, and norms for soft caps (Gemma Team, 2025).

The formulas and the layouts are those of models/gemma2.py. Layers with a window rotate faster, by `local_rotary`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal, gemma2, gemma_names, llama, rotary
from meshdsl.models.rotary import Rotary

__all__ = ["Config", "gemma3", "gemma3_12b", "gemma3_1b", "gemma3_27b", "gemma3_4b"]


@dataclass(frozen=True)
class Config(gemma2.Config):
    """Sizes and options; the defaults fit a laptop."""

    layers: int = 8
    period: int = 6
    norms: bool = True
    score_cap: float = 0.0
    logit_cap: float = 0.0
    rotary: Rotary = Rotary(1000000.0)  # noqa: RUF009 - a frozen value
    local_rotary: Rotary | None = Rotary()  # noqa: RUF009


def settings(hub: md.HubConfig) -> dict[str, Any]:
    """Both kinds of rotary positions, also where older files have them; a file has the pattern of windows or none."""
    hub.only("layer_types", gemma_names.types(hub.size("num_hidden_layers"), 6))
    hub.only("sliding_window_pattern", 6)
    hub.only("_sliding_window_pattern", 6)
    if hub.values.get("rope_parameters") is None:
        local = Rotary(hub.number("rope_local_base_freq", 10000.0))
        whole = rotary.read(hub.table("rope_scaling"), hub.number("rope_theta", 1000000.0))
    else:
        tables = hub.table("rope_parameters")
        full, near = tables.table("full_attention"), tables.table("sliding_attention")
        whole = rotary.read(full, full.number("rope_theta", 1000000.0))
        local = rotary.read(near, near.number("rope_theta", 10000.0))
        tables.close()
        for key, same in (("rope_theta", whole), ("rope_local_base_freq", local)):  # as transformers 4 has them
            hub.number(key, same.base)
        hub.table("rope_scaling")
    return {"rotary": whole, "local_rotary": local}


def config_of(config: Config) -> dict[str, Any]:
    """The keys of config.json for the windows and both kinds of rotary positions."""
    local = config.local_rotary or config.rotary
    tables = {"full_attention": rotary.written(config.rotary), "sliding_attention": rotary.written(local)}
    older = {**rotary.to_hub(config), "rope_local_base_freq": local.base}
    return {**older, "rope_parameters": tables, **gemma_names.written(config)}


HUGGING_FACE = replace(
    gemma2.HUGGING_FACE,
    tensors=partial(gemma_names.tensors, norms="qk"),
    keys=gemma_names.KEYS,
    fixed={**gemma2.HUGGING_FACE.fixed, "model_type": "gemma3_text", "use_bidirectional_attention": False},
    settings=settings,
    config=config_of,
    architecture="Gemma3ForCausalLM",
)
gemma3 = causal.workload("gemma3", Config(), gemma2.network, layouts=llama.LAYOUTS, hugging_face=HUGGING_FACE)
gemma3_1b = gemma3.replace(
    batch=512, length=8192, vocab=262144, layers=26, d_model=1152, query_heads=4, heads=1, d_head=256, d_ff=6912,
    window=512, scalar=256.0, compute_dtype="bfloat16",
)  # fmt: skip
gemma3_4b = gemma3_1b.replace(
    vocab=262208, layers=34, d_model=2560, query_heads=8, heads=4, d_ff=10240, window=1024,
    rotary=Rotary(1000000.0, 8.0, "linear"),
)  # fmt: skip
gemma3_12b = gemma3_4b.replace(layers=48, d_model=3840, query_heads=16, heads=8, d_ff=15360)
gemma3_27b = gemma3_4b.replace(layers=62, d_model=5376, query_heads=32, heads=16, d_head=128, d_ff=21504, scalar=168.0)
