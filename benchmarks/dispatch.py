"""Dispatch by index compared with dispatch by masks: python -m benchmarks.dispatch [--rounds 11] [--tpu]

One device routes one group (capacity factor 2), sends its tokens to slots and receives them, forward and backward,
without experts. Prints a JSON line for each size and method: seconds, floating-point operations and temporary memory.
The last line is the crossing point, which "auto" uses: the smallest mask size (tokens x experts x capacity) from which
dispatch by index took less CPU time at every measured size. With `--tpu`, the TPU compiler's cycles are compared
instead (needs the extra `aot`). With `--dropless`, a whole gated layer that drops no token is compared: grouped
products, and a slot for every token at every expert.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import meshdsl as md
from benchmarks import hlo, ratio, tpu_cycles
from meshdsl.nn.moe import INDEX_FROM, assign, capacity_of, dispatch_by
from meshdsl.tools.compilers.hlo import estimated_cycles

TOKENS, EXPERTS = (8, 16, 32, 64, 256, 1024, 2048), (4, 16, 64)


def executable(
    method: str, tokens: int, experts: int, capacity: int, model: int, router: str, mesh: md.Mesh | str = "one:1"
) -> jax.stages.Compiled:
    """The compiled gradient of the sum of squares of the received values, with respect to gates and values."""
    token, expert, slot = md.Dim("token", tokens), md.Dim("expert", experts), md.Dim("slot", capacity)

    def loss(gates: md.Tensor, x: md.Tensor) -> md.Tensor:
        assignment = assign(gates, tokens=token, experts=expert, capacity=slot, router=router)
        dispatch = dispatch_by(method, assignment)
        return md.sum(md.square(dispatch.receive(dispatch.send(x))))

    specs = md.spec([token, expert]), md.spec([token, md.Dim("model", model)])
    return md.compile(md.grad(loss, argnums=(0, 1)), mesh, "").lower(*specs).compile()


def estimated(router: str, tokens: int, experts: int, model: int, chip: Any) -> dict[str, Any]:
    """The TPU compiler's cycles of both methods for one size."""
    capacity = capacity_of(tokens, experts, factor=2.0, formula="mesh_tf")
    mesh = md.Mesh("one:1").on([chip])
    cycles = {
        name: estimated_cycles(executable(name, tokens, experts, capacity, model, router, mesh).as_text() or "")
        for name in ("einsum", "index")
    }
    size = {"router": router, "tokens": tokens, "experts": experts, "capacity": capacity, "model": model}
    index, einsum = cycles["index"], cycles["einsum"]
    known = {"ratio": index / einsum} if index and einsum else {}
    return {"figure": "dispatch_cycles", **size, "mask": tokens * experts * capacity, **cycles, **known}


def measured(router: str, tokens: int, experts: int, model: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of both methods for one size."""
    rng = np.random.default_rng(0)
    gates = jax.nn.softmax(rng.standard_normal((tokens, experts)).astype(np.float32))
    x = jax.numpy.asarray(rng.standard_normal((tokens, model)).astype(np.float32))
    capacity = capacity_of(tokens, experts, factor=2.0, formula="mesh_tf")
    executables = {name: executable(name, tokens, experts, capacity, model, router) for name in ("einsum", "index")}

    def step(run: jax.stages.Compiled) -> Callable[[], object]:
        return lambda: jax.block_until_ready(run(gates, x))

    times = ratio.measure({name: step(run) for name, run in executables.items()}, rounds)
    size = {"router": router, "tokens": tokens, "experts": experts, "capacity": capacity, "model": model}
    figures = {}
    for name, run in executables.items():
        summary = hlo.summary(run)
        costs = {"flops": summary["flops"], "temp_bytes": summary["temp_bytes"]}
        figures[name] = {"figure": "dispatch", **size, "method": name, **costs, **times[name]}
    return figures


def dropless(tokens: int, experts: int, model: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The figures of a layer of Mixtral's kind, and of its gradient; `hidden` is 3.5 times `model`, as in Mixtral."""
    expert, hidden = md.Dim("expert", experts), md.Dim("expert_hidden", model * 7 // 2)
    x = md.random.normal(md.random.key(0), [md.Dim("position", tokens), md.Dim("token", 1), md.Dim("model", model)])
    steps: dict[str, Callable[[], object]] = {}
    flops: dict[str, float] = {}
    for name in ("grouped", "index"):
        options: dict[str, Any] = {"router": "mixtral", "activation": "silu", "gated": True, "weigh": "hidden"}
        layer = md.model(
            lambda x, name=name, options=options: md.nn.moe_layer(
                x, expert, hidden, tokens="token", dispatch=name, **options
            )
        )
        params = layer.init(md.random.key(1), x)
        loss = md.value_and_grad(lambda params, x, layer=layer: md.mean(md.square(layer(params, x)[0])), (0, 1))
        step = md.compile(loss, "one:1", "")
        flops[name] = step.cost(params, x).to_dict()["flops"]
        steps[name] = lambda step=step, params=params: jax.block_until_ready(step(params, x))
    size = {"tokens": tokens, "experts": experts, "model": model, "hidden": hidden.size}
    for name, times in ratio.measure(steps, rounds).items():
        yield {"figure": "dropless", **size, "method": name, "flops": flops[name], **times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--router", default="top2")
    parser.add_argument("--tpu", action="store_true", help="cycles of the TPU compiler instead of CPU time")
    parser.add_argument("--dropless", action="store_true", help="a layer that drops no token")
    parser.add_argument("--model", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--experts", type=int, nargs="*", default=EXPERTS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.tpu:
        chip, *_ = tpu_cycles.chips()
        for tokens in args.tokens:
            for experts in args.experts:
                print(json.dumps(estimated(args.router, tokens, experts, args.model, chip)), flush=True)
        return 0
    if args.dropless:
        for tokens in args.tokens:
            for experts in args.experts:
                for line in dropless(tokens, experts, args.model, args.rounds):
                    print(json.dumps(line), flush=True)
        return 0
    index_wins: dict[int, bool] = {}
    for tokens in args.tokens:
        for experts in args.experts:
            figures = measured(args.router, tokens, experts, args.model, args.rounds)
            for line in figures.values():
                print(json.dumps(line), flush=True)
            mask_size = tokens * experts * figures["index"]["capacity"]
            index_wins[mask_size] = index_wins.get(mask_size, True) and figures["index"]["cpu_ratio"] < 1
    always_faster = [n for n in index_wins if all(faster for m, faster in index_wins.items() if m >= n)]
    crossing = {"index_is_faster_from": min(always_faster, default=None), "auto_takes_index_from": INDEX_FROM["cpu"]}
    print(json.dumps({"figure": "crossing", "router": args.router, "model": args.model, **crossing}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
