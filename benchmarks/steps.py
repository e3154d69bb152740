"""Bytes over the slow axis, flat and in steps, and the seconds of both on H100 nodes of eight, as JSON lines.

The four collectives on 4 nodes; a data-parallel step of 1.3 billion parameters, with its gradients in buckets; and a
mixture of experts whose experts are on 4 nodes. `slow_bytes` sums the larger of operand and result of each collective
over the slow axis, in one step of one device; `message_bytes` is the largest message of an all_to_all from one device
to another node. Each program is compared with its StableHLO. `auto` is the choice of the cost model.

    python -m benchmarks.steps
"""

from __future__ import annotations

import json
import sys
from typing import Any

import meshdsl as md
from meshdsl.models.gpt_moe import gpt2_moe
from meshdsl.models.transformer import lm
from meshdsl.tools.compilers.verify import verify

MESH, MACHINE = "node:4 gpu:8", "h100:compiled"
GPT = lm.replace(layers=24, d_model=2048, heads=16, d_head=128, d_ff=8192, vocab=50304, length=2048, batch=64)
MOE = gpt2_moe.replace(batch=64)
ROWS, BOTH = "batch:node,gpu", "batch:node,gpu; part:node,gpu"
LARGE, SMALL = (md.spec("batch:64 io:4194304"),), (md.spec("batch:64 io:65536"),)


def total(x: md.Tensor) -> md.Tensor:
    return md.sum(x, "batch")


CASES: list[tuple[str, Any, str, tuple[Any, ...], Any]] = [
    ("all_reduce", total, ROWS, LARGE, "replicated"),
    ("all_gather", lambda x: md.rename(x, batch="out"), ROWS, SMALL, "replicated"),
    ("reduce_scatter", lambda x: md.rename(total(x), io="part"), BOTH, LARGE, "replicated"),
    ("all_to_all", lambda x: md.rename(x, batch="out", io="part"), BOTH, SMALL, "replicated"),
    ("1.3B, replicated", GPT.train_step(), ROWS, GPT.specs(), "replicated"),
    ("1.3B, sharded, buckets of 25 MB", GPT.train_step(), ROWS, GPT.specs(),
     md.WeightUpdate("sharded", bucket_bytes=25e6)),
    ("MoE, 32 experts", MOE.replace(experts=32).train_step(), "batch:node,gpu; expert:node,gpu; group:node,gpu",
     MOE.replace(experts=32).specs(), "replicated"),
]  # fmt: skip


def row(name: str, f: Any, layout: str, args: tuple[Any, ...], update: Any, steps: str) -> dict[str, Any]:
    """The figures of one program; raises `AssertionError` if they differ from its StableHLO."""
    on = None if steps == "flat" else MACHINE
    step = md.compile(f, MESH, layout, weight_update=update, steps=steps, machine=on)
    program = step.program(*args)
    equal = verify(step.lower(*args).as_text(), program).equal
    assert equal, name
    slow = [record for record in program.collectives if "node" in record.axes]
    exchanged = [r.bytes / program.mesh.count(r.axes) for r in slow if r.kind == "all_to_all"]
    return {
        "case": name,
        "steps": steps,
        "collectives": len(program.collectives),
        "slow_bytes": round(sum(r.bytes * r.count for r in slow)),
        **({"message_bytes": round(max(exchanged))} if exchanged else {}),
        "ms": round(step.cost(*args, machine=MACHINE).seconds * 1e3, 3),
        "stablehlo": "equal",
    }


def main() -> int:
    for case in CASES:
        for steps in ("flat", "always", "auto"):
            print(json.dumps(row(*case, steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
