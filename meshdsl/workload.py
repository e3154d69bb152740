"""A workload is all that training or analysing a model needs, as functions of one config.

The command line, the benchmarks and the tests read workloads; a model file makes one for each of its models.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

import meshdsl as md

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """A model with its data's types, its loss, its optimizer, and layouts worth trying.

    `config` is a frozen dataclass of plain values; the functions take one like it. A batch is a dict of tensors, of
    the types that `inputs` gives. The model takes a batch; `loss(config)` is a function `(params, batch)` or
    `(params, batch, key)` that returns a scalar, or a pair of it and a dict of scalar metrics. `layouts` gives, by
    name, the text of a mesh and of a layout: the only place where a model file mentions mesh axes.

    `data(config, seed)`, where there is one, gives what training reads: a function of a split (`train` or `held_out`)
    and a step, or the number of an evaluation's batch, that returns a batch as a dict of arrays. Without it, training
    draws text for a batch of tokens and targets, and noise for a batch of floats.

    >>> from dataclasses import dataclass
    >>> import meshdsl as md
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     batch: int = 64
    ...     io: int = 32
    >>> @md.model
    ... def linear(batch):
    ...     return md.dot(batch["x"], md.param("w", [batch["x"].dims[1]], init=md.init.normal(0.1)), "io")
    >>> fit = md.Workload(
    ...     "fit",
    ...     Config(),
    ...     model=lambda config: linear,
    ...     inputs=lambda config: {"x": md.spec([md.Dim("batch", config.batch), md.Dim("io", config.io)])},
    ...     loss=lambda config: lambda params, batch: md.mean(md.square(linear(params, batch))),
    ...     optimizer=lambda config: md.optim.sgd(0.1),
    ...     layouts={"data": ("rows:8", "batch:rows")},
    ... ).replace(io=16)
    >>> params, state, batch = fit.specs()
    >>> params, state, batch
    ({'w': float32[io=16]}, {'step': int32[]}, {'x': float32[batch=64 io=16]})
    >>> program = md.compile(fit.train_step(), *fit.layouts["data"]).program(params, state, batch)
    >>> [(str(record.op), record.bytes) for record in program.collectives]
    [('all_reduce(sum) over rows', 4), ('all_reduce(sum) over rows', 64)]
    """

    name: str
    config: Any
    model: Callable[[Any], md.Model]
    inputs: Callable[[Any], dict[str, Any]]
    loss: Callable[[Any], Callable[..., Any]]
    optimizer: Callable[[Any], Any]
    layouts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    data: Callable[[Any, int], Callable[[str, int], Mapping[str, Any]]] | None = None

    def replace(self, **changes: Any) -> Workload:
        """The workload with other config values.

        Raises `ShapeError` for a name that the config lacks.
        """
        known = [f.name for f in dataclasses.fields(self.config)]
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                guess = f"did you mean {close[0]!r}? " if close else ""
                raise md.ShapeError(f"the config of {self.name} has no {name!r}; {guess}there are: {', '.join(known)}")
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    def init(self, key: md.Tensor) -> tuple[dict[str, md.Tensor], dict[str, Any]]:
        """The first parameters and optimizer state; a traceable function, to be compiled for a mesh."""
        params = self.model(self.config).init(key, self.inputs(self.config))
        return params, self.optimizer(self.config).init(params)

    def specs(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The types of parameters, optimizer state and batch: arguments for `md.compile(...)` of the train step."""
        params, state = md.eval_shape(self.init, md.random.key(0))
        return params, state, self.inputs(self.config)

    def train_step(self, *, guard: bool = False) -> Callable[..., Any]:
        """`step(params, state, batch[, key]) -> (params, state, metrics)`: one update; metrics hold the loss.

        With `guard`, a step whose loss or gradient is not finite everywhere leaves parameters and state as they were;
        the metric `non_finite` counts the numbers that are not.
        """
        loss_of, optimizer = self.loss(self.config), self.optimizer(self.config)

        def with_metrics(params: dict[str, md.Tensor], *rest: Any) -> tuple[md.Tensor, dict[str, md.Tensor]]:
            result = loss_of(params, *rest)
            return result if isinstance(result, tuple) else (result, {})

        def train_step(params: Any, state: Any, batch: Any, *key: md.Tensor) -> tuple[Any, Any, dict[str, md.Tensor]]:
            (loss, metrics), grads = md.value_and_grad(with_metrics, has_aux=True)(params, batch, *key)
            updated = optimizer.update(grads, state, params)
            if not guard:
                return *updated, {"loss": loss, **metrics}
            bad = _non_finite([loss, *jax.tree.leaves(grads)])
            keep = bad == 0
            params, state = jax.tree.map(lambda new, old: md.where(keep, new, old), updated, (params, state))
            return params, state, {"loss": loss, **metrics, "non_finite": bad}

        return train_step

    def eval_step(self) -> Callable[..., Any]:
        """`step(params, batch[, key]) -> metrics`, without an update."""
        loss_of = self.loss(self.config)

        def eval_step(params: Any, batch: Any, *key: md.Tensor) -> dict[str, md.Tensor]:
            result = loss_of(params, batch, *key)
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            return {"loss": loss, **metrics}

        return eval_step


def _non_finite(xs: Sequence[md.Tensor]) -> md.Tensor:
    """How many numbers of the tensors are NaN or infinite, as a float32 scalar."""
    counts = [md.sum(md.cast(md.logical_not(md.isfinite(x)), "float32")) for x in xs]
    return functools.reduce(lambda a, b: a + b, counts)
