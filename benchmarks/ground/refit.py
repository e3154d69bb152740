"""Refit the fitted figures of a machine without a group of rows, and predict that group.

The figures are the efficiency of large products, and on GPUs the memory bandwidth and the host's time for an operation
by default, and the rate of fused attention; the few rows on TPUs do not tell attention from products. A refit
evaluates the roofline of `meshdsl.cost` on arrays; collectives of sharded parameters run beside the kernels, which they
slow by 1.13 on GPUs. Rows of one source weigh as much as another's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import meshdsl as md

from .programs import PLAIN, Array, Programs, Work, beside, mean, solve
from .runs import Run

__all__ = ["FAMILIES", "Family", "leave_out"]

EFFICIENCY = (0.7, 0.2, 1.0)  # of large products
ATTENTION = (0.3, 0.05, 1.0)
BANDWIDTH = (0.6, 0.3, 1.0)  # of the data sheet's
OPERATION = (15e-6, 1e-6, 6e-5)  # seconds


@dataclass(frozen=True)
class Family:
    """Machines that share fitted figures, each given as (start, least, most)."""

    machines: tuple[str, ...]
    figures: dict[str, tuple[float, float, float]]


FAMILIES = {
    "a100": Family(
        ("a100-dgx", "a100-dgx-40gb"),
        {"efficiency": EFFICIENCY, "bandwidth": BANDWIDTH, "operation": OPERATION, "attention": ATTENTION},
    ),
    "h100": Family(("h100",), {"efficiency": EFFICIENCY, "bandwidth": BANDWIDTH, "attention": ATTENTION}),
    "v4": Family(("tpu-v4",), {"efficiency": EFFICIENCY}),
    "v5e": Family(("tpu-v5e",), {"efficiency": EFFICIENCY}),
    "v6e": Family(("tpu-v6e",), {"efficiency": EFFICIENCY}),
}
GROUPS: dict[str, Callable[[Run], str]] = {
    "size": lambda run: run.size,
    "tp": lambda run: str(run.tp),
    "source": lambda run: run.source,
}
DATA_SHEET = {"a100-dgx": 2.039e12, "a100-dgx-40gb": 1.555e12, "h100": 3.35e12}  # bytes/s


class Estimate:
    """The seconds of a run's step as a function of the fitted figures."""

    def __init__(self, run: Run, work: Work):
        on = md.machine(run.machine)
        self.run, self.work, self.on = run, work, on
        self.base = run.machine.partition(":")[0]
        self.top = max(fraction for _, fraction in on.efficiency)
        self.curve = np.array([on.matmul_efficiency(flops) for flops in work.flops]) / self.top
        self.peak = on.peak_of("bfloat16")
        self.inside = (work.scores[work.kernel] > 0) & (on.attention > 0)  # products of a fused attention kernel
        self.fused = (work.scores > 0) & (on.attention > 0)
        self.moved = work.moved + work.scores * (on.attention == 0)

    def seconds(self, figures: dict[str, float]) -> float:
        """The seconds of one step."""
        work, on = self.work, self.on
        efficiency = figures["efficiency"] * self.curve
        rate = np.where(self.inside, figures.get("attention", on.attention), efficiency)
        flops = work.flops * np.where(self.inside, PLAIN, 1.0)
        products = np.bincount(work.kernel, flops / (self.peak * rate), minlength=len(work.trips))
        computing = products + np.where(self.fused, 0.0, work.vector / on.vector)
        bandwidth = figures["bandwidth"] * DATA_SHEET[self.base] if "bandwidth" in figures else on.hbm_bandwidth
        host = figures.get("operation", on.operation) * work.operations
        kernels = work.trips * np.maximum(np.maximum(computing, self.moved / bandwidth) + on.launch, host)
        backward = float(kernels[work.backward & ~work.once].sum())
        once = float(kernels[work.once].sum()) + beside(work.sending_once, backward, on)
        busy = float(kernels[~work.once].sum())
        micro = max(busy, work.gathered) + (on.overlap_slowdown - 1) * min(busy, work.gathered) + work.sending
        return self.run.micro * micro + once


def leave_out(runs: Sequence[Run], programs: Programs, by: str) -> Iterator[dict[str, object]]:
    """The JSON lines of this part: each group held out in turn, and all of them together."""
    group_of = GROUPS[by]
    for name, family in FAMILIES.items():
        of_family = [run for run in runs if run.machine.partition(":")[0] in family.machines]
        estimates = [Estimate(run, programs.work(run)) for run in of_family]
        regimes = [programs.time(run).regime for run in of_family]
        groups = np.array([group_of(run) for run in of_family])
        if len(set(groups)) < 2:
            yield {"part": "leave-out", "by": by, "machine": name, "rows": len(groups), "skipped": "one group only"}
            continue
        ratio = np.ones(len(groups))
        for group in sorted(set(groups)):
            test = groups == group
            figures = fit([e for e, t in zip(estimates, test, strict=True) if not t], family)
            ratio[test] = [e.seconds(figures) / e.run.seconds for e, t in zip(estimates, test, strict=True) if t]
            yield {"part": "leave-out", "by": by, "machine": name, "held_out": group, "rows": int(test.sum()),
                   "mean_error": mean(np.abs(ratio[test] - 1)), "bias": mean(ratio[test] - 1),
                   "figures": {key: float(f"{value:.3g}") for key, value in figures.items()}}  # fmt: skip
        by_source: dict[str, list[float]] = defaultdict(list)
        for run, value in zip(of_family, ratio, strict=True):
            by_source[run.source].append(abs(value - 1))
        yield {"part": "leave-out", "by": by, "machine": name, "held_out": "each in turn", "rows": len(groups),
               "mean_error": {source: mean(errors) for source, errors in by_source.items()},
               "half_width_of_90%": widths(ratio, regimes)}  # fmt: skip
        everything = fit(estimates, family)
        yield {"part": "leave-out", "by": by, "machine": name, "held_out": "none",
               "figures": {key: float(f"{value:.3g}") for key, value in everything.items()}}  # fmt: skip


def fit(estimates: Sequence[Estimate], family: Family) -> dict[str, float]:
    """The figures that fit these rows best; every source has the same weight."""
    counts = Counter(estimate.run.source for estimate in estimates)
    measured = np.array([estimate.run.seconds for estimate in estimates])
    weights = np.array([10 / np.sqrt(counts[estimate.run.source]) for estimate in estimates])

    def residuals(x: Array) -> Array:
        figures = dict(zip(family.figures, x.tolist(), strict=True))
        return weights * np.log(np.array([e.seconds(figures) for e in estimates]) / measured)

    return solve(residuals, family.figures)


def widths(ratio: Array, regimes: Sequence[str]) -> dict[str, float]:
    """For each regime, the half-width that holds 90 % of the errors."""
    off = np.maximum(ratio, 1 / ratio) - 1
    return {name: round(float(np.quantile(off[np.array(regimes) == name], 0.9)), 3) for name in sorted(set(regimes))}
