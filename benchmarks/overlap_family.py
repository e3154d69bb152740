"""Overlap plans of GShard's models with 2,048 experts on 2,048 A100, predicted, with the planning time, as JSON lines.
A device has one group, so parts are cut along its tokens, or the slots of the experts: `chosen` says which.

    python -m benchmarks.overlap_family --layers 12 36
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import meshdsl as md
from benchmarks.moe_family import LAYOUT
from meshdsl.models.moe_transformer import preset

EXPERTS, MACHINE = 2048, "a100-p4de"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[12])
    parser.add_argument("--modes", nargs="+", default=["none", "dw", "list", "skew", "halves"])
    options = parser.parse_args()
    for layers in options.layers:
        workload = preset(EXPERTS, layers)
        for mode in options.modes:
            start = time.process_time()
            step = md.compile(
                workload.train_step(),
                f"rows:{EXPERTS}",
                LAYOUT,
                donate=(0, 1),
                overlap=mode,
                machine=None if mode == "none" else MACHINE,
            )
            row: dict[str, object] = {"experts": EXPERTS, "layers": layers, "overlap": mode}
            try:
                report = step.cost(*workload.specs(), machine=MACHINE)
            except md.LayoutError as error:
                row["refused"] = str(error).splitlines()[0]
            else:
                row |= {
                    "chosen": step.overlap.chosen, "step_ms": round(report.seconds * 1e3, 1),
                    "exposed_ms": round(report.exposed * 1e3, 2), "peak_gb": round(report.peak_bytes / 1e9, 2),
                }  # fmt: skip
            print(json.dumps({**row, "planning_cpu_s": round(time.process_time() - start, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
