"""The time of a step as predicted against as measured, on this machine: python -m benchmarks.predicted [--rounds 9]

Trains models x layouts on eight CPU devices and sets beside each measured step what `compiled.cost` says of it. Prints
JSON lines: one for each point, then one for each model (the layout predicted best against the one that was), then the
correlation and the error over all of them. The machine's figures come from `meshdsl doctor --calibrate`, which runs
none of these models. `--fit` scales five of those figures to half of the models, and says how the others come out.

A measured step is the CPU time of the process over the cores, the median of interleaved rounds: what the step takes on
the clock when all cores work for it, and about the same whatever else runs. `--again FILE` predicts anew what an
earlier run has measured; `--show MODEL/LAYOUT` prints what a prediction is made of.
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
from models.mlp import mlp
from models.resnet import digits, resnet50
from models.transformer import lm

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
    """Every model and layout."""
    for model, workload in MODELS.items():
        yield from ((model, layout) for layout in (_LM if workload.name == "lm" else workload.layouts))


def compiled(model: str, layout: str) -> md.Compiled:
    """A train step whose parameters and optimizer state are updated in place."""
    workload = MODELS[model]
    where = (_LM if workload.name == "lm" else workload.layouts)[layout]
    return md.compile(workload.train_step(), *where, donate=(0, 1))


def runner(model: str, layout: str) -> Callable[[], None]:
    """One blocking step at a time, from small random parameters on one random batch."""
    specs = MODELS[model].specs()
    step = compiled(model, layout)
    executable = step.lower(*specs).compile()
    program = step.program(*specs)
    kept = len(jax.tree.leaves(specs[:2]))
    rng = np.random.default_rng(0)
    arrays: list[Any] = []
    for v, at in zip(program.ins, executable.input_shardings[0], strict=True):
        sizes = program.extents.global_shape(v.shape)
        if v.name.startswith("state"):
            values = np.zeros(sizes)
        elif np.issubdtype(v.dtype, np.integer):
            values = rng.integers(0, 10, sizes)
        else:
            values = rng.normal(scale=0.02 if v.name.startswith("params") else 1.0, size=sizes)
        arrays.append(jax.device_put(values.astype(v.dtype), at))
    held = [arrays[:kept]]

    def run() -> None:
        results = jax.block_until_ready(executable(*held[0], *arrays[kept:]))
        held[0] = results[:kept]

    return run


def measure(which: Sequence[tuple[str, str]], rounds: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Seconds of one step of each, and how far its rounds lie apart (the middle half of them, relative)."""
    runners: dict[tuple[str, str], Callable[[], None]] = {}
    for i, point in enumerate(which):
        print(f"[{i + 1}/{len(which)}] compiling {'/'.join(point)}", file=sys.stderr)
        runners[point] = runner(*point)
        runners[point]()
    taken: dict[tuple[str, str], list[float]] = {point: [] for point in which}
    for r in range(rounds):
        print(f"round {r + 1} of {rounds}", file=sys.stderr)
        for point in which if r % 2 == 0 else reversed(which):
            start = time.process_time()
            runners[point]()
            taken[point].append((time.process_time() - start) / len(os.sched_getaffinity(0)))
    quartiles = {point: np.quantile(seconds, [0.25, 0.5, 0.75]) for point, seconds in taken.items()}
    return {point: (float(q[1]), float((q[2] - q[0]) / q[1])) for point, q in quartiles.items()}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; values are taken to differ.

    >>> spearman([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 4)


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Of all pairs, those in the same order less those in the other, as a part of them.

    >>> round(kendall([1, 2, 3, 4], [10, 30, 20, 40]), 3)
    0.667
    """
    x, y = np.asarray(a), np.asarray(b)
    i, j = np.triu_indices(len(x), 1)
    return float(np.mean(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How predictions follow measurements; an error is that of the prediction, as a part of the measurement."""
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
    """The layout predicted best against the best of those measured."""
    picked = min(rows, key=lambda row: row["predicted"])
    best = min(rows, key=lambda row: row["measured"])
    return {
        "figure": "choice",
        "model": model,
        "picked": picked["layout"],
        "best": best["layout"],
        "lost": round(picked["measured"] / best["measured"] - 1, 4),
        "kendall": round(kendall(*([row[key] for row in rows] for key in ("predicted", "measured"))), 4),
    }


FITTED = ("mlp_narrow", "lm_small", "lm_long", "digits")  # the other models are held out


def scaled(machine: Any, factors: dict[str, float]) -> Any:
    """The machine with some of its figures multiplied."""
    changes: dict[str, Any] = {name: getattr(machine, name) * factors[name] for name in factors if name in _FIGURES}
    changes["peak"] = {dtype: rate * factors["peak"] for dtype, rate in machine.peak.items()}
    least = min(1.0, 1 / max(fraction * factors["conv"] for _, fraction in machine.convolution or ((1.0, 1.0),)))
    curve = machine.convolution or machine.efficiency
    changes["convolution"] = tuple((size, fraction * factors["conv"] * least) for size, fraction in curve)
    return dataclasses.replace(machine, **changes)


_FIGURES = ("vector", "hbm_bandwidth", "launch")
_STEPS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)


def fitted(machine: Any, which: Sequence[tuple[str, str]], measured: dict[tuple[str, str], tuple[float, float]]) -> Any:
    """The machine with five of its figures scaled to the points given: least mean error, one figure at a time."""
    programs = {(model, layout): (compiled(model, layout), MODELS[model].specs()) for model, layout in which}

    def error(factors: dict[str, float]) -> float:
        on = scaled(machine, factors)
        each = [step.cost(*specs, machine=on).seconds / measured[point][0] for point, (step, specs) in programs.items()]
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
    parser.add_argument("--again", type=Path, help="the output of an earlier run, for its measurements")
    parser.add_argument(
        "--fit", action="store_true", help=f"scale the machine to {', '.join(FITTED)}; test on the others"
    )
    parser.add_argument("--show", metavar="MODEL/LAYOUT", help="print what the prediction of one point is made of")
    args = parser.parse_args()
    if args.show:
        model, _, layout = args.show.partition("/")
        print(compiled(model, layout).cost(*MODELS[model].specs(), machine=args.machine))
        return 0
    which = [(model, layout) for model, layout in points() if model in (args.model or MODELS)]
    if args.again:
        lines = [json.loads(line) for line in args.again.read_text().splitlines()]
        old = {(x["model"], x["layout"]): (x["measured"], x["spread"]) for x in lines if x["figure"] == "point"}
        which = [point for point in which if point in old]
        measured = {point: old[point] for point in which}
    else:
        md.host_devices(8)
        measured = measure(which, args.rounds)
    on = args.machine
    if args.fit:
        machine = compiled(*which[0]).cost(*MODELS[which[0][0]].specs(), machine=on).machine
        on = fitted(machine, [point for point in which if point[0] in FITTED], measured)
    rows: list[dict[str, Any]] = []
    for model, layout in which:
        seconds, spread = measured[model, layout]
        report = compiled(model, layout).cost(*MODELS[model].specs(), machine=on)
        row = {"figure": "point", "model": model, "layout": layout, "measured": round(seconds, 6)}
        row |= {"spread": round(spread, 4), "predicted": round(report.seconds, 6)}
        row["exposed"] = round(report.exposed, 6)
        row["error"] = round(report.seconds / seconds - 1, 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        if mine:
            print(json.dumps(choice(model, mine)), flush=True)
    if args.fit:
        held_out = [row for row in rows if row["model"] not in FITTED]
        print(json.dumps({"figure": "prediction", "of": "held out", **summary(held_out)}), flush=True)
    print(json.dumps({"figure": "prediction", "of": "all", **summary(rows)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
