"""Decoder-only language models with experts in every second layer, as Lancet takes them (Jiang et al., 2024).

Groups are sequences; the gate is Switch's, or batch-prioritised. `gpt2_moe` and `gpt2_moe_large` have the sizes of
GPT-2 small and large: 12 layers of 768, and 24 of 1024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from models import moe_transformer, transformer

__all__ = ["Config", "LAYOUTS", "gpt2_moe", "gpt2_moe_large", "gpt_moe"]


@dataclass(frozen=True)
class Config:
    """A decoder-only model with experts in every second layer; the defaults fit a laptop."""

    batch: int = 16
    length: int = 128
    vocab: int = 256
    layers: int = 4
    d_model: int = 256
    heads: int = 8
    d_head: int = 32
    d_ff: int = 1024
    experts: int = 8
    expert_hidden: int = 1024
    sequences: int = 1
    router: str = "switch"  # or "batch_prioritised", as in the models of Lancet
    capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    train: bool = True
    aux_weight: float = 0.01
    dispatch: str = "auto"
    dropout: float = 0.0
    label_smoothing: float = 0.0
    remat: bool | str = False
    learning_rate: float = 1e-3
    optimizer: str = "adam"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"


LAYOUTS = {
    name: (mesh, layout.replace("; source:cols", "")) for name, (mesh, layout) in moe_transformer.LAYOUTS.items()
}


def model(config: Config) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch of tokens."""
    vocab, wide, d_ff = md.Dim("vocab", config.vocab), md.Dim("model", config.d_model), md.Dim("d_ff", config.d_ff)
    heads, head, pairs = (
        md.Dim("heads", config.heads),
        md.Dim("head", config.d_head),
        md.Dim("layer", config.layers // 2),
    )
    precision = moe_transformer.precision_of(config)
    feed = moe_transformer.mixture(config, precision)

    def norm(x: md.Tensor, name: str) -> md.Tensor:
        return md.nn.layer_norm(x, wide, name=name, precision=precision)

    def attended(x: md.Tensor, name: str) -> md.Tensor:
        y = norm(x, f"{name}_norm")
        return x + md.nn.multi_head_attention(y, heads, head, causal=True, name=name, precision=precision)

    def pair(carry: Any, key: md.Tensor | None = None) -> Any:
        x, total = carry
        x = attended(x, "attention_1")
        x = x + md.nn.feed_forward(
            md.nn.layer_norm(x, wide, name="norm_1", precision=precision), d_ff, precision=precision
        )
        x = attended(x, "attention_2")
        real = md.broadcast(md.cast(True, "bool"), x.dims[:2])
        y, aux = feed(norm(x, "norm_2"), "length", real, key)
        return x + y, total + md.cast(aux, total.dtype)

    def gpt(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        x, table = md.nn.embedding(batch["tokens"], vocab, wide, precision=precision)
        x = md.nn.learned_positions(x, precision=precision)
        start = md.cast(0.0, "float64" if config.reduce_dtype == "float64" else "float32")
        keys = None if key is None else md.random.split(key, pairs)
        x, aux = md.layers(pair, (x, start), over=pairs, xs=keys, remat=config.remat)
        x = norm(x, "norm")
        return md.prefer(precision.einsum(x, table, out=[*batch["tokens"].dims, vocab]), vocab), aux

    return md.model(gpt)


def loss(config: Config) -> Callable[..., Any]:
    """(cross entropy of the next token plus the auxiliary loss, metrics of both)."""
    logits_of = model(config)

    def total(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> Any:
        logits, aux = logits_of(params, batch, key)
        each = md.nn.softmax_cross_entropy(logits, batch["targets"], label_smoothing=config.label_smoothing)
        cross_entropy = md.mean(each)
        return cross_entropy + md.cast(aux, cross_entropy.dtype), {"cross_entropy": cross_entropy, "aux": aux}

    return total


gpt_moe = md.Workload(
    "gpt_moe",
    Config(),
    model=model,
    inputs=transformer.inputs,
    loss=loss,
    optimizer=moe_transformer.optimizer,
    layouts=LAYOUTS,
)
gpt2_moe = gpt_moe.replace(layers=12, d_model=768, heads=12, d_head=64, d_ff=3072, expert_hidden=3072, vocab=50304)
gpt2_moe_large = gpt_moe.replace(
    layers=24, d_model=1024, heads=16, d_head=64, d_ff=4096, expert_hidden=4096, vocab=50304
)
