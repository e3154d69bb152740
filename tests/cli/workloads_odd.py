"""Workloads with something wrong in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import meshdsl as md


@dataclass(frozen=True)
class Config:
    batch: int = 8
    width: int = 16
    learning_rate: float = 1.0


def model(config: Config) -> md.Model:
    width = md.Dim("width", config.width)

    def linear(batch: dict[str, md.Tensor]) -> md.Tensor:
        x = md.param("b", [width], init=md.init.zeros())
        return md.sum(batch["x"] * x) if batch else md.sum(x)

    return md.model(linear)


def inputs(config: Config) -> dict[str, object]:
    return {"x": md.spec([md.Dim("batch", config.batch), md.Dim("width", config.width)])}


def loss(config: Config):
    return lambda params, batch: model(config)(params, batch)


linear = md.Workload("linear", Config(), model, inputs, loss, lambda c: md.optim.sgd(c.learning_rate))
nothing = dataclasses.replace(linear, name="nothing", inputs=lambda config: {})
