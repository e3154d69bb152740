"""The overhead of the training loop: CPU time of a step of `meshdsl.train`, beside the compiled step alone.

`python -m benchmarks.loop [--steps N] [--rounds N]` prints one JSON object for a
model without a random key, and one for a model with it. Both run the same compiled step of a small
model on one device and read its metrics one step late; the difference is what the loop costs. Batches are prepared
before, so that data is not counted. `process` is the CPU time of all threads of the process, which on a busy machine
varies by more than the loop costs; `thread` is that of the thread that runs the loop. Each is the least of the rounds,
which alternate.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.mlp import mlp
from meshdsl.train import stages, train

__all__ = ["measure"]


def measure(steps: int, rounds: int, *, has_key: bool = False) -> dict[str, Any]:
    """Milliseconds of CPU per step: bare, in the loop, and their difference."""
    workload = mlp.replace(batch=16, io=64, hidden=256)
    workload = dataclasses.replace(workload, loss=_loss_with_key) if has_key else workload
    mesh, layout = md.Mesh("all:1"), md.Layout("")
    specs = workload.inputs(workload.config)
    draw = np.random.default_rng(0)
    batch = {name: draw.standard_normal([d.size for d in spec.dims], np.float32) for name, spec in specs.items()}
    bare, looped = [], []
    for _ in range(rounds):
        bare.append(_bare(workload, mesh, layout, batch, steps, has_key))
        looped.append(_looped(workload, mesh, layout, batch, steps))
    rows: dict[str, Any] = {}
    for n, name in enumerate(("process", "thread")):
        a, b = min(times[n] for times in bare), min(times[n] for times in looped)
        rows[name] = {"bare_ms": round(a, 4), "loop_ms": round(b, 4), "overhead_ms": round(b - a, 4)}
    return rows


def _cpu() -> np.ndarray:
    """CPU seconds of the process, and of this thread, which runs the loop."""
    return np.array([time.process_time(), time.thread_time()])


def _loss_with_key(config: Any) -> Any:
    loss = mlp.loss(config)

    def with_key(params: Any, batch: Any, key: md.Tensor) -> md.Tensor:
        return loss(params, batch) + 0.0 * md.random.uniform(key)

    return with_key


def _bare(
    workload: md.Workload, mesh: md.Mesh, layout: md.Layout, batch: Mapping[str, Any], steps: int, has_key: bool
) -> np.ndarray:
    """The compiled step, called with tensors, and its loss read one step late."""
    step, _ = stages(workload, md.Plan(mesh, layout), guard=True)
    key = md.random.key(0)
    params, state = md.compile(lambda key: workload.init(key), mesh, layout)(key)
    step_key = (key,) if has_key else ()
    specs = workload.inputs(workload.config)
    pending: Mapping[str, md.Tensor] = {}
    began = _cpu()
    for n in range(steps + 20):
        if n == 20:
            began = _cpu()
        tensors = {name: md.tensor(batch[name], spec.dims) for name, spec in specs.items()}
        params, state, metrics = step(params, state, tensors, *step_key)
        for value in pending.values():
            float(value.numpy())
        pending = metrics
    return (_cpu() - began) * 1e3 / steps


def _looped(
    workload: md.Workload, mesh: md.Mesh, layout: md.Layout, batch: Mapping[str, Any], steps: int
) -> np.ndarray:
    records = train(
        workload,
        md.Plan(mesh, layout),
        steps=steps + 40,
        batches=lambda split, step: batch,
        eval_batches=0,
        non_finite="stop",
    )
    for _ in itertools.islice(records, 21):  # the start and 20 steps
        pass
    began = _cpu()
    for _ in itertools.islice(records, steps):
        pass
    seconds = _cpu() - began
    records.close()
    return seconds * 1e3 / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a step of the training loop, beside the compiled step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for has_key in (False, True):
        print(json.dumps({"key": has_key, **measure(options.steps, options.rounds, has_key=has_key)}), flush=True)


if __name__ == "__main__":
    main()
