"""The library on one GPU of this machine: python -m benchmarks.gpu PART ...

Prints JSON lines; one with `error` is a fault. `python -m tests.ops.on_device` has the operations. Parts:

attention    the attention that the compiler of the GPU chooses, and its gradients, in bfloat16, beside the formula in
             float32: relative errors, and those of the formula in bfloat16
layouts      programs for eight such GPUs, compiled and not run: the collectives, and which of them start and end apart
steps [NAME ...]  training steps: measured and predicted time, the share of the peak, and the memory of both
"""

from __future__ import annotations

import collections
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import meshdsl as md
from meshdsl.models import gpt2, gpt_moe, llama, resnet, transformer

ONE = ("one:1", "")
KINDS = "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
MACHINE = "h100"
BF16 = {"compute_dtype": "bfloat16"}
GPT2 = gpt2.gpt2.replace(batch=16, length=1024, positions=1024, vocab=50304, layers=12, d_model=768, heads=12,
                         d_ff=3072, **BF16)  # fmt: skip
LLAMA = llama.llama.replace(batch=4, length=2048, vocab=32768, layers=16, d_model=2048, heads=8, query_heads=32,
                            d_head=64, d_ff=8192, **BF16)  # fmt: skip
MOE = gpt_moe.gpt_moe.replace(batch=16, length=1024, vocab=32768, layers=8, d_model=768, heads=12, d_head=64, d_ff=3072,
                              expert_hidden=3072, **BF16)  # fmt: skip
LM = transformer.lm.replace(batch=16, length=512, vocab=8192, layers=8, d_model=1024, heads=16, d_head=64, d_ff=4096)
STEPS: dict[str, md.Workload] = {
    "gpt2": GPT2,
    "gpt2 remat": GPT2.replace(remat=True),
    "gpt2 medium": GPT2.replace(batch=8, layers=24, d_model=1024, heads=16, d_ff=4096),
    "llama 1.2B": LLAMA,
    "llama 1.2B remat": LLAMA.replace(batch=8, remat=True),
    "moe": MOE,
    "resnet50 float32": resnet.resnet50.replace(batch=128),
    "resnet50 bfloat16": resnet.resnet50.replace(batch=128, dtype="bfloat16"),
    "lm float32": LM,
}


def error(ours: Any, theirs: Any) -> float:
    """The norm of the difference over the norm."""
    a, b = (np.asarray(x).astype(np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def attention() -> Iterator[dict[str, Any]]:
    cases = {"causal": {"causal": True}, "window": {"causal": True, "window": 256}, "full": {}}
    for (name, options), group in itertools.product(cases.items(), (1, 4)):
        keys = md.spec("batch:2 length:1024 heads:4 head:64", "bfloat16")
        queries = md.spec(f"batch:2 length:1024 heads:4 group:{group} head:64", "bfloat16") if group > 1 else keys
        draw = np.random.default_rng(1)
        ins = [md.tensor(draw.normal(size=[d.size for d in x.dims]), x.dims) for x in (queries, keys, keys)]
        ins = [md.cast(x, "bfloat16") for x in ins]
        want, _ = _attend([md.cast(x, "float32") for x in ins], "blockwise", options)
        formula, _ = _attend(ins, "blockwise", options)
        made, program = _attend(ins, "auto", options)
        line: dict[str, Any] = {"attention": name, "group": group}
        for label, values in (("formula in bfloat16", formula), ("chosen", made)):
            line[label] = [f"{error(x, y):.1e}" for x, y in zip(values, want, strict=True)]
        yield line | {"kernel": sorted(set(re.findall(r"kernel=(\w+)", str(program))))}


def _attend(ins: Sequence[md.Tensor], kernel: str, options: dict[str, Any]) -> tuple[list[Any], Any]:
    """The result and its gradients, and the program."""

    def loss(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> Any:
        out = md.attention(q, k, v, **options)
        return md.sum(md.square(md.cast(out, "float32"))), out

    step = md.compile(md.value_and_grad(loss, (0, 1, 2), has_aux=True), *ONE, attention_kernel=kernel)
    (_, out), grads = step(*ins)
    return [x.numpy() for x in (out, *grads)], step.program(*ins)


def layouts() -> Iterator[dict[str, Any]]:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x8")
    small, moe = GPT2.replace(layers=4), MOE.replace(layers=2)
    dense, experts = gpt2.gpt2.layouts, gpt_moe.gpt_moe.layouts["experts"]
    points: dict[str, tuple[md.Workload, tuple[str, str], dict[str, Any]]] = {
        "gpt2 data": (small, dense["data"], {"weight_update": "sharded"}),
        "gpt2 sequence": (small, dense["sequence"], {}),
        "gpt2 context": (small, dense["context"], {}),
        "gpt2 pipeline": (small, ("rows:2 stages:4", "batch:rows; layer:stages"), {"microbatches": 8}),
        "moe experts": (moe, experts, {}),
        "moe ragged": (moe.replace(exchange="ragged"), experts, {}),
    }
    for name, (workload, (axes, layout), knobs) in points.items():
        try:
            mesh = md.Mesh(axes, devices=list(topology.devices))
            step, specs = md.compile(workload.train_step(), mesh, layout, donate=(0, 1), **knobs), workload.specs()
            made = step.lower(*specs).compile()
            kinds = re.findall(f"= .* ({KINDS})(?:-start)?\\(", made.as_text())
            apart = re.findall(f"= .* ({KINDS})-start\\(", made.as_text())
            counts = {"collectives": collections.Counter(kinds), "apart": collections.Counter(apart)}
            yield {"layout": name, **counts, **_memory(step, specs, made)}
        except Exception as problem:
            yield {"layout": name, "error": f"{type(problem).__name__}: {problem}"[:1500]}


def _memory(step: md.Compiled, specs: Any, made: Any) -> dict[str, float]:
    own, program = made.memory_analysis(), step.program(*specs)
    predicted = md.memory(program, donated=step.donated(*specs), machine=MACHINE).peak
    allocated = own.argument_size_in_bytes + own.output_size_in_bytes + own.temp_size_in_bytes - own.alias_size_in_bytes
    return {"predicted_GB": round(predicted / 1e9, 2), "allocated_GB": round(allocated / 1e9, 2)}


def steps(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names or STEPS:
        try:
            yield {"step": name, **_step(STEPS[name])}
        except Exception as problem:
            yield {"step": name, "error": f"{type(problem).__name__}: {problem}"[:800]}
        jax.clear_caches()


def _step(workload: md.Workload, rounds: int = 15) -> dict[str, Any]:
    specs = workload.specs()
    step = md.compile(workload.train_step(), *ONE, donate=(0, 1))
    start = time.perf_counter()
    made = step.lower(*specs).compile()
    compiling = time.perf_counter() - start
    program, draw = step.program(*specs), np.random.default_rng(0)
    params, state_count, arrays = len(jax.tree.leaves(specs[0])), len(jax.tree.leaves(specs[:2])), []
    for v in program.ins:
        shape = program.stored_shape(v)
        if np.issubdtype(v.dtype, np.integer):
            arrays.append(jnp.asarray(draw.integers(0, 1000, shape), v.dtype))
        else:
            x = jax.random.normal(jax.random.key(len(arrays)), shape, v.dtype)
            arrays.append(x * (0.02 if len(arrays) < params else 0 if len(arrays) < state_count else 1))
    arrays = [jax.device_put(x, at) for x, at in zip(arrays, made.input_shardings[0], strict=True)]
    state, batch, times, outs = arrays[:state_count], arrays[state_count:], [], []
    arrays.clear()
    for _ in range(rounds):
        start = time.perf_counter()
        outs = jax.block_until_ready(made(*state, *batch))
        times.append(time.perf_counter() - start)
        state = outs[:state_count]
    measured, cost = float(np.median(times[3:])), step.cost(*specs, machine=MACHINE)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "compile_s": round(compiling, 1), "measured_ms": round(measured * 1e3, 2),
        "predicted_ms": round(cost.seconds * 1e3, 2), "ratio": round(cost.seconds / measured, 3),
        "interval_ms": [round(x * 1e3, 1) for x in cost.interval],
        "mfu": round(cost.flops / measured / 989e12, 3), **_memory(step, specs, made),
        "process_peak_GB": round(peak / 1e9, 2),
        "outputs": [round(float(np.asarray(x, np.float32).reshape(-1)[0]), 4) for x in outs[state_count:]],
    }  # fmt: skip


def main(args: list[str]) -> None:
    part, rest = args[0], args[1:]
    parts = {
        "attention": attention,
        "layouts": layouts,
        "steps": lambda: steps(rest),
    }
    for line in parts[part]():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
