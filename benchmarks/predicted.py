"""Predicted step times compared with measured ones on this machine: python -m benchmarks.predicted [--rounds 9]

Trains models under layouts on eight CPU devices, and compares each measured step time with `compiled.cost`. Prints JSON
lines: one per point, then one per model (the layout predicted to be fastest and the one measured to be fastest), then
the correlation and error over all points. The machine's figures come from `meshdsl doctor --calibrate`, which runs none
of these models. `--fit` scales five of these figures to half of the models, and tests the result on the others.

A measured time is the CPU time of the process divided by the number of cores, the median of interleaved rounds. It is
the wall-clock time if all cores work on the step, and it hardly depends on other load. `--again FILE` repeats the
predictions for the measurements of an earlier run. `--show MODEL/LAYOUT` prints the report of one prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.models.mlp import mlp
from meshdsl.models.resnet import digits, resnet50
from meshdsl.models.transformer import lm

_MODEL = "vocab:cols; d_ff:cols; heads:cols"
_LM = {
    **lm.layouts,
    "data_model_4x2": ("rows:4 cols:2", f"batch:rows; {_MODEL}"),
    "vocab_only": ("rows:2 cols:4", "batch:rows; vocab:cols"),
}
_SMALL = {"batch": 8, "heads": 8, "layers": 2}
MODELS: dict[str, md.Workload] = {
    "mlp_narrow": mlp.replace(batch=512, io=256, hidden=512),
    "mlp_wide": mlp.replace(batch=128, io=512, hidden=1024),
    "lm_small": lm.replace(**_SMALL, length=32, vocab=256, d_model=128, d_head=16, d_ff=256),
    "lm_wide": lm.replace(**_SMALL, length=16, vocab=256, d_model=256, d_head=32, d_ff=512),
    "lm_long": lm.replace(**_SMALL, length=128, vocab=256, d_model=64, d_head=8, d_ff=128),
    "lm_vocab": lm.replace(**_SMALL, length=32, vocab=4096, d_model=64, d_head=8, d_ff=128),
    "digits": digits,
    "resnet": resnet50.replace(batch=8, height=16, width=16, stem=8, blocks=(1, 2, 1, 1), classes=16),
}


def points() -> Iterator[tuple[str, str]]:
    """All pairs of model and layout."""
    for model, workload in MODELS.items():
        yield from ((model, layout) for layout in (_LM if workload.name == "lm" else workload.layouts))


def compiled(model: str, layout: str) -> md.Compiled:
    """A compiled train step with donated parameters and optimizer state."""
    workload = MODELS[model]
    where = (_LM if workload.name == "lm" else workload.layouts)[layout]
    return md.compile(workload.train_step(), *where, donate=(0, 1))


def runner(model: str, layout: str) -> Callable[[], None]:
    """A function that runs one step and waits for it, on small random parameters and one random batch."""
    specs = MODELS[model].specs()
    step = compiled(model, layout)
    executable = step.lower(*specs).compile()
    program = step.program(*specs)
    state_count = len(jax.tree.leaves(specs[:2]))
    rng = np.random.default_rng(0)
    arrays: list[Any] = []
    for v, at in zip(program.ins, executable.input_shardings[0], strict=True):
        sizes = program.extents.global_shape(v.dims)
        if v.name.startswith("state"):
            values = np.zeros(sizes)
        elif np.issubdtype(v.dtype, np.integer):
            values = rng.integers(0, 10, sizes)
        else:
            values = rng.normal(scale=0.02 if v.name.startswith("params") else 1.0, size=sizes)
        arrays.append(jax.device_put(values.astype(v.dtype), at))
    state = [arrays[:state_count]]

    def run() -> None:
        results = jax.block_until_ready(executable(*state[0], *arrays[state_count:]))
        state[0] = results[:state_count]

    return run


def measure(selected: Sequence[tuple[str, str]], rounds: int) -> dict[tuple[str, str], tuple[float, float]]:
    """For each point: the median seconds of a step, and the relative interquartile range over the rounds."""
    runners: dict[tuple[str, str], Callable[[], None]] = {}
    for i, point in enumerate(selected):
        print(f"[{i + 1}/{len(selected)}] compiling {'/'.join(point)}", file=sys.stderr)
        runners[point] = runner(*point)
        runners[point]()
    times: dict[tuple[str, str], list[float]] = {point: [] for point in selected}
    for r in range(rounds):
        print(f"round {r + 1} of {rounds}", file=sys.stderr)
        for point in selected if r % 2 == 0 else reversed(selected):
            start = time.process_time()
            runners[point]()
            times[point].append((time.process_time() - start) / len(os.sched_getaffinity(0)))
    quartiles = {point: np.quantile(seconds, [0.25, 0.5, 0.75]) for point, seconds in times.items()}
    return {point: (float(q[1]), float((q[2] - q[0]) / q[1])) for point, q in quartiles.items()}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, for values without ties.

    >>> spearman([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 4)


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's rank correlation: the share of pairs in equal order minus the share in opposite order.

    >>> round(kendall([1, 2, 3, 4], [10, 30, 20, 40]), 3)
    0.667
    """
    x, y = np.asarray(a), np.asarray(b)
    i, j = np.triu_indices(len(x), 1)
    return float(np.mean(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correlation of predictions with measurements, and errors relative to the measurement."""
    predicted, measured = ([row[key] for row in rows] for key in ("predicted", "measured"))
    errors = np.asarray(predicted) / np.asarray(measured) - 1
    return {
        "points": len(rows),
        "spearman": spearman(predicted, measured),
        "kendall": round(kendall(predicted, measured), 4),
        "mean_error": round(float(np.mean(np.abs(errors))), 4),
        "median_error": round(float(np.median(np.abs(errors))), 4),
        "worst_error": round(float(errors[np.argmax(np.abs(errors))]), 4),
        "bias": round(float(np.exp(np.mean(np.log1p(errors)))), 4),
    }


def choice(model: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The layout predicted to be fastest, and the one measured to be fastest."""
    chosen = min(rows, key=lambda row: row["predicted"])
    best = min(rows, key=lambda row: row["measured"])
    return {
        "figure": "choice",
        "model": model,
        "picked": chosen["layout"],
        "best": best["layout"],
        "lost": round(chosen["measured"] / best["measured"] - 1, 4),
        "kendall": round(kendall(*([row[key] for row in rows] for key in ("predicted", "measured"))), 4),
    }


FITTED = ("mlp_narrow", "lm_small", "lm_long", "digits")  # the other models are for testing


def scaled(machine: Any, factors: dict[str, float]) -> Any:
    """The machine with some of its figures multiplied by factors."""
    changes: dict[str, Any] = {name: getattr(machine, name) * factors[name] for name in factors if name in _FIGURES}
    changes["peak"] = {dtype: rate * factors["peak"] for dtype, rate in machine.peak.items()}
    limit = min(1.0, 1 / max(fraction * factors["conv"] for _, fraction in machine.convolution or ((1.0, 1.0),)))
    curve = machine.convolution or machine.efficiency
    changes["convolution"] = tuple((size, fraction * factors["conv"] * limit) for size, fraction in curve)
    return dataclasses.replace(machine, **changes)


_FIGURES = ("vector", "hbm_bandwidth", "launch")
_STEPS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)


def fitted(
    machine: Any, selected: Sequence[tuple[str, str]], measured: dict[tuple[str, str], tuple[float, float]]
) -> Any:
    """The machine with five figures scaled to minimise the mean error over the points, one figure at a time."""
    programs = {(model, layout): (compiled(model, layout), MODELS[model].specs()) for model, layout in selected}

    def error(factors: dict[str, float]) -> float:
        candidate = scaled(machine, factors)
        each = [
            step.cost(*specs, machine=candidate).seconds / measured[point][0]
            for point, (step, specs) in programs.items()
        ]
        return float(np.mean(np.abs(np.log(each))))

    factors: dict[str, float] = dict.fromkeys((*_FIGURES, "peak", "conv"), 1.0)
    for sweep in range(4):
        for name in factors:
            tries = [{**factors, name: factors[name] * step} for step in _STEPS]
            factors = min(tries, key=error)
        print(f"fit, sweep {sweep + 1}: {factors}", file=sys.stderr)
    print(json.dumps({"figure": "fit", "models": FITTED, **{k: round(v, 3) for k, v in factors.items()}}), flush=True)
    return scaled(machine, factors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--machine", default="cpu", help="name or path of the machine file")
    parser.add_argument("--model", choices=[*MODELS], action="append", help="default: all")
    parser.add_argument("--again", type=Path, help="output of an earlier run, whose measurements are used")
    parser.add_argument(
        "--fit", action="store_true", help=f"scale the machine to {', '.join(FITTED)}; test on the others"
    )
    parser.add_argument("--show", metavar="MODEL/LAYOUT", help="print the report of one prediction")
    args = parser.parse_args()
    if args.show:
        model, _, layout = args.show.partition("/")
        print(compiled(model, layout).cost(*MODELS[model].specs(), machine=args.machine))
        return 0
    selected = [(model, layout) for model, layout in points() if model in (args.model or MODELS)]
    if args.again:
        lines = [json.loads(line) for line in args.again.read_text().splitlines()]
        old = {(x["model"], x["layout"]): (x["measured"], x["spread"]) for x in lines if x["figure"] == "point"}
        selected = [point for point in selected if point in old]
        measured = {point: old[point] for point in selected}
    else:
        md.host_devices(8)
        measured = measure(selected, args.rounds)
    target = args.machine
    if args.fit:
        machine = compiled(*selected[0]).cost(*MODELS[selected[0][0]].specs(), machine=target).machine
        target = fitted(machine, [point for point in selected if point[0] in FITTED], measured)
    rows: list[dict[str, Any]] = []
    for model, layout in selected:
        seconds, spread = measured[model, layout]
        report = compiled(model, layout).cost(*MODELS[model].specs(), machine=target)
        row = {"figure": "point", "model": model, "layout": layout, "measured": round(seconds, 6)}
        row |= {"spread": round(spread, 4), "predicted": round(report.seconds, 6)}
        row["exposed"] = round(report.exposed, 6)
        row["error"] = round(report.seconds / seconds - 1, 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for model in MODELS:
        model_rows = [row for row in rows if row["model"] == model]
        if model_rows:
            print(json.dumps(choice(model, model_rows)), flush=True)
    if args.fit:
        held_out = [row for row in rows if row["model"] not in FITTED]
        print(json.dumps({"figure": "prediction", "of": "held out", **summary(held_out)}), flush=True)
    print(json.dumps({"figure": "prediction", "of": "all", **summary(rows)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
