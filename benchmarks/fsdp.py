"""FSDP by one rule, `params:rows` in a layout: python -m benchmarks.fsdp [NAME ...] [--devices N ...] [--data FILE]

A JSON line for each model, machine and number of devices: the predicted step of one sequence a device, with layers
recomputed and gradients summed in bfloat16; the peak; the bytes that a device sends beside ZeRO-3's formula, three
times the weights in bfloat16 that others store (Rajbhandari et al., 2020, section 7); and those that it stores between
steps beside 12 / N a parameter (float32 weights and two moments; the gradient's 4 / N is stored during a step only).
`--parts` are micro-batches. With `--data`, published measurements (a JSON list of rows, see benchmarks.ground),
instead: for each source, machine and size of a model, the run with the most devices whose parameters are sharded.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshdsl as md
from meshdsl.train import load

from .ground.programs import Programs
from .ground.runs import Run, runs

NAMES = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-8b", "gemma2-9b")
MACHINES = ("h100:flash", "tpu-v5p:flash,overlap")
DEVICES = (8, 64, 256, 1024)
RULES = "batch:rows; expert_batch:rows; params:rows"


def row(name: str, machine: str, devices: int, parts: int = 1, rules: str = "") -> dict[str, Any]:
    """The line of one model on one machine."""
    workload = load(name).replace(batch=devices * parts, remat=True, reduce_dtype="bfloat16", compute_dtype="bfloat16")
    rules = rules or (RULES if name.startswith("mixtral") else RULES.replace(" expert_batch:rows;", ""))
    step = md.compile(workload.train_step(), f"rows:{devices}", rules, donate=(0, 1), microbatches=parts)
    specs = workload.specs()
    report = step.cost(*specs, machine=machine)
    program = step.program(*specs)
    count = sum(math.prod(d.size for d in x.dims) for x in specs[0].values())
    stored = sum(program.local_bytes(v) for v in program.ins if v.name.startswith(("params/", "state/")))
    formula = 3 * parts * 2 * count * (devices - 1) / devices
    return {
        "model": name,
        "machine": machine,
        "devices": devices,
        "parts": parts,
        "step_s": round(report.seconds, 3),
        "peak_gb": round(report.peak_bytes / 1e9, 2),
        "fits": report.fits,
        "sent_gb": round(report.wire_bytes / 1e9, 2),
        "zero3_gb": round(formula / 1e9, 2),
        "sent_ratio": round(report.wire_bytes / formula, 3),
        "stored_gb": round(stored / 1e9, 3),
        "stored_ratio": round(stored / (12 * count / devices), 3),
        "flops_ratio": round(report.flops * devices / _flops(workload, specs), 3),
    }


def _flops(workload: md.Workload, specs: Any) -> float:
    return md.compile(workload.train_step(), "", "").cost(*specs, machine="h100").flops


def published(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Predicted beside measured seconds of runs whose parameters are sharded over all devices."""
    largest: dict[tuple[str, str, str], Run] = {}
    for run in runs(rows):
        key = run.source, run.machine, run.size
        if run.sharded and run.group is None and (key not in largest or run.devices > largest[key].devices):
            largest[key] = run
    programs = Programs(None)
    for (source, machine, size), run in sorted(largest.items()):
        seconds = programs.time(run).seconds(run)
        error = round(seconds / run.seconds - 1, 3)
        yield {"source": source, "machine": machine, "size": size, "devices": run.devices, "measured_s": run.seconds,
               "predicted_s": round(seconds, 3), "error": error}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a named model (default: {', '.join(NAMES)})")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--parts", type=int, default=1, help="micro-batches")
    parser.add_argument("--rules", default="", metavar="LAYOUT", help="another layout on the axis `rows`")
    parser.add_argument("--data", type=Path, help="measurements, to be predicted")
    options = parser.parse_args()
    if options.data is not None:
        for line in published(json.loads(options.data.read_text(encoding="utf-8"))):
            print(json.dumps(line), flush=True)
        return 0
    for name in options.names or NAMES:
        for machine in MACHINES:
            for devices in options.devices:
                print(json.dumps(row(name, machine, devices, options.parts, options.rules)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
