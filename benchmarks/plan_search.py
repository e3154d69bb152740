"""Searches for the plans of large models: python -m benchmarks.plan_search [CASE ...] [--time-limit S] [--patience S]

Prints a JSON line for each case: the best plan, its seconds a step, the gap to the floor, processor and wall seconds of
the search. Defaults are those of `meshdsl search`. `--time-limit 120 --patience 0` is the long search that
docs/design/search.md compares them with.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

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
    parser.add_argument("--patience", type=float, default=4.0, metavar="SECONDS", help="processor time; 0: no limit")
    options = parser.parse_args()
    for name in options.cases or CASES:
        row = measured(CASES[name], options.time_limit, options.patience or None)
        print(json.dumps({"figure": "plan_search", "case": name, **row}), flush=True)


if __name__ == "__main__":
    main()
