"""Published times of collectives compared with `md.place(...).seconds`, on points that the table does not contain.

Predictions are for points of at least 16 MB. `half` uses a table of every other size (1, 4, 16, ... MB) and predicts
the sizes in between. `one_out` uses a table of all sizes except the point's, with and without the last sizes, which
need extrapolation. `formula` uses no table, but one bandwidth, one launch time and one latency fitted to the other half
of the sizes of all groups. Galvatron's two nodes have one figure per group: bandwidths are fitted to all groups but
one, and predict that one.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meshdsl as md

from .programs import mean, solve

LARGE = 16e6
KINDS = {
    "allreduce": "all_reduce",
    "all reduce": "all_reduce",
    "all2all": "all_to_all",
    "all gather": "all_gather",
    "reduce scatter": "reduce_scatter",
    "all to all": "all_to_all",
}


class Point(NamedTuple):
    """A measurement: seconds for V bytes over n devices."""

    kind: str
    n: int
    bytes: float
    seconds: float


def points(rows: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """The measurements, grouped by system."""
    by_system: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["group"] not in ("collective_vtrain", "collective_galvatron", "collective_nnscaler"):
            continue
        config, measured = row["model_config"], row["measured"]
        n = row["parallelism"]["n"]
        op: str = config["op"]
        kind = KINDS.get(op, op)
        size = config["bytes"] if "bytes" in config else config["MB"] * 2**20
        seconds = measured["time_us"] * 1e-6 if "time_us" in measured else measured["time_ms"] * 1e-3
        system = row["group"].removeprefix("collective_")
        if system == "vtrain":
            system += "_a100" if "A100" in row["hardware"] else "_v100"
        by_system[system].append(Point(kind, n, size * (n if kind == "all_to_all" else 1), seconds))
    return {system: sorted(set(group_points)) for system, group_points in by_system.items()}


def machine(levels: str, tables: dict[tuple[str, int], list[Point]], launch: float, message: float = 0.0) -> md.Machine:
    """A machine with this network and these tables, read from a machine file like a user's."""
    text = (
        'title = "measured"\ndevice = "GPU"\nvector = 1e13\nhbm = 8e10\nhbm_bandwidth = 1e12\nlaunch = 0.0\n'
        f"efficiency = [[1e9, 0.5]]\n[peak]\nother = 1e14\n[network]\nlaunch = {launch}\n"
        f"message = {message}\n{levels}"
    )
    for (kind, n), group_points in tables.items():
        slowest = np.maximum.accumulate([p.seconds for p in group_points]).tolist()
        pairs = [[p.bytes, seconds] for p, seconds in zip(group_points, slowest, strict=True)]
        text += f'[[network.measured]]\nkind = "{kind}"\ngroup = [{n}]\npoints = {pairs}\n'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.toml"
        file.write_text(text, encoding="utf-8")
        return md.machine(file)


def level(axis: str, size: int, bandwidth: float, latency: float = 0.0, share: int = 1, most: float = 0.0) -> str:
    """A switch level of the machine file."""
    bound = f"device_bandwidth = {most}\n" if most else ""
    return (
        f'[[network.level]]\nkind = "switch"\naxes = {{ {axis} = {size} }}\nbandwidth = {bandwidth}\n'
        f"latency = {latency}\nshare = {share}\n{bound}"
    )


def predicted(on: md.Machine, point: Point) -> float:
    """Seconds predicted by the cost tool."""
    return md.place(on.network, md.Mesh(x=point.n)).seconds(point.kind, ["x"], point.bytes)


def one_node(system: str, group_points: list[Point]) -> Iterator[dict[str, Any]]:
    """The errors on one system for each kind of prediction."""
    groups: dict[tuple[str, int], list[Point]] = defaultdict(list)
    for point in group_points:
        groups[point.kind, point.n].append(point)
    every_other_size = {key: group[::2] for key, group in groups.items()}
    base, launch = _formula([p for group in every_other_size.values() for p in group])
    half, fitted = machine(base, every_other_size, launch), machine(base, {}, launch)
    errors: dict[str, list[float]] = defaultdict(list)
    for key, group in groups.items():
        for i, point in enumerate(group):
            if point.bytes / (point.n if point.kind == "all_to_all" else 1) < LARGE:
                continue
            rest = {key: [p for p in group if p is not point]}
            errors["one_out"].append(predicted(machine(base, rest, launch), point) / point.seconds - 1)
            if i < len(group) - 1:
                errors["one_out, between two points"].append(errors["one_out"][-1])
            if i % 2:
                errors["half"].append(predicted(half, point) / point.seconds - 1)
                errors["formula"].append(predicted(fitted, point) / point.seconds - 1)
    for how, values in errors.items():
        size = np.abs(values)
        yield {"part": "collectives", "system": system, "predicted_by": how, "points": len(values),
               "mean_error": mean(size), "worst": round(float(size.max()), 4)}  # fmt: skip


def _formula(group_points: list[Point]) -> tuple[str, float]:
    """One network level and a launch time, fitted to the points (three figures)."""

    def level_and_launch(x: Any) -> tuple[str, float]:
        return level("gpu", 16, x[0] * 1e9, x[1] * 1e-6), x[2] * 1e-6

    def residuals(x: Any) -> Any:
        levels, launch = level_and_launch(x)
        on = machine(levels, {}, launch)
        return np.log([predicted(on, p) / p.seconds for p in group_points])

    fitted = solve(residuals, {"bandwidth": (100, 1, 1000), "latency": (3, 0, 100), "launch": (30, 1, 300)})
    return level_and_launch(list(fitted.values()))


def messages(system: str, group_points: list[Point]) -> Iterator[dict[str, Any]]:
    """The errors of all_to_alls in groups of sizes between the least and the greatest, to which formulas are fitted.

    One formula has the seconds of a message (`network.message`), the other has not.
    """
    points = [p for p in group_points if p.kind == "all_to_all"]
    sizes = sorted({p.n for p in points})
    ends = [p for p in points if p.n in (sizes[0], sizes[-1])]

    def on(x: Any) -> md.Machine:
        return machine(level("gpu", 16, x[0] * 1e9), {}, x[1] * 1e-6, x[2] * 1e-6 if len(x) > 2 else 0.0)

    for with_messages in (False, True) if len(sizes) > 2 else ():
        start = {"bandwidth": (100, 1, 1000), "launch": (100, 1, 1000)}
        start |= {"message": (10, 0, 100)} if with_messages else {}
        fitted = solve(lambda x: np.log([predicted(on(x), p) / p.seconds for p in ends]), start)
        best = on(list(fitted.values()))
        errors = [abs(predicted(best, p) / p.seconds - 1) for p in points if p not in ends]
        yield {"part": "collectives", "system": system, "predicted_by": f"all_to_all, messages {with_messages}",
               "points": len(errors), "mean_error": mean(errors), "worst": round(max(errors), 4),
               "fitted": {name: round(value, 2) for name, value in fitted.items()}}  # fmt: skip


def two_nodes(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Galvatron's bus bandwidths on two nodes of eight GPUs, for groups inside a node and groups across both nodes.

    nccl-tests ran only the first group of each kind, so the mesh is that group.
    """
    groups: list[tuple[int, bool, float]] = []
    for row in rows:
        if row["group"] == "collective_galvatron2n":
            _, _, n, _, packed = row["model_config"]["group"].split("_")
            groups.append((int(n), packed == "1", row["measured"]["busbw_GBps"]))

    def bus(x: Any, n: int, packed: bool) -> float:
        levels = level("gpu", 8, x[0] * 1e9) + level("node", 2, x[1] * 1e9, share=4, most=x[2] * 1e9)
        assignment = {"x": f"gpu:{n}" if packed and n <= 8 else f"node:2 gpu:{n // 2}"}
        placement = md.place(machine(levels, {}, 0.0).network, md.Mesh(x=n), assignment)
        return 2 * (n - 1) / n / placement.seconds("all_reduce", ["x"], 1e9)

    start = {"in_node": (150, 10, 400), "port": (12, 1, 50), "device": (8, 1, 50)}

    def fit(group_points: list[tuple[int, bool, float]]) -> list[float]:
        return list(solve(lambda x: np.log([bus(x, n, p) / b for n, p, b in group_points]), start).values())

    x = fit(groups)
    for how in ("all", "one_out"):
        errors = [abs(b / bus(fit([g for g in groups if g is not group]) if how == "one_out" else x, n, packed) - 1)
                  for group in groups for n, packed, b in [group]]  # fmt: skip
        yield {"part": "collectives", "system": "galvatron2n", "predicted_by": f"formula, fitted to {how}",
               "points": len(groups), "mean_error": mean(errors), "worst": round(max(errors), 4),
               "GB/s": dict(zip(start, np.round(x, 2).tolist(), strict=True))}  # fmt: skip
    for name, packed in (("packed", True), ("strided", False)):
        (measured,) = [b for n, p, b in groups if n == 8 and p is packed]
        yield {"part": "collectives", "system": "galvatron2n", "group": f"8 {name}", "bus_GB/s": measured,
               "predicted": round(bus(x, 8, packed), 1)}  # fmt: skip


def run(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The JSON lines of this part."""
    totals: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for system, group_points in points(rows).items():
        for line in one_node(system, group_points):
            totals[line["predicted_by"]].append((line["points"], line["mean_error"]))
            yield line
    for system, group_points in points(rows).items():
        yield from messages(system, group_points)
    yield from two_nodes(rows)
    for how, parts in totals.items():
        count = sum(n for n, _ in parts)
        yield {"part": "collectives", "system": "all of one node", "predicted_by": how, "points": count,
               "mean_error": round(sum(n * e for n, e in parts) / count, 4)}  # fmt: skip
