"""Candidates for a mixture-of-experts layer: forward, backward and update, with eight groups, experts and devices.

`python -m benchmarks.moe_layer [--rounds 40]` prints JSON lines: the collectives of the program, the dots and
collectives of each candidate on one device, and its time relative to the hand-written step. `gspmd` is `jit` with three
annotations in the model, `gspmd_bare` is without them; meshdsl uses only the layout `group:rows; expert:rows`.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import moe_layer as baseline

TOLERANCE = 1e-3  # relative to the change
MESH, LAYOUT = "rows:8", "group:rows; expert:rows"


def from_executable(executable: jax.stages.Compiled, at: dict) -> Candidate:
    placed = {name: jax.device_put(array, at[name]) for name, array in baseline.arrays().items()}
    state = {name: placed[name] for name in baseline.STATE}
    return Candidate(executable, state, lambda state: executable(state, placed["target"]))


def compiled(dispatch: str) -> tuple[md.Compiled, dict, md.Tensor]:
    """The step written with meshdsl, its initial state, and its target."""
    expert, hidden = md.Dim("expert", baseline.EXPERTS), md.Dim("hidden", baseline.HIDDEN)

    @md.model
    def layer(x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.nn.moe_layer(
            x, expert, hidden, tokens="token", dispatch=dispatch, capacity_factor=2.0, aux_weight=baseline.AUX
        )

    def loss(state: dict, target: md.Tensor) -> md.Tensor:
        params = {f"moe/{name}": state[name] for name in baseline.STATE if name != "x"}
        y, aux = layer(params, state["x"])
        return md.mean(md.square(y - target)) + aux

    def step(state: dict, target: md.Tensor) -> tuple[dict, md.Tensor]:
        value, grads = md.value_and_grad(loss)(state, target)
        return {name: state[name] - baseline.LEARNING_RATE * grads[name] for name in state}, value

    arrays = {name: md.tensor(array, " ".join(baseline.DIMS[name])) for name, array in baseline.arrays().items()}
    target = arrays.pop("target")
    return md.compile(step, MESH, LAYOUT, donate=0), arrays, target


def from_meshdsl(dispatch: str = "index") -> Candidate:
    step, state, target = compiled(dispatch)
    return Candidate.of_meshdsl(step, state, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    parser.add_argument("--control", action="store_true", help="also time a second copy of the baseline")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    step, state, target = compiled("index")
    sent = step.program(state, target).collectives
    listed = [{"kind": c.kind, "axes": c.axes, "bytes": c.bytes, "cause": str(c.cause)} for c in sent]
    print(json.dumps({"figure": "collectives", "candidate": "meshdsl", "layout": LAYOUT, "collectives": listed}))
    steps = {
        "handwritten": from_executable(*baseline.handwritten()),
        "meshdsl": from_meshdsl(),
        "meshdsl_einsum": from_meshdsl("einsum"),
        "gspmd": from_executable(*baseline.gspmd(annotated=True)),
        "gspmd_bare": from_executable(*baseline.gspmd(annotated=False)),
    }
    if args.control:
        steps["control"] = from_executable(*baseline.handwritten())
    return 0 if compare(steps, tolerance=TOLERANCE, rounds=args.rounds, model="moe_layer", layout=LAYOUT) else 1


if __name__ == "__main__":
    sys.exit(main())
