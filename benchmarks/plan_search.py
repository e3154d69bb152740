"""Searches for the plans of large models: python -m benchmarks.plan_search [CASE ...] [--time-limit S] [--patience S]

Prints a JSON line for each case: the best plan, its seconds a step, the gap to the floor, processor and wall seconds of
the search. Defaults are those of `meshdsl search`. `--time-limit 120 --patience 0` is the long search that
docs/design/search.md compares them with.

`--pipelines` prints where a pipeline is found, for Llama 2 7B with 128 sequences: on one node of 8 H100, on two slices
of 16 v5p, and on 16 nodes of 8 H100 with 100 Gbit/s a node. `stages` is 1 without a pipeline; `without_s` is the best
plan that has none. These searches turn few knobs, overlap not among them, and end by themselves. Where there is a
pipeline, `ticks_s` is the same with overlap="ticks", and `list_s` the best plan without a pipeline with "list".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import meshdsl as md
from meshdsl.models.llama import llama2_7b
from meshdsl.models.mixtral import mixtral_8x7b
from meshdsl.models.moe_transformer import preset
from meshdsl.models.transformer import lm

BF16 = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
LARGE = lm.replace(
    layers=24, d_model=2048, d_ff=8192, heads=16, d_head=128, vocab=32768, length=1024, batch=1024, **BF16
)  # 1.3 billion parameters


@dataclass(frozen=True)
class Case:
    """A model, a number of devices, and their machine."""

    workload: md.Workload
    devices: int
    machine: str


CASES = {
    "lm": Case(lm, 8, "tpu-v5e"),
    "1.3B-256": Case(LARGE, 256, "tpu-v5e"),
    "1.3B-2048": Case(LARGE.replace(batch=4096), 2048, "tpu-v5p"),
    "llama-h100": Case(llama2_7b.replace(batch=256, **BF16), 64, "h100-a3:compiled,flash"),
    "llama-v5p": Case(llama2_7b.replace(batch=256, **BF16), 64, "tpu-v5p:flash,overlap"),
    "mixtral-v5p": Case(mixtral_8x7b.replace(batch=512, capacity_factor=1.0, **BF16), 64, "tpu-v5p:flash,overlap"),
    "gshard-128": Case(preset(128, 12), 128, "tpu-v4"),
    "gshard-2048": Case(preset(2048, 36), 2048, "tpu-v4"),
}


SHORT = llama2_7b.replace(batch=128, **BF16)
DIMS = "batch length d_ff heads"
KNOBS: dict[str, list[Any]] = {"weight_update": ["sharded"], "remat": ["none", "full"], "microbatches": [1, 8, 64]}


def slow_nodes() -> md.Machine:
    """H100 whose nodes share one port of 100 Gbit/s."""
    machine = md.machine("h100:compiled,flash")
    gpu, node = machine.network.levels
    return replace(machine, network=replace(machine.network, levels=(gpu, replace(node, bandwidth=12.5e9, share=8))))


PIPELINES: dict[str, tuple[str, Callable[[], md.Machine]]] = {
    "node": ("gpu:8", lambda: md.machine("h100:compiled,flash")),
    "slices": ("slice:2 x:4 y:4", lambda: md.machine("tpu-v5p:flash,overlap")),
    "slow_nodes": ("node:16 gpu:8", slow_nodes),
}


def in_stages(name: str) -> dict[str, object]:
    """The best plan on a mesh, and the best one without a pipeline."""
    mesh, machine_of = PIPELINES[name]
    machine = machine_of()
    found = [
        md.search(SHORT, mesh=mesh, dims=dims, machine=machine, knobs=KNOBS, time_limit=None).best
        for dims in (f"{DIMS} layer", DIMS)
    ]
    best, other = found
    stages = best.plan.mesh.count(best.plan.layout.axes("layer")) if best.plan.microbatches > 1 else 1
    overlapped = {"ticks_s": best.plan, "list_s": other.plan} if stages > 1 else {}
    return {
        "figure": "pipeline_search", "case": name, "mesh": mesh, "plan": best.plan.to_dict(), "stages": stages,
        "step_s": best.seconds, "without_s": other.seconds, "without": other.plan.to_dict(),
        **{key: overlap(plan, key.removesuffix("_s"), machine) for key, plan in overlapped.items()},
    }  # fmt: skip


def overlap(plan: md.Plan, mode: str, machine: md.Machine) -> float:
    """Predicted seconds of a plan under an overlap."""
    step = md.compile(SHORT.train_step(), plan=plan.replace(overlap=mode), donate=(0, 1), machine=machine)
    return step.cost(*SHORT.specs(), machine=machine).seconds


def measured(case: Case, time_limit: float, patience: float | None) -> dict[str, object]:
    """The plan found for a case, and what the search took."""
    wall, processor = time.perf_counter(), time.process_time()
    result = md.search(
        case.workload, devices=case.devices, machine=case.machine, time_limit=time_limit, patience=patience
    )
    return {
        "step_seconds": result.best.seconds,
        "gap": result.gap,
        "plan": result.plan.to_dict(),
        "plans_costed": result.counts.costed,
        "stopped": result.stopped,
        "processor_seconds": round(time.process_time() - processor, 1),
        "seconds": round(time.perf_counter() - wall, 1),
    }


def main() -> None:
    """Run the named cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="of each search")
    parser.add_argument("--patience", type=float, default=6.0, metavar="SECONDS", help="processor time; 0: no limit")
    parser.add_argument("--pipelines", action="store_true", help="where a pipeline is found, instead")
    options = parser.parse_args()
    for name in PIPELINES if options.pipelines else ():
        print(json.dumps(in_stages(name)), flush=True)
    if options.pipelines:
        return
    for name in options.cases or CASES:
        row = measured(CASES[name], options.time_limit, options.patience or None)
        print(json.dumps({"figure": "plan_search", "case": name, **row}), flush=True)


if __name__ == "__main__":
    main()
