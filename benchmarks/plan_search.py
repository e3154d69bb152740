"""Searches for the plans of large models: python -m benchmarks.plan_search [CASE ...] [--plans N]

Prints a JSON line for each case: the best plan, its seconds a step, the plans estimated and costed, the gap to the
floor, and processor seconds of the search. `best_known_s` is the best of this plan and of the case's reference, which a
search with `--plans 100` has found, and which is costed again; `behind` is the part by which the plan is slower.

`--pipelines` prints where a pipeline is found, for Llama 2 7B with 128 sequences: on one node of 8 H100, on two slices
of 16 v5p, and on 16 nodes of 8 H100 with 100 Gbit/s a node. `stages` is 1 without a pipeline; `without_s` is the best
plan that has none. These searches turn few knobs, overlap not among them. Where there is a
pipeline, `ticks_s` is the same with overlap="ticks", and `list_s` the best plan without a pipeline with "list".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.models.deepseek import deepseek_v3
from meshdsl.models.llama import llama2_7b, llama3_8b, llama3_70b
from meshdsl.models.mixtral import mixtral_8x7b
from meshdsl.models.moe_transformer import preset
from meshdsl.models.transformer import lm

BF16 = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """A model, a number of devices, their machine, and the best plan that a long search has found."""

    workload: md.Workload
    devices: int
    machine: str
    reference: dict[str, Any]


def imported(stacked: bool) -> md.Workload:
    """A language model in plain JAX: its layers in a Python loop, or stacked in a scan with checkpoints."""

    def block(x: Any, p: Any) -> Any:
        batch, length, _ = x.shape
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        q, k, v = (y.reshape(batch, length, 16, 128) for y in jnp.split(h @ p["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embed"][tokens]
        if stacked:
            x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(x, p)
        logits = x @ params["embed"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])

    def spec(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((24, *shape) if stacked and shape[0] != 32768 else shape, "bfloat16")

    layer = {"qkv": spec(2048, 6144), "out": spec(2048, 2048), "up": spec(2048, 8192), "down": spec(8192, 2048)}
    params = {"embed": spec(32768, 2048), "layers": layer if stacked else [layer] * 8}
    rows = "layer " if stacked else ""
    names = {"*/embed": "vocab model", "*/out": f"{rows}heads*head model", "*/up": f"{rows}model d_ff"}
    text = jax.ShapeDtypeStruct((256, 1024), "int32")
    named = {"tokens": "batch length", **names}
    return md.from_jax(loss, params, text, text, names=named).workload("imported")


MIXTRAL = mixtral_8x7b.replace(batch=512, capacity_factor=1.0, **BF16)
SHARDED: dict[str, Any] = {"weight_update": "sharded", "steps": "flat"}
CASES = {
    "lm": Case(lm, 8, "tpu-v5e", {"mesh": "x:8", "layout": "batch:x"}),
    "llama3_8b": Case(
        llama3_8b, 64, "h100", {"mesh": "x:2 y:32", "layout": "d_ff:x,y batch:x,y", "microbatches": 4, **SHARDED}
    ),
    "llama3_70b": Case(
        llama3_70b,
        64,
        "h100",
        {
            "mesh": "x:64",
            "layout": "d_ff:x batch:x",
            "remat": "offload",
            "steps": "flat",
            "weight_update": {"mode": "sharded", "regather": True},
        },
    ),
    "llama3_70b_512": Case(
        llama3_70b,
        512,
        "h100",
        {
            "mesh": "x:2 y:8 z:32",
            "layout": "head:z d_ff:y,z batch:y,z length:x",
            "weight_update": {"mode": "sharded", "regather": True},
            "microbatches": 2,
            "steps": "flat",
        },
    ),
    "mixtral": Case(
        MIXTRAL,
        64,
        "tpu-v5p:flash,overlap",
        {"mesh": "x:64", "layout": "d_ff:x batch:x expert_batch:x", "weight_update": "sharded", "microbatches": 4},
    ),
    "gshard": Case(
        preset(128, 36),
        128,
        "tpu-v3",
        {
            "mesh": "x:32 y:4",
            "layout": "expert:x,y vocab:y batch:x,y group:x,y",
            "remat": "none",
            "overlap": "skew",
            **SHARDED,
        },
    ),
    "deepseek": Case(
        deepseek_v3,
        2048,
        "h100",
        {
            "mesh": "x:32 y:64",
            "layout": "heads:y d_ff:x,y batch:x,y expert_batch:x,y",
            "remat": "offload",
            "weight_update": "sharded",
            "steps": "flat",
        },
    ),
    "deepseek_256": Case(
        deepseek_v3,
        256,
        "h100",
        {
            "mesh": "x:128 y:2",
            "layout": "heads:x vocab:x expert:x batch:x length:y position:y gate_slot:y slot:y",
            "weight_update": {"mode": "sharded", "regather": True},
            "remat": "offload",
            "microbatches": 32,
            "overlap": "skew",
        },
    ),
    "imported_loop": Case(imported(stacked=False), 64, "h100", {"mesh": "x:64", "layout": "batch:x", **SHARDED}),
    "imported_scan": Case(imported(stacked=True), 64, "h100", {"mesh": "x:64", "layout": "batch:x", **SHARDED}),
}


SHORT = llama2_7b.replace(batch=128, **BF16)
DIMS = "batch length d_ff heads"
KNOBS: dict[str, list[Any]] = {"weight_update": ["sharded"], "remat": ["none", "full"], "microbatches": [1, 8, 64]}


def slow_nodes() -> md.Machine:
    """H100 whose nodes share one port of 100 Gbit/s."""
    machine = md.machine("h100:flash")
    gpu, node = machine.network.levels
    return replace(machine, network=replace(machine.network, levels=(gpu, replace(node, bandwidth=12.5e9, share=8))))


PIPELINES: dict[str, tuple[str, Callable[[], md.Machine]]] = {
    "node": ("gpu:8", lambda: md.machine("h100:flash")),
    "slices": ("slice:2 x:4 y:4", lambda: md.machine("tpu-v5p:flash,overlap")),
    "slow_nodes": ("node:16 gpu:8", slow_nodes),
}


def in_stages(name: str) -> dict[str, object]:
    """The best plan on a mesh, and the best one without a pipeline."""
    mesh, machine_of = PIPELINES[name]
    machine = machine_of()
    found = [
        md.search(SHORT, mesh=mesh, dims=dims, machine=machine, knobs=KNOBS).best for dims in (f"{DIMS} layer", DIMS)
    ]
    best, other = found
    stages = best.plan.mesh.count(best.plan.layout.axes("layer")) if best.plan.microbatches > 1 else 1
    overlapped = {"ticks_s": best.plan, "list_s": other.plan} if stages > 1 else {}
    return {
        "figure": "pipeline_search", "case": name, "mesh": mesh, "plan": best.plan.to_dict(), "stages": stages,
        "step_s": best.seconds, "without_s": other.seconds, "without": other.plan.to_dict(),
        **{
            key: seconds(SHORT, plan.replace(overlap=key.removesuffix("_s")), machine)
            for key, plan in overlapped.items()
        },
    }  # fmt: skip


def seconds(workload: md.Workload, plan: md.Plan, machine: md.Machine | str) -> float:
    """Predicted seconds of a step under a plan."""
    decides: dict[str, Any] = {"machine": machine} if plan.needs_machine else {}
    step = md.compile(workload.train_step(), plan=plan, donate=(0, 1), **decides)
    return step.cost(*workload.specs(), machine=machine).seconds


def measured(case: Case, plans: int | None) -> dict[str, object]:
    """The plan found for a case, and what the search took."""
    processor = time.process_time()
    result = md.search(case.workload, devices=case.devices, machine=case.machine, plans=plans)
    searched = round(time.process_time() - processor, 1)
    reference = seconds(case.workload, md.Plan.from_dict(case.reference), case.machine)
    counts, known = result.counts, min(reference, result.best.seconds)
    low, high = counts.ratios or (1.0, 1.0)
    return {
        "step_s": result.best.seconds,
        "best_known_s": known,
        "behind": result.best.seconds / known - 1,
        "gap": result.gap,
        "plan": result.plan.to_dict(),
        "estimated": counts.estimated,
        "costed": counts.costed,
        "least_ratio": low,
        "greatest_ratio": high,
        "processor_s": searched,
    }


def main() -> None:
    """Run the named cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--plans", type=int, metavar="N", help="costed exactly in each search")
    parser.add_argument("--pipelines", action="store_true", help="where a pipeline is found, instead")
    options = parser.parse_args()
    for name in PIPELINES if options.pipelines else ():
        print(json.dumps(in_stages(name)), flush=True)
    if options.pipelines:
        return
    for name in options.cases or CASES:
        print(json.dumps({"figure": "plan_search", "case": name, **measured(CASES[name], options.plans)}), flush=True)


if __name__ == "__main__":
    main()
