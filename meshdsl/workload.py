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

from .metric import MetricTerms, sums_of


@dataclass(frozen=True)
class Workload:
    """A model with its inputs, loss, optimizer and named layouts.

    `config` is a frozen dataclass of plain values; the other fields are functions of it. `inputs(config)` returns the
    specs of a batch, a dict of tensors. The model takes a batch. `loss(config)` returns a function `(params, batch)` or
    `(params, batch, key)`, which returns a loss, or a loss and a dict of metrics. Each is a scalar, or says how it is
    computed from parts of the data: `md.train.mean(total, count)` and the other functions that return a
    `md.train.Metric`. A model whose parameters include running statistics also returns a dict of their new values, by
    path: a step stores them, so its optimizer should leave them alone (`md.optim.with_frozen`). `eval_loss(config)` is
    optional: the loss of evaluation, where it differs. `layouts` maps names to the text of a mesh and the text of a
    layout; a model file mentions mesh axes nowhere else.

    A step runs in micro-batches, parts of the batch along one dim, if the loss and all metrics are `md.train.Metric`s:
    the result is that of the whole batch. A scalar is not joined, unless `mean_over(config)`, which is optional, claims
    that it is a mean over a dim of the batch, of terms that do not depend on each other; `meshdsl.train.train` checks
    this. `mean_over` returns the dim of the parts, by default `batch`, or the only dim that all inputs have; the dim
    and a number n, if a part must consist of whole groups of n consecutive elements; or None if the model does not
    allow parts, because of batch normalisation or dropout. A loss that takes a key gets another one in each
    micro-batch. A config with the field `remat` (False, True, or a policy of `md.checkpoint`) lets a plan choose the
    rematerialisation.

    `data(config, seed)` is optional. It returns a function of a split (`train` or `held_out`) and a step (for
    `held_out`: the index of the evaluation batch), which returns a batch as a dict of arrays. Without it, training uses
    text for a batch of tokens and targets, and noise for a batch of floats.

    `hugging_face` is optional: the names of the parameters and of the config in a Hugging Face directory. So is
    `decoder(config, search)`, which returns the function `(params, prompt[, key])` that continues a prompt
    [batch, length] by a search such as `md.nn.decode.generate`; `meshdsl generate` needs it. `imported` is the
    `md.from_jax` that the workload was made of.

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
    mean_over: Callable[[Any], str | tuple[str, int] | None] | None = None
    hugging_face: md.HuggingFace | None = None
    decoder: Callable[[Any, Callable[..., Any]], Callable[..., md.Tensor]] | None = None
    eval_loss: Callable[[Any], Callable[..., Any]] | None = None
    imported: md.Imported | None = None

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
            moving = {path: p for path, p in params.items() if not optimizer.frozen(path)}
            still = {path: p for path, p in params.items() if path not in moving}
            (loss, (metrics, statistics)), grads = self._gradients(remat, microbatches)(moving, still, batch, *key)
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
        """The function `(trained, frozen, batch[, key]) -> ((loss, (metrics, statistics)), gradients)`."""
        workload = self._with_remat(remat)
        of_params = workload.loss(workload.config)

        def loss_of(params: dict[str, md.Tensor], frozen: dict[str, md.Tensor], *rest: Any) -> Any:
            return of_params({**params, **frozen}, *rest)

        def with_metrics(params: dict[str, md.Tensor], *rest: Any) -> tuple[md.Tensor, Any]:
            loss, metrics, statistics = _parts(loss_of(params, *rest))
            return loss.result(), ({name: sums.result() for name, sums in metrics.items()}, statistics)

        return (
            md.value_and_grad(with_metrics, has_aux=True)
            if microbatches == 1
            else functools.partial(workload._accumulated, microbatches, loss_of)
        )

    def _accumulated(
        self, n: int, loss_of: Callable[..., Any], params: Any, frozen: Any, batch: Mapping[str, Any], *key: md.Tensor
    ) -> Any:
        """The loss, metrics, statistics and gradients of n micro-batches.

        Counts have no gradient, so those of the whole batch are computed first; whatever else of the loss they do not
        need is dead code. Each micro-batch then adds its total, divided by the count of all, and gradients add up.
        """
        over, group = self.parts_along()
        rows = {name: x for name, x in batch.items() if over in [d.name for d in x.dims]}
        size = md.dims(over, of=next(iter(rows.values())).dims)[0].size if rows else 0
        if rows and size % n:
            raise md.ShapeError(
                f"{n} micro-batches (microbatches={n}, or --microbatches {n}) do not divide {over}={size}\n"
                f"  give a number that divides {size}"
            )
        split = _Rows(over, group, rows)
        found: list[Any] = []

        def counts_of(rows: Mapping[str, md.Tensor]) -> list[Any]:
            found[:] = _parts(loss_of(params, frozen, {**batch, **split.joined(rows)}, *key))
            return [term.count for term in found[0].terms]

        counts = md.accumulate(counts_of, split.rows, 1, split.dim)
        self._check_joined(*found)
        numbered = bool(key) or any(t.how in ("maximum", "minimum") for sums in found[1].values() for t in sums.terms)

        def gradients(rows: Mapping[str, md.Tensor], *number: md.Tensor) -> Any:
            index = number[0] if number else None
            own_key = [md.random.fold_in(k, number[0]) for k in key]

            def share(params: Any) -> tuple[md.Tensor, Any]:
                loss, metrics, statistics = _parts(loss_of(params, frozen, {**batch, **split.joined(rows)}, *own_key))
                totals = loss.of_terms(lambda t: dataclasses.replace(t, count=None))  # the counts are known
                joined = [sums.of_terms(lambda t: t.part(index, n)) for sums in (totals, *metrics.values())]
                return loss.share(n, counts), (joined, {path: x / n for path, x in statistics.items()})

            (_, aux), grads = md.value_and_grad(share, has_aux=True)(params)
            return aux, grads

        (joined, statistics), grads = md.accumulate(gradients, split.rows, n, split.dim, numbered=numbered)
        loss, *metrics = (sums.of_terms(lambda t: t.whole(n)) for sums in joined)
        results = {name: sums.result() for name, sums in zip(found[1], metrics, strict=True)}
        return (loss.share(1, counts), (results, statistics)), grads

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

    def parts_along(self) -> tuple[str, int]:
        """The dim along which a batch is divided into parts, and the number of its elements that stay together.

        Raises `ShapeError` if the batch cannot be divided.
        """
        if self.mean_over is None:
            inputs = [[d.name for d in spec.dims] for spec in self.inputs(self.config).values()]
            shared = [name for name in inputs[0] if all(name in names for names in inputs)]
            has_batch = any("batch" in names for names in inputs)
            if not has_batch and len(shared) != 1:
                raise md.ShapeError(
                    f"{self.name} does not say along which dim its batch is divided into micro-batches\n"
                    f"  dims of all inputs: {', '.join(shared) or 'none'}; choose one: "
                    "md.Workload(mean_over=lambda config: 'batch')"
                )
            return "batch" if has_batch else shared[0], 1
        over = self.mean_over(self.config)
        if over is None:
            raise md.ShapeError(
                f"{self.name} with this config does not run in micro-batches: its loss is not declared to be a mean of "
                "independent terms, because mean_over(config) is None\n"
                "  batch normalisation and dropout make terms depend on the batch; train on smaller batches"
            )
        return (over, 1) if isinstance(over, str) else over

    def _check_joined(
        self, loss: MetricTerms, metrics: Mapping[str, MetricTerms], statistics: Mapping[str, Any]
    ) -> None:
        """Raises `ShapeError` if parts of the batch cannot be joined."""
        plain = [name for name, sums in {"loss": loss, **metrics}.items() if sums.plain]
        if self.mean_over is None and (plain or statistics):
            what = f"{plain[0]!r} is a plain scalar" if plain else f"the loss returns {next(iter(statistics))!r}"
            raise md.ShapeError(
                f"{self.name} does not run in micro-batches: {what}, not declared to be a mean over a dim; a mean of "
                "means is not the mean\n"
                "  return the sum and the count, md.train.mean(total, count); md.train.total, maximum, minimum, norm "
                "and same join other numbers\n"
                "  or, if each is a mean of as many independent terms in every part, claim it: "
                "md.Workload(mean_over=lambda config: 'batch')"
            )

    def eval_step(self, *, join: bool = False) -> Callable[..., Any]:
        """The function `step(params, batch[, key]) -> metrics`, which includes the loss and updates nothing.

        With `join`, the metrics are those of a part of the data, as `meshdsl.train.train` joins them.
        """
        loss_of = (self.eval_loss or self.loss)(self.config)

        def eval_step(params: Any, batch: Any, *key: md.Tensor) -> dict[str, Any]:
            loss, metrics, _ = _parts(loss_of(params, batch, *key))
            parts = {"loss": loss, **metrics}
            return parts if join else {name: sums.result() for name, sums in parts.items()}

        return eval_step


class _Rows:
    """Inputs along a dim whose groups of consecutive elements stay together, and the reverse of the grouping."""

    def __init__(self, over: str, group: int, rows: dict[str, md.Tensor]):
        self.over, self.dim, self.rows = over, over, rows
        if group > 1:
            taken = [d for x in rows.values() for d in x.dims]
            made = (md.Dim(f"{over}__{part}", group) for part in ("groups", "group"))
            self.dim, self.inner = (md.fresh_dim(d, taken).name for d in made)
            self.rows = {name: self._grouped(name, x, group) for name, x in rows.items()}

    def _grouped(self, name: str, x: md.Tensor, group: int) -> md.Tensor:
        dim = next(d for d in x.dims if d.name == self.over)
        if dim.size % group:
            raise md.ShapeError(f"{name!r} has {dim}, which is not a multiple of the {group} elements of a group")
        return md.unflatten(x, dim, [md.Dim(self.dim, dim.size // group), md.Dim(self.inner, group)])

    def joined(self, rows: Mapping[str, md.Tensor]) -> dict[str, md.Tensor]:
        """The inputs of a part, with the dim that the model knows."""
        if self.dim == self.over:
            return dict(rows)
        return {name: md.flatten(x, [self.dim, self.inner], self.over) for name, x in rows.items()}


def _parts(result: Any) -> tuple[MetricTerms, dict[str, MetricTerms], dict[str, md.Tensor]]:
    """The loss, its metrics and the new running statistics, of what a loss returns."""
    loss, *more = result if isinstance(result, tuple) else (result,)
    metrics, statistics = (*more, {}, {})[:2]
    return sums_of(loss), {name: sums_of(x) for name, x in metrics.items()}, statistics


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
