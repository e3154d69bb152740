"""The smallest run that has everything to remember: two weights, Adam's moments, and a loss that draws numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import meshdsl as md

__all__ = ["Config", "tiny"]


@dataclass(frozen=True)
class Inner:
    keep: float = 0.9


@dataclass(frozen=True)
class Config:
    batch: int = 4
    io: int = 3
    hidden: int = 5
    learning_rate: float = 0.01
    drop: Inner = dataclasses.field(default_factory=Inner)


def inputs(config: Config) -> dict[str, object]:
    return {"x": md.spec([md.Dim("batch", config.batch), md.Dim("io", config.io)])}


def model(config: Config) -> md.Model:
    io, hidden = md.Dim("io", config.io), md.Dim("hidden", config.hidden)

    def autoencoder(batch: dict[str, md.Tensor]) -> md.Tensor:
        w = md.param("w", [io, hidden], init=md.init.normal(0.5))
        v = md.param("v", [hidden, io], init=md.init.normal(0.5))
        return md.einsum(md.tanh(md.einsum(batch["x"], w, out="batch hidden")), v, out="batch io")

    return md.model(autoencoder)


def loss(config: Config) -> Callable[..., md.Tensor]:
    y_of = model(config)

    def squared_error(params: dict[str, md.Tensor], batch: dict[str, md.Tensor], key: md.Tensor) -> md.Tensor:
        x = batch["x"]
        kept = md.cast(md.random.bernoulli(key, config.drop.keep, x.dims), x.dtype)
        return md.mean(md.square(y_of(params, {"x": x * kept}) - x))

    return squared_error


tiny = md.Workload(
    "tiny",
    Config(),
    model=model,
    inputs=inputs,
    loss=loss,
    optimizer=lambda config: md.optim.adam(config.learning_rate),
    layouts={"data": ("all:2", "batch:all"), "model": ("all:2", "hidden:all")},
)
