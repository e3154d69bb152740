"""Replicated and sharded weight updates, hand-written and by meshdsl: python -m benchmarks.sharded_update [--rounds 40]

Prints JSON lines: the dots and collectives of each candidate on one device, its memory, and its time relative to the
hand-written sharded step. The states are compared after two steps.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import sharded_update as baseline

TOLERANCE = 1e-2  # relative to the change; Adam's first steps have equal size for all gradients and amplify rounding


def from_executable(cut: bool) -> Candidate:
    step = baseline.sharded if cut else baseline.replicated
    executable, at, batch = baseline.compiled(step, cut)
    state, batch_arrays = baseline.arrays()
    placed = jax.tree.map(jax.device_put, state, at)
    rest = [jax.device_put(x, batch) for x in batch_arrays.values()]
    return Candidate(executable, placed, lambda state: executable(state, *rest))


def compiled(mode: str) -> tuple[md.Compiled, dict, md.Tensor, md.Tensor]:
    """The same model and optimizer written with meshdsl, and its arguments; only `weight_update=` differs by mode."""
    adam = md.optim.adam(baseline.RATE, baseline.B1, baseline.B2, baseline.EPS)

    def loss(params: Any, x: md.Tensor, target: md.Tensor) -> md.Tensor:
        h = md.relu(md.dot(x, params["w1"], "in"))
        h = md.relu(md.dot(h, params["w2"], "first"))
        return md.mean(md.square(md.dot(h, params["w3"], "second") - target))

    def step(state: Any, x: md.Tensor, target: md.Tensor) -> Any:
        value, grads = md.value_and_grad(loss)(state["params"], x, target)
        moments = {name: state[name] for name in ("m", "v", "step")}
        params, moments = adam.update(grads, moments, state["params"])
        return {"params": params, **moments}, value

    arrays, batch_arrays = baseline.arrays()
    state = {
        key: {n: md.tensor(a, baseline.DIMS[n]) for n, a in tree.items()}
        if isinstance(tree, dict)
        else md.tensor(tree, ())
        for key, tree in arrays.items()
    }
    step_on_mesh = md.compile(step, "all:8", "batch:all", donate=0, weight_update=mode)
    x, target = md.tensor(batch_arrays["x"], "batch in"), md.tensor(batch_arrays["target"], "batch out")
    return step_on_mesh, state, x, target


def from_meshdsl(mode: str) -> Candidate:
    return Candidate.of_meshdsl(*compiled(mode))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    steps = {
        "handwritten sharded": from_executable(cut=True),
        "meshdsl sharded": from_meshdsl("sharded"),
        "meshdsl replicated": from_meshdsl("replicated"),
        "handwritten replicated": from_executable(cut=False),
    }
    return 0 if compare(steps, tolerance=TOLERANCE, rounds=args.rounds, model="adam_mlp", layout="data") else 1


if __name__ == "__main__":
    sys.exit(main())
