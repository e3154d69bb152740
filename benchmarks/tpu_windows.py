"""Planned products that the TPU compiler keeps in their windows, for steps on eight chips, as JSON lines.

`moe` is a mixture of experts of d_model 512 with 16 experts under `halves`. The others are a dense model of d_model
512: `tensor` with tensor parallelism under `list`; `sequence` and `ring` with positions sharded between its layers too,
under `halves` and `ring`; `update` with a sharded update under `list`. `inside` of the `planned` products run between
start and done of their collective; `synchronous` collectives should have run beside products, but the compiler does not
overlap them. `cycles` are the compiler's estimate, without communication. On v5e, no plan for `tensor` exists. Needs
the extra `aot`. 12 layers take the compiler 6 to 20 minutes.

    python -m benchmarks.tpu_windows                       # 4 layers on v5e
    python -m benchmarks.tpu_windows moe --layers 2 12
    python -m benchmarks.tpu_windows tensor sequence --layers 2 --chip v6e --overlap list
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import meshdsl as md
from meshdsl.models.gpt_moe import gpt_moe
from meshdsl.models.transformer import LAYOUTS, lm

SIZES = {"batch": 64, "length": 256, "d_model": 512, "d_ff": 2048, "vocab": 1024, "compute_dtype": "bfloat16"}
MOE = gpt_moe.replace(**SIZES, heads=8, d_head=64, expert_hidden=2048, experts=16, capacity_factor=1.0)
CASES = {
    "moe": (MOE, md.Plan("rows:8", "batch:rows; group:rows; expert:rows", overlap="halves")),
    "tensor": (lm.replace(**SIZES), md.Plan(*LAYOUTS["data_model"], overlap="list")),
    "sequence": (lm.replace(**SIZES), md.Plan(*LAYOUTS["sequence"], overlap="halves")),
    "ring": (lm.replace(**SIZES), md.Plan(*LAYOUTS["sequence"], overlap="ring")),
    "update": (lm.replace(**SIZES), md.Plan("rows:8", "batch:rows", weight_update="sharded", overlap="list")),
}
CHIPS = {"v5e": "2x4", "v5p": "2x2x2", "v6e": "2x4"}


def row(case: str, layers: int, chip: str, overlap: str | None, timeout: float) -> dict[str, object]:
    """The windows of one case in the compiled text."""
    workload, plan = CASES[case]
    plan = plan if overlap is None else plan.replace(overlap=overlap)
    model = workload.replace(layers=layers)
    step = md.compile(model.train_step(), plan=plan, donate=(0, 1), machine=f"tpu-{chip}")
    begin = time.perf_counter()
    result: dict[str, object] = {"case": case, "chip": chip, "layers": layers, "overlap": plan.overlap.mode}
    try:
        program = step.program(*model.specs())
        topology = f"tpu:{chip}:{CHIPS[chip]}"
        compiled = md.compile_for(topology, program, donated=step.donated(*model.specs()), timeout=timeout)
    except (md.LayoutError, md.CompilerError) as error:
        return {**result, "refused": str(error)}
    return {
        **result,
        "windows": sum(window.planned > 0 for window in compiled.windows),
        "synchronous": sum(window.planned > 0 and not window.asynchronous for window in compiled.windows),
        "planned": sum(window.planned for window in compiled.windows),
        "inside": sum(window.inside for window in compiled.windows),
        "cycles": compiled.cycles,
        "compile_s": round(time.perf_counter() - begin),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)}; all by default")
    parser.add_argument("--layers", nargs="+", type=int, default=[4])
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--overlap", help="another mode than the case's")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one compilation")
    options = parser.parse_args()
    if wrong := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(wrong)}; there are: {', '.join(CASES)}")
    for case in options.cases or CASES:
        for layers in options.layers:
            print(json.dumps(row(case, layers, options.chip, options.overlap, options.timeout)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
