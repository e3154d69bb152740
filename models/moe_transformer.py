"""The Transformer with experts of GShard (Lepikhin et al., 2020, section 2).

In every second layer of encoder and decoder, the feed-forward layer is a mixture of experts. Each token goes to the two
experts with its largest gate values. Tokens of a group compete for the experts' slots; tokens without a slot skip it.

If a layout shards `expert` and `group` over one axis, tokens are sent to their experts by all_to_all. The presets are
the seven models of Table 1, with the sizes of appendix A.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models import parallel_text, seq2seq

__all__ = ["Config", "Experts", "FAMILY", "LAYOUTS", "decoder", "mixture", "moe", "optimizer", "parts", "preset"]


@dataclass(frozen=True)
class Experts:
    """Options of the experts in every second layer: sizes, router, and optimizer."""

    experts: int = 8
    expert_hidden: int = 1024
    sequences: int = 1  # sequences per group; the tokens of a group compete for the experts' slots
    router: str = "gshard"  # Algorithm 1 with capacity ceil(2 tokens / experts); or any router of md.nn.moe.route
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 2.0
    decode_capacity_factor: float | None = None  # None: decoding drops no tokens
    exchange: str = "padded"  # or "ragged", which sends only filled slots
    train: bool = True  # selects the capacity factor; training with a key also rejects second choices at random
    aux_weight: float = 0.01
    dispatch: str = "auto"
    optimizer: str = "adafactor"  # or "adam"


@dataclass(frozen=True)
class Config(Experts, seq2seq.Config):
    """A Transformer with experts in every second layer; d_ff is the width of the dense feed-forward layers."""

    learning_rate: float = 0.01


_EXPERTS = "batch:rows; group:rows; expert:rows"
_MODEL = "vocab:cols; heads:cols; d_ff:cols; expert_hidden:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows; group:rows; expert_group:rows"),
    "experts": ("rows:8", _EXPERTS),
    "experts_model": ("rows:4 cols:2", f"{_EXPERTS}; {_MODEL}"),
    "model": ("cols:8", _MODEL),
    "sequence": ("rows:4 cols:2", f"{_EXPERTS}; length:cols; source:cols; {_MODEL}"),
}


def mixture(config: Experts, precision: md.nn.Precision) -> seq2seq.Feed:
    """The feed-forward layer with experts. Groups are whole sequences, so dropped tokens do not depend on the mesh."""
    experts, hidden = md.Dim("expert", config.experts), md.Dim("expert_hidden", config.expert_hidden)
    router = md.nn.moe.Router(
        config.router,
        capacity_factor=config.capacity_factor,
        eval_capacity_factor=config.eval_capacity_factor,
        aux_weight=config.aux_weight,
    )

    def feed(x: md.Tensor, at: str, real: md.Tensor, key: md.Tensor | None) -> tuple[md.Tensor, md.Tensor]:
        y, aux = md.nn.moe_layer(
            grouped(x, at, config.sequences),
            experts,
            hidden,
            tokens="token",
            router=router,
            dispatch=md.nn.moe.TokenExchange(config.dispatch, config.exchange),
            train=config.train,
            key=key,
            nonpadding=grouped(real, at, config.sequences),
            precision=precision,
        )
        return ungrouped(y, x), aux

    return feed


def grouped(x: md.Tensor, at: str, sequences: int) -> md.Tensor:
    """Reshapes [batch, at, ...] to [group, token, ...]; a group is `sequences` consecutive sequences."""
    if sequences == 1:
        return md.rename(x, **{"batch": "group", at: "token"})
    batch = next(d for d in x.dims if d.name == "batch")
    if batch.size % sequences:
        raise md.ShapeError(f"the batch of {batch.size} is not a multiple of {sequences}, the sequences per group")
    x = md.unflatten(x, "batch", [md.Dim("group", batch.size // sequences), md.Dim("sequence", sequences)])
    return md.flatten(x, ["sequence", at], "token")


def ungrouped(y: md.Tensor, like: md.Tensor) -> md.Tensor:
    """The inverse of `grouped`: reshapes y to the batch and position dims of `like`."""
    batch, at = like.dims[:2]
    if y.dims[0].size == batch.size:
        return md.rename(y, group="batch", token=at.name)
    y = md.unflatten(y, "token", [md.Dim("sequence", batch.size // y.dims[0].size), at])
    return md.flatten(y, ["group", "sequence"], "batch")


def model(config: Config) -> md.Model:
    """A model of a batch: (logits [batch, length, vocab], auxiliary loss). Raises `ShapeError` for odd `layers`."""
    return seq2seq.transformer(config, mixture(config, config.precision), every=2)


def decoder(config: Config, search: seq2seq.Search) -> md.Model:
    """Like `seq2seq.decoder`, with experts.

    In decoding, a group is one position of `sequences` sequences with all their beams. These few, similar tokens often
    choose the same experts, so by default experts have enough slots for all of them; the result equals that of the
    whole sequence at once without drops. `decode_capacity_factor` reduces the slots.
    """
    config = dataclasses.replace(config, train=False)
    factor = config.experts if config.decode_capacity_factor is None else config.decode_capacity_factor
    position_feed = mixture(dataclasses.replace(config, eval_capacity_factor=factor), config.precision)
    return seq2seq.decoder(config, search, mixture(config, config.precision), every=2, feed_place=position_feed)


def loss(config: Config) -> Callable[..., Any]:
    """The loss function: cross entropy of the targets plus the auxiliary loss. A key turns on noise and dropout."""
    logits_of = model(config)

    def total(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> Any:
        logits, aux = logits_of(params, batch, key)
        cross_entropy, balance = seq2seq.token_loss(config, logits, batch["targets"]), md.train.mean(aux)
        return cross_entropy + balance, {"cross_entropy": cross_entropy, "aux": balance}

    return total


def data(config: Config, seed: int) -> parallel_text.Batches:
    """The parallel text of models/translation.py, in bytes: sources and their English."""
    text = parallel_text.parallel_text(config.source, config.length, "source")
    return parallel_text.Batches(text, config.batch, seed)


def parts(config: Any) -> tuple[str, int] | None:
    """Micro-batches have whole groups: then the auxiliary loss, a mean over groups, is that of the batch."""
    return None if config.dropout else ("batch", config.sequences)


def optimizer(config: Any) -> md.optim.Optimizer:
    """Adafactor as in GShard's appendix A.2, with each expert as a separate weight; Adam; or SGD with momentum."""
    if config.optimizer == "adam":
        return md.optim.adam(config.learning_rate)
    if config.optimizer == "momentum":
        return md.optim.momentum(config.learning_rate)
    if config.optimizer != "adafactor":
        raise md.ShapeError(f"unknown optimizer {config.optimizer!r}; known: adafactor, adam, momentum")
    rate = md.optim.inverse_sqrt(config.learning_rate, hold=10_000)
    return md.optim.adafactor(rate, max_b2=0.99, stacked="layer* expert")


moe = md.Workload(
    "moe", Config(), model=model, inputs=seq2seq.inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS,
    mean_over=parts, data=data,
)  # fmt: skip

FAMILY = tuple((experts, layers) for layers in (12, 36) for experts in (128, 512, 2048)) + ((2048, 60),)


def preset(experts: int, layers: int, **changes: Any) -> md.Workload:
    """A model of GShard's Table 1 with the sizes of appendix A.2; `layers` counts encoder and decoder together.

    >>> preset(2048, 36).config.layers
    18

    A batch has 4 million tokens, and as many groups as experts: one group per device if there are as many devices.
    """
    if (experts, layers) not in FAMILY:
        raise md.ShapeError(f"Table 1 has no model with {experts} experts and {layers} layers; known: {FAMILY}")
    sizes = {
        "experts": experts, "layers": layers // 2, "d_model": 1024, "heads": 16, "d_head": 128, "d_ff": 8192,
        "expert_hidden": 8192, "vocab": 64000, "source": 128, "length": 128, "batch": 16 * experts, "sequences": 16,
        "remat": True, "learning_rate": 1.0,
    }  # fmt: skip
    return moe.replace(**{**sizes, **changes})
