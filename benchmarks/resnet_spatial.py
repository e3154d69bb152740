"""ResNet-50 sharded in space and on one device, on handwritten digits: python -m benchmarks.resnet_spatial

In float64, trains fifty layers at reduced width on 8 x 8 images (scikit-learn, in the `dev` extra) under each layout,
from the same parameters on the same batches. Prints JSON lines: the losses, the largest relative difference to the
first run, and the bytes sent per device and step, by kind of collective.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time

import jax
import numpy as np

import meshdsl as md
from meshdsl.models import resnet

TOLERANCE = 1e-9
LAYOUTS = {"unsplit": ("rows:1", ""), **{name: resnet.LAYOUTS[name] for name in ("spatial", "channels", "data")}}


def train(layout: str, steps: int) -> dict[str, object]:
    """The losses of `steps` steps under one layout, and the bytes sent per step."""
    workload = resnet.resnet50.replace(
        batch=8, height=8, width=8, color=1, classes=10, stem=4, stem_size=3, stem_stride=1, stem_pool=0,
        learning_rate=0.01, dtype="float64",
    )  # fmt: skip
    mesh, rules = LAYOUTS[layout]
    started = time.perf_counter()
    params, state = md.compile(workload.init, "rows:1", "")(md.random.key(0))
    params, state = jax.tree.map(lambda x: md.tensor(x.numpy(), x.dims), (params, state))
    step = md.compile(workload.train_step(), mesh, rules)
    losses, sent = [], collections.Counter()
    for i in range(steps):
        batch = resnet.digits_batch(workload.config, 0, i)
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"].numpy()))
        if not i:
            for record in step.program(params, state, batch).collectives:
                sent[record.kind] += round(record.count * record.wire_bytes)
    seconds = time.perf_counter() - started
    return {"layout": layout, "mesh": mesh, "losses": losses, "sent_per_step": dict(sent), "seconds": round(seconds, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="default: unsplit and spatial")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    baseline, agree = None, True
    for layout in args.layout or ("unsplit", "spatial"):
        run = train(layout, args.steps)
        losses = np.array(run["losses"])
        baseline = losses if baseline is None else baseline
        difference = float(np.max(np.abs(losses - baseline) / np.abs(baseline)))
        agree &= difference <= TOLERANCE
        print(
            json.dumps({"figure": "resnet", **run, "difference": difference, "agrees": difference <= TOLERANCE}),
            flush=True,
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
