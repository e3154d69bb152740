"""CPU-time ratios of steps, measured in interleaved rounds so that other load affects all candidates equally.

CPU time includes all threads of the process; on a shared machine it varies less than wall time. Each round runs every
candidate once, in an order that rotates and is reversed from time to time. Ratios are computed within a round; the
median over rounds is reported with a bootstrap interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import numpy as np

LEAST_ROUNDS = 40


def measure(
    candidates: Mapping[str, Callable[[], object]], rounds: int = LEAST_ROUNDS, warmup: int = 2
) -> dict[str, dict]:
    """Times each candidate, called once per round; ratios are relative to the first. All seconds are per step."""
    names = list(candidates)
    for _ in range(warmup):
        for name in names:
            candidates[name]()
    cpu = np.zeros((rounds, len(names)))
    wall = np.zeros((rounds, len(names)))
    for r in range(rounds):
        # Reversed from time to time, because with rotation alone each candidate always follows the same one.
        direction = 1 if r // len(names) % 2 == 0 else -1
        for i in range(len(names)):
            candidate = (r + direction * i) % len(names)
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            candidates[names[candidate]]()
            cpu[r, candidate] = time.process_time() - cpu_start
            wall[r, candidate] = time.perf_counter() - wall_start
    return {name: _figures(cpu, wall, i, rounds) for i, name in enumerate(names)}


def report(
    candidates: Mapping[str, Callable[[], object]], rounds: int = LEAST_ROUNDS, **labels: object
) -> dict[str, dict]:
    """Calls `measure`, prints a JSON line per candidate with the labels, and returns the figures."""
    results = measure(candidates, rounds)
    first = next(iter(results))
    for name, figures in results.items():
        print(
            json.dumps({"figure": "time", **labels, "candidate": name, "ratio_to": first, **figures}),
            flush=True,
        )
    return results


def _figures(cpu: np.ndarray, wall: np.ndarray, i: int, rounds: int) -> dict:
    ratios = cpu[:, i] / cpu[:, 0]
    low, high = bootstrap_median(ratios)
    return {
        "rounds": rounds,
        "cpu_seconds": round(float(np.median(cpu[:, i])), 6),
        "wall_seconds": round(float(np.median(wall[:, i])), 6),
        "cpu_ratio": round(float(np.median(ratios)), 4),
        "cpu_ratio_low": round(low, 4),
        "cpu_ratio_high": round(high, 4),
        "wall_ratio": round(float(np.median(wall[:, i] / wall[:, 0])), 4),
    }


def bootstrap_median(values: np.ndarray, coverage: float = 0.95, resamples: int = 4000) -> tuple[float, float]:
    """A bootstrap percentile interval of the median, with a fixed seed."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (resamples, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)
