"""Bytes sent by the padded and by the ragged exchange of a mixture-of-experts layer.

`python -m benchmarks.ragged_exchange` prints a JSON line for each router and capacity factor: one layer, forward and
backward, with eight groups of 128 tokens and eight experts over eight devices, model 256 in float32. The router's
logits are random: `skew` is the standard deviation of a part shared by all tokens of a group; each token's own part has
standard deviation 1. `padded` and `ragged` are bytes sent per device; `ragged` includes the counts and is the mean over
devices, `ragged_most` is the maximum, and `at_most` is the bound stated by the program. Bytes are computed from the
routing; nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

import meshdsl as md

GROUPS, TOKENS, EXPERTS, MODEL = 8, 128, 8, 256
MESH, LAYOUT = f"rows:{GROUPS}", "batch:rows; expert:rows"
CASES = [
    ("gshard", 1.0),
    ("gshard", 2.0),
    ("deepspeed", 1.0),
    ("deepspeed", 2.0),
    ("switch_transformer", 1.25),
    ("switch_transformer", 2.0),
    ("expert_choice", 2.0),
]


def program(router: str, factor: float, exchange: str) -> md.Program:
    """The program of the layer's value and gradient for eight devices."""
    expert, hidden = md.Dim("expert", EXPERTS), md.Dim("expert_hidden", 4 * MODEL)

    @md.model
    def layer(x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.nn.moe_layer(
            x, expert, hidden, router=router, capacity_factor=factor, exchange=exchange, dispatch="index"
        )

    def loss(params: dict[str, md.Tensor], x: md.Tensor) -> md.Tensor:
        y, aux = layer(params, x)
        return md.sum(md.square(y)) + aux

    x = md.spec(f"batch:{GROUPS} length:{TOKENS} model:{MODEL}")
    return md.compile(md.value_and_grad(loss, argnums=(0, 1)), MESH, LAYOUT).program(layer.specs(x), x)


def counts(router: str, slots: int, skew: float) -> np.ndarray:
    """The number of slots up to each expert's last filled slot [group, expert]."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(GROUPS, TOKENS, EXPERTS)) + skew * random.normal(size=(GROUPS, 1, EXPERTS))
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    uniforms = random.random((GROUPS, TOKENS))

    def used(gates: md.Tensor, uniforms: md.Tensor) -> md.Tensor:
        kwargs = {"uniforms": uniforms} if router == "gshard" else {}
        slot = md.Dim("slot", slots)
        return md.nn.moe.assign(gates, tokens="length", experts="gate", capacity=slot, router=router, **kwargs).used

    specs = md.spec(f"batch:{GROUPS} length:{TOKENS} gate:{EXPERTS}"), md.spec(f"batch:{GROUPS} length:{TOKENS}")
    return md.simulate(md.compile(used, "one:1", "").program(*specs), gates, uniforms)[0]


def _share(op: Any) -> float:
    """The expected share of filled slots of a ragged exchange."""
    return op.share


def figures(router: str, factor: float, skew: float) -> dict[str, Any]:
    """The figures of one router and capacity factor."""
    padded = [c for c in program(router, factor, "padded").collectives if c.kind == "all_to_all"]
    sent = program(router, factor, "ragged").collectives
    ragged = [c for c in sent if c.kind == "ragged_all_to_all"]
    count_bytes = sum(c.wire_bytes for c in sent if c.kind == "all_to_all")
    slots = padded[0].shape[2]
    used = counts(router, slots, skew)
    others = np.where(np.eye(GROUPS, dtype=bool), 0, used) * MODEL * 4  # group g and expert g are on device g
    bytes_by_device = (len(ragged) // 2) * (
        others.sum(1) + others.sum(0)
    ) + count_bytes  # tokens to experts, and results back
    return {
        "figure": "ragged_exchange",
        "router": router,
        "capacity_factor": factor,
        "slots": slots,
        "skew": skew,
        "filled": round(float(used.mean() / slots), 3),
        "expected": round(_share(ragged[0].op), 3),
        "padded": sum(c.wire_bytes for c in padded),
        "at_most": sum(c.wire_bytes for c in ragged) + count_bytes,
        "ragged": round(float(bytes_by_device.mean())),
        "ragged_most": int(bytes_by_device.max()),
        "counts": count_bytes,
        "ratio": round(float(bytes_by_device.mean() / sum(c.wire_bytes for c in padded)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skew", type=float, nargs="*", default=[0.0, 1.0])
    args = parser.parse_args()
    for skew in args.skew:
        for router, factor in CASES:
            print(json.dumps(figures(router, factor, skew)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
