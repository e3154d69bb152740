"""The kernels of one device in a published run, and the time that the cost tool predicts for them.

`Programs` traces the train step of a run once and keeps its kernels as arrays, which a refit evaluates thousands of
times, and the times of `Compiled.cost`. One micro-batch is traced. Of its program, the update and the collectives of
gradients over the data axes run once a step; everything else runs once a micro-batch. The gradients of replicated
parameters are reduced in buckets beside the backward pass of the last micro-batch, as PyTorch's
`DistributedDataParallel` does (Li et al., VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md

from .runs import Run

__all__ = ["PLAIN", "Array", "Programs", "StepTime", "Work", "beside", "mean", "solve"]

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]
REPLICAS = {"data", "slice"}  # the axes over which gradients are reduced
PLAIN = 7 / 12  # FLOPs of a fused causal attention over those of the plain formula


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a micro-batch and of what runs once a step, and the half-width of the interval."""

    micro: float
    once: float
    width: float
    regime: str

    def seconds(self, run: Run) -> float:
        """Seconds of a whole step."""
        return run.micro * self.micro + self.once


@dataclass(frozen=True)
class Work:
    """The kernels of a program, one row each, and its products, each with the number of its kernel."""

    trips: Array
    operations: Array  # that the host launches
    vector: Array  # FLOPs
    moved: Array  # bytes without attention scores
    scores: Array  # bytes of attention scores
    once: Array  # whether it runs once a step
    backward: Array  # whether it is part of the backward pass
    kernel: Array  # of each product: the number of its kernel
    flops: Array  # of each product, and of an attention's plain formula
    sending: float  # seconds of a micro-batch's collectives, on the packaged machine
    sending_once: float
    gathered: float  # seconds of a micro-batch's collectives over the data axes, which run beside its kernels


class Programs:
    """Times and arrays of traced runs, kept in a file between runs of this command; valid for one state of the code."""

    def __init__(self, file: Path | None):
        self.file, self.state = file, _sources()
        self.known: dict[str, Any] = {}
        if file is not None and file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            self.known = stored["programs"] if stored["sources"] == self.state else {}

    def save(self) -> None:
        """Write the cache file atomically."""
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps({"sources": self.state, "programs": self.known}), encoding="utf-8")
            part.replace(self.file)

    def time(self, run: Run) -> StepTime:
        """The time of `Compiled.cost`."""
        return StepTime(**self._entry(run)["time"])

    def work(self, run: Run) -> Work:
        """The kernels as arrays."""
        stored = self._entry(run)["work"]
        values: dict[str, Any] = {name: np.array(v) if isinstance(v, list) else v for name, v in stored.items()}
        return Work(**values)

    def _entry(self, run: Run) -> dict[str, Any]:
        key = f"{run.machine} {run.key}"
        if key not in self.known:
            report = run.step().cost(*run.workload.specs(), machine=run.machine)
            self.known[key] = {"time": vars(_time(report, run)), "work": _lists(_work(report, run))}
        return self.known[key]


def _time(report: md.Report, run: Run) -> StepTime:
    """A machine's times; without accumulation, a replicated gradient is reduced in every micro-batch, here once."""
    timeline, first = report.timeline, _backward(report)
    once = [each for each in timeline.costs if _runs_once(each.line, first, run)]
    sending = sum(each.blocking for each in once if each.line.collective is not None)
    total = sum(each.blocking for each in once)
    backward = sum(each.blocking for each in timeline.costs if _in_backward(each.line))
    last = total - sending + beside(sending, backward, report.machine)
    return StepTime(timeline.seconds - total, last, report.machine.half_width(timeline.regime), timeline.regime)


def beside(sending: float, backward: float, machine: md.Machine) -> float:
    """The seconds that collectives add to a step if they run beside a backward pass of so many seconds."""
    hidden = min(sending, backward)
    return sending - hidden + (machine.overlap_slowdown - 1) * hidden


def _in_backward(line: Any) -> bool:
    return bool(line.backward) and line.collective is None


def _backward(report: md.Report) -> int:
    return next(line.index for line in report.ledger.lines if line.backward)


def _runs_once(line: Any, backward: int, run: Run) -> bool:
    record = line.collective
    if record is not None:
        return not run.sharded and bool(REPLICAS & set(record.axes))
    return line.index > backward and not line.backward


def _work(report: md.Report, run: Run) -> Work:
    backward = _backward(report)
    kernels: dict[Any, list[Any]] = {}
    sends = {"micro": 0.0, "once": 0.0, "gathered": 0.0}
    for each in report.timeline.costs:
        line = each.line
        if line.collective is None:
            kernels.setdefault(line.step, []).append(line)
            continue
        once = _runs_once(line, backward, run)
        gathered = run.sharded and bool(REPLICAS & set(line.collective.axes))
        sends["once" if once else "gathered" if gathered else "micro"] += each.seconds
    columns: dict[str, list[float]] = {field.name: [] for field in fields(Work)[:9]}
    for number, lines in enumerate(kernels.values()):
        columns["trips"].append(lines[0].trips)
        columns["operations"].append(sum(line.kind != "move" for line in lines))
        columns["vector"].append(sum(line.flops for line in lines if line.kind == "vector"))
        columns["moved"].append(sum(line.hbm_bytes - line.score_bytes for line in lines))
        whole = sum(line.attention.score_bytes for line in lines if line.attention is not None)
        columns["scores"].append(sum(line.score_bytes for line in lines) + whole)
        columns["once"].append(all(_runs_once(line, backward, run) for line in lines))
        columns["backward"].append(all(_in_backward(line) for line in lines))
        for line in (line for line in lines if line.kind == "matmul"):
            columns["kernel"].append(number)
            columns["flops"].append(line.flops / (PLAIN if line.attention is not None else 1))
    arrays = {name: np.array(values) for name, values in columns.items()}
    return Work(**arrays, sending=sends["micro"], sending_once=sends["once"], gathered=sends["gathered"])


def _lists(work: Work) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(work).items()}


def _sources() -> str:
    """A hash of the code and the machine files that a time depends on."""
    files = [*sorted((ROOT / "meshdsl").rglob("*.py")), *sorted((ROOT / "meshdsl").rglob("*.toml"))]
    files += [ROOT / "models" / "transformer.py", Path(__file__), Path(__file__).with_name("runs.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def solve(residuals: Callable[[Array], Array], start: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """The parameters, each given as (start, lower, upper), that minimise a robust loss of the residuals."""
    from scipy.optimize import least_squares

    x0, low, high = (np.array(values) for values in zip(*start.values(), strict=True))
    solution = least_squares(residuals, x0, loss="soft_l1", f_scale=0.1, bounds=(low, high), x_scale=np.abs(x0))
    return dict(zip(start, solution.x.tolist(), strict=True))


def mean(values: Sequence[float] | Array) -> float:
    """The mean, rounded for printing."""
    return round(float(np.mean(values)), 4)
