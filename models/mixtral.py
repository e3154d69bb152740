"""Mixtral: Llama's layers with a mixture of experts in place of the feed-forward layer (Jiang et al., 2024).

    x = embed[tokens]
    for each layer:  x = x + attention(norm(x));  x = x + sum over the two best experts e of g_e FFN_e(norm(x))
    logits = norm(x) unembed;  loss = mean over batch and length of the cross entropy

g is the softmax over all experts, divided by its sum over the two. By default, no token is dropped: the experts
compute grouped products, or with `dispatch` "index" or "einsum" a slot for every token, experts / chosen times the
work. With a `capacity_factor`, a sequence is a group; an expert has ceil(factor * chosen * length / experts) slots, and
tokens beyond them skip it. There, `expert_position` is no dim, and the layouts with `context` do not apply.

The layouts are those of models/llama.py, and three with whole experts on different devices, where slots are sent by
all_to_all and grouped products gather the experts: `expert`; `expert_model` also shards heads, vocabulary and each
expert; `expert_zero` also stores heads and vocabulary sharded over the data axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal, llama, rotary
from meshdsl.models.rotary import Rotary

__all__ = ["Config", "LAYOUTS", "experts", "mixtral", "mixtral_8x22b", "mixtral_8x7b", "network"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes and options; the defaults fit a laptop. `d_ff` is the width of one expert."""

    experts: int = 4
    chosen: int = 2  # experts of each token
    capacity_factor: float = 0.0  # 0: no token is dropped
    dispatch: str = "auto"  # of md.nn.moe_layer; auto: "grouped" if no token is dropped
    exchange: str = "padded"  # or "ragged", which sends only filled slots
    window: int = 0  # keys that a query sees, including its own; 0: all before it


_DATA = "batch:rows; expert_batch:rows"
_MODEL = "vocab:cols; d_ff:cols; heads:cols"
_RING = "length:ring; position:ring; expert_position:ring"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", _DATA),
    "zero": ("rows:8", f"{_DATA}; vocab:rows; d_ff:rows; heads:rows"),
    "model": ("cols:2", _MODEL),
    "data_model": ("rows:4 cols:2", f"{_DATA}; {_MODEL}"),
    "sequence": ("rows:4 cols:2", f"{_DATA}; length:cols; {_MODEL}"),
    "context": ("rows:2 ring:4", f"{_DATA}; {_RING}"),
    "zero_context": ("rows:2 ring:4", f"{_DATA}; {_RING}; vocab:rows; d_ff:rows; heads:rows"),
    "expert": ("rows:4", "batch:rows; expert:rows"),
    "expert_model": ("rows:4 cols:2", f"batch:rows; expert:rows; {_MODEL}"),
    "expert_zero": ("rows:4", "batch:rows; expert:rows; vocab:rows; heads:rows"),
}


def experts(x: md.Tensor, expert: md.Dim, hidden: md.Dim, *, together: bool = False, **options: Any) -> md.Tensor:
    """A gated mixture of experts of x [batch, length, model] or [batch, model]; the options are those of `moe_layer`.

    If `together`, the tokens of a sequence share the slots of the experts; if not, each is a group.
    """
    tokens = md.rename(x, length="position") if "length" in [d.name for d in x.dims] else x
    if not together or tokens is x:
        tokens = md.reshape(tokens, [*tokens.dims[:-1], md.Dim("token", 1), tokens.dims[-1]])
    y, _ = md.nn.moe_layer(
        tokens, expert, hidden, tokens=tokens.dims[-2], weigh="hidden", activation="silu", gated=True, **options
    )
    return md.reshape(y, x.dims)


def network(config: Config) -> tuple[causal.Network, causal.Empty]:
    """The network of models/causal.py, and its empty cache."""
    (_, wide, heads, d_ff, _), precision, factor = config.dims(), config.precision, config.capacity_factor
    head, group = md.Dim("head", config.d_head), md.Dim("group", config.query_heads // config.heads)
    speeds, window = config.rotary.speeds(head), config.window or None
    attention = causal.Attention(wide, heads, head, precision, group, speeds=speeds, window=window)
    dropless = not factor and config.exchange == "padded"
    dispatch = "grouped" if dropless and config.dispatch == "auto" else config.dispatch
    norm = partial(md.nn.rms_norm, over=wide, eps=config.eps, precision=precision)

    def feed_forward(x: md.Tensor) -> md.Tensor:
        return experts(
            x, md.Dim("expert", config.experts), d_ff, together=bool(factor), router="mixtral", k=config.chosen,
            capacity_formula="paper" if factor else "all", capacity_factor=factor or 1.0, exchange=config.exchange,
            dispatch=dispatch, precision=precision,
        )  # fmt: skip

    def block(x: md.Tensor, attend: causal.Attend) -> md.Tensor:
        x = x + attend(norm(x, name="norm_1"))
        return x + feed_forward(norm(x, name="norm_2"))

    return causal.stacked(config, attention, block, norm, tied=config.tied)


_LAYER = "model.layers.{layer}.block_sparse_moe"
TENSORS = {
    **{path: line for path, line in llama.TENSORS.items() if "feed_forward" not in path},
    "layer/moe/gate": (f"{_LAYER}.gate.weight", "gate, model"),
    "layer/moe/wi_gate": (f"{_LAYER}.experts.{{expert}}.w1.weight", "d_ff, model"),
    "layer/moe/wi": (f"{_LAYER}.experts.{{expert}}.w3.weight", "d_ff, model"),
    "layer/moe/wo": (f"{_LAYER}.experts.{{expert}}.w2.weight", "model, d_ff"),
}


def settings(hub: md.HubConfig) -> dict[str, Any]:
    """The fields that are not one key of config.json: rotary positions, and the window, which may be null."""
    window = 0 if hub.values.get("sliding_window") is None else hub.size("sliding_window")
    return {**rotary.settings(hub), "window": window}


HUGGING_FACE = replace(
    llama.HUGGING_FACE,
    tensors=TENSORS,
    keys={**llama.HUGGING_FACE.keys, "num_local_experts": "experts", "num_experts_per_tok": "chosen"},
    fixed={"model_type": "mixtral", "hidden_act": "silu"},
    defaults={**llama.HUGGING_FACE.defaults, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    settings=settings,
    config=lambda config: {**rotary.to_hub(config), "sliding_window": config.window or None},
    architecture="MixtralForCausalLM",
)
mixtral = causal.workload("mixtral", Config(), network, layouts=LAYOUTS, hugging_face=HUGGING_FACE)
mixtral_8x7b = mixtral.replace(
    length=4096, vocab=32000, layers=32, d_model=4096, query_heads=32, heads=8, d_head=128, d_ff=14336, experts=8,
    rotary=Rotary(1000000.0),
)  # fmt: skip
mixtral_8x22b = mixtral_8x7b.replace(vocab=32768, layers=56, d_model=6144, query_heads=48, d_ff=16384)
