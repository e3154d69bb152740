"""Published training runs of larger models compared with predictions, with one fitted efficiency per chip.

MaxText on slices of TPU v5e (16 to 128 billion parameters), LLM Foundry on A100 and H100 (125 million to 70 billion).
The work of one device comes from the train step of models/transformer.py with the published sizes. The time of its
kernels is the roofline of the packaged machine file with one fitted number: the fraction of the peak that products
reach. Attention counts as one fused kernel (both systems have one): its scores are not stored in memory, and the
backward pass recomputes them.

Both systems shard the parameters over the replicas (FSDP). A layout with one mesh axis cannot express this, because
batch and model would compete for the axis in every activation. The program is therefore data parallel, and the cost of
FSDP is added: per micro-batch, the bf16 parameters are all-gathered twice and their gradients reduce-scattered; each
device updates its own part. Tensor parallelism is part of the program. Communication of a micro-batch overlaps with its
kernels, so the longer of the two counts. Between slices of v5e, gradients are all-reduced over the data centre network
at the end, without overlap. One row in four of MaxText stores the projections of attention in host memory instead of
recomputing them; here everything is recomputed.

The published rates count model FLOPs by the systems' own formulas; the same formulas convert them back to seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdsl as md
from models.transformer import lm

from .programs import Programs, Rates, Work, device_seconds, mean, solve

BF16 = 2  # bytes


@dataclass(frozen=True)
class Run:
    """A measurement, and the layout of its step."""

    chip: str
    machine: str
    workload: md.Workload
    mesh: str
    layout: str
    replicas: int  # devices over which the parameters are sharded
    slices: int
    micro_batches: int
    seconds: float
    bandwidth: float = 1.0  # of the memory, as a fraction of the machine file's


def maxtext(row: dict[str, Any]) -> Run:
    """A run of MaxText: a Llama-like model with full rematerialisation."""
    m, p = row["model_config"], row["parallelism"]
    tensor = 16 if "tensor16" in p["ici"] else 1
    replicas = 256 // tensor
    batch = m["per_device_batch"] * 256
    workload = lm.replace(
        batch=batch * p["dcn_data"], length=m["seq"], vocab=m["vocab"], layers=m["layers"], d_model=m["d_model"],
        heads=m["heads"], d_head=m["d_head"], d_ff=m["d_ff"], activation="silu", gated=True, norm="rms",
        positions="rotary", tied=False, remat=True, compute_dtype="bfloat16", reduce_dtype="bfloat16",
    )  # fmt: skip
    width = m["heads"] * m["d_head"]
    matrices = m["layers"] * (4 * m["d_model"] * width + 3 * m["d_model"] * m["d_ff"]) + m["d_model"] * m["vocab"]
    attention = (
        12 * m["layers"] * width * m["seq"]
    )  # both halves of the scores are counted, also if causal (see the row's note)
    flops = (6 * matrices + attention) * batch * m["seq"] / 256
    seconds = flops / (row["measured"]["tflops_per_chip"] * 1e12)
    mesh = f"slice:{p['dcn_data']} data:{replicas} model:{tensor}"
    layout = "batch:slice,data; heads:model; d_ff:model; vocab:model"
    return Run("v5e", "tpu-v5e", workload, mesh, layout, replicas, p["dcn_data"], 1, seconds)


def llm_foundry(row: dict[str, Any]) -> Run:
    """A run of LLM Foundry: MPT with data parallelism."""
    m, p = row["model_config"], row["parallelism"]
    eight = p["precision"] == "amp_fp8"
    chip = row["hardware"][:4].lower() + (" fp8" if eight else "")
    workload = lm.replace(
        batch=p["micro_batch"] * p["gpus"], length=m["seq"], vocab=m["vocab"], layers=m["layers"],
        d_model=m["d_model"], heads=m["heads"], d_head=m["d_model"] // m["heads"], d_ff=m["d_ff"], activation="gelu",
        tied=True, remat=p["act_ckpt"] == "True", compute_dtype="bfloat16", reduce_dtype="bfloat16",
    )  # fmt: skip
    tokens = p["micro_batch"] * p["grad_accum"] * m["seq"]
    seconds = tokens / row["measured"]["tokens_per_s_per_gpu"]
    machine = "a100-p4de" if chip == "a100" else "h100"
    smaller = 1555 / 2039 if "A100 40GB" in row["hardware"] else 1.0  # data sheets of A100 40 GB and 80 GB
    mesh = f"data:{p['gpus']}"
    return Run(chip, machine, workload, mesh, "batch:data", p["gpus"], 1, p["grad_accum"], seconds, smaller)


class Estimate:
    """The seconds of a run's step as a function of the efficiency; everything else is computed once."""

    def __init__(self, run: Run, work: Work):
        on = md.machine(run.machine)
        self.run, self.work, self.launch = run, work, on.launch
        self.peak = on.peak_of("float8_e4m3fn" if "fp8" in run.chip else "bfloat16")
        self.vector, self.bandwidth = on.vector, on.hbm_bandwidth * run.bandwidth
        self.moved = work.moved - work.scores
        of_scores = (work.scores > 0) & (work.products > 0)
        again = 1 + of_scores / max(of_scores.sum(), 1)  # one more product for the scores, distributed over all of them
        attention = np.where(of_scores, self.peak / on.peak_of("bfloat16"), 1.0)  # with fp8, attention stays in bf16
        self.products = work.products * again * attention
        place = md.place(on.network, md.Mesh(run.mesh)).seconds
        size = BF16 * work.parameters
        tensor = sum(place(k, a, v) * n for k, a, v, n in work.sends if a == ("model",))
        sharding = 2 * place("all_gather", ["data"], size) + place("reduce_scatter", ["data"], size)
        self.sending = tensor + sharding
        self.between = place("all_reduce", ["slice"], size / run.replicas) if run.slices > 1 else 0.0

    def seconds(self, efficiency: float) -> float:
        """The seconds of one step."""
        rates = Rates(self.peak, self.vector, self.bandwidth, ((1.0, efficiency),))
        work = self.work
        device = device_seconds(rates, self.products, work.vector, self.moved)
        kernels = work.trips * (device + self.launch)
        update = float(kernels[work.update].sum()) / self.run.replicas
        micro_batch = max(float(kernels[~work.update].sum()), self.sending)
        return self.run.micro_batches * micro_batch + update + self.between


def run(rows: Sequence[dict[str, Any]], programs: Programs) -> Iterator[dict[str, Any]]:
    """The JSON lines of this part."""
    chips: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        if row["group"] in ("maxtext_v5e", "llmfoundry"):
            one = maxtext(row) if row["group"] == "maxtext_v5e" else llm_foundry(row)
            chips[one.chip].append(one)
    for chip, chip_runs in chips.items():
        estimates = [Estimate(r, programs.work(r.workload, r.mesh, r.layout)) for r in chip_runs]
        programs.save()
        measured = np.array([r.seconds for r in chip_runs])

        def seconds(x: Any, estimates: list[Estimate] = estimates) -> Any:
            return np.array([estimate.seconds(float(x[0])) for estimate in estimates])

        def fit(keep: Any, measured: Any = measured, seconds: Any = seconds) -> dict[str, float]:
            return solve(lambda x: np.log(seconds(x) / measured)[keep], {"efficiency": (0.6, 0.05, 0.98)})

        every = np.ones(len(chip_runs), dtype=bool)
        sizes = np.array([(r.workload.config.d_model, r.workload.config.layers) for r in chip_runs])
        held_out = np.zeros(len(chip_runs))
        for size in np.unique(sizes, axis=0):
            test = (sizes == size).all(axis=1)
            held_out[test] = seconds(list(fit(~test).values()))[test]
        fitted = fit(every)
        for rows_fitted, estimate in (("all", seconds(list(fitted.values()))), ("the other models", held_out)):
            error = np.abs(estimate / measured - 1)
            yield {"part": "training", "chip": chip, "fitted_to": rows_fitted, "rows": len(chip_runs),
                   "efficiency": round(fitted["efficiency"], 3), "mean_error": mean(error),
                   "within_15%": mean(error <= 0.15), "worst": round(float(error.max()), 3)}  # fmt: skip
        by_model: dict[str, list[float]] = defaultdict(list)
        for r, error in zip(chip_runs, seconds(list(fitted.values())) / measured - 1, strict=True):
            by_model[f"{r.workload.config.d_model}x{r.workload.config.layers}"].append(float(error))
        yield {"part": "training", "chip": chip, "mean_signed_error": {k: mean(v) for k, v in by_model.items()}}
