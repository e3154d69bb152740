"""Workloads as a user writes them, small enough to train in a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import meshdsl as md


@dataclass(frozen=True)
class Config:
    batch: int = 8
    length: int = 16
    vocab: int = 256
    width: int = 16
    learning_rate: float = 1.0
    tied: bool = False
    scale: float | None = None
    sizes: tuple[int, ...] = ()
    norm: Literal["layer", "rms"] = "layer"


def inputs(config: Config) -> dict[str, object]:
    spec = md.spec([md.Dim("batch", config.batch), md.Dim("length", config.length)], "int32")
    return {"tokens": spec, "targets": spec}


def model(config: Config) -> md.Model:
    vocab, width = md.Dim("vocab", config.vocab), md.Dim("width", config.width)

    def bigram(batch: dict[str, md.Tensor]) -> md.Tensor:
        embed = md.param("embed", [vocab, width], init=md.init.normal(0.02))
        unembed = md.param("unembed", [width, vocab], init=md.init.normal(0.02))
        x = md.einsum(md.one_hot(batch["tokens"], vocab, "float32"), embed, out="batch length width")
        return md.einsum(x, unembed, out="batch length vocab")

    return md.model(bigram)


def loss(config: Config) -> Callable[..., md.Tensor]:
    logits_of, vocab = model(config), md.Dim("vocab", config.vocab)

    def cross_entropy(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.Tensor:
        targets = md.one_hot(batch["targets"], vocab, "float32")
        return -md.mean(md.sum(md.log_softmax(logits_of(params, batch), "vocab") * targets, "vocab"))

    return cross_entropy


LAYOUTS = {"data": ("all:8", "batch:all"), "grid": ("rows:2 cols:4", "batch:rows; vocab:cols")}
bigram = md.Workload("bigram", Config(), model, inputs, loss, lambda c: md.optim.sgd(c.learning_rate), LAYOUTS)
not_a_workload = 3
