"""Neural collaborative filtering: NeuMF of He et al. (2017, section 3.4), on who calls what in the standard library.

    gmf = p[user] * q[item]                       a generalised dot product of two tables
    mlp = relu(... relu([p'[user], q'[item]] w1 + b1) ...)       layers over two tables of its own
    score = [gmf, mlp] h;  loss = mean binary cross entropy, of what was called and of `negatives` that were not

A product with two vectors one after the other is the sum of two products, which is how [a, b] w is written here. The
score has no activation: the loss and the ranking take the logit. Held out is one callee of each function; the hit
rate is how often it ranks among the first ten of itself and 99 that the function never calls (section 4.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdsl as md
from models.call_graph import CallGraph, call_graph

__all__ = ["Config", "LAYOUTS", "data", "hit_rate", "inputs", "loss", "model", "ncf", "optimizer"]

TOP = 10


@dataclass(frozen=True)
class Config:
    """Sizes; the tables have a row for each of `users` and `items`, used or not."""

    batch: int = 1024
    negatives: int = 4  # drawn for each call, as in section 4.1
    users: int = 4096
    items: int = 1024
    factors: int = 16
    width: int = 32  # of the tables of the layers
    hidden: tuple[int, ...] = (32, 16)
    learning_rate: float = 3e-3
    dtype: str = "float32"


LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "tables": ("cols:8", "user:cols; item:cols"),
    "data_tables": ("rows:2 cols:4", "batch:rows; user:cols; item:cols"),
    "model": ("rows:2 cols:4", "batch:rows; factor:cols; hidden1:cols"),
}


def inputs(config: Config) -> dict[str, object]:
    """One batch: functions [batch], and for each one it calls and others that it does not [batch, candidate]."""
    batch, candidate = md.Dim("batch", config.batch), md.Dim("candidate", 1 + config.negatives)
    return {"user": md.spec(batch, "int32"), "item": md.spec([batch, candidate], "int32")}


def model(config: Config) -> md.Model:
    """The score [batch, candidate] of each item for its function, as a logit."""
    rows = {"user": md.Dim("user", config.users), "item": md.Dim("item", config.items)}
    factor, width = md.Dim("factor", config.factors), md.Dim("width", config.width)
    precision = md.nn.Precision(config.dtype, config.dtype, config.dtype)

    def table(batch: dict[str, md.Tensor], name: str, into: md.Dim) -> md.Tensor:
        """Rows [..., into] of the table `name`."""
        init = md.init.normal(0.01)
        return md.nn.embedding(batch[name], rows[name], into, name=name, init=init, precision=precision)[0]

    def product(x: md.Tensor, over: md.Dim, into: tuple[md.Dim, ...], name: str, init: Any) -> md.Tensor:
        w = md.param(name, [over, *into], init=init(fan_in=over), dtype=config.dtype)
        return md.einsum(x, w, out=[*(d for d in x.dims if d != over), *into])

    def neumf(batch: dict[str, md.Tensor]) -> md.Tensor:
        with md.scope("gmf"):
            gmf = table(batch, "item", factor) * table(batch, "user", factor)
        with md.scope("mlp"):
            # lecun's init of both halves of [a, b] w1 is he's of the whole
            first, *others = (md.Dim(f"hidden{i}", size) for i, size in enumerate(config.hidden, start=1))
            y = product(table(batch, "item", width), width, (first,), "w1_item", md.init.lecun)
            y = y + product(table(batch, "user", width), width, (first,), "w1_user", md.init.lecun)
            y = md.relu(y + md.param("b1", first, init=md.init.zeros(), dtype=config.dtype))
            for before, into in zip((first, *others), others, strict=False):
                layer = md.nn.dense(
                    y, before, into, name=into.name, init=md.init.he(fan_in=before), precision=precision
                )
                y = md.relu(layer)
        return product(gmf, factor, (), "h_gmf", md.init.lecun) + product(y, y.dims[-1], (), "h_mlp", md.init.lecun)

    return md.model(neumf)


def loss(config: Config) -> Callable[..., Any]:
    """The mean binary cross entropy in nats; with enough candidates, the hit rate of this batch as a metric too."""
    score_of = model(config)

    def cross_entropy(
        params: dict[str, md.Tensor], batch: dict[str, md.Tensor]
    ) -> tuple[md.Tensor, dict[str, md.Tensor]]:
        score = score_of(params, batch)  # [batch, candidate]
        called = md.cast(md.iota(score.dims[-1], "int32") == 0, score.dtype)
        mean = md.mean(md.softplus(score) - called * score)
        return mean, ({"hit_rate": _hits(score)} if config.negatives >= TOP else {})

    return cross_entropy


def _hits(score: md.Tensor) -> md.Tensor:
    """The share of rows whose first candidate has fewer than TOP others at or above its score."""
    first = md.sum(md.slice(score, "candidate", 0, 1), "candidate")
    above = md.sum(md.cast(score >= first, "int32"), "candidate") - 1
    return md.mean(md.cast(above < TOP, "float32"))


def optimizer(config: Config) -> md.optim.Optimizer:
    """Adam, as in section 4.1."""
    return md.optim.adam(config.learning_rate)


@dataclass(frozen=True)
class Batches:
    """The graph as training reads it; the held-out split draws the same negatives whatever the seed."""

    graph: CallGraph
    config: Config
    seed: int

    def describe(self) -> dict[str, object]:
        """Sizes of the data."""
        return self.graph.describe()

    def __call__(self, split: str, step: int) -> dict[str, np.ndarray]:
        seed = self.seed if split == "train" else 0
        return self.graph.batch(split, seed, step, self.config.batch, self.config.negatives)


def data(config: Config, seed: int) -> Batches:
    """Calls of the standard library's functions: `data(config, seed)(split, step)` is a batch."""
    return Batches(call_graph(config.users, config.items), config, seed)


def hit_rate(
    params: dict[str, md.Tensor], config: Config, mesh: md.Mesh, layout: md.Layout, graph: CallGraph | None = None
) -> float:
    """The share of functions whose held-out callee ranks in the first ten of itself and 99 that they never call."""
    graph = graph or call_graph(config.users, config.items)
    people = len(graph.users)
    evaluation = ncf.replace(**{**dataclasses.asdict(config), "batch": people, "negatives": 99})
    batch = {
        name: md.tensor(values, evaluation.inputs(evaluation.config)[name].shape)
        for name, values in graph.batch("held_out", 0, 0, people, 99).items()
    }
    return float(md.compile(evaluation.eval_step(), mesh, layout)(params, batch)["hit_rate"].numpy())


ncf = md.Workload(
    "ncf", Config(), model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS, data=data
)
