"""A dense language model under overlap plans: tensor parallel, sharded weight updates, and weights gathered in each
layer (ZeRO-3); predicted, as JSON lines.

12 layers, d_model 1024, d_ff 4096, length 1024, batch 64, vocabulary 32,768, bfloat16, on 16 A100. Times are of the
cost tool's timeline.

    python -m benchmarks.overlap_dense
"""

from __future__ import annotations

import json
import sys

import meshdsl as md
from meshdsl.models.transformer import lm

CASES = (
    (
        "tensor parallel",
        "rows:2 cols:8",
        "batch:rows; vocab:cols; d_ff:cols; heads:cols",
        "replicated",
        ("list", "halves"),
    ),
    ("sharded update", "rows:16", "batch:rows", "sharded", ("list", "ring")),
    (
        "weights gathered in each layer",
        "rows:16",
        "batch:rows",
        md.WeightUpdate("sharded", regather=True),
        ("list", "skew", "ring"),
    ),
)


def main() -> int:
    model = lm.replace(
        layers=12, d_model=1024, d_ff=4096, heads=16, d_head=64, length=1024, batch=64, vocab=32768,
        compute_dtype="bfloat16",
    )  # fmt: skip
    for name, mesh, layout, update, modes in CASES:
        first = None
        for mode in ("none", *modes):
            step = md.compile(
                model.train_step(),
                mesh,
                layout,
                donate=(0, 1),
                weight_update=update,
                overlap=mode,
                machine=None if mode == "none" else "a100-p4de",
            )
            report = step.cost(*model.specs(), machine="a100-p4de")
            first = first or report.exposed
            row = {
                "case": name, "overlap": mode, "chosen": step.overlap.chosen, "step_ms": round(report.seconds * 1e3, 1),
                "exposed_ms": round(report.exposed * 1e3, 2), "peak_gb": round(report.peak_bytes / 1e9, 2),
                "exposed_change": round(report.exposed / first - 1, 3),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
