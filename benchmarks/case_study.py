"""Plans for public training runs: python -m benchmarks.case_study [CASE ...] --save FILE

For each case: the expert's public recipe as a plan, its predicted time beside the published one, and the best plan that
`md.search` finds for the same model, batch and machine, starting from the recipe. One JSON line each; `--save` also
writes them to a file. docs/case_study.md shows the file benchmarks/case_study.json (`--table`, `python
docs/_ext/pictures.py`) and its numbers (`--numbers`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshdsl as md
from meshdsl.models.llama import llama2_7b
from meshdsl.models.mixtral import mixtral_8x7b
from meshdsl.models.transformer import lm

__all__ = ["CASES", "DATA", "Case", "shown", "tables"]

DATA = Path(__file__).parent / "case_study.json"
BF16 = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
MIXED = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}  # grad_dtype of MaxText's base.yml is float32
FSDP = md.WeightUpdate("sharded", regather=True)
MAXTEXT = "github.com/AI-Hypercomputer/maxtext"


@dataclass(frozen=True)
class Case:
    """A published run. `rate` is tokens a second and device; None if nothing is published for this model and size."""

    title: str
    machine: str
    workload: md.Workload
    recipe: md.Plan
    rate: float | None
    origin: str
    note: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.workload.config.batch * self.workload.config.length


def _flops(matrices: float, length: int, layers: int, width: int) -> float:
    """Model FLOPs of one token by MaxText's formula: its products, and the whole square of attention scores."""
    return 6 * matrices + 12 * layers * width * length


_LLAMA = _flops(32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000, 4096, 32, 4096)
_MIXTRAL = _flops(32 * (2 * 4096**2 + 2 * 4096 * 1024 + 6 * 4096 * 14336 + 8 * 4096) + 4096 * 32000, 4096, 32, 4096)

CASES = {
    "llama-h100": Case(
        "Llama 2 7B, length 4,096, 64 H100",
        "h100-a3:flash",
        llama2_7b.replace(batch=256, **MIXED),
        md.Plan("node:8 gpu:8", "batch:node,gpu", md.WeightUpdate("sharded", group="gpu", regather=True), "products"),
        409e12 / _LLAMA,
        f"{MAXTEXT}, MaxText/configs/a3/llama_2_7b: README.md (8 x A3: 409 TFLOP/s a GPU), 8vm.sh "
        "(dcn_data_parallelism=8 ici_fsdp_parallelism=8), models/gpu/llama2_7b.yml (batch 4 a GPU, minimal_flash)",
        "On 1, 2, 4 and 16 nodes, MaxText publishes 492, 422, 407 and 375 TFLOP/s a GPU; our times are -1, -5, -2 "
        "and -3 % off (benchmarks.ground).",
    ),
    "llama-v5p": Case(
        "Llama 2 7B, length 4,096, v5p-128 (64 chips)",
        "tpu-v5p:flash,overlap",
        llama2_7b.replace(batch=256, **MIXED),
        md.Plan("data:64", "batch:data", FSDP, "products"),
        None,
        f"{MAXTEXT}, MaxText/configs/v5p/llama2_7b.sh (FSDP, batch 4 a chip, remat minimal)",
        "No throughput is published for this script; the README beside it has 328 TFLOP/s a chip for a model of 32 "
        "billion parameters on v5p-128.",
    ),
    "mpt-a100": Case(
        "MPT 7B, length 2,048, 16 A100 40 GB",
        "a100-dgx-40gb:eager,triton",
        lm.replace(
            **BF16, activation="gelu", tied=True, remat=True, batch=256, length=2048, vocab=50368, layers=32,
            d_model=4096, heads=32, d_head=128, d_ff=16384,
        ),
        md.Plan("data:16", "batch:data", FSDP),
        3645.0,
        "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: 16 GPUs, FULL_SHARD, micro-batch 16, "
        "activation checkpointing, bf16: 3,645 tokens a second and GPU",
        "LLM Foundry's 7B model is MPT; it publishes no Llama on this machine.",
    ),
    "mixtral-v5p": Case(
        "Mixtral 8x7B, length 4,096, v5p-128 (64 chips)",
        "tpu-v5p:flash,overlap",
        mixtral_8x7b.replace(batch=512, capacity_factor=1.0, **MIXED),
        md.Plan("data:64", "batch:data expert_batch:data", FSDP, "full"),
        251.94e12 / _MIXTRAL,
        f"{MAXTEXT}, tests/end_to_end/tpu/mixtral/Run_Mixtral.md (v5p-128: 251.94 TFLOP/s a chip, 54.89 % MFU)",
        "The batch, rematerialisation and sharding of that run are not published: batch 8 a chip, full and FSDP, as in "
        "MaxText's other recipes, are assumed. MaxText drops no token; a capacity factor of 1 has its FLOPs.",
    ),
}  # fmt: skip


def measured(case: Case, plans: int | None) -> dict[str, Any]:
    """The recipe's cost, and the plan found from it."""
    recipe = md.compile(case.workload.train_step(), plan=case.recipe, donate=(0, 1))
    report = recipe.cost(*case.workload.specs(), machine=case.machine)
    devices = case.recipe.mesh.size
    meshes = [f"x:{devices}", *(f"x:{n} y:{devices // n}" for n in range(2, devices // 2 + 1) if not devices % n)]
    began = time.process_time()
    result = md.search(case.workload, mesh=meshes, machine=case.machine, start=case.recipe, plans=plans)
    processor = round(time.process_time() - began, 1)
    published = None if case.rate is None else case.tokens / devices / case.rate
    best = result.best
    return {
        "devices": devices,
        "tokens": case.tokens,
        "published_seconds": published,
        "recipe": {**_cost(report, case.recipe), "interval": list(report.interval)},
        "found": {**_cost(best.report, best.plan), "gap": result.gap, "costed": result.counts.costed},
        "differences": [list(change) for change in case.recipe.diff(best.plan).changes],
        "estimated": result.counts.estimated,
        "search_processor_seconds": processor,
    }


def _cost(report: Any, plan: md.Plan) -> dict[str, Any]:
    costs = {"seconds": report.seconds, "peak_bytes": report.peak_bytes, "parts": dict(report.parts)}
    return {"plan": plan.to_dict(), **costs}


def shown(name: str, row: dict[str, Any]) -> dict[str, str]:
    """The cells of one case for the tables of the page."""
    case, recipe, plan = CASES[name], row["recipe"], row["found"]
    low, high = recipe["interval"]
    published = row["published_seconds"]
    per = row["tokens"] / row["devices"]
    return {
        "case": case.title,
        "published": "none" if published is None else f"{published:.2f} s",
        "recipe": f"{recipe['seconds']:.2f} s ({low:.2f} to {high:.2f})",
        "inside": "-" if published is None else "yes" if low <= published <= high else "no",
        "found": f"{plan['seconds']:.2f} s",
        "faster by": f"{1 - plan['seconds'] / recipe['seconds']:.0%}",
        "gap": f"{plan['gap']:.0%}",
        "tokens a second and device": f"{per / plan['seconds']:,.0f}",
    }


def tables(rows: dict[str, Any]) -> str:
    """The page's table: one line for each case."""
    lines = [shown(name, row) for name, row in rows.items()]
    heads = list(lines[0])
    marks = [":--" if head == "case" else "--:" for head in heads]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, marks, *(line.values() for line in lines)))


def numbers(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Further numbers of the page."""
    line: dict[str, Any] = {"case": name, "faster": 1 - row["found"]["seconds"] / row["recipe"]["seconds"]}
    for which in ("recipe", "found"):
        cost = row[which]
        exposed = cost["parts"]["exposed communication"]
        line |= {f"{which}_gb": cost["peak_bytes"] / 1e9, f"{which}_exposed_s": exposed}
        line[f"{which}_exposed"] = exposed / cost["seconds"]
    if row["published_seconds"] is not None:
        line |= {
            "published_s": row["published_seconds"],
            "above": row["published_seconds"] / row["recipe"]["seconds"] - 1,
        }
    return line


def main() -> int:
    """Print a JSON line for each case, or the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--plans", type=int, metavar="N", help="costed exactly in each search")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the rows to a JSON file")
    parser.add_argument("--table", action="store_true", help="only print the table of benchmarks/case_study.json")
    parser.add_argument("--numbers", action="store_true", help="only print the other numbers of that file")
    options = parser.parse_args()
    if options.table:
        print(tables(json.loads(DATA.read_text(encoding="utf-8"))))
        return 0
    if options.numbers:
        for name, row in json.loads(DATA.read_text(encoding="utf-8")).items():
            print(json.dumps(numbers(name, row)))
        return 0
    rows: dict[str, Any] = {}
    for name in options.cases or CASES:
        rows[name] = measured(CASES[name], options.plans)
        print(json.dumps({"figure": "case_study", "case": name, **rows[name]}), flush=True)
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
