"""Candidates for the two-layer training step under every layout: python -m benchmarks.two_layer [--rounds 40]

Prints JSON lines: the dots and collectives of each candidate on one device, and its time relative to the hand-written
step.
"""

from __future__ import annotations

import argparse
import sys

import jax

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import two_layer as baseline
from meshdsl.models import mlp

TOLERANCE = 1e-2  # relative to the change, which is about 1e-4 of the parameters; a missing all-reduce gives > 0.5


def from_executable(executable: jax.stages.Compiled, at: dict) -> Candidate:
    placed = {name: jax.device_put(array, at[name]) for name, array in baseline.arrays().items()}
    x, target = placed["x"], placed["target"]
    params = {name: placed[name] for name in baseline.PARAMETERS}
    return Candidate(executable, params, lambda params: executable(params, x, target))


def compiled(layout: str) -> tuple[md.Compiled, dict, dict]:
    """The loss of models/mlp.py, differentiated and updated with meshdsl, under a layout of its table."""
    config = mlp.Config(baseline.BATCH, baseline.IO, baseline.HIDDEN, baseline.LEARNING_RATE)
    loss = mlp.loss(config)

    def step(params: dict, batch: dict) -> tuple[dict, md.Tensor]:
        value, grads = md.value_and_grad(loss)(params, batch)
        return {name: params[name] - config.learning_rate * grads[name] for name in params}, value

    arrays = {name: md.tensor(array, baseline.DIMS[name]) for name, array in baseline.arrays().items()}
    params = {name: arrays[name] for name in baseline.PARAMETERS}
    batch = {"x": arrays["x"], "target": arrays["target"]}
    return md.compile(step, *mlp.LAYOUTS[layout], donate=0), params, batch


def from_meshdsl(layout: str) -> Candidate:
    return Candidate.of_meshdsl(*compiled(layout))


def candidates(layout: str) -> dict[str, Candidate]:
    """All candidates; the first is the baseline."""
    return {
        "handwritten": from_executable(*baseline.handwritten(layout)),
        "meshdsl": from_meshdsl(layout),
        "gspmd": from_executable(*baseline.gspmd(layout)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    parser.add_argument("--layout", choices=[*baseline.LAYOUTS], action="append", help="default: all")
    parser.add_argument("--control", action="store_true", help="also time a second copy of the baseline")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    agree = True
    for layout in args.layout or baseline.LAYOUTS:
        steps = candidates(layout)
        if args.control:
            steps["control"] = from_executable(*baseline.handwritten(layout))
        agree &= compare(steps, tolerance=TOLERANCE, rounds=args.rounds, model="two_layer", layout=layout)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
