"""Bytes over the slow axis, flat and in steps, and the seconds of both on H100 nodes of eight, as JSON lines.

The four collectives on 4 nodes; a value that is replicated along the fast axis; a data-parallel step of 1.3 billion
parameters, with its gradients in buckets; a mixture of experts whose experts are on 4 nodes; steps of 7 billion
parameters on 64 devices, and of 671 billion on 2,048; and the gradients of a layer of DeepSeek-V3's sizes, whose 256
experts are on 4 nodes and whose tokens go to two of them, flat and by node, slots padded and filled. `slow_mb` sums the
larger of operand and result of each collective over the slow axis, in one step of one device; `message_kb` is the
largest message of an all_to_all from one device to another node. Only filled slots count, as expected. Each program is
compared with its StableHLO, but for filled slots, which CPUs do not exchange. `auto` is the choice of the cost model.

With `--slices`, the four collectives on two slices of eight TPU v5e, compiled by the TPU compiler (extra `aot`):
what its own text sends between the slices, of one device.

    python -m benchmarks.steps
    python -m benchmarks.steps --slices
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import meshdsl as md
from meshdsl.models.deepseek import deepseek_v3
from meshdsl.models.gpt_moe import gpt2_moe
from meshdsl.models.llama import llama2_7b
from meshdsl.models.transformer import lm
from meshdsl.tools.compilers.verify import verify

MACHINE = "h100"
GPT = lm.replace(layers=24, d_model=2048, heads=16, d_head=128, d_ff=8192, vocab=50304, length=2048, batch=64)
MOE = gpt2_moe.replace(batch=64, experts=32)
LLAMA = llama2_7b.replace(batch=128, compute_dtype="bfloat16", remat=True)
ROWS, BOTH, TENSOR = "batch:node,gpu", "batch:node,gpu; part:node,gpu", "heads:gpu; d_ff:gpu; vocab:gpu"
LARGE, SMALL = (md.spec("batch:64 io:4194304"),), (md.spec("batch:64 io:65536"),)


def total(x: md.Tensor) -> md.Tensor:
    return md.sum(x, "batch")


def gathered(x: md.Tensor) -> md.Tensor:
    return md.rename(x, batch="out")


def exchanged(x: md.Tensor) -> md.Tensor:
    return md.rename(x, batch="out", io="part")


def scattered(x: md.Tensor) -> md.Tensor:
    return md.rename(total(x), io="part")


def experts(nodes: str | None, exchange: str) -> tuple[Any, tuple[Any, ...]]:
    """The gradients of a mixture of 256 experts in bfloat16, of which a token has 8 on two of 4 nodes."""
    model = md.model(lambda x: md.nn.moe_layer(
        x, "expert:256", "hidden:2048", router="top_k", k=8, groups=4, best_groups=2, capacity_factor=1.0,
        capacity_formula="paper", dispatch="index", precision=md.nn.Precision(compute="bfloat16"), nodes=nodes,
        exchange=exchange,
    )[0])  # fmt: skip
    x = md.spec("batch:32 length:4096 model:7168", "bfloat16")
    return md.grad(lambda params, x: md.sum(md.square(md.cast(model(params, x), "float32")))), (model.specs(x), x)


BY_NODE = "batch:gpu,node; node_batch:gpu; node:node; node_expert:gpu"
Case = tuple[str, Any, md.Plan, tuple[Any, ...]]


def case(name: str, f: Any, layout: str, args: tuple[Any, ...], mesh: str = "node:4 gpu:8", **knobs: Any) -> Case:
    return name, f, md.Plan(mesh, layout, **knobs), args


CASES = [
    case("all_reduce", total, ROWS, LARGE),
    case("all_gather", gathered, ROWS, SMALL),
    case("reduce_scatter", scattered, BOTH, LARGE),
    case("all_to_all", exchanged, BOTH, SMALL),
    case("all_reduce, idle gpu", total, "batch:node", LARGE),
    case("all_gather, idle gpu", gathered, "batch:node", SMALL),
    case("all_to_all, idle gpu", exchanged, "batch:node; part:node", SMALL),
    case("1.3B", GPT.train_step(), ROWS, GPT.specs()),
    case("1.3B, sharded, buckets of 25 MB", GPT.train_step(), ROWS, GPT.specs(),
         weight_update=md.WeightUpdate("sharded", bucket_bytes=25e6)),
    case("MoE", MOE.train_step(), "batch:node,gpu; expert:node,gpu; group:node,gpu", MOE.specs()),
    case("7B, data", LLAMA.train_step(), ROWS, LLAMA.specs(), "node:8 gpu:8", weight_update="sharded"),
    case("7B, tensor", LLAMA.train_step(), f"batch:node; {TENSOR}", LLAMA.specs(), "node:8 gpu:8",
         weight_update="sharded"),
    case("671B", deepseek_v3.train_step(), f"batch:node; expert:node; {TENSOR}", deepseek_v3.specs(), "node:256 gpu:8",
         weight_update="sharded", microbatches=60),
    *(case(f"{exchange} {'by node' if nodes else 'flat'}", f, layout, args)
      for nodes, layout in ((None, "batch:node,gpu; expert:node,gpu"), ("node:4", BY_NODE))
      for exchange in ("padded", "ragged") for f, args in [experts(nodes, exchange)]),
]  # fmt: skip


def row(name: str, f: Any, plan: md.Plan, args: tuple[Any, ...], steps: str) -> dict[str, Any]:
    """The figures of one program; raises `AssertionError` if they differ from its StableHLO."""
    step = md.compile(f, plan=plan.replace(steps=steps, machine=None if steps == "flat" else MACHINE))
    program = step.program(*args)
    filled = any(record.op.share < 1 or "ragged" in record.kind for record in program.collectives)
    assert filled or verify(step.lower(*args).as_text(), program).equal, name
    slow = [record for record in program.collectives if "node" in record.axes]
    messages = [r.bytes / program.mesh.count(r.axes) for r in slow if r.kind == "all_to_all"]
    seconds = step.cost(*args, machine=MACHINE).seconds
    return {
        "case": name,
        "steps": steps,
        "collectives": len(program.collectives),
        "slow_mb": sum(r.bytes * r.count * r.op.share for r in slow) / 1e6,
        **({"message_kb": max(messages) / 1e3} if messages else {}),
        "ms": round(seconds * 1e3, 3),
        "seconds": seconds,
        "stablehlo": "not compared" if filled else "equal",
    }


def v5e() -> md.Machine:
    """TPU v5e in slices of eight."""
    on = md.machine("tpu-v5e")
    torus, *outer = on.network.levels
    levels = (dataclasses.replace(torus, axes={"x": 2, "y": 4}), *outer)
    return dataclasses.replace(on, network=dataclasses.replace(on.network, levels=levels))


def between_slices(name: str, f: Any, plan: md.Plan, args: tuple[Any, ...], steps: str) -> dict[str, Any]:
    """The bytes that the TPU compiler sends between two slices, beside those of our program over the axis `slice`."""
    rules = str(plan.layout).replace("node", "slice").replace("gpu", "chip")
    on = None if steps == "flat" else v5e()
    program = md.compile(f, "slice:2 chip:8", rules, steps=steps, machine=on).program(*args)
    compiled = md.compile_for("tpu:v5e:2x4", program, slices=2, effort="O1")
    crossing = [each for each in compiled.collectives if not each.groups]
    return {
        "slices": name,
        "steps": steps,
        "stated_mb": sum(r.bytes * r.count for r in program.collectives if "slice" in r.axes) / 1e6,
        "dcn_mb": sum(each.bytes * each.count for each in crossing) / 1e6,
        "dcn_kinds": sorted(each.kind for each in crossing),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", action="store_true")
    options = parser.parse_args()
    figures = between_slices if options.slices else row
    for each in CASES[:4] if options.slices else CASES:
        for steps in ("flat", "always", "auto"):
            if options.slices and steps == "auto":
                continue
            try:
                print(json.dumps(figures(*each, steps)), flush=True)
            except md.NoEffectError as error:  # no collective is over both axes
                print(f"{each[0]}, {steps}: {error}".splitlines()[0], file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
