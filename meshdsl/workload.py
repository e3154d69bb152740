"""`Workload`: a model with its inputs, loss, optimizer and layouts, as functions of one config.

The command line, the benchmarks and the tests take workloads; a model file defines one for each of its models.
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


@dataclass(frozen=True)
class Workload:
    """A model with its inputs, loss, optimizer and named layouts.

    `config` is a frozen dataclass of plain values; the other fields are functions of it. `inputs(config)` returns the
    specs of a batch, a dict of tensors. The model takes a batch. `loss(config)` returns a function `(params, batch)` or
    `(params, batch, key)`, which returns a scalar, or a scalar and a dict of scalar metrics. A model whose parameters
    include running statistics also returns a dict of their new values, by path: a step stores them, so its optimizer
    should leave them alone (`md.optim.with_frozen`). `eval_loss(config)` is optional: the loss of evaluation, where it
    differs. `layouts` maps names to the text of a mesh and the text of a layout; a model file mentions mesh axes
    nowhere else.

    `mean_over(config)` is optional. It returns the dim of the batch over which loss and metrics are means of terms that
    do not depend on each other, or None: with batch normalisation, dropout or a weighted mean there is no such dim. A
    step runs in micro-batches along this dim. A config with the field `remat` (False, True, or a policy of
    `md.checkpoint`) lets a plan choose the rematerialisation.

    `data(config, seed)` is optional. It returns a function of a split (`train` or `held_out`) and a step (for
    `held_out`: the index of the evaluation batch), which returns a batch as a dict of arrays. Without it, training uses
    text for a batch of tokens and targets, and noise for a batch of floats.

    `hugging_face` is optional: the names of the parameters and of the config in a Hugging Face directory. So is
    `decoder(config, search)`, which returns the function `(params, prompt[, key])` that continues a prompt
    [batch, length] by a search such as `md.nn.decode.generate`; `meshdsl generate` needs it.

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
    mean_over: Callable[[Any], str | None] | None = None
    hugging_face: md.HuggingFace | None = None
    decoder: Callable[[Any, Callable[..., Any]], Callable[..., md.Tensor]] | None = None
    eval_loss: Callable[[Any], Callable[..., Any]] | None = None

    def replace(self, **changes: Any) -> Workload:
        """A copy of the workload with other config values; raises `ShapeError` for a name that the config lacks."""
        field_names = [f.name for f in dataclasses.fields(self.config)]
        for name in changes:
            if name not in field_names:
                close = difflib.get_close_matches(name, field_names, n=1)
                guess = f"did you mean {close[0]!r}? " if close else ""
                raise md.ShapeError(
                    f"the config of {self.name} has no {name!r}; {guess}known: {', '.join(field_names)}"
                )
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    def init(self, key: md.Tensor) -> tuple[dict[str, md.Tensor], dict[str, Any]]:
        """Initial parameters and optimizer state. It can be traced: compile it to create each shard on its device."""
        model, optimizer = self.model(self.config), self.optimizer(self.config)
        for part, value, needed in (("model", model, md.Model), ("optimizer", optimizer, md.optim.Optimizer)):
            if not isinstance(value, needed):
                raise md.ShapeError(
                    f"{part}(config) of the workload {self.name} returns a {type(value).__name__}; "
                    f"expected {'an md.optim.Optimizer' if part == 'optimizer' else 'an md.Model'}"
                )
        params = model.init(key, self.inputs(self.config))
        return params, optimizer.init(params)

    def specs(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The specs of parameters, optimizer state and batch, which are the arguments of the train step."""
        params, state = md.eval_shape(self.init, md.random.key(0))
        return params, state, self.inputs(self.config)

    def train_step(self, *, guard: bool = False) -> Callable[..., Any]:
        """The function `step(params, state, batch[, key]) -> (params, state, metrics)`; metrics include the loss.

        With `guard`, a step whose loss or gradient has NaN or infinite elements returns parameters and state unchanged;
        the metric `non_finite` is the number of these elements. The step also takes the knobs `remat` and
        `microbatches` of a `md.Plan`; `md.compile(step, plan=plan)` sets them. It raises `ShapeError` if the workload
        does not support them.
        """
        optimizer = self.optimizer(self.config)

        def train_step(
            params: Any, state: Any, batch: Any, *key: md.Tensor, remat: str = "model", microbatches: int = 1
        ) -> tuple[Any, Any, dict[str, md.Tensor]]:
            (loss, (metrics, statistics)), grads = self._gradients(remat, microbatches)(params, batch, *key)
            new, state_after = optimizer.update(grads, state, params)
            updated = _replaced(new, statistics), state_after
            if not guard:
                return *updated, {"loss": loss, **metrics}
            non_finite = _non_finite([loss, *jax.tree.leaves(grads)])
            is_finite = non_finite == 0
            params, state = jax.tree.map(lambda new, old: md.where(is_finite, new, old), updated, (params, state))
            return params, state, {"loss": loss, **metrics, "non_finite": non_finite}

        return train_step

    def _gradients(self, remat: str, microbatches: int) -> Callable[..., Any]:
        """The function `(params, batch[, key]) -> ((loss, (metrics, statistics)), gradients)`."""
        workload = self._with_remat(remat)
        loss_of = workload.loss(workload.config)
        over = self._parts_along() if microbatches > 1 else ""

        def with_metrics(params: dict[str, md.Tensor], *rest: Any) -> tuple[md.Tensor, Any]:
            return _parts(loss_of(params, *rest))

        gradients = md.value_and_grad(with_metrics, has_aux=True)
        if microbatches == 1:
            return gradients

        def accumulated(params: dict[str, md.Tensor], batch: dict[str, md.Tensor], *key: md.Tensor) -> Any:
            parts = {name: x for name, x in batch.items() if over in [d.name for d in x.dims]}
            total = md.accumulate(lambda part: gradients(params, {**batch, **part}, *key), parts, microbatches, over)
            return jax.tree.map(lambda x: x / microbatches, total)

        return accumulated

    def _with_remat(self, remat: str) -> Workload:
        """The workload with this rematerialisation; "model": its own."""
        if remat == "model":
            return self
        if "remat" not in [f.name for f in dataclasses.fields(self.config)]:
            raise md.ShapeError(
                f"the config of {self.name} has no field remat, so a plan cannot choose its rematerialisation\n"
                "  add `remat: bool | str = False` and pass it to md.layers(remat=) or md.checkpoint"
            )
        return self.replace(remat={"none": False, "full": True}.get(remat, remat))

    def _parts_along(self) -> str:
        """The dim along which the batch is divided into micro-batches."""
        over = self.mean_over(self.config) if self.mean_over else None
        if over is None:
            raise md.ShapeError(
                f"{self.name} with this config does not run in micro-batches: its loss is not declared to be a mean of "
                "independent terms over a dim\n"
                "  if it is (no batch normalisation, no dropout, no weighted mean), say so: "
                "md.Workload(mean_over=lambda config: 'batch')"
            )
        return over

    def eval_step(self) -> Callable[..., Any]:
        """The function `step(params, batch[, key]) -> metrics`, which includes the loss and updates nothing."""
        loss_of = (self.eval_loss or self.loss)(self.config)

        def eval_step(params: Any, batch: Any, *key: md.Tensor) -> dict[str, md.Tensor]:
            loss, (metrics, _) = _parts(loss_of(params, batch, *key))
            return {"loss": loss, **metrics}

        return eval_step


def _parts(result: Any) -> tuple[md.Tensor, tuple[dict[str, md.Tensor], dict[str, md.Tensor]]]:
    """The loss, its metrics and the new running statistics, of what a loss returns."""
    loss, *more = result if isinstance(result, tuple) else (result,)
    metrics, statistics = (*more, {}, {})[:2]
    return loss, (metrics, statistics)


def _replaced(params: Any, statistics: Mapping[str, md.Tensor]) -> Any:
    """The parameters, with new running statistics."""
    unknown = [path for path in statistics if path not in params]
    if unknown:
        raise md.ShapeError(
            f"the loss returns a running statistic {unknown[0]!r}, which is no parameter; known: {', '.join(params)}"
        )
    return {**params, **statistics} if statistics else params


def _non_finite(xs: Sequence[md.Tensor]) -> md.Tensor:
    """The number of NaN or infinite elements of the tensors, as a float32 scalar."""
    counts = [md.sum(md.cast(md.logical_not(md.isfinite(x)), "float32")) for x in xs]
    return functools.reduce(lambda a, b: a + b, counts)
