"""`python -m meshdsl.demo`: one language model, three layouts, eight CPU devices, one result.

A byte-level Transformer trains on text that every Python carries, from the same seed, under three layouts. The loss
curves agree to float32 rounding, what is sent does not; if the curves disagree, the exit code is 1. Results go to
stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import meshdsl as md
from meshdsl.train import Progress, configure, corpus, load, place, report, stages, train

__all__ = ["TOLERANCE", "main"]

LAYOUTS = ("data", "model", "data_model")
WORKLOAD = "models/transformer.py:lm"
# GELU because it is smooth: training amplifies a rounding error a thousandfold where it decides the side of a ReLU.
SETTINGS = ["batch=16", "length=64", "layers=2", "d_model=128", "heads=8", "d_head=16", "d_ff=512", "activation=gelu"]
STEPS = 100
# A float32 sum of n terms is off by about 2**-24 * sqrt(n) of its size, and the loss is a sum over thousands of terms
# in an order that the layout decides: 2**-24 * 64, and as much again for what the steps before it left behind.
TOLERANCE = 2**-17


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, print; returns 1 when the layouts disagree."""
    parser = argparse.ArgumentParser(prog="python -m meshdsl.demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps under each layout (default {STEPS})")
    options = parser.parse_args(arguments)
    try:
        return _demo(max(2, options.steps))
    except md.MeshdslError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _demo(steps: int) -> int:
    md.host_devices(8)
    began = time.perf_counter()
    workload = configure(load(str(_checkout() / WORKLOAD)), SETTINGS)
    text = corpus()
    print(
        f"{WORKLOAD} with {' '.join(SETTINGS)}\n"
        f"text: {len(text.documents)} documents that this Python carries, sha256 {text.sha256[:16]}"
    )
    curves, bits = {}, {}
    for name in LAYOUTS:
        mesh, layout = place(workload, name, None)
        print(f"  {name:<11} mesh {mesh!s:<15} layout {layout}", flush=True)
        curves[name], bits[name] = _trained(workload, name, steps)

    difference = [max(losses) / min(losses) - 1 for losses in zip(*curves.values(), strict=True)]
    print(f"\nThe loss of {steps} steps, in nats per byte; a digit says how many curves fall on one place\n")
    print(report.chart(curves))
    shown = sorted({1, *(round(steps * i / 8) for i in range(1, 9))} - {0})
    rows = [[n, *(f"{curves[name][n - 1]:.6f}" for name in LAYOUTS), f"{difference[n - 1]:.1e}"] for n in shown]
    print("\n" + report.table(["step", *LAYOUTS, "difference"], rows, left=0))
    print("\nHeld-out text, in bits per byte: " + ", ".join(f"{name} {bits[name]:.5f}" for name in LAYOUTS))
    agree = max(difference) <= TOLERANCE
    print(
        f"Largest relative difference between the three curves: {max(difference):.1e}, at step "
        f"{difference.index(max(difference)) + 1}; float32 rounding allows {TOLERANCE:.1e}"
    )

    print("\nWhat one device runs under data_model: the forward half of a layer, elementwise operations left out\n")
    print("\n".join(_layer(workload)))
    print("\nWhat one device sends in a training step, loop trips counted\n")
    print(_sent(workload))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if not agree:
        print(f"the layouts disagree by {max(difference):.1e}, more than float32 rounding", file=sys.stderr)
    return 0 if agree else 1


def _checkout() -> Path:
    root = Path(__file__).parent.parent
    if not (root / WORKLOAD.partition(":")[0]).is_file():
        raise md.MeshdslError(f"the demo needs models/ of a checkout, and {root} has none\n  run it with: make demo")
    return root


def _trained(workload: md.Workload, name: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step under one layout, and the held-out bits per byte afterwards."""
    losses, bits = [], 0.0
    with Progress(steps, name) as progress:
        for record in train(workload, *place(workload, name, None), steps=steps):
            if record["event"] == "step":
                losses.append(record["loss"])
                progress.update(record["step"], f"loss {record['loss']:.3f}")
            if record["event"] == "eval":
                bits = record["bits_per_byte"]
    return losses, bits


def _layer(workload: md.Workload) -> Iterator[str]:
    """The matrix products and collectives of the first loop body of the printed program, as printed."""
    mesh, layout = place(workload, "data_model", None)
    params, _, batch = workload.specs()
    program = md.compile(workload.eval_step(), mesh, layout).program(params, batch)
    kept = {"einsum", *(record.kind for record in program.collectives)}
    lines = iter(str(program).splitlines())
    body = next(line for line in lines if line.lstrip().startswith("body("))
    depth = len(body) - len(body.lstrip())
    for line in lines:
        if len(line) - len(line.lstrip()) <= depth:
            return
        operation = re.match(r"\s*%\d+ = (\w+)", line)
        if operation and operation[1] in kept:
            yield "  " + re.sub(r"\s+# \S*/", "  # ", line.strip())


def _sent(workload: md.Workload) -> str:
    """Counts and bytes of every layout, by kind of collective and mesh axes."""
    rows = []
    for name in LAYOUTS:
        compiled, types = stages(workload, *place(workload, name, None))
        found = report.collectives(compiled.program(*types))
        rows += [[name, row["kind"], ",".join(row["axes"]), *_sizes(row)] for row in found]
        total: Mapping[str, Any] = {key: sum(row[key] for row in found) for key in ("count", "bytes", "wire_bytes")}
        rows.append([name, "total", "", *_sizes(total)])
    return report.table(["layout", "kind", "axes", "count", "bytes", "sent by a device"], rows, left=3)


def _sizes(row: Mapping[str, Any]) -> list[str]:
    return [str(row["count"]), report.size(row["bytes"]), report.size(row["wire_bytes"])]


if __name__ == "__main__":
    sys.exit(main())
