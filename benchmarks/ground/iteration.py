"""GPT training on one node of A100 with data and tensor parallelism: published iteration times and predictions.

The measured system is Megatron-DeepSpeed with fp16, activation checkpointing and fused Adam: 450 runs over five models
(d_model, layers) x (tp, dp) x micro-batch x batch. For each (model, tp, dp, micro-batch), the train step of
models/transformer.py is traced and partitioned on `data:dp model:tp`, and its costs are read. The forward and backward
pass run once per micro-batch; the update and the all_reduce of the gradients (one, as DeepSpeed buckets them) run once.

Differences: Megatron recomputes whole layers, with six all_reduces per layer. meshdsl does not recompute the last
product and its all_reduce, whose results are not used, and has five. Dropout is omitted.

Two models of the step time are fitted on four of the (d_model, layers) at a time and tested on the fifth.

compiled  the model of `compiled.cost`, for a compiler that fuses: each kernel takes its roofline time plus a launch.
eager     for a library that launches one equation at a time from Python, like the measured system: a kernel takes its
          roofline time, or one launch per equation that computes something, whichever is more.

Both have five parameters: the efficiency of products at two sizes, the memory bandwidth (at most the data sheet's),
the launch time, and a factor for the time of the tensor-parallel all_reduces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import meshdsl as md
from models.transformer import lm

from .programs import Array, Programs, Rates, Work, check, device_seconds, machine_file, mean, report, solve

LAYOUT = "batch:data; heads:model; d_ff:model; vocab:model"
LENGTH, HEADS, VOCAB = 1024, 16, 51200
SIZES = (1e10, 1e12)  # FLOPs of the products at which the efficiency is fitted
PEAK, VECTOR, BANDWIDTH = 312e12, 19.5e12, 2.039e12  # A100 80 GB, data sheet
START = {
    "efficiency_1e10": (0.6, 0.05, 0.95),
    "efficiency_1e12": (0.7, 0.05, 0.95),
    "bandwidth": (0.8, 0.4, 1.0),  # of the data sheet's
    "launch": (20.0, 1.0, 80.0),  # microseconds
    "sending": (1.0, 0.3, 3.0),
}  # start, least, most


class Case(NamedTuple):
    """A program: a model, a layout and a micro-batch size."""

    d_model: int
    layers: int
    tp: int
    dp: int
    micro_batch: int

    @property
    def mesh(self) -> str:
        return f"data:{self.dp} model:{self.tp}"

    @property
    def workload(self) -> md.Workload:
        return lm.replace(
            batch=self.micro_batch * self.dp, length=LENGTH, vocab=VOCAB, layers=self.layers, d_model=self.d_model,
            heads=HEADS, d_head=self.d_model // HEADS, d_ff=4 * self.d_model, activation="gelu", tied=True,
            remat=True, compute_dtype="bfloat16", reduce_dtype="bfloat16",
        )  # fmt: skip


class Run(NamedTuple):
    """A measurement."""

    case: Case
    batch: int
    seconds: float

    @property
    def trips(self) -> float:
        """The number of micro-batches per replica."""
        return self.batch / self.case.micro_batch / self.case.dp

    @property
    def model(self) -> tuple[int, int]:
        return self.case.d_model, self.case.layers

    @property
    def choice(self) -> tuple[int, ...]:
        """The key shared by runs of one model, number of GPUs and batch size, whose layouts are compared."""
        return (*self.model, self.case.tp * self.case.dp, self.batch)


def runs(rows: Sequence[dict[str, Any]]) -> list[Run]:
    """The measurements; raises an error for a row of another experiment."""
    measurements: list[Run] = []
    for row in rows:
        if row["group"] != "vtrain_single":
            continue
        m, p = row["model_config"], row["parallelism"]
        if (m["seq"], m["heads"], p["pp"], p["recompute"]) != (LENGTH, HEADS, 1, "full"):
            raise ValueError(f"row {row['id']} is not of this experiment: {m} {p}")
        case = Case(m["d_model"], m["layers"], p["tp"], p["dp"], m["micro_batch"])
        measurements.append(Run(case, m["global_batch"], row["measured"]["iter_time_ms"] * 1e-3))
    return measurements


@dataclass(frozen=True)
class Table:
    """The kernels of all cases, concatenated, and the case index of each run."""

    kernels: Work  # the forward and backward parts, concatenated
    starts: Array  # where each case begins
    sending: Array  # of each case: seconds of the tensor-parallel collectives of a micro-batch
    gradients: Array  # seconds of the gradients' all_reduce
    updating: Array  # bytes that the update moves
    case: Array  # of each run
    trips: Array
    measured: Array

    def summed(self, values: Array) -> Array:
        """Sums over the kernels of each case."""
        return np.add.reduceat(values * self.kernels.trips, self.starts)


def table(programs: Programs, measured: Sequence[Run]) -> tuple[Table, dict[Case, Work]]:
    """Traces the cases that are not cached, and builds the table for the fit."""
    cases = sorted({run.case for run in measured})
    works = {case: programs.work(case.workload, case.mesh, LAYOUT) for case in cases}
    network = md.machine("a100-p4de").network
    parts: dict[str, list[Array]] = defaultdict(list)
    columns: dict[str, list[float]] = defaultdict(list)
    for case, work in works.items():
        placement = md.place(network, md.Mesh(case.mesh))
        keep = ~work.update
        for name in ("trips", "calls", "products", "vector", "moved", "scores", "update"):
            parts[name].append(getattr(work, name)[keep])
        columns["sending"].append(sum(placement.seconds(k, a, v) * n for k, a, v, n in work.sends if a == ("model",)))
        gradients = sum(v * n for _, a, v, n in work.sends if a == ("data",))
        columns["gradients"].append(placement.seconds("all_reduce", ["data"], gradients))
        columns["updating"].append(float((work.trips * work.moved)[work.update].sum()))
    kernels = Work(**{name: np.concatenate(values) for name, values in parts.items()}, sends=(), parameters=0)
    ends = np.cumsum([len(values) for values in parts["trips"]])
    index = {case: i for i, case in enumerate(cases)}
    return Table(
        kernels,
        starts=np.concatenate([[0], ends[:-1]]),
        **{name: np.array(values) for name, values in columns.items()},
        case=np.array([index[run.case] for run in measured]),
        trips=np.array([run.trips for run in measured]),
        measured=np.array([run.seconds for run in measured]),
    ), works


def rates(x: Sequence[float] | Array) -> Rates:
    """The device for these parameters; larger products are at least as efficient as small ones."""
    efficiency = np.maximum.accumulate(x[:2]).tolist()
    return Rates(PEAK, VECTOR, x[2] * BANDWIDTH, tuple(zip(SIZES, efficiency, strict=True)))


def predict(data: Table, eager: bool, x: Sequence[float] | Array) -> Array:
    """The predicted seconds of every run."""
    k = data.kernels
    device = device_seconds(rates(x), k.products, k.vector, k.moved)
    launch = x[3] * 1e-6
    kernels = np.maximum(device, launch * k.calls) if eager else device + launch
    micro_batch = data.summed(kernels) + x[4] * data.sending
    update = data.gradients + data.updating / (x[2] * BANDWIDTH)
    return data.trips * micro_batch[data.case] + update[data.case]


def fit(data: Table, eager: bool, rows: Array) -> dict[str, float]:
    """The parameters that fit these rows best."""
    return solve(lambda x: np.log(predict(data, eager, x)[rows] / data.measured[rows]), START)


def quality(measured: Sequence[Run], seconds: Array) -> dict[str, Any]:
    """Errors, rank correlation, and the slowdown from choosing the layout that is predicted to be fastest."""
    from scipy.stats import kendalltau

    truth = np.array([run.seconds for run in measured])
    choices: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, run in enumerate(measured):
        choices[run.choice].append(i)
    several = [at for at in choices.values() if len(at) > 1]
    lost = [truth[min(at, key=lambda i: seconds[i])] / truth[at].min() - 1 for at in several]
    orders: list[Any] = [kendalltau(seconds[at], truth[at]).statistic for at in several]  # pyright: ignore
    return {
        "rows": len(measured),
        "mean_error": mean(np.abs(seconds / truth - 1)),
        "within_15%": mean(np.abs(seconds / truth - 1) <= 0.15),
        "kendall_tau": round(float(np.asarray(kendalltau(seconds, truth)[0])), 4),
        "kendall_tau_within_choices": mean(orders),
        "choices": len(several),
        "lost_by_best": mean(lost),
    }


def run(rows: Sequence[dict[str, Any]], programs: Programs) -> Iterator[dict[str, Any]]:
    """The JSON lines of this part."""
    measured = runs(rows)
    data, works = table(programs, measured)
    models = np.array([measured[i].model for i in range(len(measured))])
    for name, eager in (("compiled", False), ("eager", True)):
        held_out = np.zeros(len(measured))
        for model in np.unique(models, axis=0):
            test = (models == model).all(axis=1)
            fitted = fit(data, eager, ~test)
            held_out[test] = predict(data, eager, list(fitted.values()))[test]
            yield {"part": "iteration", "model_of_a_step": name, "held_out": model.tolist(),
                   **quality([r for r, t in zip(measured, test, strict=True) if t], held_out[test])}  # fmt: skip
        yield {"part": "iteration", "model_of_a_step": name, "held_out": "each in turn", **quality(measured, held_out)}
        fitted = fit(data, eager, np.ones(len(measured), dtype=bool))
        yield {"part": "iteration", "model_of_a_step": name, "fitted_to": "all",
               "parameters": {key: round(value, 3) for key, value in fitted.items()},
               **quality(measured, predict(data, eager, list(fitted.values())))}  # fmt: skip
        if not eager:
            yield from agreement(works, list(fitted.values()))


def agreement(works: dict[Case, Work], x: list[float]) -> Iterator[dict[str, Any]]:
    """Compares the arrays with the cost tool, on a machine file with the fitted figures."""
    import tempfile
    from pathlib import Path

    device = rates(x)
    with tempfile.TemporaryDirectory() as folder:
        file = machine_file(
            Path(folder), "a100-p4de", efficiency=[list(point) for point in device.efficiency],
            hbm_bandwidth=device.bandwidth, launch=x[3] * 1e-6, vector=VECTOR,
            asynchronous=[],
        )  # fmt: skip
        for case in (min(works), max(works)):
            cost = report(case.workload, case.mesh, LAYOUT, machine=file)
            yield {"part": "iteration", "agreement_with_compiled_cost": list(case),
                   "difference": round(check(works[case], cost, device), 6)}  # fmt: skip
