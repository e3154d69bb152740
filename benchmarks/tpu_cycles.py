"""The TPU compiler's own estimate of each training step: python -m benchmarks.tpu_cycles [NAME ...] [--large]

Needs the extra `aot`, but no TPU. Compiles every workload for eight v5e chips three times: hand-written
with `shard_map` where this exists, by meshdsl, and by GSPMD (`jit` with shardings). Prints a JSON line per candidate:
`cycles` is the sum of the compiler's `estimated_cycles` on one device, loop bodies times their trips, of a conditional
its longest branch, without communication; `sent` are the bytes one device sends along rings, `asynchronous` those that
it sends beside computation; `peak` is the compiler's peak memory. Ratios are of meshdsl to the other candidate, of
loops to loops and of unrolled programs to each other. `--large` compiles workloads of real sizes, whose GSPMD
program is that of the same traced graph. `--text DIRECTORY` keeps the compiler's texts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

import meshdsl as md
from benchmarks import gpt2, halo, language_model, moe_layer, sharded_update, two_layer
from benchmarks.handwritten import halo as halo_by_hand
from benchmarks.handwritten import language_model as lm_by_hand
from benchmarks.handwritten import moe_layer as moe_by_hand
from benchmarks.handwritten import sharded_update as update_by_hand
from benchmarks.handwritten import two_layer as two_by_hand
from meshdsl.models import moe_transformer, resnet, seq2seq, transformer
from meshdsl.tools.compilers.aot import ENVIRONMENT, available
from meshdsl.tools.compilers.gspmd import gspmd as gspmd_of
from meshdsl.tools.compilers.hlo import Performed, estimated_cycles, performed

TOPOLOGY = "v5e:2x4"
UNKNOWN = 1 << 60  # cycles; the compiler states more where it has no estimate
Candidates = Mapping[str, Callable[[], jax.stages.Compiled]]
LLAMA = transformer.lm.replace(
    layers=4, d_model=1024, heads=4, queries_per_key=4, d_head=64, d_ff=2816, length=1024, vocab=32000, gated=True,
    activation="silu", norm="rms", positions="rotary", compute_dtype="bfloat16",
)  # fmt: skip


def chips() -> list[Any]:
    """Eight v5e chips that nothing can run on."""
    os.environ.update(ENVIRONMENT)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices)


def ours(step: md.Compiled, args: tuple[Any, ...], on: list[Any]) -> jax.stages.Compiled:
    return _on_chips(step, on).lower(*args).compile()


def gspmd(step: md.Compiled, args: tuple[Any, ...], on: list[Any], unrolled: bool = False) -> jax.stages.Compiled:
    """GSPMD's program for the graph that meshdsl traced, which reuses the memory of the same arguments."""
    step, numbers = _on_chips(step, on), iter(range(len(jax.tree_util.tree_leaves(args))))
    inputs = [[next(numbers) for _ in jax.tree_util.tree_leaves(arg)] for arg in args]
    return gspmd_of(step.graph(*args), step.program(*args), [i for n in step.donate for i in inputs[n]], unrolled)


def _on_chips(step: md.Compiled, on: list[Any]) -> md.Compiled:
    axes = step.mesh.axes
    grid = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=on).devices
    return step.under(step.mesh.on([*grid.flat]), step.layout)


def workloads(on: list[Any]) -> dict[str, Candidates]:
    """The candidates of each workload; `handwritten` where it exists, `meshdsl`, and `gspmd`."""

    def mesh_dsl(compiled: Callable[..., Any], *options: Any) -> Callable[[], jax.stages.Compiled]:
        def make() -> jax.stages.Compiled:
            step, *args = compiled(*options)
            return ours(step, tuple(args), on)

        return make

    def graph(compiled: Callable[..., Any], *options: Any) -> Callable[[], jax.stages.Compiled]:
        def make() -> jax.stages.Compiled:
            step, *args = compiled(*options)
            return gspmd(step, tuple(args), on)

        return make

    return {
        "two_layer": {
            "handwritten": lambda: two_by_hand.handwritten("data_model", on)[0],
            "meshdsl": mesh_dsl(two_layer.compiled, "data_model"),
            "gspmd": lambda: two_by_hand.gspmd("data_model", on)[0],
        },
        "convolution": {
            "handwritten": lambda: halo_by_hand.handwritten(on)[0],
            "meshdsl": mesh_dsl(halo.compiled),
            "gspmd": lambda: halo_by_hand.gspmd(on)[0],
        },
        "moe_layer": {
            "handwritten": lambda: moe_by_hand.handwritten(on)[0],
            "meshdsl": mesh_dsl(moe_layer.compiled, "auto"),
            "gspmd": lambda: moe_by_hand.gspmd(True, on)[0],
        },
        "sharded_update": {
            "handwritten": lambda: update_by_hand.compiled(update_by_hand.sharded, True, on)[0],
            "meshdsl": mesh_dsl(sharded_update.compiled, "sharded"),
        },
        "language_model": {
            "handwritten": lambda: lm_by_hand.handwritten(devices=on)[0],
            "meshdsl": mesh_dsl(language_model.compiled),
            "gspmd": lambda: lm_by_hand.gspmd(on)[0],
        },
        "gpt2": {"meshdsl": mesh_dsl(gpt2.compiled), "gspmd": graph(gpt2.compiled)},
    }


def large(on: list[Any]) -> dict[str, Candidates]:
    """Train steps of real sizes, by meshdsl and by GSPMD; of the Llama, each in a loop and unrolled."""
    points = {
        "llama data": (LLAMA, transformer.LAYOUTS["data"]),
        "llama data_model": (LLAMA, transformer.LAYOUTS["data_model"]),
        "llama remat": (LLAMA.replace(remat=True), transformer.LAYOUTS["data"]),
        "llama remat data_model": (LLAMA.replace(remat=True), transformer.LAYOUTS["data_model"]),
        "llama sequence": (LLAMA, transformer.LAYOUTS["sequence"]),
        "moe experts_model": (moe_transformer.moe, moe_transformer.LAYOUTS["experts_model"]),
        "seq2seq model": (seq2seq.seq2seq, seq2seq.LAYOUTS["model"]),
        "resnet50 spatial": (resnet.resnet50.replace(batch=32), resnet.LAYOUTS["spatial"]),
    }

    def candidate(workload: md.Workload, mesh: str, layout: str, make: Any, **options: Any) -> Any:
        step = md.compile(workload.train_step(), mesh, layout, donate=(0, 1), **options)
        return lambda: make(step, tuple(workload.specs()), on)

    return {
        name: {"meshdsl": candidate(workload, *at, ours), "gspmd": candidate(workload, *at, gspmd)}
        | (
            {
                "unrolled": candidate(workload, *at, ours, unroll=True),
                "gspmd unrolled": candidate(workload, *at, functools.partial(gspmd, unrolled=True)),
            }
            if name.startswith("llama")
            else {}
        )
        for name, (workload, at) in points.items()
    }


def sent(collective: Performed) -> float:
    """Bytes that one device sends along a ring in all runs of a collective."""
    n = len(collective.groups[0])
    share = {"all_reduce": 2 * (n - 1) / n, "permute": 1}.get(collective.kind, (n - 1) / n)
    return share * collective.bytes * collective.count


def figures(executable: jax.stages.Compiled) -> dict[str, int]:
    """Cycles, bytes sent, those sent beside computation, and peak memory of one device, as the compiler states them."""
    text = executable.as_text()
    assert text is not None
    cycles, memory = estimated_cycles(text), executable.memory_analysis()
    assert cycles is not None and memory is not None, "a loop with unknown trips, or no figures of memory"
    return {
        "cycles": cycles if cycles < UNKNOWN else 0,
        "sent": round(sum(map(sent, performed(text)))),
        "asynchronous": round(sum(sent(each) for each in performed(text) if each.asynchronous)),
        "peak": memory.peak_memory_in_bytes,
    }


def compare(name: str, makers: Candidates, texts: str | None = None) -> dict[str, dict[str, int]]:
    """Compile the candidates of a workload, print their figures, then the ratios of meshdsl to the others."""
    by_candidate: dict[str, dict[str, int]] = {}
    for candidate, make in makers.items():
        start = time.perf_counter()
        executable = make()
        by_candidate[candidate] = figures(executable)
        line = {"figure": "tpu_cycles", "workload": name, "candidate": candidate, **by_candidate[candidate]}
        line["peak_mb"] = round(by_candidate[candidate]["peak"] / 1e6, 1)
        print(json.dumps(line | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
        if texts:
            Path(texts, f"{name.replace(' ', '_')}-{candidate}.txt").write_text(executable.as_text() or "")
    pairs = [("meshdsl", other) for other in by_candidate if other != "meshdsl" and "unrolled" not in other]
    pairs += [("unrolled", "gspmd unrolled")] if {"unrolled", "gspmd unrolled"} <= by_candidate.keys() else []
    ratios = {
        f"{figure}_to_{other.replace(' ', '_')}": round(by_candidate[our][figure] / theirs, 4)
        for our, other in pairs
        for figure, theirs in by_candidate[other].items()
        if theirs and (by_candidate[our][figure] or figure != "cycles")
    }
    print(json.dumps({"figure": "tpu_cycles_ratio", "workload": name, **ratios}), flush=True)
    return by_candidate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--large", action="store_true", help="workloads of real sizes instead")
    parser.add_argument("--candidate", action="append", help="only this one; may be repeated")
    parser.add_argument("--text", metavar="DIRECTORY", help="write the compiler's texts there")
    args = parser.parse_args()
    if problem := available():
        raise SystemExit(f"the TPU compiler is missing: {problem}")
    jax.config.update("jax_platforms", "cpu")
    on = chips()
    every = large(on) if args.large else workloads(on)
    if unknown := set(args.names) - set(every):
        raise SystemExit(f"there is no workload {sorted(unknown)}; there are: {', '.join(every)}")
    for name in args.names or every:
        makers = {c: make for c, make in every[name].items() if not args.candidate or c in (*args.candidate, "meshdsl")}
        compare(name, makers, args.text)


if __name__ == "__main__":
    main()
