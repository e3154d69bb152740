"""Attention with split positions: python -m benchmarks.attention [--rounds 40]

Prints JSON lines: bytes that a ring sends beside the formula; how unequal the devices' work is under a causal mask; the
predicted memory of a model like Llama 7B at length 131,072 on 64 devices, with and without scores; and collectives and
CPU time of a step beside hand-written ring attention and all_to_all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import attention as baseline
from meshdsl.models.transformer import lm

TOLERANCE = 1e-3  # relative to the change of the parameters


def attend(method: str, causal: bool) -> Callable[..., Any]:
    def step(params: dict) -> tuple[dict, md.Tensor]:
        def loss(params: dict) -> md.Tensor:
            return md.mean(md.square(md.attention(params["q"], params["k"], params["v"], causal=causal, method=method)))

        value, grads = md.value_and_grad(loss)(params)
        return {name: params[name] - baseline.LEARNING_RATE * grads[name] for name in params}, value

    return step


def candidates(method: str) -> dict[str, Candidate]:
    """The hand-written step and ours; the ring without a mask, the all_to_all with a causal one."""
    executable, at = baseline.handwritten(method)
    names, arrays = "qkv", baseline.arrays()

    def by_hand(state: Any) -> tuple[dict, object]:
        *after, loss = executable(*(state[name] for name in names))
        return dict(zip(names, after, strict=True)), loss

    placed = {name: jax.device_put(arrays[name], at) for name in names}
    mesh = md.Mesh(f"rows:{baseline.DEVICES}").on(jax.devices()[: baseline.DEVICES])
    step = md.compile(attend(method, causal=method == "all_to_all"), mesh, "length:rows", donate=0)
    params = {name: md.tensor(arrays[name], baseline.DIMS) for name in names}
    return {"handwritten": Candidate(executable, placed, by_hand), "meshdsl": Candidate.of_meshdsl(step, params)}


def sent(n: int, group: int, causal: bool, backward: bool) -> tuple[int, int, list[str]]:
    """Bytes that one device sends in a ring, those of the formula, and the kinds of collectives."""
    length, head = 1024 * n, 128
    q = md.spec(f"length:{length} heads:4 group:{group} head:{head}", "bfloat16")
    k = md.spec(f"length:{length} heads:4 head:{head}", "bfloat16")

    def forward(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
        return md.attention(q, k, v, causal=causal, method="ring")

    def total(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
        return md.sum(md.cast(forward(q, k, v), "float32"))

    step = md.grad(total, (0, 1, 2)) if backward else forward
    collectives = [r for r in md.compile(step, f"rows:{n}", "length:rows").program(q, k, k).collectives if r.shape]
    block = 1024 * 4 * head * 2  # bytes of one device's keys
    forward_bytes = 2 * (n - 1) * block
    formula = forward_bytes
    if backward:  # keys and values again, and their cotangents in float32, which go all the way around
        formula += 2 * (n - 1) * block + 2 * n * 2 * block
    return round(sum(r.wire_bytes * r.count for r in collectives)), formula, sorted({r.kind for r in collectives})


def ring_lines() -> None:
    for n in (4, 16, 64):
        for group in (1, 8):
            for backward in (False, True):
                bytes_sent, formula, kinds = sent(n, group, False, backward)
                line = {"figure": "ring_bytes", "devices": n, "group": group, "backward": backward, "kinds": kinds}
                line |= {"bytes": bytes_sent, "formula": formula, "equal": bytes_sent == formula}
                print(json.dumps(line), flush=True)
            balanced, formula, _ = sent(n, group, True, False)
            line = {"figure": "balance_bytes", "devices": n, "group": group, "bytes": balanced, "in_order": formula}
            print(json.dumps({**line, "ratio": round(balanced / formula, 3)}), flush=True)


def work(n: int, half: int, zigzag: bool) -> list[int]:
    """Pairs of a query and a key, at most as late, that each of n devices computes."""
    owned = [(i, 2 * n - 1 - i) if zigzag else (2 * i, 2 * i + 1) for i in range(n)]
    return [sum(half * half * c + half * (half + 1) // 2 for c in chunks) for chunks in owned]


def balance_lines() -> None:
    for n in (8, 64):
        for zigzag in (False, True):
            pairs = work(n, 1024, zigzag)
            more = max(pairs) / (sum(pairs) / n) - 1
            line = {"figure": "imbalance", "devices": n, "zigzag": zigzag, "slowest_above_mean": round(more, 4)}
            print(json.dumps(line), flush=True)


def memory_lines() -> None:
    """A model like Llama 7B, one sequence of 131,072 tokens, 64 devices of 95.7 GB (TPU v5p)."""
    config = {
        "batch": 1, "length": 131072, "vocab": 32000, "layers": 32, "d_model": 4096, "heads": 32, "d_head": 128,
        "d_ff": 11008, "activation": "silu", "gated": True, "norm": "rms", "positions": "rotary", "remat": True,
        "compute_dtype": "bfloat16",
    }  # fmt: skip
    layouts = {
        "context 8 x heads 8": "length:context heads:model d_ff:model vocab:model",
        "context 64": "length:context,model",
    }
    machine = md.machine("tpu-v5p")
    for method in ("plain", "auto", "ring"):
        for name, layout in layouts.items():
            workload = lm.replace(**config, attention=method)
            step = md.compile(
                workload.train_step(),
                "context:8 model:8",
                layout,
                donate=(0, 1),
                weight_update="sharded",
            )
            report = step.cost(*workload.specs(), machine=machine).to_dict()
            peak = md.memory(step.program(*workload.specs())).peak
            line = {"figure": "llama_7b_128k", "method": method, "layout": name, "peak_gb": round(peak / 1e9, 2)}
            line |= {"fits_v5e_16gb": peak < 15.75e9, "seconds": report.get("seconds")}
            print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds; 0: no timing")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    ring_lines()
    balance_lines()
    memory_lines()
    agree = True
    for method in baseline.METHODS:
        agree &= compare(candidates(method), tolerance=TOLERANCE, rounds=args.rounds, model="attention", method=method)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
