"""The training loop: one compiled step, run repeatedly.

Parameters and optimizer state are created on their own devices and donated to every step. Training batches depend only
on (seed, step), and evaluation always uses the same held-out batches. A run that is stopped and resumed is therefore
bitwise equal to one that is not. A step whose loss or gradient is not finite changes no parameter.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Generator, Iterator
from typing import Any

import meshdsl as md

from .batches import Batches, Text, data_for, tensors, tokens_of
from .reader import Reader, Record, finite
from .state import Keeping, State, closing
from .stop import Stop, Stopped
from .values import as_json

__all__ = ["stages", "train"]


def train(
    workload: md.Workload,
    mesh: md.Mesh,
    layout: md.Layout,
    *,
    steps: int,
    seed: int = 0,
    batches: Batches | None = None,
    eval_every: int = 0,
    eval_batches: int = 8,
    weight_update: str = "replicated",
    machine: str | None = None,
    non_finite: str = "stop",
    max_skips: int = 10,
    keep: Keeping | None = None,
    stop: Stop | None = None,
) -> Generator[Record]:
    """Trains until `steps` steps are done; yields a record for the start, each step, save and evaluation, and the end.

    `batches(split, step)` returns the data of the splits `train` and `held_out`; the default is `data_for(workload)`.
    The run evaluates on `eval_batches` held-out batches (0: never) every `eval_every` steps (0: not during training)
    and after the last step. `weight_update` is passed to `md.compile`; `machine` is used if it is "auto". A NaN or
    infinite loss or gradient raises `NonFiniteLoss`; with `non_finite="skip"`, only after `max_skips` such steps in a
    row. With `keep`, the run resumes from its newest checkpoint, and saves during training and after the last step. If
    `stop` reports a signal, the run saves and raises `Stopped`.
    """
    batches = data_for(workload, seed) if batches is None else batches
    specs = workload.inputs(workload.config)
    key = md.random.key(seed)
    key_parameter = _key(workload)
    eval_key = (
        (key,) if key_parameter and key_parameter.default is key_parameter.empty else ()
    )  # an optional key is not passed: no dropout
    run, types = stages(workload, mesh, layout, weight_update=weight_update, machine=machine, guard=True)
    program = run.program(*types)  # raises all errors of the layout before parameters are created
    evaluate_step = md.compile(workload.eval_step(), mesh, layout)
    stop = Stop() if stop is None else stop

    with closing(keep):
        started = time.perf_counter()
        tree_specs = {"params": types[0], "state": types[1]}
        restored = keep.restore(tree_specs, program, seed) if keep else None
        if keep and not (restored and restored[0].saved >= steps):
            keep.checkpoints.claim()  # fails now instead of at the first save, if the directory is locked or read-only
        state = restored[0] if restored else State(_initialise(workload, mesh, layout, key))
        yield {
            "event": "start",
            "workload": workload.name,
            "mesh": str(mesh),
            "layout": str(layout),
            "seed": seed,
            "config": as_json(dataclasses.asdict(workload.config)),
            "parameters": sum(math.prod(d.size for d in p.shape) for p in types[0].values()),
            "data": as_json(describe()) if (describe := getattr(batches, "describe", None)) else {"kind": "given"},
        }
        if restored:
            left = max(steps - state.step, 0)
            yield {
                "event": "resume",
                "step": state.step,
                "from": restored[1],
                "changed": restored[2],
                "steps_left": left,
            }
        first_step = state.step
        reader = Reader(state, steps, tokens_of(specs), non_finite, max_skips)
        due = False

        def save(*, wait: bool) -> Iterator[Record]:
            yield from reader.read()  # so that the saved counts include the last step
            nonlocal due
            if keep and state.saved != state.step:
                started = time.perf_counter()
                due = not keep.save(state, seed, wait=wait)
                if not due:
                    yield {"event": "save", "step": state.step, "seconds": time.perf_counter() - started}
                reader.restart()

        def stop_run(signal_number: int) -> Iterator[Record]:
            if keep:
                yield from save(wait=True)
                keep.checkpoints.wait()
                raise Stopped(signal_number, state.step)

        def evaluate() -> Iterator[Record]:
            yield from reader.read()
            totals: dict[str, float] = {}
            for i in range(eval_batches):
                metrics = evaluate_step(state.tree["params"], tensors(batches("held_out", i), specs), *eval_key)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value.numpy()) / eval_batches
                if signal_number := stop.now():
                    yield from stop_run(signal_number)
            if isinstance(batches, Text):
                totals["bits_per_byte"] = totals.get("cross_entropy", totals["loss"]) / math.log(2)
            yield {"event": "eval", "step": state.step, "batches": eval_batches, **finite(totals)}
            reader.restart()

        if signal_number := stop.now():
            yield from stop_run(signal_number)
        next_answer = stop.ask()
        while state.step < steps:
            step = state.step + 1
            batch = tensors(batches("train", step), specs)
            step_key = (md.random.fold_in(key, step),) if key_parameter else ()
            params, slots, metrics = run(state.tree["params"], state.tree["state"], batch, *step_key)
            state.tree, state.step = {"params": params, "state": slots}, step
            stop_answer, next_answer = next_answer, stop.ask()
            yield from reader.read()
            reader.pending = (step, metrics)
            due = due or (keep is not None and keep.due(step))
            if due and step != steps:
                yield from save(wait=False)
            if signal_number := stop_answer():
                yield from stop_run(signal_number)
            if eval_batches and eval_every and step % eval_every == 0 and step != steps:
                yield from evaluate()
        yield from save(wait=True)
        if eval_batches:
            yield from evaluate()
        if keep:
            keep.checkpoints.wait()
        yield _end(state, reader, steps - first_step, time.perf_counter() - started, batches)


def _end(state: State, reader: Reader, steps_done: int, seconds: float, batches: Batches) -> Record:
    end: Record = {"event": "end", "steps": max(steps_done, 0), "seconds": seconds}
    if state.skipped:
        end["skipped"] = state.skipped
    if reader.counted:
        end["seconds_per_step"] = reader.seconds / reader.counted
        if reader.tokens:
            name = "bytes_per_second" if isinstance(batches, Text) else "tokens_per_second"
            end[name] = reader.tokens * reader.counted / reader.seconds
    return end


def stages(
    workload: md.Workload,
    mesh: md.Mesh,
    layout: md.Layout,
    *,
    forward: bool = False,
    weight_update: str = "replicated",
    machine: str | None = None,
    guard: bool = False,
) -> tuple[md.Compiled, tuple[Any, ...]]:
    """The compiled training step and its argument specs, for `.graph`, `.program` and `.lower`. Needs no devices.

    With `forward`, the evaluation step, without gradients and update. With `guard`, the step that `train` runs, which
    keeps the parameters and state if the loss or gradient is not finite.
    """
    params, state, batch = workload.specs()
    key = (md.spec("key_word:2", "uint32"),) if _key(workload) else ()
    if forward:
        return md.compile(workload.eval_step(), mesh, layout), (params, batch, *key)
    step = workload.train_step(guard=guard)
    update_machine = machine if weight_update == "auto" else None
    compiled = md.compile(step, mesh, layout, donate=(0, 1), weight_update=weight_update, machine=update_machine)
    return compiled, (params, state, batch, *key)


def _initialise(workload: md.Workload, mesh: md.Mesh, layout: md.Layout, key: md.Tensor) -> dict[str, Any]:
    """Initial parameters and optimizer state; each shard is created on its own device."""

    def init(key: md.Tensor) -> dict[str, Any]:
        return dict(zip(("params", "state"), workload.init(key), strict=True))  # the same paths as in the step

    return md.compile(init, mesh, layout)(key)


def _key(workload: md.Workload) -> inspect.Parameter | None:
    """The third parameter of the loss, a random key, or None if it has only params and batch."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(workload.loss(workload.config)).parameters.values()
    return next(iter([p for p in parameters if p.kind in kinds][2:]), None)
