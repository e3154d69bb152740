"""Predicted memory per device compared with the TPU compiler's: python -m benchmarks.tpu_memory [--full] [NAME ...]

Needs `pip install "meshdsl[aot]"`, but no TPU. Prints a JSON line for each train step and topology, then the errors;
the errors are also printed if the script is interrupted.

`theirs` is the compiler's peak memory. `sum` is its argument + output + temp - alias, which is larger for programs with
loops, and can exceed the device's memory for programs that do compile. The fusion model was developed on the points of
FITTED; the points of HELD_OUT were compiled afterwards. Copies of rows were added to the model with all these points
known, except "lm modern", which was compiled later. `--full` runs the compiler with full effort, which takes several
times as long.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time

import meshdsl as md
from models import mlp, resnet, transformer

MLP = mlp.mlp.replace(batch=32768, io=4096, hidden=16384)
LM = transformer.lm.replace(
    layers=4, d_model=1024, heads=8, d_head=128, d_ff=4096, vocab=8192, batch=32, length=1024, compute_dtype="bfloat16"
)
WIDE = LM.replace(layers=2, vocab=32768, batch=64, length=512)
MODERN = LM.replace(norm="rms", gated=True, positions="rotary", batch=128, remat=True)
SHORT = resnet.resnet50.replace(blocks=(1, 1, 1, 1), batch=256)
LAYOUTS = {**transformer.LAYOUTS, "16": ("rows:4 cols:4", transformer.LAYOUTS["sequence"][1])}

Point = tuple[md.Workload, tuple[str, str], str]
FITTED: dict[str, Point] = {
    "mlp data": (MLP, mlp.LAYOUTS["data"], "tpu:v5e:2x4"),
    "mlp model": (MLP, mlp.LAYOUTS["model"], "tpu:v5e:2x4"),
    "mlp three_d": (MLP, mlp.LAYOUTS["three_d"], "tpu:v4:2x2x1"),
    "mlp io": (MLP.replace(batch=8192, io=8192), ("all:8", "io:all"), "tpu:v5e:2x4"),
    "lm data_model": (LM, LAYOUTS["data_model"], "tpu:v5e:2x4"),
    "lm data_model, batch 64": (LM.replace(batch=64), LAYOUTS["data_model"], "tpu:v5e:2x4"),
    "lm data_model, 8 layers": (LM.replace(layers=8), LAYOUTS["data_model"], "tpu:v5e:2x4"),
    "lm data_model, remat": (LM.replace(remat=True), LAYOUTS["data_model"], "tpu:v5e:2x4"),
    "lm wide data": (WIDE, LAYOUTS["data"], "tpu:v5e:2x4"),
    "lm wide sequence": (WIDE, LAYOUTS["sequence"], "tpu:v5e:2x4"),
}
HELD_OUT: dict[str, Point] = {
    "mlp data_model": (MLP.replace(batch=65536), mlp.LAYOUTS["data_model"], "tpu:v5p:2x2x2"),
    "mlp 16 devices": (MLP, ("rows:4 cols:4", "batch:rows; hidden:cols"), "tpu:v5e:4x4"),
    "lm float32": (LM.replace(compute_dtype="float32"), LAYOUTS["data_model"], "tpu:v6e:2x4"),
    "lm modern": (MODERN.replace(batch=32, remat=False), LAYOUTS["data_model"], "tpu:v5p:2x2x2"),
    "lm modern data": (MODERN, LAYOUTS["data"], "tpu:v5p:2x2x2"),
    "lm model": (LM.replace(batch=16), LAYOUTS["model"], "tpu:v5e:2x4"),
    "lm collectives kept, 16 devices": (LM.replace(remat="collectives", batch=64), LAYOUTS["16"], "tpu:v5e:4x4"),
    "lm bfloat16 parameters": (WIDE.replace(param_dtype="bfloat16"), LAYOUTS["data_model"], "tpu:v4:2x2x1"),
    "lm heads of 64": (LM.replace(heads=16, d_head=64), LAYOUTS["sequence"], "tpu:v6e:2x4"),
    "resnet data": (SHORT, resnet.LAYOUTS["data"], "tpu:v5e:2x4"),
}


def measure(name: str, point: Point, effort: str) -> dict[str, object]:
    """The predicted and the compiler's memory of one train step."""
    workload, (mesh, layout), topology = point
    step = md.compile(workload.train_step(), mesh, layout, donate=(0, 1))
    program = step.program(*workload.specs())
    donated = [v for v in program.ins if v.name.partition("/")[0] in ("params", "state")]
    start = time.perf_counter()
    ours = md.memory(program, donated=donated)
    seconds = time.perf_counter() - start
    compiled = md.compile_for(topology, program, donated=donated, effort=effort)
    assert compiled.memory is not None, str(compiled)
    return {
        "figure": "tpu_memory",
        "point": name,
        "topology": topology,
        "held_out": name in HELD_OUT,
        "ours": ours.peak,
        "theirs": compiled.memory.peak,
        "error": round(ours.peak / compiled.memory.peak - 1, 4),
        "sum": compiled.memory.total,
        "error_of_sum": round(ours.peak / compiled.memory.total - 1, 4),
        "at": f"{ours.at.op} {ours.at.where}",
        "our_seconds": round(seconds, 3),
        "their_seconds": round(compiled.seconds, 1),
    }


def summary(lines: list[dict[str, object]], label: str) -> dict[str, object]:
    """The median and the largest error."""
    errors = [abs(float(str(line["error"]))) for line in lines]
    of_sum = [abs(float(str(line["error_of_sum"]))) for line in lines]
    return {
        "figure": "tpu_memory_summary",
        "points": label,
        "count": len(lines),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "median_error_of_sum": round(statistics.median(of_sum), 4),
        "worst_error_of_sum": max(of_sum),
    }


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--full"]
    effort = "" if "--full" in sys.argv else "O1"
    lines: list[dict[str, object]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name, point in {**FITTED, **HELD_OUT}.items():
            if not names or name in names:
                lines.append(measure(name, point, effort))
                print(json.dumps(lines[-1]), flush=True)
    finally:  # also if the script is interrupted or a compilation fails
        for label, held_out in (("fitted", False), ("held out", True)):
            if selected := [line for line in lines if line["held_out"] == held_out]:
                print(json.dumps(summary(selected, label)), flush=True)


if __name__ == "__main__":
    main()
