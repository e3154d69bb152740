"""The computation and communication of a published training run, from meshdsl's program of the same model.

`work` traces a train step and stores its costs per kernel as a few arrays, which a fit can evaluate thousands of times.
`device_seconds` is the roofline of the cost tool (`compiled.cost`) on these arrays; `check` compares the two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]
SCORES = "length", "memory"  # the dims of attention's scores


@dataclass(frozen=True)
class Work:
    """A train step on one device, per kernel. Kernels of the update run once, the others once per micro-batch."""

    trips: Array  # trips of the loop over layers
    calls: Array  # number of equations that compute something, which a library without a compiler launches one by one
    products: Array  # FLOPs of matrix products
    vector: Array  # FLOPs of the rest
    moved: Array  # bytes read and written
    scores: Array  # bytes of attention scores, which a fused attention kernel does not read or write
    update: Array  # whether the kernel belongs to the update
    sends: tuple[tuple[str, tuple[str, ...], float, int], ...]  # (kind, mesh axes, bytes V, trips)
    parameters: float  # number of parameters on one device

    @property
    def size(self) -> int:
        """The number of kernels."""
        return len(self.trips)


@dataclass(frozen=True)
class Rates:
    """The fitted figures of a device; the other figures of a machine file are constants."""

    peak: float
    vector: float
    bandwidth: float
    efficiency: tuple[tuple[float, float], ...]

    def of_size(self, flops: Array) -> Array:
        """The fraction of the peak that products of this many FLOPs reach, as in `Machine.matmul_efficiency`."""
        index, fraction = zip(*self.efficiency, strict=True)
        return np.interp(np.log(np.maximum(flops, 1.0)), np.log(index), fraction)


def device_seconds(rates: Rates, products: Array, vector: Array, moved: Array) -> Array:
    """The seconds of each kernel on the device, without launch time."""
    computing = products / (rates.peak * rates.of_size(products)) + vector / rates.vector
    return np.maximum(computing, moved / rates.bandwidth)


class Programs:
    """The results of `work`, cached in a file between runs of the script; valid for one state of the sources."""

    def __init__(self, file: Path | None):
        self.file = file
        self.known: dict[str, Any] = {}
        if file is not None and file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            self.known = stored["work"] if stored["sources"] == _sources() else {}

    def save(self) -> None:
        """Write the cache file atomically."""
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps({"sources": _sources(), "work": self.known}), encoding="utf-8")
            part.replace(self.file)

    def work(self, workload: md.Workload, mesh: str, layout: str) -> Work:
        """The work of one device in a train step."""
        key = f"{workload.name} {workload.config} {mesh} {layout}"
        if key not in self.known:
            self.known[key] = _lists(_work(report(workload, mesh, layout)))
        stored = dict(self.known[key])
        sends = tuple((kind, tuple(axes), size, trips) for kind, axes, size, trips in stored.pop("sends"))
        parameters = stored.pop("parameters")
        return Work(**{name: np.array(values) for name, values in stored.items()}, sends=sends, parameters=parameters)


def report(workload: md.Workload, mesh: str, layout: str, machine: Any = "a100-p4de") -> md.Report:
    """The cost report of a train step."""
    params, state, batch = workload.specs()
    step = md.compile(workload.train_step(), mesh, layout, donate=(0, 1))
    return step.cost(params, state, batch, machine=machine)


def _work(cost: md.Report) -> Work:
    program, lines = cost.program, cost.ledger.lines
    backward = [line.index for line in lines if line.backward]
    kernels: dict[int, list[Any]] = {}
    sends: list[tuple[str, tuple[str, ...], float, int]] = []
    for line in lines:
        record = line.collective
        if record is None:
            kernels.setdefault(id(line.step), []).append(line)
            continue
        whole = record.bytes * (program.mesh.count(record.axes) if record.kind == "all_to_all" else 1)
        sends.append((record.kind, record.axes, float(whole), line.trips))
    columns: dict[str, list[float]] = {f.name: [] for f in dataclasses.fields(Work)[:7]}
    for group in kernels.values():
        first, step = group[0], group[0].step
        stored = [*step.reads, *step.writes]
        scores = [v for v in stored if {d.name for d in v.shape}.issuperset(SCORES)]
        moved = sum(line.hbm_bytes for line in group)
        columns["trips"].append(first.trips)
        columns["calls"].append(sum(line.kind != "move" and line.op != "cast" for line in group))
        columns["products"].append(sum(line.flops for line in group if line.kind == "matmul"))
        columns["vector"].append(sum(line.flops for line in group if line.kind != "matmul"))
        columns["moved"].append(moved)
        columns["scores"].append(min(moved, sum(map(program.local_bytes, scores))))
        columns["update"].append(first.index > backward[0] and not any(line.backward for line in group))
    held = [v for v in program.ins if v.name.startswith("params/")]
    count = sum(program.local_bytes(v) / v.dtype.itemsize for v in held)
    return Work(**{k: np.array(v) for k, v in columns.items()}, sends=tuple(sends), parameters=count)


def check(work: Work, cost: md.Report, rates: Rates) -> float:
    """The relative difference between the arrays' device seconds and the cost tool's, on a machine with these rates."""
    ours = work.trips @ device_seconds(rates, work.products, work.vector, work.moved)
    launches = work.trips.sum() * cost.machine.launch
    tool_seconds = sum(cost.seconds for cost in cost.timeline.costs if cost.line.collective is None) - launches
    return abs(ours / tool_seconds - 1)


def machine_file(folder: Path, base: str, **changes: Any) -> Path:
    """The packaged machine with other values for top-level keys of its file."""
    import tomllib

    text = Path(md.machine(base).file).read_text(encoding="utf-8")
    lines = text.splitlines()
    for key, value in changes.items():
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{key} ="))
        lines[index] = f"{key} = {json.dumps(value)}"
    file = folder / f"{base}-fitted.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tomllib.loads(file.read_text(encoding="utf-8"))
    return file


def _lists(work: Work) -> dict[str, Any]:
    fields = {f.name: getattr(work, f.name) for f in dataclasses.fields(Work)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def _sources() -> str:
    """A hash of the sources that a program and its costs depend on."""
    units = ("ops", "layouts", "lowering", "passes", "nn", "optim")
    files = [file for unit in units for file in sorted((ROOT / "meshdsl" / unit).rglob("*.py"))]
    files += [ROOT / "meshdsl" / f"{name}.py" for name in ("ir", "trace", "autodiff", "control", "params")]
    files += [ROOT / "meshdsl" / "cost" / f"{name}.py" for name in ("fusion", "ledger")]
    files += [ROOT / "models" / "transformer.py", Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def solve(residuals: Callable[[Array], Array], start: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """The parameters, each given as (start, lower, upper), that minimise a robust loss of the residuals."""
    from scipy.optimize import least_squares

    x0, low, high = (np.array(values) for values in zip(*start.values(), strict=True))
    scale = np.maximum(x0, 1e-3)
    solution = least_squares(residuals, x0, loss="soft_l1", f_scale=0.1, bounds=(low, high), x_scale=scale)
    return dict(zip(start, solution.x.tolist(), strict=True))


def mean(values: Sequence[float] | Array) -> float:
    """The mean, rounded for printing."""
    return round(float(np.mean(values)), 4)
