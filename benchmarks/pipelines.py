"""Cycles and memory of a pipeline by the TPU compiler, beside the same stage without a pipeline, as JSON lines.

A Llama in bfloat16 with 4 stages of 2 layers on four v5e, for several numbers M of micro-batches of a fixed size.
`ideal` is (M+S-1) times the cycles of a micro-batch on chips that each compute the layers of one stage: a quarter of
the difference between steps of 8 and 4 micro-batches. `cycles` are the compiler's estimate, without communication.
`asynchronous` counts the messages between stages that start and end apart, out of `messages`. Needs the extra `aot`.

    python -m benchmarks.pipelines                      # M = 8, 16, 64, with full rematerialisation
    python -m benchmarks.pipelines 8 32 --remat none
"""

from __future__ import annotations

import argparse
import json
import sys

import meshdsl as md
from meshdsl.models.llama import llama

STAGES, LAYERS, PART = 4, 2, 8  # stages, layers of a stage, sequences of a micro-batch
MODEL = llama.replace(
    length=512, vocab=2048, d_model=1024, query_heads=8, heads=8, d_head=128, d_ff=2816, compute_dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip


def compiled(stages: int, microbatches: int, remat: str) -> md.Compilation:
    """The compiler's text of a step in stages, or of one stage alone."""
    model = MODEL.replace(batch=PART * microbatches, layers=LAYERS * stages)
    layout = "layer:stages" if stages > 1 else ""
    plan = md.Plan(f"stages:{STAGES}", layout, remat=remat, microbatches=microbatches)
    step = md.compile(model.train_step(), plan=plan, donate=(0, 1))
    program = step.program(*model.specs())
    return md.compile_for("tpu:v5e:2x2", program, donated=step.donated(*model.specs()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("microbatches", nargs="*", type=int, default=[8, 16, 64])
    parser.add_argument("--remat", default="full", help="a rematerialisation, as in md.Plan")
    options = parser.parse_args()
    few, many = (compiled(1, m, options.remat).cycles for m in (4, 8))
    assert few is not None and many is not None
    trip = (many - few) / 4
    for microbatches in options.microbatches:
        step = compiled(STAGES, microbatches, options.remat)
        assert step.cycles is not None and step.memory is not None
        ideal = (microbatches + STAGES - 1) * trip
        row = {"microbatches": microbatches, "remat": options.remat, "cycles": step.cycles, "ideal": round(ideal),
               "ratio": round(step.cycles / ideal, 3), "peak_bytes": step.memory.peak}  # fmt: skip
        messages = [each for each in step.collectives if each.kind == "permute"]
        row |= {"messages": len(messages), "asynchronous": sum(each.asynchronous for each in messages)}
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
