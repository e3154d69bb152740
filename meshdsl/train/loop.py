"""Training is one compiled step, run again and again; what it does is the same under every layout.

Parameters and optimizer state are made on the devices that keep them and are donated to every step. Batches depend on
(seed, step) alone, and evaluation on neither: it always sees the same held-out windows. So a run that was stopped
after any step and resumed is, bit for bit, the run that was not; and a step that is not finite changes nothing.
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
from .state import Keeping, State, keeping
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
    """Train for some steps; yields one record for the start, each step, each save, each evaluation and the end.

    `batches(split, step)` gives the data, for splits `train` and `held_out`; by default `data_for` the workload.
    There is an evaluation every `eval_every` steps (0: none on the way) and after the last, on `eval_batches`
    held-out batches (0: never). `weight_update` is that of `md.compile`, and `machine` the one that "auto" decides
    for. A loss or gradient that is NaN or infinite raises `NonFiniteLoss`; with `non_finite="skip"`, only when there
    are `max_skips` in a row. With `keep`, the run goes on from its newest checkpoint, and saves on the way and after
    the last step; when `stop` then says so, it saves and raises `Stopped`.
    """
    batches = data_for(workload, seed) if batches is None else batches
    specs = workload.inputs(workload.config)
    key = md.random.key(seed)
    takes = _key(workload)
    eval_key = (key,) if takes and takes.default is takes.empty else ()  # where it may be left out: no dropout
    run, types = stages(workload, mesh, layout, weight_update=weight_update, machine=machine, guard=True)
    program = run.program(*types)  # whatever is wrong with the layout is said here, all of it, before anything is made
    judge = md.compile(workload.eval_step(), mesh, layout)
    stop = Stop() if stop is None else stop

    with keeping(keep):
        began = time.perf_counter()
        like = {"params": types[0], "state": types[1]}
        found = keep.restore(like, program, seed) if keep else None
        if keep and not (found and found[0].saved >= steps):
            keep.checkpoints.claim()  # a second run, or a disk that cannot be written, is no surprise at the first save
        state = found[0] if found else State(_initialised(workload, mesh, layout, key))
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
        if found:
            left = max(steps - state.step, 0)
            yield {"event": "resume", "step": state.step, "from": found[1], "changed": found[2], "steps_left": left}
        first = state.step
        reader = Reader(state, steps, tokens_of(specs), non_finite, max_skips)
        due = False

        def save(*, wait: bool) -> Iterator[Record]:
            yield from reader.read()  # the counts that are saved are those of all steps done
            nonlocal due
            if keep and state.saved != state.step:
                began = time.perf_counter()
                due = not keep.save(state, seed, wait=wait)
                if not due:
                    yield {"event": "save", "step": state.step, "seconds": time.perf_counter() - began}
                reader.restart()

        def leave(number: int) -> Iterator[Record]:
            if keep:
                yield from save(wait=True)
                keep.checkpoints.wait()
                raise Stopped(number, state.step)

        def evaluate() -> Iterator[Record]:
            yield from reader.read()
            totals: dict[str, float] = {}
            for i in range(eval_batches):
                metrics = judge(state.tree["params"], tensors(batches("held_out", i), specs), *eval_key)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value.numpy()) / eval_batches
                if number := stop.now():
                    yield from leave(number)
            if isinstance(batches, Text):
                totals["bits_per_byte"] = totals.get("cross_entropy", totals["loss"]) / math.log(2)
            yield {"event": "eval", "step": state.step, "batches": eval_batches, **finite(totals)}
            reader.restart()

        if number := stop.now():
            yield from leave(number)
        asked = stop.ask()
        while state.step < steps:
            step = state.step + 1
            batch = tensors(batches("train", step), specs)
            step_key = (md.random.fold_in(key, step),) if takes else ()
            params, slots, metrics = run(state.tree["params"], state.tree["state"], batch, *step_key)
            state.tree, state.step = {"params": params, "state": slots}, step
            before, asked = asked, stop.ask()
            yield from reader.read()
            reader.pending = (step, metrics)
            due = due or (keep is not None and keep.due(step))
            if due and step != steps:
                yield from save(wait=False)
            if number := before():
                yield from leave(number)
            if eval_batches and eval_every and step % eval_every == 0 and step != steps:
                yield from evaluate()
        yield from save(wait=True)
        if eval_batches:
            yield from evaluate()
        if keep:
            keep.checkpoints.wait()
        yield _end(state, reader, steps - first, time.perf_counter() - began, batches)


def _end(state: State, reader: Reader, done: int, seconds: float, batches: Batches) -> Record:
    end: Record = {"event": "end", "steps": max(done, 0), "seconds": seconds}
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
    """The training step, and the types of its arguments: what `.graph`, `.program` and `.lower` take. No devices.

    With `forward`, the evaluation step: no gradients, no update. With `guard`, the step as `train` runs it, which
    changes nothing when its loss or gradient is not finite.
    """
    params, state, batch = workload.specs()
    key = (md.spec("key_word:2", "uint32"),) if _key(workload) else ()
    if forward:
        return md.compile(workload.eval_step(), mesh, layout), (params, batch, *key)
    step = workload.train_step(guard=guard)
    on = machine if weight_update == "auto" else None
    compiled = md.compile(step, mesh, layout, donate=(0, 1), weight_update=weight_update, machine=on)
    return compiled, (params, state, batch, *key)


def _initialised(workload: md.Workload, mesh: md.Mesh, layout: md.Layout, key: md.Tensor) -> dict[str, Any]:
    """Parameters and optimizer state, each shard made on its own device."""

    def init(key: md.Tensor) -> dict[str, Any]:
        return dict(zip(("params", "state"), workload.init(key), strict=True))  # the paths that they have in the step

    return md.compile(init, mesh, layout)(key)


def _key(workload: md.Workload) -> inspect.Parameter | None:
    """The loss's parameter after params and batch, if there is one: the key of the random numbers it draws."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(workload.loss(workload.config)).parameters.values()
    return next(iter([p for p in parameters if p.kind in kinds][2:]), None)
