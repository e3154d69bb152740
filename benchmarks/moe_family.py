"""GShard's family of models, analysed without hardware: python -m benchmarks.moe_family [--compile] [FIGURE ...]

Prints JSON lines by figure. `parameters`: the seven models and the paper's Table 1. `scale`: time and memory that
meshdsl takes to compile a train step. `steps`: predicted steps per second on TPU v3 cores, days and core-years, the
measurements of Table 3, and memory by its use (Figure 7). `batch`: which batch the paper's 128 experts can have had.
`communication`: Figure 9. `breakdown`: the predicted forward pass of an encoder pair (a dense layer and a layer with
experts), and Figure 8; with `wraps` false, the 32 x 32 torus (2,048 cores) has no wrap-around links. `--compile` adds
`compiled`: the largest model compiled by the TPU compiler for 2,048 devices (extra `aot`, takes minutes).
Predictions were not fitted to these measurements, but for the time of a message of an all_to_all, which fits figure 9.

The paper: D. Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020,
arXiv:2006.16668. A device is a core of a TPU v3, and there are as many devices as experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax

import meshdsl as md
from meshdsl.models.moe_transformer import FAMILY, preset

LAYOUT = "batch:rows; group:rows; expert:rows"
MACHINE = "tpu-v3"
BILLIONS = {
    (128, 12): 12.5, (512, 12): 50, (2048, 12): 200, (128, 36): 37, (512, 36): 150, (2048, 36): 600, (2048, 60): 1000,
}  # fmt: skip
# Table 3: steps per second. Batches have 4 million tokens for 2,048 experts, 1 million for fewer
STEPS = {(128, 12): 2.16, (512, 12): 3.28, (2048, 12): 2.15, (128, 36): 0.67, (512, 36): 1.05, (2048, 36): 0.72}
DAYS = {(128, 12): 5.4, (512, 12): 3.5, (2048, 12): 1.4, (128, 36): 17.3, (512, 36): 11.0, (2048, 36): 4.0}
CORE_YEARS = {(128, 12): 1.9, (512, 12): 4.9, (2048, 12): 7.5, (128, 36): 6.1, (512, 36): 15.5, (2048, 36): 22.4}
SEQUENCES = {128: 8192, 512: 8192, 2048: 32768}  # sequences per batch, of 128 tokens
# Figure 8 and section 5.3: growth of times from 128 to 2,048 experts
FIGURE_8 = {"growth": 1.7, "all_to_all_growth": 3.75}
SHARES = {128: 0.16, 2048: 0.36}  # share of the all_to_all in the time, by number of experts
PARTS = ("feed-forward", "attention", "gate", "dispatch and combine", "norms and residuals")
TOPOLOGIES = ("tpu:v5p:16x16x8", "tpu:v3:32x32")


def compiled(workload: md.Workload, experts: int, function: Any = None) -> md.Compiled:
    """The train step, or a function of params and batch, compiled for one expert per device."""
    return md.compile(function or workload.train_step(), f"rows:{experts}", LAYOUT, donate=() if function else (0, 1))


def parameters() -> Iterator[dict[str, Any]]:
    """The number of parameters of each model; the experts' parameters are sharded, the others replicated."""
    for experts, layers in FAMILY:
        params = preset(experts, layers).specs()[0]
        sizes = {path: math.prod(d.size for d in spec.dims) for path, spec in params.items()}
        split = sum(n for path, n in sizes.items() if any(d.name == "expert" for d in params[path].dims))
        total = sum(sizes.values())
        yield {
            "experts": experts,
            "layers": layers,
            "parameters": total,
            "of_experts": split,
            "on_a_device": total - split + split // experts,
            "billions": total / 1e9,
            "millions_on_a_device": (total - split + split // experts) / 1e6,
            "paper_billions": BILLIONS[experts, layers],
            "ratio": round(total / BILLIONS[experts, layers] / 1e9, 3),
        }


def scale() -> Iterator[dict[str, Any]]:
    """Seconds and memory of tracing, differentiating and partitioning a train step. Memory is the process's peak."""
    for experts in (2048, 128):
        marks = [time.perf_counter()]
        workload = preset(experts, 36)
        args, step = workload.specs(), compiled(workload, experts)
        for stage in (step.graph, step.program):
            stage(*args)
            marks.append(time.perf_counter())
        yield {
            "experts": experts,
            "layers": 36,
            "devices": experts,
            "trace_and_gradient_seconds": round(marks[1] - marks[0], 2),
            "partition_seconds": round(marks[2] - marks[1], 2),
            "peak_host_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            "instructions": step.program(*args).instructions,
        }


def steps() -> Iterator[dict[str, Any]]:
    """Predicted train steps; the deep models use rematerialisation, and the deepest bfloat16, as in the paper."""
    seconds: dict[tuple[int, int], float] = {}
    for experts, layers in FAMILY:
        report = train_step(experts, layers, SEQUENCES[experts])
        seconds[experts, layers] = report.seconds
        low, high = report.interval
        parts = report.memory.by_category
        weights = parts["parameters"] + parts["optimizer state"]
        measured = STEPS.get((experts, layers), math.nan)
        trained = DAYS.get((experts, layers), math.nan) * measured * report.seconds  # days for as many steps
        yield {
            "experts": experts,
            "layers": layers,
            "tokens_on_a_device": SEQUENCES[experts] * 128 // experts,
            "steps_a_second": round(1 / report.seconds, 2),
            "interval": [round(1 / high, 2), round(1 / low, 2)],
            "peak_gigabytes": round(report.peak_bytes / 1e9, 2),
            "weights_gigabytes": round(weights / 1e9, 2),
            "activations_gigabytes": round(parts["saved activations"] / 1e9, 2),
            "temporary_gigabytes": round((report.peak_bytes - weights - parts["saved activations"]) / 1e9, 2),
            "fits": report.fits,
        } | (
            {
                "paper": measured,
                "ratio": round(1 / report.seconds / measured, 2),
                "days": round(trained, 1),
                "paper_days": DAYS[experts, layers],
                "core_years": round(trained * experts / 365, 1),
                "paper_core_years": CORE_YEARS[experts, layers],
            }
            if (experts, layers) in STEPS
            else {}
        )
    for layers in (12, 36):  # only these two have equally many tokens per device
        growth = seconds[2048, layers] / seconds[512, layers]
        paper = STEPS[512, layers] / STEPS[2048, layers]
        yield {"from": 512, "to": 2048, "layers": layers, "growth": round(growth, 2), "paper": round(paper, 2)}


def train_step(experts: int, layers: int, sequences: int) -> md.Report:
    """The report of a train step on one core for each expert."""
    dtype = "bfloat16" if layers > 36 else "float32"  # section 4.3: bfloat16 activations for 60 layers alone
    workload = preset(experts, layers, batch=sequences, remat=layers > 12, compute_dtype=dtype)
    return compiled(workload, experts).cost(*workload.specs(), machine=MACHINE)


def batch() -> Iterator[dict[str, Any]]:
    """The models of table 3 on batches of 1 million tokens of the source, or of source and target together.

    A last line recomputes in the first of them what its memory needs, as the paper's compiler does.

    `of_peak` is the share of the cores' peak that the products of a step would take at the paper's rate.
    """
    for ((experts, layers), measured), sides in itertools.product(STEPS.items(), ("source", "both")):
        sequences = SEQUENCES[experts] // (1 if sides == "source" else 2)
        report = train_step(experts, layers, sequences)
        low, high = report.interval
        products = sum(line.flops * line.trips for line in report.ledger.lines if line.matmul is not None)
        yield {
            "tokens_of": sides,
            "experts": experts,
            "layers": layers,
            "sequences_on_a_core": sequences // experts,
            "steps_a_second": round(1 / report.seconds, 2),
            "interval": [round(1 / high, 2), round(1 / low, 2)],
            "paper": measured,
            "ratio": round(1 / report.seconds / measured, 2),
            "of_peak": round(products * measured / md.machine(MACHINE).peak_of("float32"), 2),
            "peak_gigabytes": round(report.peak_bytes / 1e9, 2),
            "fits": report.fits,
        }
    workload = preset(128, 12, batch=SEQUENCES[128], remat=False)
    limit = md.machine(MACHINE).hbm
    step = md.compile(workload.train_step(), "rows:128", LAYOUT, donate=(0, 1), memory_limit=limit)
    report = step.cost(*workload.specs(), machine=MACHINE)
    yield {
        "tokens_of": "source",
        "recomputed": step.plan.remat,
        "experts": 128,
        "layers": 12,
        "memory_limit_gigabytes": round(limit / 1e9, 1),
        "limited_steps_a_second": round(1 / report.seconds, 2),
        "limited_peak_gigabytes": round(report.peak_bytes / 1e9, 2),
    }


def communication() -> Iterator[dict[str, Any]]:
    """Milliseconds of 8 and 32 MB on 16 to 2,048 cores, with the torus's wrap-around links and without."""
    for wraps, megabytes in itertools.product((True, False), (8, 32)):
        network = machine_with(wraps).network
        times: dict[int, dict[str, float]] = {}
        for n in (2**i for i in range(4, 12)):
            placement = md.place(network, md.Mesh(f"d:{n}"))
            sizes = {"all_reduce": 1, "all_to_all": n, "all_gather": n, "permute": 1}
            times[n] = {k: 1e3 * placement.seconds(k, ["d"], megabytes * 1e6 * many) for k, many in sizes.items()}
            rounded = {kind: round(each, 3) for kind, each in times[n].items()}
            yield {"wraps": wraps, "megabytes": megabytes, "partitions": n, "milliseconds": rounded}
        growth = {f"{kind}_growth": round(times[2048][kind] / times[16][kind], 2) for kind in times[16]}
        yield {"wraps": wraps, "megabytes": megabytes, **growth, "paper": {"all_reduce": 1, "all_to_all": 9}}


def machine_with(wraps: bool) -> md.Machine:
    """The machine; or without the wrap-around links of its torus and the time of a message, which explain as much."""
    machine = md.machine(MACHINE)
    if wraps:
        return machine
    levels = tuple(dataclasses.replace(level, wrap=0) for level in machine.network.levels)
    return dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=levels, message=0.0))


def part_of(line: Any) -> str:
    """The part of the layers that an instruction belongs to, inferred from the dims of its operands and results."""
    dims = {d.name for v in (*line.eqn.ins, *line.eqn.outs) for d in v.dims}
    if dims & {"d_ff", "expert_hidden"}:
        return "feed-forward"
    if "heads" in dims:
        return "attention"
    slots, tokens = dims & {"slot", "gate_slot"}, "token" in dims and "gate" not in dims
    if line.op == "all_to_all" or ("model" in dims and (slots or tokens)):
        return "dispatch and combine"
    if dims & {"gate", "slot", "gate_slot", "token", "expert"}:
        return "gate"
    return "norms and residuals"


def breakdown() -> Iterator[dict[str, Any]]:
    """The forward pass of an encoder pair for 128 and 2,048 experts with 2,048 tokens per device, and its growth."""
    for dispatch, wraps in (("einsum", True), ("index", True), ("einsum", False)):  # the paper uses einsum
        parts: dict[int, dict[str, float]] = {}
        all_to_all_seconds: dict[int, float] = {}
        for experts in (128, 2048):
            costs = encoder_pair(experts, dispatch, wraps)
            parts[experts] = {part: sum(c.blocking for c in costs if part_of(c.line) == part) for part in PARTS}
            all_to_all_seconds[experts] = sum(c.blocking for c in costs if c.line.op == "all_to_all")
            total = sum(parts[experts].values())
            yield {
                "dispatch": dispatch,
                "wraps": wraps,
                "experts": experts,
                "milliseconds": round(total * 1e3, 2),
                "milliseconds_of": {part: round(s * 1e3, 3) for part, s in parts[experts].items()},
                "share_of": {part: round(s / total, 3) for part, s in parts[experts].items()},
                "all_to_all_share": round(all_to_all_seconds[experts] / total, 3),
                "paper_all_to_all_share": SHARES[experts],
            }
        yield {
            "dispatch": dispatch,
            "wraps": wraps,
            "growth": round(sum(parts[2048].values()) / sum(parts[128].values()), 2),
            "paper_growth": FIGURE_8["growth"],
            "growth_of": {part: round(parts[2048][part] / parts[128][part], 2) for part in PARTS},
            "all_to_all_growth": round(all_to_all_seconds[2048] / all_to_all_seconds[128], 2),
            "paper_all_to_all_growth": FIGURE_8["all_to_all_growth"],
        }


def encoder_pair(experts: int, dispatch: str, wraps: bool) -> list[Any]:
    """The cost of each line of one trip of the encoder's loop."""
    workload = preset(experts, 12, dispatch=dispatch, remat=False)
    params, _, batch = workload.specs()
    loss = workload.loss(workload.config)
    report = compiled(workload, experts, lambda params, batch: loss(params, batch)[0]).cost(
        params, batch, machine=machine_with(wraps)
    )
    loops = itertools.groupby(report.timeline.costs, lambda cost: cost.line.trips)
    trips, costs = next((trips, list(costs)) for trips, costs in loops if trips > 1)
    return [dataclasses.replace(c, seconds=c.seconds / trips, exposed=c.exposed / trips) for c in costs]


def through_the_compiler() -> Iterator[dict[str, Any]]:
    """The train step with 2,048 experts, 36 layers, Adafactor and rematerialisation."""
    workload = preset(2048, 36)
    args, step = workload.specs(), compiled(workload, 2048)
    program, donated = step.program(*args), step.donated(*args)
    predicted = md.memory(program, donated=donated).peak
    for topology in TOPOLOGIES:
        parts = md.compile_for(topology, program, donated=donated, effort="O1", timeout=3600)
        counts = {kind: sum(c.kind == kind for c in parts.collectives) for kind in {c.kind for c in parts.collectives}}
        yield {
            "topology": topology,
            "devices": parts.devices,
            "fits": parts.fits,
            "predicted_gigabytes": round(predicted / 1e9, 2),
            "reported_gigabytes": round(parts.needed / 1e9, 2),
            "collectives_in_text": counts,
            "seconds": round(parts.seconds),
            "message": parts.message,
        }


FIGURES = {
    "scale": scale, "parameters": parameters, "steps": steps, "batch": batch, "communication": communication,
    "breakdown": breakdown,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)}; default: all")
    parser.add_argument(
        "--compile", action="store_true", help="also compile the largest model for 2,048 TPUs (minutes)"
    )
    args = parser.parse_args()
    if unknown := set(args.figures) - set(FIGURES):
        parser.error(f"unknown figure {', '.join(sorted(unknown))}; known: {', '.join(FIGURES)}")
    jax.config.update("jax_platforms", "cpu")
    figures = {name: FIGURES[name] for name in args.figures or FIGURES}
    for name, lines in {**figures, **({"compiled": through_the_compiler} if args.compile else {})}.items():
        for line in lines():
            print(json.dumps({"figure": f"moe_family {name}", **line}), flush=True)


if __name__ == "__main__":
    main()
