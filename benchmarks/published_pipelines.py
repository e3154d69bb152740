"""Pipelines of published sizes, predicted, beside published rates: python -m benchmarks.published_pipelines [CASE ...]

Prints a JSON line per case: seconds to plan (trace to cost), the predicted step, MFU, share of exposed communication,
bubble and memory of one device. MFU counts the FLOP of a token as Chowdhery et al. (2022, appendix B): 6 for each
parameter that it uses, and those of attention.

gpt3       GPT-3 175B on 1,536 A100 with TP 8 and PP 12, everything recomputed; published are 138 to 148 TFLOP/s, 44 to
           47 % (Narayanan et al., 2021), with recomputed FLOPs, as `hardware` counts
llama3     Llama 3 405B on 16,384 H100 with TP 8 and PP 16; published are 400 TFLOP/s, 41 % (Llama team, 2024), without
           recomputation, which with one chunk does not fit, and with a layer less on the first and the last stage;
           here all stages have the same layers and share the vocabulary
deepseek   DeepSeek-V3's sizes on 2,048 H100 and v5p
scale      a Llama of 64 layers on 2,048 devices: seconds to trace, partition and lower
small      four layers on four devices
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import meshdsl as md
from meshdsl.models.deepseek import deepseek_v3
from meshdsl.models.gpt2 import gpt3_175b
from meshdsl.models.llama import llama, llama3_405b

TENSOR = "heads:cols; d_ff:cols"
EXPERTS = "layer:stages; batch:rows,cols; expert:cols; expert_batch:rows; vocab:stages"  # cols: in one node


class Case(NamedTuple):
    """A model, its parameters that a token uses, the width of its heads together, a machine with its peak, a plan."""

    workload: md.Workload
    used: float
    heads: int
    machine: str
    peak: float
    plan: md.Plan
    published: str = ""
    hardware: bool = False  # whether recomputed FLOPs count in the published rate


SMALL = llama.replace(batch=16, length=8, vocab=32, layers=4, d_model=16, d_ff=32, query_heads=2, heads=1)
DEEP = llama.replace(
    batch=1024, length=512, vocab=4096, layers=64, d_model=1024, query_heads=8, heads=8, d_head=128, d_ff=4096
)
GPT3 = "stages:12 rows:16 cols:8", f"layer:stages; batch:rows; {TENSOR}; vocab:cols"
LLAMA3 = "stages:16 rows:128 cols:8", f"layer:stages; batch:rows; length:cols; {TENSOR}; vocab:stages,cols", "sharded"
SUMS = {"reduce_dtype": "bfloat16"}  # of products whose parts are on several devices, as these two were trained
CASES: dict[str, list[Case]] = {
    "gpt3": [
        Case(gpt3_175b.replace(**SUMS), 174.6e9, 12288, "a100-dgx", 312e12,
             md.Plan(*GPT3, remat="full", microbatches=96, chunks=v), "44 to 47 %", True)
        for v in (1, 4)
    ],
    "llama3": [
        Case(llama3_405b.replace(**SUMS), 405e9, 16384, "h100:flash", 989e12,
             md.Plan(*LLAMA3, remat=remat, microbatches=16, chunks=v), "41 %")
        for v, remat in ((1, "full"), (8, "none"))
    ],
    "deepseek": [
        Case(deepseek_v3, 37e9, 128 * (192 + 128) // 2, machine, peak,
             md.Plan(f"stages:{stages} rows:{256 // stages} cols:8", EXPERTS, "sharded", microbatches=parts))
        for machine, peak, stages, parts in (
            ("h100:flash", 989e12, 32, 240), ("tpu-v5p:flash,overlap", 459e12, 16, 120),
        )
    ],
    "small": [Case(SMALL, 1e4, 16, "tpu-v5e", 197e12, md.Plan("stages:4", "layer:stages", microbatches=4))],
}  # fmt: skip


def predicted(case: Case, overlap: str = "none") -> dict[str, object]:
    """The predicted step of a case; the time to plan it counts from the trace."""
    started = time.perf_counter()
    specs = case.workload.specs()
    plan = case.plan if overlap == "none" else case.plan.replace(overlap=overlap, machine=case.machine)
    step = md.compile(case.workload.train_step(), plan=plan, donate=(0, 1))
    report = step.cost(*specs, machine=case.machine)
    config: Any = case.workload.config
    tokens = config.batch * config.length
    flops = (6 * case.used + 12 * config.layers * case.heads * config.length) * tokens
    flops *= 4 / 3 if case.hardware else 1
    return {
        "machine": case.machine,
        "devices": case.plan.mesh.size,
        "chunks": case.plan.chunks,
        "plan": case.plan.to_dict(),
        "planned_s": round(time.perf_counter() - started, 1),
        "step_s": round(report.seconds, 6),
        "mfu": round(flops / report.seconds / case.plan.mesh.size / case.peak, 3),
        "published": case.published,
        "exposed": round(report.parts["exposed communication"] / report.seconds, 3),
        "bubble": round(step.pipelines(*specs)[0].bubble, 3),
        "peak_gb": round(report.peak_bytes / 1e9, 1),
    }


def scale() -> dict[str, object]:
    """Seconds of each stage for 64 layers on 2,048 devices."""
    plan = md.Plan("stages:16 rows:16 cols:8", f"layer:stages; batch:rows; {TENSOR}; vocab:cols", microbatches=64)
    step, specs = md.compile(DEEP.train_step(), plan=plan, donate=(0, 1)), DEEP.specs()
    marks = [time.perf_counter()]
    for stage in (step.graph, step.program, step.lower):
        stage(*specs)
        marks.append(time.perf_counter())
    names = ("trace_s", "partition_s", "lower_s")
    seconds = {name: round(b - a, 2) for name, a, b in zip(names, marks, marks[1:], strict=False)}
    return {"devices": plan.mesh.size, "layers": DEEP.config.layers, **seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join([*CASES, "scale"]))
    parser.add_argument("--overlap", default="none", help="an overlap plan, of all cases but `scale`")
    options = parser.parse_args()
    for name in options.cases or [*CASES, "scale"]:
        if name not in CASES and name != "scale":
            parser.error(f"no case {name!r}; there are {', '.join([*CASES, 'scale'])}")
        for row in [scale()] if name == "scale" else (predicted(each, options.overlap) for each in CASES[name]):
            print(json.dumps({"case": name, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
