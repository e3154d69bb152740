"""Neural collaborative filtering: NeuMF of He et al. (2017, section 3.4), on calls in Python's standard library.

    gmf = p[user] * q[item]                       a generalised dot product of two tables
    mlp = relu(... relu([p'[user], q'[item]] w1 + b1) ...)       layers over two further tables
    score = [gmf, mlp] h;  loss = mean binary cross entropy over callees and `negatives` that are not callees

The product of a concatenation, [a, b] w, is written as the sum of two products. The score is a logit without
activation. One callee of each function is held out. The hit rate is the share of functions whose held-out callee ranks
in the top ten among itself and 99 items that the function does not call (section 4.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.call_graph import CallGraph, call_graph

__all__ = ["Config", "LAYOUTS", "data", "hit_rate", "inputs", "loss", "model", "ncf", "optimizer"]

TOP = 10


@dataclass(frozen=True)
class Config:
    """Sizes and the learning rate; the tables have `users` and `items` rows, even if the data has fewer."""

    batch: int = 1024
    negatives: int = 4  # per call, as in section 4.1
    users: int = 4096
    items: int = 1024
    factors: int = 16
    width: int = 32  # of the tables for the layers
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
    """The specs of a batch: functions [batch], and for each a callee and items it does not call [batch, candidate]."""
    batch, candidate = md.Dim("batch", config.batch), md.Dim("candidate", 1 + config.negatives)
    return {"user": md.spec(batch, "int32"), "item": md.spec([batch, candidate], "int32")}


def model(config: Config) -> md.Model:
    """A model that computes the logit [batch, candidate] of each item for its function."""
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
            # LeCun init of both halves of [a, b] w1 equals He init of the whole
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
    """The loss function: mean binary cross entropy in nats. With enough candidates, the hit rate is a metric."""
    score_of = model(config)

    def cross_entropy(
        params: dict[str, md.Tensor], batch: dict[str, md.Tensor]
    ) -> tuple[md.train.Metric, dict[str, md.train.Metric]]:
        score = score_of(params, batch)  # [batch, candidate]
        called = md.cast(md.iota(score.dims[-1], "int32") == 0, score.dtype)
        mean = md.train.mean(md.softplus(score) - called * score)
        return mean, ({"hit_rate": _hits(score)} if config.negatives >= TOP else {})

    return cross_entropy


def _hits(score: md.Tensor) -> md.train.Metric:
    """The share of rows in which fewer than TOP other candidates score at least as high as the first."""
    first = md.sum(md.slice(score, "candidate", 0, 1), "candidate")
    higher = md.sum(md.cast(score >= first, "int32"), "candidate") - 1
    return md.train.mean(higher < TOP)


def optimizer(config: Config) -> md.optim.Optimizer:
    """Adam, as in section 4.1."""
    return md.optim.adam(config.learning_rate)


@dataclass(frozen=True)
class Batches:
    """Batches of the call graph; the held-out split has the same negatives for every seed."""

    graph: CallGraph
    config: Config
    seed: int

    def describe(self) -> dict[str, object]:
        """The sizes of the data, as a dict."""
        return self.graph.describe()

    def __call__(self, split: str, step: int) -> dict[str, np.ndarray]:
        seed = self.seed if split == "train" else 0
        return self.graph.batch(split, seed, step, self.config.batch, self.config.negatives)


def data(config: Config, seed: int) -> Batches:
    """The data function of the workload: `data(config, seed)(split, step)` returns a batch."""
    return Batches(call_graph(config.users, config.items), config, seed)


def hit_rate(
    params: dict[str, md.Tensor], config: Config, mesh: md.Mesh, layout: md.Layout, graph: CallGraph | None = None
) -> float:
    """The share of functions whose held-out callee ranks in the top ten among itself and 99 items they do not call."""
    graph = graph or call_graph(config.users, config.items)
    user_count = len(graph.users)
    evaluation = ncf.replace(**{**dataclasses.asdict(config), "batch": user_count, "negatives": 99})
    batch = {
        name: md.tensor(values, evaluation.inputs(evaluation.config)[name].dims)
        for name, values in graph.batch("held_out", 0, 0, user_count, 99).items()
    }
    return float(md.compile(evaluation.eval_step(), mesh, layout)(params, batch)["hit_rate"].numpy())


ncf = md.Workload(
    "ncf", Config(), model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS, data=data
)
