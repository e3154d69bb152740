"""The two-layer example of Mesh-TensorFlow (Shazeer et al., 2018, section 8) and its layouts.

    y = relu(x w + bias) v        x [batch, io]   w [io, hidden]   bias [hidden]   v [hidden, io]
    loss = mean over batch and io of (y - target)^2; the update is plain gradient descent

Data parallelism all-reduces the gradients, model parallelism all-reduces y; the results are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import meshdsl as md

__all__ = ["Config", "ILLEGAL", "LAYOUTS", "inputs", "loss", "mlp", "model"]


@dataclass(frozen=True)
class Config:
    """Sizes and the learning rate."""

    batch: int = 512
    io: int = 1024
    hidden: int = 4096
    learning_rate: float = 0.1


LAYOUTS = {
    "empty": ("all:8", ""),
    "data": ("all:8", "batch:all"),
    "model": ("all:8", "hidden:all"),
    "data_model": ("rows:2 cols:4", "batch:rows; hidden:cols"),
    "three_d": ("rows:2 cols:2 planes:2", "batch:rows; hidden:cols; io:planes"),
}
ILLEGAL = ("all:8", "batch:all; hidden:all")  # the hidden layer has both dims, but a tensor can use an axis only once


def inputs(config: Config) -> dict[str, object]:
    """The specs of a batch: x and its target, both [batch, io]."""
    spec = md.spec([md.Dim("batch", config.batch), md.Dim("io", config.io)])
    return {"x": spec, "target": spec}


def model(config: Config) -> md.Model:
    """A model that computes y [batch, io].

    >>> {path: spec.dims for path, spec in model(Config(io=2, hidden=3)).specs(inputs(Config(io=2))).items()}
    {'w': (io=2, hidden=3), 'bias': (hidden=3,), 'v': (hidden=3, io=2)}
    """
    io, hidden = md.Dim("io", config.io), md.Dim("hidden", config.hidden)

    def two_layers(batch: dict[str, md.Tensor]) -> md.Tensor:
        w = md.param("w", [io, hidden], init=md.init.lecun(fan_in="io"))
        bias = md.param("bias", hidden, init=md.init.zeros())
        v = md.param("v", [hidden, io], init=md.init.lecun(fan_in="hidden"))
        h = md.relu(md.einsum(batch["x"], w, out="batch hidden") + bias)
        return md.einsum(h, v, out="batch io")

    return md.model(two_layers)


def loss(config: Config) -> Callable[..., md.train.Metric]:
    """The loss function: mean squared error."""
    y_of = model(config)

    def squared_error(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.train.Metric:
        return md.train.mean(md.square(y_of(params, batch) - batch["target"]))

    return squared_error


mlp = md.Workload(
    name="mlp",
    config=Config(),
    model=model,
    inputs=inputs,
    loss=loss,
    optimizer=lambda config: md.optim.sgd(config.learning_rate),
    layouts=LAYOUTS,
)
