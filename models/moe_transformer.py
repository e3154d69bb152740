"""The Transformer with experts of GShard (Lepikhin et al., 2020, section 2).

Every second layer of encoder and decoder has a mixture of experts for its feed-forward layer: each token is sent to
the two experts that its gate prefers, those of a group compete for places, and what finds none passes by the layer.

`expert` and `group` may be split by one axis: tokens then go to their experts by all_to_all, which follows from the
layout; nothing here names an axis. The presets are the seven models of Table 1, with the sizes of appendix A.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from models import seq2seq

__all__ = ["Config", "Experts", "FAMILY", "LAYOUTS", "decoder", "mixture", "moe", "optimizer", "preset"]


@dataclass(frozen=True)
class Experts:
    """Every second layer has experts: their sizes, their gate, and what trains a model that has them."""

    experts: int = 8
    expert_hidden: int = 1024
    sequences: int = 1  # sequences of one group, whose tokens compete for the experts' places
    router: str = "gshard"  # Algorithm 1 with its capacity, ceil(2 tokens / experts); or any other of md.nn.moe.route
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 2.0
    decode_capacity_factor: float | None = None  # None: no token is dropped where one is made at a time
    exchange: str = "padded"  # or "ragged", which sends only the slots that are filled
    train: bool = True  # which of the two holds; in training second choices are drawn, given a key
    aux_weight: float = 0.01
    dispatch: str = "auto"
    optimizer: str = "adafactor"  # or "adam"


@dataclass(frozen=True)
class Config(Experts, seq2seq.Config):
    """A Transformer whose every second layer has experts; d_ff is the width of the dense ones."""

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
    """The feed-forward layer of experts. Some sequences are a group, so that drops do not depend on the devices."""
    experts, hidden = md.Dim("expert", config.experts), md.Dim("expert_hidden", config.expert_hidden)

    def feed(x: md.Tensor, at: str, real: md.Tensor, key: md.Tensor | None) -> tuple[md.Tensor, md.Tensor]:
        y, aux = md.nn.moe_layer(
            grouped(x, at, config.sequences),
            experts,
            hidden,
            tokens="token",
            router=config.router,
            capacity_factor=config.capacity_factor,
            eval_capacity_factor=config.eval_capacity_factor,
            train=config.train,
            key=key,
            nonpadding=grouped(real, at, config.sequences),
            aux_weight=config.aux_weight,
            dispatch=config.dispatch,
            exchange=config.exchange,
            precision=precision,
        )
        return ungrouped(y, x), aux

    return feed


def grouped(x: md.Tensor, at: str, sequences: int) -> md.Tensor:
    """[batch, at, ...] as [group, token, ...]: a group is some sequences after each other."""
    if sequences == 1:
        return md.rename(x, **{"batch": "group", at: "token"})
    batch = next(d for d in x.dims if d.name == "batch")
    if batch.size % sequences:
        raise md.ShapeError(f"groups of {sequences} sequences do not divide a batch of {batch.size}")
    x = md.unflatten(x, "batch", [md.Dim("group", batch.size // sequences), md.Dim("sequence", sequences)])
    return md.flatten(x, ["sequence", at], "token")


def ungrouped(y: md.Tensor, like: md.Tensor) -> md.Tensor:
    """The other way, to the dims of what was grouped."""
    batch, at = like.dims[:2]
    if y.dims[0].size == batch.size:
        return md.rename(y, group="batch", token=at.name)
    y = md.unflatten(y, "token", [md.Dim("sequence", batch.size // y.dims[0].size), at])
    return md.flatten(y, ["group", "sequence"], "batch")


def model(config: Config) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch. Raises `ShapeError` for an odd number of layers."""
    return seq2seq.transformer(config, mixture(config, config.precision), every=2)


def decoder(config: Config, search: seq2seq.Search) -> md.Model:
    """What a search finds for each source of a batch: `seq2seq.decoder`, with experts.

    A group is one place of `sequences` sequences, with all their beams: few tokens, and alike (their first ones are
    the same), so they crowd at few experts. By default each has a place wherever it goes; the result is then what the
    whole sequence at once would give without drops. `decode_capacity_factor` gives an expert fewer slots.
    """
    config = dataclasses.replace(config, train=False)
    factor = config.experts if config.decode_capacity_factor is None else config.decode_capacity_factor
    place = mixture(dataclasses.replace(config, eval_capacity_factor=factor), config.precision)
    return seq2seq.decoder(config, search, mixture(config, config.precision), every=2, feed_place=place)


def loss(config: Config) -> Callable[..., Any]:
    """(cross entropy of the targets plus the auxiliary loss, metrics of both); takes a key for noise and dropout."""
    logits_of = model(config)

    def total(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> Any:
        logits, aux = logits_of(params, batch, key)
        cross_entropy = seq2seq.token_loss(config, logits, batch["targets"])
        return cross_entropy + md.cast(aux, cross_entropy.dtype), {"cross_entropy": cross_entropy, "aux": aux}

    return total


def optimizer(config: Any) -> md.optim.Optimizer:
    """Adafactor as in GShard's appendix A.2, every expert a weight of its own; Adam; or SGD with momentum."""
    if config.optimizer == "adam":
        return md.optim.adam(config.learning_rate)
    if config.optimizer == "momentum":
        return md.optim.momentum(config.learning_rate)
    if config.optimizer != "adafactor":
        raise md.ShapeError(f"no optimizer {config.optimizer!r}; there are: adafactor, adam, momentum")
    rate = md.optim.inverse_sqrt(config.learning_rate, hold=10_000)
    return md.optim.adafactor(rate, max_b2=0.99, stacked="layer* expert")


moe = md.Workload("moe", Config(), model=model, inputs=seq2seq.inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS)

FAMILY = tuple((experts, layers) for layers in (12, 36) for experts in (128, 512, 2048)) + ((2048, 60),)


def preset(experts: int, layers: int, **changes: Any) -> md.Workload:
    """One model of GShard's Table 1, `layers` being those of encoder and decoder together; sizes of appendix A.2.

    >>> preset(2048, 36).config.layers
    18

    4 million tokens a batch; as many groups as experts, so that each of as many devices has one.
    """
    if (experts, layers) not in FAMILY:
        raise md.ShapeError(f"Table 1 has no model of {experts} experts and {layers} layers; it has: {FAMILY}")
    sizes = {
        "experts": experts, "layers": layers // 2, "d_model": 1024, "heads": 16, "d_head": 128, "d_ff": 8192,
        "expert_hidden": 8192, "vocab": 64000, "source": 128, "length": 128, "batch": 16 * experts, "sequences": 16,
        "remat": True, "learning_rate": 1.0,
    }  # fmt: skip
    return moe.replace(**{**sizes, **changes})
