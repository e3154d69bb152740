"""GShard's family of models, analysed without hardware: python -m benchmarks.moe_family [--compile] [FIGURE ...]

JSON lines, by figure: `parameters`, the seven models beside the paper's Table 1; `scale`, what the compiler's own work
on a train step takes; `steps`, predicted steps a second on TPU v3 cores beside those measured in Table 3, and memory;
`breakdown`, the predicted forward pass of an encoder pair (a Transformer layer, one with experts) beside Figure 8, also
with `wraps` false: as if the torus of 32 x 32 chips, 2,048 cores, were not closed into rings.
`--compile` adds `compiled`: the largest model through the TPU's own compiler, for 2,048 devices (`meshdsl[aot]`,
minutes). Predictions are estimates: none of them was fitted to these measurements.

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
from models.moe_transformer import FAMILY, preset

LAYOUT = "batch:rows; group:rows; expert:rows"
MACHINE = "tpu-v3"
BILLIONS = {
    (128, 12): 12.5, (512, 12): 50, (2048, 12): 200, (128, 36): 37, (512, 36): 150, (2048, 36): 600, (2048, 60): 1000,
}  # fmt: skip
# Table 3: steps a second; Table 1 with 4 million tokens in a batch for 2,048 experts, 1 million for the others
STEPS = {(128, 12): 2.16, (512, 12): 3.28, (2048, 12): 2.15, (128, 36): 0.67, (512, 36): 1.05, (2048, 36): 0.72}
SEQUENCES = {128: 8192, 512: 8192, 2048: 32768}  # of 128 tokens, in a batch
# Figure 8 and section 5.3, from 128 experts to 2,048: times, shares of the time, and of the roofline reached
FIGURE_8 = {"growth": 1.7, "all_to_all_growth": 3.75}
SHARES = {128: 0.16, 2048: 0.36}  # of the all_to_all, by experts
PARTS = ("feed-forward", "attention", "gate", "dispatch and combine", "norms and residuals")
TOPOLOGIES = ("tpu:v5p:16x16x8", "tpu:v3:32x32")


def compiled(workload: md.Workload, experts: int, function: Any = None) -> md.Compiled:
    """The train step, or a function of params and batch, with one expert a device."""
    return md.compile(function or workload.train_step(), f"rows:{experts}", LAYOUT, donate=() if function else (0, 1))


def parameters() -> Iterator[dict[str, Any]]:
    """The weights of each model, of which all but the experts' are on every device."""
    for experts, layers in FAMILY:
        params = preset(experts, layers).specs()[0]
        sizes = {path: math.prod(d.size for d in spec.shape) for path, spec in params.items()}
        split = sum(n for path, n in sizes.items() if any(d.name == "expert" for d in params[path].shape))
        total = sum(sizes.values())
        yield {
            "experts": experts,
            "layers": layers,
            "parameters": total,
            "of_experts": split,
            "on_a_device": total - split + split // experts,
            "paper_billions": BILLIONS[experts, layers],
            "ratio": round(total / BILLIONS[experts, layers] / 1e9, 3),
        }


def scale() -> Iterator[dict[str, Any]]:
    """Seconds and memory of tracing, differentiating and partitioning a train step; nothing else ran before."""
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
    """Predicted train steps; the deep models make their activations again, as the paper's did."""
    seconds: dict[tuple[int, int], float] = {}
    for (experts, layers), measured in STEPS.items():
        workload = preset(experts, layers, batch=SEQUENCES[experts], remat=layers > 12)
        report = compiled(workload, experts).cost(*workload.specs(), machine=MACHINE)
        seconds[experts, layers] = report.seconds
        low, high = report.interval
        yield {
            "experts": experts,
            "layers": layers,
            "tokens_on_a_device": SEQUENCES[experts] * 128 // experts,
            "steps_a_second": round(1 / report.seconds, 2),
            "interval": [round(1 / high, 2), round(1 / low, 2)],
            "paper": measured,
            "ratio": round(1 / report.seconds / measured, 2),
            "peak_gigabytes": round(report.peak_bytes / 1e9, 2),
            "fits": report.fits,
        }
    for layers in (12, 36):  # only these two have as many tokens on a device
        growth = seconds[2048, layers] / seconds[512, layers]
        paper = STEPS[512, layers] / STEPS[2048, layers]
        yield {"from": 512, "to": 2048, "layers": layers, "growth": round(growth, 2), "paper": round(paper, 2)}


def part_of(line: Any) -> str:
    """Which part of the layers an instruction belongs to, by the dims of its operands and results."""
    dims = {d.name for v in (*line.eqn.ins, *line.eqn.outs) for d in v.shape}
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
    """The forward pass of an encoder pair at 128 and at 2,048 experts, 2,048 tokens on a device, and its growth."""
    for dispatch, wraps in (("einsum", True), ("index", True), ("einsum", False)):  # the paper's is by einsum
        found: dict[int, dict[str, float]] = {}
        sent: dict[int, float] = {}
        for experts in (128, 2048):
            costs = encoder_pair(experts, dispatch, wraps)
            found[experts] = {part: sum(c.blocking for c in costs if part_of(c.line) == part) for part in PARTS}
            sent[experts] = sum(c.blocking for c in costs if c.line.op == "all_to_all")
            total = sum(found[experts].values())
            yield {
                "dispatch": dispatch,
                "wraps": wraps,
                "experts": experts,
                "milliseconds": round(total * 1e3, 2),
                "milliseconds_of": {part: round(s * 1e3, 3) for part, s in found[experts].items()},
                "share_of": {part: round(s / total, 3) for part, s in found[experts].items()},
                "all_to_all_share": round(sent[experts] / total, 3),
                "paper_all_to_all_share": SHARES[experts],
            }
        yield {
            "dispatch": dispatch,
            "wraps": wraps,
            "growth": round(sum(found[2048].values()) / sum(found[128].values()), 2),
            "paper_growth": FIGURE_8["growth"],
            "growth_of": {part: round(found[2048][part] / found[128][part], 2) for part in PARTS},
            "all_to_all_growth": round(sent[2048] / sent[128], 2),
            "paper_all_to_all_growth": FIGURE_8["all_to_all_growth"],
        }


def encoder_pair(experts: int, dispatch: str, wraps: bool) -> list[Any]:
    """What one trip of the encoder's loop costs, line by line."""
    machine = md.machine(MACHINE)
    if not wraps:
        levels = tuple(dataclasses.replace(level, wrap=0) for level in machine.network.levels)
        machine = dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=levels))
    workload = preset(experts, 12, dispatch=dispatch, remat=False)
    params, _, batch = workload.specs()
    loss = workload.loss(workload.config)
    report = compiled(workload, experts, lambda params, batch: loss(params, batch)[0]).cost(
        params, batch, machine=machine
    )
    loops = itertools.groupby(report.timeline.costs, lambda cost: cost.line.trips)
    trips, costs = next((trips, list(costs)) for trips, costs in loops if trips > 1)
    return [dataclasses.replace(c, seconds=c.seconds / trips, exposed=c.exposed / trips) for c in costs]


def through_the_compiler() -> Iterator[dict[str, Any]]:
    """The train step of 2,048 experts and 36 layers, with Adafactor, its activations made again."""
    workload = preset(2048, 36)
    args, step = workload.specs(), compiled(workload, 2048)
    program, donated = step.program(*args), step.donated(*args)
    predicted = md.memory(program, donated=donated).peak
    for topology in TOPOLOGIES:
        found = md.compile_for(topology, program, donated=donated, effort="O1", timeout=3600)
        counts = {kind: sum(c.kind == kind for c in found.collectives) for kind in {c.kind for c in found.collectives}}
        yield {
            "topology": topology,
            "devices": found.devices,
            "fits": found.fits,
            "predicted_gigabytes": round(predicted / 1e9, 2),
            "reported_gigabytes": round(found.needed / 1e9, 2),
            "collectives_in_text": counts,
            "seconds": round(found.seconds),
            "message": found.message,
        }


FIGURES = {"scale": scale, "parameters": parameters, "steps": steps, "breakdown": breakdown}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--compile", action="store_true", help="also compile the largest for 2,048 TPUs (minutes)")
    args = parser.parse_args()
    if unknown := set(args.figures) - set(FIGURES):
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are: {', '.join(FIGURES)}")
    jax.config.update("jax_platforms", "cpu")
    wanted = {name: FIGURES[name] for name in args.figures or FIGURES}
    for name, lines in {**wanted, **({"compiled": through_the_compiler} if args.compile else {})}.items():
        for line in lines():
            print(json.dumps({"figure": f"moe_family {name}", **line}), flush=True)


if __name__ == "__main__":
    main()
