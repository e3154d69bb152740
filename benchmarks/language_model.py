"""Candidates for the language model's training step: python -m benchmarks.language_model [--rounds 40]

Prints JSON lines: the dots and collectives of each candidate on one device of a 2 x 4 mesh, and its time relative to
the hand-written step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
import numpy as np

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import language_model as baseline
from meshdsl.models import transformer

TOLERANCE = 1e-2  # of the change; gradients of biases nearly cancel. A missing all-reduce gives more than 0.5.


def from_executable(executable: jax.stages.Compiled, state_at: dict, tokens_at: jax.NamedSharding) -> Candidate:
    arrays = baseline.arrays()
    tokens, targets = (jax.device_put(arrays[name], tokens_at) for name in ("tokens", "targets"))
    start = baseline.initial_state({name: arrays[name] for name in baseline.DIMS})
    state = jax.tree.map(jax.device_put, start, state_at)
    return Candidate(executable, state, lambda state: executable(state, tokens, targets))


# From the paths of models/transformer.py to the baseline's names.
PATHS = {
    "embed": "embed",
    "positions": "positions",
    "layer/norm_1/scale": "scale_1",
    "layer/norm_1/bias": "bias_1",
    "layer/attention/wq": "wq",
    "layer/attention/wk": "wk",
    "layer/attention/wv": "wv",
    "layer/attention/wo": "wo",
    "layer/norm_2/scale": "scale_2",
    "layer/norm_2/bias": "bias_2",
    "layer/feed_forward/w_in": "w_in",
    "layer/feed_forward/w_out": "w_out",
    "norm/scale": "scale",
    "norm/bias": "bias",
    "unembed": "unembed",
}


def compiled() -> tuple[md.Compiled, tuple, dict]:
    """The train step of models/transformer.py with the benchmark's sizes, its state and its batch."""
    workload = transformer.benchmark
    arrays = baseline.arrays()
    params, moments, batch = workload.specs()
    values = {path: md.tensor(arrays[PATHS[path]], spec.dims) for path, spec in params.items()}
    state = jax.tree.map(lambda spec: md.tensor(np.zeros([d.size for d in spec.dims], spec.dtype), spec.dims), moments)
    tokens = {name: md.tensor(arrays[name], spec.dims) for name, spec in batch.items()}
    train_step = workload.train_step()

    def step(state: tuple, batch: dict) -> tuple[tuple, md.Tensor]:
        params, moments, metrics = train_step(*state, batch)
        return (params, moments), metrics["loss"]

    return md.compile(step, *workload.layouts["data_model"], donate=0), (values, state), tokens


def from_meshdsl() -> Candidate:
    candidate = Candidate.of_meshdsl(*compiled())
    host = candidate.host

    def baseline_names(state: object) -> dict[str, np.ndarray]:
        state_arrays = {path.removeprefix("0/").removeprefix("1/"): array for path, array in host(state).items()}
        return {"step": state_arrays["step"]} | {
            f"{spec}/{PATHS[path]}": state_arrays[path if spec == "params" else f"{spec}/{path}"]
            for spec in ("params", "m", "v")
            for path in PATHS
        }

    return dataclasses.replace(candidate, host=baseline_names)


def candidates() -> dict[str, Candidate]:
    """All candidates; the first is the baseline."""
    return {
        "handwritten": from_executable(*baseline.handwritten()),
        "meshdsl": from_meshdsl(),
        "handwritten_jax_grad": from_executable(*baseline.handwritten(baseline.jax_grad_step)),
        "gspmd": from_executable(*baseline.gspmd()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    parser.add_argument("--control", action="store_true", help="also time a second copy of the baseline")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    steps = candidates()
    if args.control:
        steps["control"] = from_executable(*baseline.handwritten())
    agree = compare(steps, tolerance=TOLERANCE, rounds=args.rounds, model="language_model", layout="megatron")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
