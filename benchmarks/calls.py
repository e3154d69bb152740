"""The overhead of a call: CPU time of calling a compiled function of 100 arrays, beside `jax.jit` of the same function.

`jaxified` is `md.jaxify` of the compiled function, `inside` is `jax.jit` of that.

`python -m benchmarks.calls [--arrays N] [--calls N] [--rounds N]` prints one JSON object for one device and one for
eight. Every array has eight numbers, so that the call and not the computation is measured; on eight devices each array
is split over all of them. Times are milliseconds of the thread that calls (`time.thread_time`), the median of rounds
that alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

import meshdsl as md


def add_one(*arrays: Any) -> list[Any]:
    """The function that is called."""
    return [x + 1.0 for x in arrays]


def measure(devices: int, arrays: int, calls: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of one call by each candidate; `overhead_ms` is that of `md.compile` over that of `jax.jit`."""
    mesh, layout = md.Mesh(f"all:{devices}"), md.Layout("place:all" if devices > 1 else "")
    tensors = [md.tensor(np.zeros(8, np.float32), "place") for _ in range(arrays)]
    step = md.compile(add_one, mesh, layout)
    tensors = step(*tensors)
    values = [x.array for x in tensors]
    jitted, jaxified = jax.jit(add_one), md.jaxify(step, *tensors)
    inside = jax.jit(jaxified)
    candidates: dict[str, Callable[[], list[Any]]] = {
        "meshdsl": lambda: step(*tensors),
        "jit": lambda: jitted(*values),
        "jaxified": lambda: jaxified(*values),
        "inside": lambda: inside(*values),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            times[name].append(_milliseconds(call, calls))
    median = {name: statistics.median(each) for name, each in times.items()}
    return {
        "figure": "calls",
        "devices": devices,
        "arrays": arrays,
        **{f"{name}_ms": round(ms, 4) for name, ms in median.items()},
        "overhead_ms": round(median["meshdsl"] - median["jit"], 4),
    }


def _milliseconds(call: Callable[[], list[Any]], calls: int) -> float:
    """CPU time of this thread for one call, after a first call that may compile."""
    results = call()
    jax.block_until_ready([getattr(x, "array", x) for x in results])
    start = time.thread_time()
    for _ in range(calls):
        results = call()
    seconds = time.thread_time() - start
    jax.block_until_ready([getattr(x, "array", x) for x in results])
    return seconds / calls * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a call of a compiled function, beside jax.jit")
    parser.add_argument("--arrays", type=int, default=100)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for devices in (1, 8):
        print(json.dumps(measure(devices, options.arrays, options.calls, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
