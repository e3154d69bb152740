"""The language model's training step by every candidate: python -m benchmarks.language_model [--rounds 40]

Prints JSON lines: what each candidate runs on one device of a 2 x 4 mesh, and its time against the
hand-written step.
"""

from __future__ import annotations

import argparse
import sys

import jax

from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import language_model as baseline

TOLERANCE = (
    1e-2  # of the change: biases start at zero and their gradients nearly cancel; a missing sum is > 0.5
)


def from_executable(
    executable: jax.stages.Compiled, state_at: dict, tokens_at: jax.NamedSharding
) -> Candidate:
    whole = baseline.arrays()
    tokens, targets = (jax.device_put(whole[name], tokens_at) for name in ("tokens", "targets"))
    start = baseline.initial_state({name: whole[name] for name in baseline.DIMS})
    state = jax.tree.map(jax.device_put, start, state_at)
    return Candidate(executable, state, lambda state: executable(state, tokens, targets))


def candidates() -> dict[str, Candidate]:
    """The baseline comes first."""
    return {
        "handwritten": from_executable(*baseline.handwritten()),
        # meshdsl_step() is added here: a Candidate on baseline.arrays(), named as in initial_state.
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
