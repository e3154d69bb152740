"""Two tables of the papers, reproduced from programs: python -m benchmarks.paper_tables

Mesh-TensorFlow's Table 1 (Shazeer et al., 2018) gives the cost per processor of five layouts of the two-layer example,
each as a sum of products of sizes. This script draws random sizes, partitions the train step and reads its costs.
Computation and communication are fitted as sums of the paper's terms: the coefficients are positive and the fit is
exact. Peak memory stays between two multiples of the paper's sum.

GShard's Table 4 (Lepikhin et al., 2020) gives the order of growth of operators when the number of partitions and the
sharded dims grow together. This script computes the slope of log(cost) over log(partitions), from 8 to 512 partitions,
without running anything. Communication is compared in bytes that a partition sends, where the paper's order is one of
bytes; that of the dispatch, O(sqrt(D)), is one of time on a torus, so its time is compared, on TPU v3.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.models.mlp import LAYOUTS, mlp

MACHINE = "tpu-v4"  # supports 512 partitions; the figures do not depend on it
CASES = 24
PARTITIONS = (8, 32, 128, 512)
Terms = Callable[[Mapping[str, float]], list[float]]
Samples = list[tuple[dict[str, float], dict[str, float]]]  # sizes, and the program's costs


@dataclass(frozen=True)
class Row:
    """One layout of Table 1: the terms of each cost, in the sizes b, i(o), h and the sizes of the mesh axes."""

    mesh: str
    computation: Terms
    communication: Terms
    memory: Terms


TABLE_1 = {
    "empty": Row(
        "all",
        lambda s: [s["b"] * s["i"] * s["h"]],
        lambda s: [],
        lambda s: [s["b"] * s["i"], s["b"] * s["h"], s["i"] * s["h"]],
    ),
    "data": Row(
        "all",
        lambda s: [s["b"] * s["i"] * s["h"] / s["n"]],
        lambda s: [s["i"] * s["h"]],
        lambda s: [s["b"] * s["i"] / s["n"], s["b"] * s["h"] / s["n"], s["i"] * s["h"]],
    ),
    "model": Row(
        "all",
        lambda s: [s["b"] * s["i"] * s["h"] / s["n"]],
        lambda s: [s["b"] * s["i"]],
        lambda s: [s["b"] * s["i"], s["b"] * s["h"] / s["n"], s["i"] * s["h"] / s["n"]],
    ),
    "data_model": Row(
        "rows cols",
        lambda s: [s["b"] * s["i"] * s["h"] / s["n"]],
        lambda s: [s["b"] * s["i"] / s["rows"], s["i"] * s["h"] / s["cols"]],
        lambda s: [s["b"] * s["i"] / s["rows"], s["b"] * s["h"] / s["n"], s["i"] * s["h"] / s["cols"]],
    ),
    "three_d": Row(
        "rows cols planes",
        lambda s: [s["b"] * s["i"] * s["h"] / s["n"]],
        lambda s: [
            s["b"] * s["i"] / s["rows"] / s["planes"],
            s["b"] * s["h"] / s["rows"] / s["cols"],
            s["i"] * s["h"] / s["cols"] / s["planes"],
        ],
        lambda s: [
            s["b"] * s["i"] / s["rows"] / s["planes"],
            s["b"] * s["h"] / s["rows"] / s["cols"],
            s["i"] * s["h"] / s["cols"] / s["planes"],
        ],
    ),
}


def table_1(layout: str) -> dict[str, Any]:
    """The fitted coefficients of the paper's terms, and the largest relative error."""
    row, rng = TABLE_1[layout], np.random.default_rng(1)
    samples: Samples = []
    for _ in range(CASES):
        axes = {axis: int(2 ** rng.integers(1, 4)) for axis in row.mesh.split()}
        n = math.prod(axes.values())
        b, i, h = (int(n * 2 ** rng.integers(3, 10)) for _ in range(3))
        workload = mlp.replace(batch=b, io=i, hidden=h)
        mesh = " ".join(f"{axis}:{size}" for axis, size in axes.items())
        step = md.compile(workload.train_step(), mesh, LAYOUTS[layout][1], donate=(0, 1))
        reports = step.cost(*workload.specs(), machine=MACHINE)
        costs = {
            "computation": sum(line.flops for line in reports.ledger.lines if line.matmul is not None),
            "communication": sum(c.bytes * c.count for c in reports.program.collectives),
            "memory": reports.memory.peak,
        }
        samples.append(({"b": b, "i": i, "h": h, "n": n, **axes}, costs))
    return {
        "table": "Mesh-TensorFlow 1",
        "layout": layout,
        **{cost: fit(getattr(row, cost), cost, samples) for cost in ("computation", "communication")},
        "memory": bounds(row.memory, "memory", samples),
    }


def fit(terms: Terms, cost: str, samples: Samples) -> dict[str, Any]:
    """Fits a cost as a sum of its terms by least squares of relative errors.

    For communication, adds terms that the paper omits: reductions of the bias (terms in h) and of the loss (a
    constant).
    """
    exact = np.array([costs[cost] for _, costs in samples])
    term_count = len(terms(samples[0][0]))
    if not term_count:
        return {"coefficients": [], "error": float(np.max(exact) > 0)}
    dropped = [[s["h"], s["h"] / s.get("cols", 1), 1.0] if cost == "communication" else [] for s, _ in samples]
    rows = np.array([[*terms(s), *dropped_terms] for (s, _), dropped_terms in zip(samples, dropped, strict=True)])
    x, *_ = np.linalg.lstsq(rows / exact[:, None], np.ones(len(exact)), rcond=None)
    error = float(np.max(np.abs(rows @ x / exact - 1)))
    return {"coefficients": [round(float(v), 3) for v in x[:term_count]], "error": error}


def bounds(terms: Terms, cost: str, samples: Samples) -> dict[str, Any]:
    """The smallest and largest ratio of a cost to the sum of its terms, and the range of the sums in powers of ten.

    A peak is a maximum of several sums, so it is not a sum of terms; a bounded ratio shows that it has the same order.
    """
    sums = [sum(terms(s)) for s, _ in samples]
    ratios = [costs[cost] / total for (_, costs), total in zip(samples, sums, strict=True)]
    return {
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "orders": round(math.log10(max(sums) / min(sums)), 1),
    }


@dataclass(frozen=True)
class Operator:
    """One row of Table 4: an operator, the dims that grow with the number of partitions D, and the paper's orders."""

    name: str
    grows: str
    function: Callable[..., md.Tensor]
    specs: Callable[[int], list[Any]]
    layout: md.Layout
    compute: float  # order of the computation per partition: 0 is O(1), 1 is O(D)
    communication: float | None  # the paper's order of communication; None: a partition sends nothing
    kinds: tuple[str, ...] = ()
    unit: str = "bytes"  # of the paper's order: bytes that a partition sends, or seconds


def _matmul(x: md.Tensor, y: md.Tensor) -> md.Tensor:
    return md.prefer(md.einsum(x, y, out="A C"), "A")


def _moe(gates: md.Tensor, x: md.Tensor) -> md.Tensor:
    return md.prefer(md.einsum(gates, x, out="E G C M"), "E")


def _pair(a: int, b: int, c: int) -> list[Any]:
    return [md.spec(f"A:{a} B:{b}"), md.spec(f"B:{b} C:{c}")]


def _image(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.conv(x, w, window={"X": "x", "Y": "y"}, out="B O X Y")


TABLE_4 = (
    Operator("Add(A,A->A)", "A", lambda x, y: x + y, lambda d: [md.spec(f"A:{64 * d}")] * 2, md.Layout("A:d"), 0, None),
    Operator(
        "Matmul(AB,BC->AC)", "B", _matmul, lambda d: _pair(64, 64 * d, 64), md.Layout("B:d"), 0, 0, ("all_reduce",)
    ),
    Operator("Matmul(AB,BC->AC)", "A", _matmul, lambda d: _pair(64 * d, 64, 64), md.Layout("A:d"), 0, None),
    Operator(
        "Matmul(AB,BC->AC)",
        "A,B",
        _matmul,
        lambda d: _pair(16 * d, 16 * d, 16),
        md.Layout("A:d", overrides={"y": "B:d"}),
        1,
        1,
        ("all_gather",),
    ),
    Operator(
        "Matmul(AB,BC->AC)",
        "A,C",
        _matmul,
        lambda d: _pair(16 * d, 16, 16 * d),
        md.Layout("A:d", overrides={"y": "C:d"}),
        1,
        1,
        ("all_gather",),
    ),
    Operator(
        "Reduce(AB->A)", "A", lambda x: md.sum(x, "B"), lambda d: [md.spec(f"A:{64 * d} B:64")], md.Layout("A:d"), 0,
        None,
    ),
    Operator(
        "Reduce(AB->A)", "B", lambda x: md.sum(x, "B"), lambda d: [md.spec(f"A:64 B:{64 * d}")], md.Layout("B:d"), 0, 0,
        ("all_reduce",),
    ),
    Operator(
        "Einsum(GSEC,GSM->EGCM)",
        "G,E",
        _moe,
        lambda d: [md.spec(f"G:{d} S:1024 E:{d} C:{1024 // d}"), md.spec(f"G:{d} S:1024 M:16")],
        md.Layout("G:d E:d", overrides={"gates": "G:d E:", "x": "G:d"}),
        0,
        0.5,
        ("all_to_all",),
        "seconds",
    ),
    Operator(
        "Convolution(BIXY,xyIO->BOXY)",
        "X",
        _image,
        lambda d: [md.spec(f"B:2 I:4 X:{16 * d} Y:16"), md.spec("x:3 y:3 I:4 O:4")],
        md.Layout("X:d"),
        0,
        0,
        ("permute",),
    ),
)  # fmt: skip


def table_4(operator: Operator) -> dict[str, Any]:
    """The slopes of computation and communication over partitions, and the paper's orders."""
    reports: list[md.Report] = []
    for d in PARTITIONS:
        step = md.compile(operator.function, f"d:{d}", operator.layout)
        reports.append(step.cost(*operator.specs(d), machine=MACHINE))
    kinds = sorted({record.kind for record in reports[-1].program.collectives})
    compute = slope([report.ledger.flops for report in reports])
    sent = [sum(c.bytes * c.count for c in report.program.collectives) for report in reports]
    communication = slope(sent) if any(sent) else None
    timed = operator.unit == "seconds"
    compared = dispatch_order() if timed else communication
    equal = (
        abs(compute - operator.compute) < 0.05
        and (compared is None) == (operator.communication is None)
        and abs((compared or 0) - (operator.communication or 0)) < (0.1 if timed else 0.05)
        and tuple(kinds) == operator.kinds
    )
    return {
        "table": "GShard 4",
        "operator": operator.name,
        "grows": operator.grows,
        "compute_order": round(compute, 3),
        "bytes_order": None if communication is None else round(communication, 3),
        **({"seconds_order": round(compared, 3)} if timed and compared is not None else {}),
        "collectives": kinds,
        "paper": {"compute_order": operator.compute, f"{operator.unit}_order": operator.communication},
        "equal": equal,
    }


def dispatch_seconds(partitions: Sequence[int]) -> list[float]:
    """The time of the dispatch's all_to_all of 8 MB from each partition, on TPU v3 cores."""
    layout = next(operator.layout for operator in TABLE_4 if operator.function is _moe)
    seconds: list[float] = []
    for d in partitions:
        step = md.compile(_moe, f"d:{d}", layout)
        specs = [md.spec(f"G:{d} S:4096 E:{d} C:{4096 // d}"), md.spec(f"G:{d} S:4096 M:512")]
        seconds += [sum(send.seconds for send in step.cost(*specs, machine="tpu-v3").sends)]
    return seconds


def dispatch_order() -> float:
    """The exponent of that time, while the torus does not wrap: blocks travel O(sqrt(D)) links."""
    return slope(dispatch_seconds(PARTITIONS))


def dispatch_growth() -> dict[str, Any]:
    """Its growth from 16 to 2,048 partitions, whose torus wraps around. Section 5.3 measured 9 times."""
    first, last = dispatch_seconds((16, 2048))
    growth = last / first
    return {"table": "GShard 4", "operator": "all_to_all", "time_growth": round(growth, 2), "paper": {"time_growth": 9}}


def slope(costs: Sequence[float]) -> float:
    """The exponent of growth with the number of partitions, by least squares."""
    return float(np.polyfit(np.log(PARTITIONS), np.log(costs), 1)[0])


def main() -> int:
    """Print a JSON line for each row; returns 1 if an order differs from the paper's."""
    failures = 0
    for layout in TABLE_1:
        row = table_1(layout)
        print(json.dumps(row), flush=True)
        parts = [row[cost] for cost in ("computation", "communication")]
        failures += any(part["error"] > 1e-9 or any(c <= 0 for c in part["coefficients"]) for part in parts)
        failures += row["memory"]["most"] > 3 * row["memory"]["least"]
    for operator in TABLE_4:
        row = table_4(operator)
        print(json.dumps(row), flush=True)
        failures += not row["equal"]
    print(json.dumps(dispatch_growth()), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
