"""Training is one compiled step, run again and again; what it does is the same under every layout.

Parameters and optimizer state are made on the devices that keep them and are donated to every step. The host reads
the metrics of a step only after the next one is on its way, so reading costs no step any time. Batches depend on
(seed, step) alone, and evaluation on neither: it always sees the same held-out windows.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import meshdsl as md

from .data import SPLITS, VOCABULARY, corpus

__all__ = ["NonFiniteLoss", "data_for", "stages", "train"]

Batches = Callable[[str, int], Mapping[str, np.ndarray]]  # (split, step) -> a batch; what lies in it is up to the split
Record = dict[str, Any]


class NonFiniteLoss(md.MeshdslError):
    """The loss became NaN or infinite."""

    exit_code = 5


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
) -> Iterator[Record]:
    """Train for some steps; yields one record for the start, each step, each evaluation and the end.

    `batches(split, step)` gives the data, for splits `train` and `held_out`; by default `data_for` the workload.
    There is an evaluation every `eval_every` steps (0: none on the way) and after the last, on `eval_batches`
    held-out batches (0: never). Raises `NonFiniteLoss` when a loss is NaN or infinite.
    """
    batches = data_for(workload, seed) if batches is None else batches
    specs = workload.inputs(workload.config)
    key = md.random.key(seed)
    takes = _key(workload)
    eval_key = (key,) if takes and takes.default is takes.empty else ()  # where it may be left out: no dropout
    run, types = stages(workload, mesh, layout)
    run.program(*types)  # whatever is wrong with the layout is said here, all of it, before anything is made
    judge = md.compile(workload.eval_step(), mesh, layout)

    began = time.perf_counter()
    params, state = _initialised(workload, mesh, layout, key)
    yield {
        "event": "start",
        "workload": workload.name,
        "mesh": str(mesh),
        "layout": str(layout),
        "seed": seed,
        "config": {k: _plain(v) for k, v in dataclasses.asdict(workload.config).items()},
        "parameters": sum(math.prod(p.shape) for p in params.values()),
        "data": describe() if (describe := getattr(batches, "describe", None)) else {"kind": "given"},
    }

    def evaluate(step: int) -> Record:
        totals: dict[str, float] = {}
        for i in range(eval_batches):
            metrics = judge(params, _tensors(batches("held_out", i), specs), *eval_key)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value.numpy()) / eval_batches
        record = {"event": "eval", "step": step, "batches": eval_batches, **totals}
        if isinstance(batches, _Text):
            record["bits_per_byte"] = totals.get("cross_entropy", totals["loss"]) / math.log(2)
        return record

    reader = _Reader()
    for step in range(1, steps + 1):
        batch = _tensors(batches("train", step), specs)
        step_key = (md.random.fold_in(key, step),) if takes else ()
        params, state, metrics = run(params, state, batch, *step_key)
        yield from reader.read()
        reader.pending = (step, metrics)
        if eval_batches and eval_every and step % eval_every == 0 and step != steps:
            yield from reader.read()
            yield evaluate(step)
            reader.started = time.perf_counter()
    yield from reader.read()
    if eval_batches:
        yield evaluate(steps)
    end = {"event": "end", "steps": steps, "seconds": time.perf_counter() - began}
    if reader.counted:
        end["seconds_per_step"] = reader.seconds / reader.counted
        if isinstance(batches, _Text):
            end["bytes_per_second"] = batches.bytes_per_step * reader.counted / reader.seconds
    yield end


def stages(
    workload: md.Workload, mesh: md.Mesh, layout: md.Layout, *, forward: bool = False
) -> tuple[md.Compiled, tuple[Any, ...]]:
    """The training step, and the types of its arguments: what `.graph`, `.program` and `.lower` take. No devices.

    With `forward`, the evaluation step: no gradients, no update.
    """
    params, state, batch = workload.specs()
    key = (md.spec("key_word:2", "uint32"),) if _key(workload) else ()
    if forward:
        return md.compile(workload.eval_step(), mesh, layout), (params, batch, *key)
    return md.compile(workload.train_step(), mesh, layout, donate=(0, 1)), (params, state, batch, *key)


def _initialised(workload: md.Workload, mesh: md.Mesh, layout: md.Layout, key: md.Tensor) -> tuple[Any, Any]:
    """Parameters and optimizer state, each shard made on its own device."""

    def init(key: md.Tensor) -> dict[str, Any]:
        return dict(zip(("params", "state"), workload.init(key), strict=True))  # the paths that they have in the step

    made = md.compile(init, mesh, layout)(key)
    return made["params"], made["state"]


class _Reader:
    """Reads a step's metrics one step late. The time of the first step, which compiles, is not counted."""

    def __init__(self) -> None:
        self.pending: tuple[int, Mapping[str, md.Tensor]] | None = None
        self.last: tuple[int, float] | None = None
        self.started = time.perf_counter()
        self.seconds, self.counted = 0.0, 0

    def read(self) -> Iterator[Record]:
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {name: float(value.numpy()) for name, value in metrics.items()}
        seconds, self.started = time.perf_counter() - self.started, time.perf_counter()
        if not math.isfinite(values["loss"]):
            raise NonFiniteLoss(_diverged(step, values, self.last))
        if self.last is not None:
            self.seconds, self.counted = self.seconds + seconds, self.counted + 1
        self.last = (step, values["loss"])
        yield {"event": "step", "step": step, **values, "seconds": seconds}


def _diverged(step: int, values: Mapping[str, float], last: tuple[int, float] | None) -> str:
    others = ", ".join(f"{name} {value:.6g}" for name, value in values.items() if name != "loss")
    before = f"it was {last[1]:.6g} at step {last[0]}" if last else "it was so from the beginning"
    return (
        f"the loss of step {step} is {values['loss']}\n"
        f"  {before}{f'; this step has {others}' if others else ''}\n"
        "  try a lower learning rate, a longer warm-up, or clipping of the gradient's norm"
    )


class _Text:
    """Text, for a workload whose batch is `tokens` and `targets` with dims batch and length."""

    def __init__(self, seed: int, batch: int, length: int):
        self.seed, self.batch, self.length = seed, batch, length
        self.bytes_per_step = batch * length

    def describe(self) -> Record:
        return {"kind": "text", **corpus().describe()}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        seed = self.seed if split == SPLITS[0] else 0
        return corpus().batch(split, seed, step, self.batch, self.length)


class _Noise:
    """Random numbers of mean 0 and variance 1, for a workload whose batch is numbers: good for trying and timing."""

    def __init__(self, seed: int, sizes: Mapping[str, tuple[int, ...]]):
        self.seed, self.sizes = seed, sizes

    def describe(self) -> Record:
        return {"kind": "noise", "fields": sorted(self.sizes)}

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        bits = np.random.Philox(key=self.seed % 2**128, counter=[0, 0, SPLITS.index(split), step])
        words = {name: bits.random_raw(math.prod(size)).reshape(size) for name, size in self.sizes.items()}
        return {name: (word / 2.0**63 - 1) * math.sqrt(3) for name, word in words.items()}


def data_for(workload: md.Workload, seed: int) -> Batches:
    """The workload's own data; else text for a batch of tokens and targets, noise for a batch of floats.

    Raises `MeshdslError` for any other batch.
    """
    if workload.data is not None:
        return workload.data(workload.config, seed)
    specs = workload.inputs(workload.config)
    listed = ", ".join(f"{name}: {spec}" for name, spec in specs.items())
    if all(spec.dtype.kind == "f" for spec in specs.values()):
        return _Noise(seed, {name: tuple(dim.size for dim in spec.shape) for name, spec in specs.items()})
    shapes = {spec.shape for spec in specs.values()}
    if set(specs) != {"tokens", "targets"} or len(shapes) != 1 or len(specs["tokens"].shape) != 2:
        raise md.MeshdslError(
            f"there is no data for {workload.name}, whose batch is {listed}\n"
            "  text is drawn for a batch of integers called tokens and targets, with dims batch and length\n"
            "  give the workload its own: md.Workload(..., data=f), with f(config, seed)(split, step) -> dict of arrays"
        )
    vocabulary = getattr(workload.config, "vocab", VOCABULARY)
    if vocabulary < VOCABULARY:
        raise md.MeshdslError(f"{workload.name} has a vocabulary of {vocabulary}, and text is {VOCABULARY} bytes")
    batch, length = (dim.size for dim in specs["tokens"].shape)
    return _Text(seed, batch, length)


def _tensors(batch: Mapping[str, np.ndarray], specs: Mapping[str, Any]) -> dict[str, md.Tensor]:
    return {name: md.tensor(np.asarray(batch[name], spec.dtype), spec.shape) for name, spec in specs.items()}


def _key(workload: md.Workload) -> inspect.Parameter | None:
    """The loss's parameter after params and batch, if there is one: the key of the random numbers it draws."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(workload.loss(workload.config)).parameters.values()
    return next(iter([p for p in parameters if p.kind in kinds][2:]), None)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
