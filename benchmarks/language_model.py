"""The language model's training step by every candidate: python -m benchmarks.language_model [--rounds 40]

Prints JSON lines: what each candidate runs on one device of a 2 x 4 mesh, and its time against the
hand-written step.
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
from models import transformer

TOLERANCE = 1e-2  # of the change: biases start at zero and their gradients nearly cancel; a missing sum is > 0.5


def from_executable(executable: jax.stages.Compiled, state_at: dict, tokens_at: jax.NamedSharding) -> Candidate:
    whole = baseline.arrays()
    tokens, targets = (jax.device_put(whole[name], tokens_at) for name in ("tokens", "targets"))
    start = baseline.initial_state({name: whole[name] for name in baseline.DIMS})
    state = jax.tree.map(jax.device_put, start, state_at)
    return Candidate(executable, state, lambda state: executable(state, tokens, targets))


# The baseline's names, under models/transformer.py's.
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


def from_meshdsl() -> Candidate:
    """models/transformer.py's train step at the benchmark's sizes, on the baseline's arrays."""
    workload = transformer.benchmark
    whole = baseline.arrays()
    params, moments, batch = workload.specs()
    values = {path: md.tensor(whole[PATHS[path]], kind.shape) for path, kind in params.items()}
    state = jax.tree.map(
        lambda kind: md.tensor(np.zeros([d.size for d in kind.shape], kind.dtype), kind.shape), moments
    )
    tokens = {name: md.tensor(whole[name], kind.shape) for name, kind in batch.items()}
    train_step = workload.train_step()

    def step(state: tuple, batch: dict) -> tuple[tuple, md.Tensor]:
        params, moments, metrics = train_step(*state, batch)
        return (params, moments), metrics["loss"]

    compiled = md.compile(step, *workload.layouts["data_model"], donate=0)
    candidate = Candidate.of_meshdsl(compiled, (values, state), tokens)
    host = candidate.host

    def named(state: object) -> dict[str, np.ndarray]:
        there = {path.removeprefix("0/").removeprefix("1/"): array for path, array in host(state).items()}
        return {"step": there["step"]} | {
            f"{kind}/{PATHS[path]}": there[path if kind == "params" else f"{kind}/{path}"]
            for kind in ("params", "m", "v")
            for path in PATHS
        }

    return dataclasses.replace(candidate, host=named)


def candidates() -> dict[str, Candidate]:
    """The baseline comes first."""
    return {
        "handwritten": from_executable(*baseline.handwritten()),
        "meshdsl": from_meshdsl(),
        "handwritten_jax_grad": from_executable(*baseline.handwritten(baseline.jax_grad_step)),
        "gspmd": from_executable(*baseline.gspmd()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0 leaves the times out")
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
