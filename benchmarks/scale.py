"""Compile time as a function of devices, layers and weights: python -m benchmarks.scale [--weights N ...]

Prints a JSON line for each mesh and number of layers: seconds to trace, differentiate, partition and lower the language
model's train step, and the number of instructions of the program. The devices need not exist.

With `--weights`, instead, a step of Adam on a chain of N layers that are N separate weights: processor milliseconds a
weight to trace and differentiate it, to partition it over eight devices with replicated and with sharded updates, and
for JAX to trace the same step with `jax.jit` and `jax.grad`; medians of five, without the garbage collector. `ratio` is
the replicated partition over JAX's trace.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.models import transformer

CASES = (("rows:2 cols:4", 4), ("rows:2 cols:4", 64), ("rows:256 cols:8", 4), ("rows:256 cols:8", 64))


def measure(mesh: str, layers: int) -> dict[str, object]:
    """Times each stage of one train step once."""
    rows = int(mesh.split()[0].partition(":")[2])
    workload = transformer.benchmark.replace(layers=layers, batch=8 * rows)
    marks = [time.perf_counter()]
    args = workload.specs()
    compiled = md.compile(workload.train_step(), mesh, workload.layouts["data_model"][1], donate=(0, 1))
    for stage in (compiled.graph, compiled.program, compiled.lower):
        stage(*args)
        marks.append(time.perf_counter())
    names = ("trace_and_gradient_seconds", "partition_seconds", "lower_seconds")
    return {
        "figure": "scale",
        "mesh": mesh,
        "devices": md.Mesh(mesh).size,
        "layers": layers,
        **{name: round(b - a, 3) for name, a, b in zip(names, marks, marks[1:], strict=False)},
        "total_seconds": round(marks[-1] - marks[0], 3),
        "instructions": compiled.program(*args).instructions,
        "graph_equations": compiled.graph(*args).instructions,
    }


def step(
    total: Callable[[Any], Any],
    tanh: Callable[[Any], Any],
    dot: Callable[[Any, Any], Any],
    sqrt: Callable[[Any], Any],
    grad: Any,
) -> Any:
    """A step of Adam on a chain of layers, in the operations of one library."""

    def train_step(weights: list[Any], means: list[Any], squares: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            y = x
            for w in weights:
                y = tanh(dot(y, w))
            return total(y * y)

        new: list[Any] = []
        for w, m, v, g in zip(weights, means, squares, grad(loss)(weights), strict=True):
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * (g * g)
            new.append((w - 0.001 * m / (sqrt(v) + 1e-8), m, v))
        return [list(each) for each in zip(*new, strict=True)]

    return train_step


def measure_weights(count: int) -> dict[str, object]:
    """Milliseconds a weight of each stage."""

    def layer(y: Any, w: Any) -> Any:
        return md.rename(md.dot(y, w, "io"), out="io")

    ours = step(md.sum, md.tanh, layer, md.sqrt, md.grad)
    theirs = step(jnp.sum, jnp.tanh, jnp.dot, jnp.sqrt, jax.grad)
    stacks = [md.spec("io:16 out:16")] * count
    args = stacks, stacks, stacks, md.spec("batch:16 io:16")
    arrays = [jax.ShapeDtypeStruct((16, 16), "float32")] * count
    times: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> None:
        gc.disable()
        start = time.process_time()
        run()
        times.setdefault(name, []).append(1e3 * (time.process_time() - start) / count)
        gc.enable()

    for _ in range(5):
        for update in ("replicated", "sharded"):
            compiled = md.compile(lambda *xs: ours(*xs), "rows:8", "batch:rows", weight_update=update)
            timed("trace", lambda compiled=compiled: compiled.graph(*args))
            timed(update, lambda compiled=compiled: compiled.program(*args))
        timed("jit", lambda: jax.jit(lambda *xs: theirs(*xs)).trace(arrays, arrays, arrays, arrays[0]))
    found = {name: statistics.median(each) for name, each in times.items()}
    ratio = found["replicated"] / found["jit"]
    return {
        "figure": "weights",
        "weights": count,
        **{f"{name}_ms": round(each, 3) for name, each in found.items()},
        "ratio": round(ratio, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, nargs="+", metavar="N", help="time steps with so many weights, instead")
    options = parser.parse_args()
    for count in options.weights or ():
        print(json.dumps(measure_weights(count)), flush=True)
    if options.weights:
        return
    measure("rows:2 cols:1", 1)  # warm-up, so that JAX's start is not timed
    for mesh, layers in CASES:
        print(json.dumps(measure(mesh, layers)), flush=True)


if __name__ == "__main__":
    main()
