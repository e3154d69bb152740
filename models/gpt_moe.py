"""Decoder-only language models with experts in every second layer, as in Lancet (Jiang et al., 2024).

Each sequence is a group; the router is "switch" or "batch_prioritised". The layers are in models/encoder_decoder.py.
`gpt2_moe` and `gpt2_moe_large` have the sizes of GPT-2 small and large: 12 layers of 768, and 24 of 1024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models import encoder_decoder, moe_transformer, transformer

__all__ = ["Config", "LAYOUTS", "gpt2_moe", "gpt2_moe_large", "gpt_moe"]


@dataclass(frozen=True)
class Config(moe_transformer.Experts, encoder_decoder.Config):
    """A decoder-only model with experts in every second layer; the defaults fit a laptop."""

    length: int = 128
    vocab: int = 256
    router: str = "switch"  # or "batch_prioritised", as in Lancet's models
    capacity_factor: float = 1.25
    optimizer: str = "adam"


LAYOUTS = {
    name: (mesh, layout.replace("; source:cols", "")) for name, (mesh, layout) in moe_transformer.LAYOUTS.items()
}


def model(config: Config) -> md.Model:
    """A model of a batch of tokens: (logits [batch, length, vocab], auxiliary loss)."""
    return encoder_decoder.language_model(config, moe_transformer.mixture(config, config.precision), every=2)


def loss(config: Config) -> Callable[..., Any]:
    """The loss function: cross entropy of the next token plus the auxiliary loss. A key turns on noise and dropout."""
    logits_of = model(config)

    def total(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> Any:
        logits, aux = logits_of(params, batch, key)
        each = md.nn.softmax_cross_entropy(logits, batch["targets"], label_smoothing=config.label_smoothing)
        cross_entropy, balance = md.train.mean(each, batch["targets"] != -100), md.train.mean(aux)
        return cross_entropy + balance, {"cross_entropy": cross_entropy, "aux": balance}

    return total


gpt_moe = md.Workload(
    "gpt_moe",
    Config(),
    model=model,
    inputs=transformer.inputs,
    loss=loss,
    optimizer=moe_transformer.optimizer,
    layouts=LAYOUTS,
    mean_over=moe_transformer.parts,
)
gpt2_moe = gpt_moe.replace(layers=12, d_model=768, heads=12, d_head=64, d_ff=3072, expert_hidden=3072, vocab=50304)
gpt2_moe_large = gpt_moe.replace(
    layers=24, d_model=1024, heads=16, d_head=64, d_ff=4096, expert_hidden=4096, vocab=50304
)
