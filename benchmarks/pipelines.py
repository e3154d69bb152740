"""Cycles and memory of a pipeline by the TPU compiler, beside the same stage without a pipeline, as JSON lines.

A Llama in bfloat16 with 4 stages of 2 layers on four v5e, for several numbers M of micro-batches of a fixed size.
`ideal` is (M+S-1) times the cycles of a micro-batch on chips that each compute the layers of one stage: a quarter of
the difference between steps of 8 and 4 micro-batches. `cycles` are the compiler's estimate, without communication, and
`predicted_ratio` is the same ratio by the cost model.
`asynchronous` counts the messages between stages that start and end apart, out of `messages`. Needs the extra `aot`.

    python -m benchmarks.pipelines                      # M = 8, 16, 64, with full rematerialisation
    python -m benchmarks.pipelines 8 32 --remat none
    python -m benchmarks.pipelines --chunks             # 1 and 2 chunks, of stages of 4 layers, with M = S
    python -m benchmarks.pipelines --ticks              # v6e, 2 stages with 4 chips each, without and with "ticks"
    python -m benchmarks.pipelines --gpipe              # beside handwritten/gpipe.py, with M = 4S
    python -m benchmarks.pipelines --cpu --rounds 40    # CPU time of both, for a small model on four CPU devices

Of chunks and ticks, `predicted_ms`, `exposed_ms` and `predicted_bytes` are of the cost model for the chip. Of ticks,
`asynchronous` counts all collectives of the text that start and end apart, out of `collectives`.

Beside GPipe, `attention` is "fused" (our kernel, and JAX's splash attention; the compiler states no cycles for either)
or "plain" (blocks of at most 512 x 512, and one block). Both recompute the layers. Ratios are ours to GPipe's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import splash_attention as splash

import meshdsl as md
from benchmarks.candidates import Candidate, compare
from benchmarks.handwritten import gpipe
from meshdsl.models.llama import llama
from meshdsl.tools.compilers.aot import ENVIRONMENT
from meshdsl.tools.compilers.hlo import estimated_cycles

STAGES, LAYERS, PART = 4, 2, 8  # stages, layers of a stage, sequences of a micro-batch
MODEL = llama.replace(
    length=512, vocab=2048, d_model=1024, query_heads=8, heads=8, d_head=128, d_ff=2816, compute_dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip
SMALL = llama.replace(
    batch=32, length=128, vocab=512, layers=8, d_model=128, query_heads=4, heads=4, d_head=32, d_ff=352
)
TOLERANCE = 1e-2  # of the change of a state, relative; gradients that nearly cancel differ most


def planned(stages: int, microbatches: int, remat: str, kernel: str = "auto", *, layers: int = LAYERS, chunks: int = 1):
    """A step in stages of so many layers, or of one stage alone, and the specs of its arguments."""
    model = MODEL.replace(batch=PART * microbatches, layers=layers * stages)
    layout = "layer:stages" if stages > 1 else ""
    options: dict[str, Any] = {"microbatches": microbatches, "attention_kernel": kernel, "chunks": chunks}
    plan = md.Plan(f"stages:{STAGES}", layout, remat=remat, **options)
    return md.compile(model.train_step(), plan=plan, donate=(0, 1)), model.specs()


def computing(step: md.Compiled, specs: Any) -> float:
    """The predicted seconds of a step in which something is computed; cycles count no others."""
    report = step.cost(*specs, machine="tpu-v5e")
    return report.seconds - report.exposed


def compiled(step: md.Compiled, specs: Any) -> md.Compilation:
    """The compiler's text of a step."""
    return md.compile_for("tpu:v5e:2x2", step.program(*specs), donated=step.donated(*specs))


def beside_chunks(layers: int = 4) -> None:
    """Print time and memory of 1 and 2 chunks, predicted and by the TPU compiler, at M = S."""
    for chunks in (1, 2):
        step, specs = planned(STAGES, STAGES, "full", layers=layers, chunks=chunks)
        report, text = step.cost(*specs, machine="tpu-v5e"), compiled(step, specs)
        assert text.cycles is not None and text.memory is not None
        row = {"figure": "chunks", "chunks": chunks, "layers": layers, "microbatches": STAGES,
               "predicted_ms": round(1e3 * report.seconds, 1), "cycles": text.cycles,
               "bubble": round(step.pipelines(*specs)[0].bubble, 3),
               "predicted_bytes": report.peak_bytes, "peak_bytes": text.memory.peak}  # fmt: skip
        print(json.dumps(row), flush=True)


def beside_ticks(microbatches: int = 4) -> None:
    """Print time, memory and asynchronous collectives on v6e without and with overlap in a tick."""
    model = MODEL.replace(batch=PART * microbatches, layers=2 * LAYERS)
    layout, specs = "layer:stages; heads:cols; d_ff:cols; vocab:cols", model.specs()
    for overlap in ("none", "ticks"):
        machine = None if overlap == "none" else "tpu-v6e"
        plan = md.Plan("stages:2 cols:4", layout, microbatches=microbatches, overlap=overlap, machine=machine)
        step = md.compile(model.train_step(), plan=plan, donate=(0, 1))
        report = step.cost(*specs, machine="tpu-v6e")
        text = md.compile_for("tpu:v6e:2x4", step.program(*specs), donated=step.donated(*specs))
        assert text.cycles is not None and text.memory is not None
        row = {"figure": "ticks", "overlap": overlap, "chosen": step.overlap.chosen, "cycles": text.cycles,
               "peak_mb": round(text.memory.peak / 1e6), "collectives": len(text.collectives),
               "asynchronous": sum(each.asynchronous for each in text.collectives),
               "predicted_ms": round(1e3 * report.seconds, 1),
               "exposed_ms": round(1e3 * report.exposed, 1)}  # fmt: skip
        print(json.dumps(row), flush=True)


def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by the TPU kernel that JAX ships, as `gpipe.attention`."""
    batch, length, heads, group, head = q.shape
    b = min(length, 512)
    sizes = splash.BlockSizes(
        block_q=b, block_kv=b, block_q_dkv=b, block_kv_dkv=b, block_q_dq=b, block_kv_dq=b, block_kv_dkv_compute=b
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length)) for _ in range(heads * group)])
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    q, k, v = (x.reshape(batch, length, heads, head).transpose(0, 2, 1, 3) for x in (q / np.sqrt(head), k, v))
    y: Any = jax.vmap(attend)(q.astype(v.dtype), k, v)
    return y.transpose(0, 2, 1, 3).reshape(batch, length, heads, group, head)


def beside_gpipe(attention: str) -> None:
    """Print cycles and peak memory of both by the TPU compiler, at M = 4S."""
    microbatches = 4 * STAGES
    params, state, batch = MODEL.replace(batch=PART * microbatches, layers=LAYERS * STAGES).specs()
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct([d.size for d in s.dims], s.dtype), (params, state, batch))
    os.environ.update(ENVIRONMENT)
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.make_mesh((STAGES,), ("stages",), devices=chips)
    text = (shapes[2]["tokens"], shapes[2]["targets"])
    attend = fused if attention == "fused" else gpipe.attention
    theirs = gpipe.compiled(shapes[:2], text, mesh, microbatches, attend)[0]
    ours = compiled(*planned(STAGES, microbatches, "full", "auto" if attention == "fused" else "blockwise"))
    assert ours.cycles is not None and ours.memory is not None
    memory, cycles = theirs.memory_analysis(), estimated_cycles(theirs.as_text() or "")
    assert memory is not None and cycles is not None
    peak = memory.peak_memory_in_bytes
    row = {"figure": "gpipe", "microbatches": microbatches, "attention": attention, "cycles": ours.cycles,
           "gpipe_cycles": cycles, "cycles_ratio": round(ours.cycles / cycles, 3), "peak_bytes": ours.memory.peak,
           "gpipe_peak_bytes": peak, "peak_ratio": round(ours.memory.peak / peak, 3)}  # fmt: skip
    print(json.dumps(row), flush=True)


def on_cpu(rounds: int) -> bool:
    """Print the CPU time of both on four CPU devices, at M = 4S; returns whether their states agree."""
    train = SMALL.train_step()
    plan = md.Plan(f"stages:{STAGES}", "layer:stages", remat="full", microbatches=4 * STAGES)

    def step(state: Any, tokens: md.Tensor, targets: md.Tensor, *, remat: str = "model", microbatches: int = 1) -> Any:
        batch = {"tokens": tokens, "targets": targets}
        params, moments, metrics = train(*state, batch, remat=remat, microbatches=microbatches)
        return (params, moments), metrics["loss"]

    state, numbers = SMALL.init(md.random.key(0)), np.random.default_rng(0)
    text = numbers.integers(0, SMALL.config.vocab, (SMALL.config.batch, SMALL.config.length + 1), np.int32)
    dims = SMALL.specs()[2]["tokens"].dims
    batch = [md.tensor(x, dims) for x in (text[:, :-1], text[:, 1:])]
    arrays, rows = jax.tree.map(lambda x: x.numpy(), state), [x.numpy() for x in batch]
    mesh = jax.make_mesh((STAGES,), ("stages",), devices=jax.devices()[:STAGES])
    theirs, at = gpipe.compiled(arrays, (rows[0], rows[1]), mesh, 4 * STAGES)
    placed = jax.device_put(rows, jax.NamedSharding(mesh, jax.P()))
    candidates = {
        "gpipe": Candidate(theirs, jax.tree.map(jax.device_put, arrays, at), lambda state: theirs(state, *placed)),
        "meshdsl": Candidate.of_meshdsl(md.compile(step, plan=plan, donate=0), state, *batch),
    }
    return compare(candidates, tolerance=TOLERANCE, rounds=rounds, model="llama", layout="layer:stages")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("microbatches", nargs="*", type=int, default=[8, 16, 64])
    parser.add_argument("--remat", default="full", help="a rematerialisation, as in md.Plan")
    parser.add_argument("--gpipe", action="store_true", help="cycles and peak memory beside GPipe by hand instead")
    parser.add_argument("--chunks", action="store_true", help="1 and 2 chunks of each stage instead")
    parser.add_argument("--ticks", action="store_true", help="overlap in a tick, on v6e, instead")
    parser.add_argument("--cpu", action="store_true", help="CPU time beside GPipe by hand instead")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds of --cpu")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    if options.gpipe:
        for attention in ("fused", "plain"):
            beside_gpipe(attention)
        return 0
    if options.chunks:
        beside_chunks()
        return 0
    if options.ticks:
        beside_ticks()
        return 0
    if options.cpu:
        return 0 if on_cpu(options.rounds) else 1
    alone = {m: planned(1, m, options.remat) for m in (4, 8)}
    few, many = (compiled(*each).cycles for each in alone.values())
    assert few is not None and many is not None
    trip, predicted_trip = (many - few) / 4, (computing(*alone[8]) - computing(*alone[4])) / 4
    for microbatches in options.microbatches:
        piped = planned(STAGES, microbatches, options.remat)
        step, ticks = compiled(*piped), microbatches + STAGES - 1
        assert step.cycles is not None and step.memory is not None
        row = {"microbatches": microbatches, "remat": options.remat, "cycles": step.cycles,
               "ideal": round(ticks * trip), "ratio": round(step.cycles / ticks / trip, 3),
               "predicted_ratio": round(computing(*piped) / ticks / predicted_trip, 3),
               "peak_bytes": step.memory.peak}  # fmt: skip
        messages = [each for each in step.collectives if each.kind == "permute"]
        row |= {"messages": len(messages), "asynchronous": sum(each.asynchronous for each in messages)}
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
