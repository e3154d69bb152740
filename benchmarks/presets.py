"""The models with a name: parameters beside the published number, tokens a second beside a public run.

    python -m benchmarks.presets [NAME ...]

One JSON line for each. The run is the public one as far as its source tells: model, batch, length, machine, what is
sharded, what is recomputed; `note` says what differs. Nothing was run: `rate` is predicted, `public` is published, both
in tokens a second and device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, NamedTuple

import meshdsl as md
from meshdsl.models.deepseek import deepseek_v3
from meshdsl.models.gpt2 import gpt3_175b
from meshdsl.models.llama import llama3_8b, llama3_70b, llama3_405b
from meshdsl.train import load

from .case_study import BF16, CASES, FSDP

__all__ = ["PUBLISHED", "RUNS", "parameters"]

# The numbers of the model's paper, or of its model card where the paper rounds more.
PUBLISHED = {
    "llama2-7b": 6.74e9, "llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9, "mixtral-8x7b": 46.70e9,
    "mixtral-8x22b": 140.63e9, "deepseek-v3": 671.03e9, "gemma2-2b": 2.614e9, "gemma2-9b": 9.242e9,
    "gemma2-27b": 27.227e9, "gemma3-1b": 1.000e9, "gemma3-4b": 3.880e9, "gemma3-12b": 11.766e9, "gemma3-27b": 27.009e9,
    "qwen3-8b": 8.19e9, "qwen3-32b": 32.76e9, "gpt3-175b": 174.60e9, "gpt2-xl": 1.558e9,
}  # fmt: skip


class Run(NamedTuple):
    """A public run: tokens a second and device, its source, and our plan for it."""

    workload: md.Workload
    machine: str
    plan: md.Plan
    public: float
    source: str
    note: str = ""


def _case(name: str) -> Run:
    case = CASES[name]
    assert case.rate is not None
    return Run(case.workload, case.machine, case.recipe, case.rate, case.origin, case.note)


def _fsdp(workload: md.Workload, chip: str, chips: int, each: int, public: float) -> Run:
    """A recipe of MaxText for Llama 3.1: parameters sharded over all chips, layers recomputed."""
    source = "github.com/AI-Hypercomputer/tpu-recipes, training/{trillium,v5p}"
    plan = md.Plan(f"data:{chips}", "batch:data", FSDP, "full")
    return Run(workload.replace(batch=each * chips, **BF16), f"tpu-{chip}:flash,overlap", plan, public, source)


RUNS = {
    "llama2-7b": _case("llama-h100"),
    "llama3-8b": _fsdp(llama3_8b, "v6e", 256, 4, 7207.0),
    "llama3-70b": _fsdp(llama3_70b, "v6e", 256, 5, 960.2),
    "llama3-405b": _fsdp(llama3_405b, "v5p", 512, 2, 124.6),
    "mixtral-8x7b": _case("mixtral-v5p"),
    "gpt3-175b": Run(
        gpt3_175b.replace(**BF16),
        "a100-dgx:eager",
        md.Plan(
            "data:16 stages:8 tensor:8",
            "batch:data; layer:stages; heads:tensor; d_ff:tensor; vocab:tensor",
            remat="full",
            microbatches=96,
        ),
        300e9 / (34 * 86400 * 1024),
        "Narayanan et al., 2021, section 5.1: 34 days for 300 billion tokens on 1,024 A100, batch 1,536",
        "The paper does not say how the 1,024 GPUs are divided; 16 x 8 stages x 8 is assumed, without interleaving.",
    ),
    "deepseek-v3": Run(
        deepseek_v3,
        "h100",
        md.Plan(
            "node:256 gpu:8",
            "batch:node; expert:node; heads:gpu; d_ff:gpu; vocab:gpu",
            "sharded",
            microbatches=60,
            machine="h100",
        ),
        14.8e12 / (2.664e6 * 3600),
        "DeepSeek-AI, 2024, table 1: 2.664 million H800 hours for 14.8 trillion tokens",
        "Not alike: theirs is in 8 bits, with 16 pipeline stages and all-to-alls behind computation.",
    ),
}


def parameters(name: str) -> int:
    """The number of parameters of a named model.

    >>> parameters("llama3-8b")
    8030261248
    """
    workload = load(name)
    specs = workload.model(workload.config).specs(workload.inputs(workload.config))
    return sum(math.prod(d.size for d in spec.dims) for spec in specs.values())


def row(name: str) -> dict[str, Any]:
    """The line of one model."""
    count = parameters(name)
    line: dict[str, Any] = {"name": name, "parameters": count, "billions": count / 1e9, "published": PUBLISHED[name]}
    line |= {"published_billions": PUBLISHED[name] / 1e9}
    if name not in RUNS:
        return line
    run = RUNS[name]
    step = md.compile(run.workload.train_step(), plan=run.plan, donate=(0, 1))
    report = step.cost(*run.workload.specs(), machine=run.machine)
    rate = run.workload.config.batch * run.workload.config.length / run.plan.mesh.size / report.seconds
    return line | {
        "machine": run.machine,
        "devices": run.plan.mesh.size,
        "seconds": report.seconds,
        "peak_gb": report.peak_bytes / 1e9,
        "rate": rate,
        "public": run.public,
        "ratio": rate / run.public,
        "source": run.source,
        "note": run.note,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PUBLISHED)} (default: all)")
    for name in parser.parse_args().names or PUBLISHED:
        print(json.dumps(row(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
