"""Compile time as a function of devices and layers: python -m benchmarks.scale

Prints a JSON line for each mesh and number of layers: seconds to trace, differentiate, partition and lower the language
model's train step, and the number of instructions of the program. The devices need not exist.
"""

from __future__ import annotations

import json
import time

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


def main() -> None:
    measure("rows:2 cols:1", 1)  # warm-up, so that JAX's start is not timed
    for mesh, layers in CASES:
        print(json.dumps(measure(mesh, layers)), flush=True)


if __name__ == "__main__":
    main()
