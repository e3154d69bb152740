"""The training loop: one compiled step, run repeatedly.

Parameters and optimizer state are created on their own devices and donated to every step. Training batches depend only
on (seed, step), and evaluation always uses the same held-out batches. A run that is stopped and resumed is therefore
bitwise equal to one that is not. A step whose loss or gradient is not finite changes no parameter.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshdsl as md

from ..errors.values import as_json
from ..metric import MetricTerms, on_host
from ..optim.optimizers import name_of
from .batches import Batches, Text, data_for, described, targets_of, tensors, tokens_of
from .iterators import position_of
from .parts import check_average, check_microbatches, joined
from .peers import digests, versions
from .reader import NonFiniteLoss, Record, Recorder, finite
from .state import Keeping, State, closing
from .step import initialised, key_of, needs_key, stages, state_of, stored
from .stop import Stop, Stopped
from .tokens import TokenFiles
from .watch import Watch


def train(
    workload: md.Workload,
    plan: md.Plan,
    *,
    steps: int,
    seed: int = 0,
    batches: Batches | None = None,
    eval_every: int = 0,
    eval_batches: int = 8,
    peak_seconds: float | None = None,
    non_finite: str = "stop",
    max_skips: int = 10,
    keep: Keeping | None = None,
    stop: Stop | None = None,
    watch: Watch | None = None,
    optimizer_changed: bool = False,
) -> Generator[Record]:
    """Trains until `steps` steps are done; returns an iterator of the run's records.

    It yields a record for the start, each step, save and evaluation, and the end.

    `batches(split, step)` returns the data of the splits `train` and `held_out`; the default is `data_for(workload)`.
    The run evaluates on `eval_batches` held-out batches (0: never) every `eval_every` steps (0: not during training)
    and after the last step. If the seconds are known that the products of a step take at the devices' peak,
    `peak_seconds`, records have the model FLOP utilisation, `mfu`. A NaN or infinite loss or gradient raises
    `NonFiniteLoss`; with `non_finite="skip"`, only after `max_skips` such steps in a row. With `keep`, the run resumes
    from its newest checkpoint, and saves during training and after the last step. A run that would drop optimizer
    state, or make new state for restored parameters, needs `optimizer_changed=True`, and otherwise raises `UsageError`.
    If `stop` reports a signal, the run saves and raises `Stopped`. `watch` is told where the run is.
    """
    _check(workload, steps, batches, non_finite)
    batches = data_for(workload, seed) if batches is None else batches
    with closing(keep):
        run = _Run(
            workload, plan, steps, seed, batches, eval_every, eval_batches, keep, stop or Stop(), watch or Watch()
        )
        started = time.perf_counter()
        restored = run.restored(optimizer_changed=optimizer_changed)
        if keep and not (restored and restored[0].saved >= steps):
            keep.checkpoints.claim()  # fails now instead of at the first save, if the directory is locked or read-only
        run.begin(restored and restored[0], non_finite, max_skips, peak_seconds)
        yield run.start()
        first_step = run.state.step
        if restored:
            yield {"event": "resume", "step": first_step, **restored[1], "steps_left": max(steps - first_step, 0)}
        yield from run.all_steps(resumed=restored is not None)
        yield _end(run.state, run.reader, steps - first_step, time.perf_counter() - started, batches)


def _check(workload: Any, steps: Any, batches: Any, non_finite: str) -> None:
    """Raises `MeshdslError` for arguments of `train` that no run can have."""
    if not isinstance(workload, md.Workload):
        raise md.MeshdslError(f"train takes an md.Workload, got {workload!r}")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise md.MeshdslError(f"steps is a number of steps from 0, got {steps!r}")
    if steps >= 2**32 and key_of(workload):
        raise md.MeshdslError(f"a loss that draws random numbers has keys for steps below {2**32}, got steps={steps}")
    if batches is not None and not callable(batches):
        raise md.MeshdslError(
            f"batches is a function (split, step) -> dict of arrays, got {type(batches).__name__}\n"
            "  an iterator with a position: meshdsl.train.Iterated(iterator, held_out)"
        )
    if non_finite not in ("stop", "skip"):
        raise md.MeshdslError(f"non_finite is 'stop' or 'skip', got {non_finite!r}")


@dataclass
class _Run:
    """The run of one process."""

    workload: md.Workload
    plan: md.Plan
    steps: int
    seed: int
    batches: Batches
    eval_every: int
    eval_batches: int
    keep: Keeping | None
    stop: Stop
    watch: Watch
    save_due: bool = False
    averaged: list[str] | None = None  # plain metrics that could not be checked; None before the first evaluation

    def __post_init__(self) -> None:
        workload, plan = self.workload, self.plan
        self.train_step, self.types = stages(workload, plan, guard=True)
        self.watch.program = self.program = self.train_step.program(*self.types)  # raises all errors of the layout
        self.specs = workload.inputs(workload.config)
        self.targets = targets_of(workload.loss(workload.config), self.types[0], self.specs, *self.types[3:])
        if isinstance(self.batches, TokenFiles) and "targets" in self.targets:
            self.batches.check(self.targets["targets"].classes.size)
        self.description = described(self.batches)
        optimizer = name_of(workload.optimizer(workload.config))
        # more values to store with every checkpoint
        self.compared = {"rows": _rows(self.specs), "optimizer": optimizer, "versions": versions()}
        self.stored_as = stored(self.program, plan.layout, self.types)
        self.evaluate_step = md.compile(workload.eval_step(join=True), plan.mesh, plan.layout)
        key = md.random.key(self.seed)
        self.keys = _Keys(key) if key_of(workload) else None
        self.eval_key = (key,) if needs_key(workload) else ()  # an optional key is not passed: no dropout

    def restored(self, *, optimizer_changed: bool) -> tuple[State, Record] | None:
        """The state of the checkpoint from which this run goes on, and what to record of it; None for a new run."""
        return self.keep and self.keep.restore(
            {"params": self.types[0], "state": self.types[1]}, self.program, self.seed, self.batches,
            self.description, init=lambda params: state_of(self.workload, self.plan.mesh, self.stored_as, params),
            optimizer_changed=optimizer_changed, **self.compared,
        )  # fmt: skip

    def begin(self, restored: State | None, *reading: Any) -> None:
        """Take the restored state, or make a new one; `reading` are the last arguments of the `Recorder`."""
        key = md.random.key(self.seed)
        self.state = restored or State(initialised(self.workload, self.plan.mesh, self.stored_as, key))
        self.reader = Recorder(self.state, self.steps, tokens_of(self.specs), *reading)

    def start(self) -> Record:
        """The record of the start."""
        return {
            "event": "start",
            "workload": self.workload.name,
            "mesh": str(self.plan.mesh),
            "layout": str(self.plan.layout),
            "seed": self.seed,
            "config": as_json(dataclasses.asdict(self.workload.config)),
            "parameters": sum(math.prod(d.size for d in p.dims) for p in self.types[0].values()),
            "data": self.description or {"kind": "given"},
        }

    def all_steps(self, *, resumed: bool) -> Iterator[Record]:
        """The records of all remaining steps, and of the saves and evaluations between and after them."""
        state, stop = self.state, self.stop
        if signal_number := stop.now():
            yield from self.stop_run(signal_number)
        if resumed and self.evaluation_due():  # the run may have ended between the save and the evaluation
            yield from self.evaluate()
        next_answer = stop.ask()
        while state.step < self.steps:
            metrics = self.one_step()
            stop_answer, next_answer = next_answer, stop.ask()
            yield from self.reader.read()
            self.reader.pending = (state.step, metrics)
            self.save_due = self.save_due or (self.keep is not None and self.keep.due(state.step))
            if self.save_due and state.step != self.steps:
                yield from self.save(wait=False)
            if signal_number := stop_answer():
                yield from self.stop_run(signal_number)
            if self.evaluation_due():
                yield from self.evaluate()
        yield from self.last()

    def last(self) -> Iterator[Record]:
        """Save and evaluate after the last step."""
        yield from self.save(wait=True)
        found: Record = {}
        for found in self.evaluate() if self.eval_batches else ():
            yield found
        if self.keep:
            self.keep.checkpoints.wait()
        if found.get("event") == "eval" and found["loss"] is None:
            raise NonFiniteLoss(
                f"the eval loss of step {self.state.step}, the last one, is not finite\n"
                "  look at the held-out data, and at the eval losses of earlier steps"
            )

    def one_step(self) -> Mapping[str, md.Tensor]:
        """Start the next step and return its metrics, which may not be computed yet."""
        state, step = self.state, self.state.step + 1
        self.watch.reads(step)
        arrays = self.batches("train", step)
        self.watch.starts(step)
        batch = tensors(arrays, self.specs, self.targets)
        if self.reader.compile_seconds is None and self.plan.microbatches > 1 and not self.eval_key:
            self.check_microbatches({name: np.asarray(arrays[name], spec.dtype) for name, spec in self.specs.items()})
        step_key = (self.keys.at(step),) if self.keys else ()
        began = time.perf_counter() if self.reader.compile_seconds is None else 0.0
        params, slots, metrics = self.train_step(state.tree["params"], state.tree["state"], batch, *step_key)
        if self.reader.compile_seconds is None:  # a call returns once the step is compiled and started
            self.reader.compile_seconds = time.perf_counter() - began
        state.tree, state.step = {"params": params, "state": slots}, step
        return metrics

    def evaluation_due(self) -> bool:
        """True if to evaluate after this step; after the last step the run always does."""
        step = self.state.step
        return bool(self.eval_batches and self.eval_every and 0 < step < self.steps and step % self.eval_every == 0)

    def save(self, *, wait: bool) -> Iterator[Record]:
        """Save the state, unless this step is saved already. Without `wait`, not while an earlier save is written."""
        yield from self.reader.read()  # so that the saved counts include the last step
        if self.keep is None or self.state.saved == self.state.step:
            return
        self.watch.saves()
        started = time.perf_counter()
        position = position_of(self.batches)
        stored = {"description": self.description, "position": position, **self.compared}
        saved = self.keep.save(self.state, self.seed, wait=wait, **stored)
        self.save_due = not saved
        if saved:
            seconds = time.perf_counter() - started
            copies = {"digests": digests(self.state.tree)} if jax.process_count() > 1 else {}
            yield {"event": "save", "step": self.state.step, "seconds": seconds, **copies}
        self.reader.restart()

    def stop_run(self, signal_number: int) -> Iterator[Record]:
        """Save and raise `Stopped`; does nothing in a run without checkpoints."""
        if self.keep:
            yield from self.save(wait=True)
            self.keep.checkpoints.wait()
            raise Stopped(signal_number, self.state.step)

    def evaluate(self) -> Iterator[Record]:
        """Evaluate on the held-out batches; yields the records of the last step and of the evaluation."""
        yield from self.reader.read()
        total: dict[str, MetricTerms] = {}
        first: list[Mapping[str, np.ndarray]] = []
        for i in range(self.eval_batches):
            self.watch.evaluates(i)
            batch = self.batches("held_out", i)
            metrics = self.metrics_of(batch)
            total = joined([total, metrics]) if total else dict(metrics)
            if self.averaged is None and len(first) < 2:
                first.append(batch)
            if signal_number := self.stop.now():
                yield from self.stop_run(signal_number)
        self.watch.evaluates(0)  # or what it does after the last batch, which is not limited
        if len(first) == 2:
            self.averaged = check_average(self.workload, first, self.metrics_of)
        totals = {name: on_host(sums) for name, sums in total.items()}
        if size := getattr(self.batches, "bytes_per_token", None):
            totals["bits_per_byte"] = totals.get("cross_entropy", totals["loss"]) / math.log(2) / size
        averaged = {"averaged": self.averaged} if self.averaged else {}
        yield {"event": "eval", "step": self.state.step, "batches": self.eval_batches, **finite(totals), **averaged}
        self.reader.restart()

    def metrics_of(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, MetricTerms]:
        """The metrics of an evaluation batch, which are joined with those of others."""
        checked = tensors(batch, self.specs, self.targets)
        return self.evaluate_step(self.state.tree["params"], checked, *self.eval_key)

    def check_microbatches(self, batch: Mapping[str, np.ndarray]) -> None:
        """Raises `MeshdslError` if the micro-batches of this batch would be joined wrongly."""
        workload = dataclasses.replace(self.workload, eval_loss=None)
        step = md.compile(workload.eval_step(join=True), self.plan.mesh, self.plan.layout)

        def evaluate(part: Mapping[str, np.ndarray]) -> Mapping[str, MetricTerms]:
            inputs = {name: md.tensor(part[name], [d.name for d in spec.dims]) for name, spec in self.specs.items()}
            return step(self.state.tree["params"], inputs)

        graph = str(step.graph(self.state.tree["params"], self.specs))
        tolerance = 0.03 if "float16" in graph or "float8" in graph else 1e-3
        check_microbatches(workload, self.plan.microbatches, batch, evaluate, tolerance)


class _Keys:
    """The random key of each step, computed for many steps at once: each is `md.random.fold_in(key, step)`."""

    COUNT = 128

    def __init__(self, key: md.Tensor):
        self.key, self.first, self.rows = key, 0, list[Any]()

    def at(self, step: int) -> md.Tensor:
        if not self.first <= step < self.first + len(self.rows):
            steps = np.arange(step, min(step + self.COUNT, 2**32), dtype=np.uint32)
            keys = md.random.fold_in(self.key, md.tensor(steps, "step"))
            self.first, self.rows = step, list(keys.array)  # on the device, because sending each costs 0.08 ms
        return md.tensor(self.rows[step - self.first], self.key.dims)


def _end(state: State, reader: Recorder, steps_done: int, seconds: float, batches: Batches) -> Record:
    end: Record = {"event": "end", "steps": max(steps_done, 0), "seconds": seconds}
    if state.skipped:
        end["skipped"] = state.skipped
    if reader.counted:
        end["seconds_per_step"] = reader.seconds / reader.counted
        if reader.tokens:
            name = "bytes_per_second" if isinstance(batches, Text) else "tokens_per_second"
            end[name] = reader.tokens * reader.counted / reader.seconds
    return end


def _rows(specs: Mapping[str, Any]) -> int:
    """The number of rows of a batch: the size of the dim `batch`, else of the first dim."""
    dims = [d for spec in specs.values() for d in spec.dims]
    return next((d.size for d in [*(d for d in dims if d.name == "batch"), *dims]), 0)
