"""Seconds of the sums of bits at a save, beside those of a step: `python -m tests.train.digest_cost`.

On four CPU devices, for the parameters and optimizer state of two models of the package, whose weights each device
stores. The least of five; the first call also compiles.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import meshdsl as md
from meshdsl.train import load, train
from meshdsl.train.checkpoint.arguments import flat
from meshdsl.train.checkpoint.digest import sums
from meshdsl.train.peers import digests

EVERY = 100  # steps between saves, as by default


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    md.host_devices(4)
    for name in ("mlp", "transformer:lm"):
        workload, plan = load(name), md.Plan("all:4", "batch:all")
        step = min(r["seconds"] for r in train(workload, plan, steps=6, eval_batches=0) if r["event"] == "step")
        init = md.compile(lambda key, w=workload: dict(zip(("params", "state"), w.init(key), strict=True)), plan=plan)
        tree = init(md.random.key(0))
        row: dict[str, object] = {
            "model": name,
            "megabytes": sum(x.stored.nbytes for x in flat(tree).values()) // 10**6,
        }
        row["step_seconds"] = round(step, 3)
        calls = {"digests": lambda t=tree: digests(t), "sums_at_a_url": lambda t=tree: sums(flat(t))}
        for what, call in calls.items():
            first, least = seconds(call), min(seconds(call) for _ in range(5))
            percent = round(100 * least / EVERY / step, 3)
            row[what] = {"first": round(first, 2), "seconds": round(least, 3), "percent_of_a_step": percent}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
