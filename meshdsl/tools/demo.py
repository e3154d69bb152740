"""`python -m meshdsl.tools.demo`: trains one language model under three layouts on eight CPU devices.

A byte-level Transformer trains on the Python standard library's own text, from the same seed, under each layout. The
loss curves agree up to float32 rounding; the collectives differ. If the curves disagree, the exit code is 1. Results
go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence

import meshdsl as md
from meshdsl.train import Progress, configure, corpus, load, mesh_and_layout, stages, train

from ..cost.report.explain import totals_table
from ..errors.tables import chart, table

LAYOUTS = ("data", "model", "data_model")
WORKLOAD = "transformer:lm"
# GELU, because it is smooth: a rounding error that flips the sign at a ReLU is amplified a thousandfold by training.
SETTINGS = ["batch=16", "length=64", "layers=2", "d_model=128", "heads=8", "d_head=16", "d_ff=512", "activation=gelu"]
STEPS = 100
# The relative error of a float32 sum of n terms is about 2**-24 * sqrt(n). The loss sums thousands of terms in an order
# that depends on the layout: 2**-24 * 64, doubled for the errors of earlier steps.
TOLERANCE = 2**-17


def main(arguments: Sequence[str] | None = None) -> int:
    """Train under each layout and print the comparison; returns 1 if the loss curves disagree."""
    description = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m meshdsl.tools.demo", description=description)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"number of steps under each layout (default {STEPS})")
    options = parser.parse_args(arguments)
    return _demo(max(2, options.steps))


def _demo(steps: int) -> int:
    md.host_devices(8)
    started = time.perf_counter()
    workload = configure(load(WORKLOAD), SETTINGS)
    text = corpus()
    print(
        f"{WORKLOAD} with {' '.join(SETTINGS)}\n"
        f"data: {len(text.documents)} documents of the Python standard library's own text, sha256 {text.sha256[:16]}"
    )
    curves, bits = {}, {}
    for name in LAYOUTS:
        mesh, layout = mesh_and_layout(workload, name, None)
        print(f"  {name:<11} mesh {mesh!s:<15} layout {layout}", flush=True)
        curves[name], bits[name] = _train(workload, name, steps)

    difference = [max(losses) / min(losses) - 1 for losses in zip(*curves.values(), strict=True)]
    print(f"\nLoss over {steps} steps, in nats per byte; a digit is the number of curves that share a cell\n")
    print(chart(curves))
    shown = sorted({1, *(round(steps * i / 8) for i in range(1, 9))} - {0})
    rows = [[n, *(f"{curves[name][n - 1]:.6f}" for name in LAYOUTS), f"{difference[n - 1]:.1e}"] for n in shown]
    print("\n" + table(["step", *LAYOUTS, "difference"], rows, ">" * (2 + len(LAYOUTS)), indent=0))
    print("\nEval loss, in bits per byte: " + ", ".join(f"{name} {bits[name]:.5f}" for name in LAYOUTS))
    agree = max(difference) <= TOLERANCE
    print(
        f"Largest relative difference between the three curves: {max(difference):.1e}, at step "
        f"{difference.index(max(difference)) + 1}; float32 rounding allows {TOLERANCE:.1e}"
    )

    print("\nForward pass of one layer on one device under data_model, without elementwise operations\n")
    print("\n".join(_layer(workload)))
    for name in LAYOUTS:
        compiled, types = stages(workload, md.Plan(*mesh_and_layout(workload, name, None)))
        print(f"\nCollectives of one training step per device under {name}, with loop trips counted\n")
        print(totals_table(compiled.program(*types)))
    print(f"\n{time.perf_counter() - started:.0f} s in total")
    if not agree:
        print(f"the layouts disagree by {max(difference):.1e}, more than float32 rounding", file=sys.stderr)
    return 0 if agree else 1


def _train(workload: md.Workload, name: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step under one layout, and the eval bits per byte after the last step."""
    losses, bits = [], 0.0
    with Progress(steps, name) as progress:
        for record in train(workload, md.Plan(*mesh_and_layout(workload, name, None)), steps=steps):
            if record["event"] == "step":
                losses.append(record["loss"])
                progress.update(record["step"], f"loss {record['loss']:.3f}")
            if record["event"] == "eval":
                bits = record["bits_per_byte"]
    return losses, bits


def _layer(workload: md.Workload) -> Iterator[str]:
    """The lines of the printed program with matrix products and collectives of the first loop body."""
    mesh, layout = mesh_and_layout(workload, "data_model", None)
    params, _, batch = workload.specs()
    program = md.compile(workload.eval_step(), mesh, layout).program(params, batch)
    operations = {"einsum", *(record.kind for record in program.collectives)}
    lines = iter(str(program).splitlines())
    body = next(line for line in lines if line.lstrip().startswith("body("))
    depth = len(body) - len(body.lstrip())
    for line in lines:
        if len(line) - len(line.lstrip()) <= depth:
            return
        operation = re.match(r"\s*%\d+ = (\w+)", line)
        if operation and operation[1] in operations:
            yield "  " + re.sub(r"\s+# \S*/", "  # ", line.strip())


if __name__ == "__main__":
    sys.exit(main())
