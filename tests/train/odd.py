"""A workload with a field of every type, and data that can be wrong in every way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import meshdsl as md

__all__ = ["Config", "odd"]


@dataclass(frozen=True)
class Config:
    batch: int = 4
    io: int = 3
    scale: float = 1.0
    wrong: Literal["nothing", "held_out", "missing", "shape", "dtype", "raises"] = "nothing"
    pair: tuple[int, float] = (1, 2.0)
    sizes: tuple[int, ...] = ()
    names: list[str] = dataclasses.field(default_factory=list[str])
    table: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    perhaps: int | None = None
    unreadable: Any = math.tau


def inputs(config: Config) -> dict[str, object]:
    return {"x": md.spec([md.Dim("batch", config.batch), md.Dim("io", config.io)])}


def model(config: Config) -> md.Model:
    def scaled(batch: dict[str, md.Tensor]) -> md.Tensor:
        return batch["x"] * md.param("w", [md.Dim("io", config.io)], init=md.init.normal(0.5))

    return md.model(scaled)


def loss(config: Config) -> Callable[..., md.Tensor]:
    y_of = model(config)
    return lambda params, batch: md.mean(md.square(y_of(params, batch) - batch["x"]))


def data(config: Config, seed: int) -> Callable[[str, int], dict[str, Any]]:
    def batch(split: str, step: int) -> dict[str, Any]:
        x = np.ones((config.batch, config.io))
        if config.wrong == "raises":
            raise FileNotFoundError("no such shard")
        held_out_nan = config.wrong == "held_out" and split == "held_out"
        return {
            "missing": {"y": x},
            "shape": {"x": x[:, 1:]},
            "dtype": {"x": x * 1j},
        }.get(config.wrong, {"x": x * math.nan if held_out_nan else x})

    return batch


odd = md.Workload(
    "odd",
    Config(),
    model=model,
    inputs=inputs,
    loss=loss,
    optimizer=lambda config: md.optim.sgd(0.1),
    layouts={"data": ("all:2", "batch:all")},
    data=data,
)
