"""Predicted step time and exposed communication of GPT2-S-MoE and GPT2-L-MoE for every `--overlap`, as JSON lines;
also for what Lancet compares itself with (`benchmarks.overlap_baselines`).

The setting is that of Lancet's evaluation (Jiang et al., 2024, section 7): length 512, two experts per device, experts
in every second layer, capacity factor 1, SGD with momentum. The batch per device is 24 (S) and 48 (L) on A100, and 16
and 8 on V100. All times are those of the cost model's timeline. `none` is the scanned program, and `unrolled` the same
layer by layer, with the overlap that the compiler is assumed to find.

    python -m benchmarks.overlap                            # S and L on 16 A100
    python -m benchmarks.overlap --sizes S --machines v100-p3dn --devices 16 32 64 --routers switch batch_prioritised
    python -m benchmarks.overlap --sizes S --one-group      # all sequences of a device are one group
    python -m benchmarks.overlap --sizes S --modes none skew  # loops kept

With `--one-group`, a plan cuts the tokens of the group, as in the paper. With `--exchange ragged`, the first mode sends
only filled slots too, as the baselines of the paper do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import meshdsl as md
from benchmarks.overlap_baselines import BASELINES, planned
from meshdsl.models.gpt_moe import gpt2_moe, gpt2_moe_large

MODELS = {"S": gpt2_moe, "L": gpt2_moe_large}
BATCH = {("S", "a100-p4de"): 24, ("L", "a100-p4de"): 48, ("S", "v100-p3dn"): 16, ("L", "v100-p3dn"): 8}
MODES = ("none", "unrolled", "experts", "dw", "partition", "lancet", "list", "skew", "halves")


def workload(size: str, machine: str, devices: int, router: str) -> md.Workload:
    """A model of the evaluation, scaled to `devices` devices."""
    dtype = "bfloat16" if machine.startswith("a100") else "float16"
    return MODELS[size].replace(
        batch=BATCH[size, machine] * devices,
        length=512,
        experts=2 * devices,
        router=router,
        capacity_factor=1.0,
        compute_dtype=dtype,
        optimizer="momentum",
    )


def row(
    size: str, machine: str, devices: int, router: str, mode: str, one_group: bool, exchange: str
) -> dict[str, Any]:
    """The predicted times of one model under one overlap mode."""
    model = workload(size, machine, devices, router).replace(exchange=exchange)
    if one_group:
        model = model.replace(sequences=BATCH[size, machine])
    start = time.process_time()
    plain = mode in ("none", "unrolled", *BASELINES)
    step = md.compile(
        model.train_step(),
        f"rows:{devices}",
        "batch:rows; group:rows; expert:rows",
        donate=(0, 1),
        overlap="none" if plain else mode,
        unroll=mode == "unrolled",
        machine=None if plain else machine,
    )
    report = step.cost(*model.specs(), machine=machine)
    chosen = step.overlap.chosen
    if mode in BASELINES:
        program, donated = step.program(*model.specs()), step.donated(*model.specs())
        places = [program.ins.index(v) for v in donated]
        report = planned(mode, program, md.machine(machine), donated=places)[1].after
        chosen = report.name
    return {
        "size": size, "machine": machine, "devices": devices, "router": router, "exchange": exchange, "overlap": mode,
        "chosen": chosen, "step_ms": round(report.seconds * 1e3, 2),
        "exposed_ms": round(report.exposed * 1e3, 2), "peak_gb": round(report.peak_bytes / 1e9, 2),
        "planning_cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case, with its speedup and relative change of exposed time, both compared to the first mode."""
    for machine in options.machines:
        for size in options.sizes:
            for devices in options.devices:
                for router in options.routers:
                    first: dict[str, Any] | None = None
                    for mode in options.modes:
                        result = row(size, machine, devices, router, mode, options.one_group, options.exchange)
                        first = first or result
                        result["speedup"] = round(first["step_ms"] / result["step_ms"], 3)
                        result["exposed_change"] = round(result["exposed_ms"] / first["exposed_ms"] - 1, 3)
                        yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=["S", "L"])
    parser.add_argument("--machines", nargs="+", choices=["a100-p4de", "v100-p3dn"], default=["a100-p4de"])
    parser.add_argument("--devices", nargs="+", type=int, default=[16])
    parser.add_argument("--routers", nargs="+", choices=["switch", "batch_prioritised"], default=["switch"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--one-group", action="store_true", help="route all sequences of a device as one group")
    parser.add_argument("--exchange", choices=["padded", "ragged"], default="padded", help="of slots, without a plan")
    for result in rows(parser.parse_args()):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
