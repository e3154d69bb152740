"""Where each weight's update runs: on every device that holds the weight, or on one shard of it each.

`passes.shard_updates` finds the updates and splits them; here is which of them it splits (all that it can, or those
that a machine says are worth it), and the table that tells the user what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .cost.machine import Machine
from .cost.network import place
from .errors import LayoutError
from .ir import Graph, Var
from .layouts import Layout, Mesh, Sharding
from .layouts.sharding import Axes
from .lowering import Program, partition
from .lowering.program import show_bytes
from .passes.hoist import hoist_casts
from .passes.shard_updates import Decision, Worth, shard_updates
from .passes.updates import Placed, Update

__all__ = ["MODES", "Lowered", "WeightUpdate", "lower"]

MODES = ("replicated", "sharded", "auto")


@dataclass(frozen=True)
class WeightUpdate:
    """What was decided for each weight. `print` shows the table."""

    mode: str
    decisions: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        if not self.decisions:
            return "weight update: replicated, as asked; every device updates what it holds"
        rows = [("weight", "shape", "update cut by", "group", "saved", "time", "")]
        for d in self.decisions:
            shape = " ".join(f"{dim.name}={dim.size}" for dim in d.shape)
            cut = " ".join(f"{dim}:{','.join(axes)}" for dim, axes in d.split) if d.sharded else "-"
            seconds = "" if d.seconds_saved is None else f"{d.seconds_saved * 1e6:.0f} us"
            saved = show_bytes(d.bytes_saved) if d.sharded else ""
            rows.append((d.weight, shape, cut, ",".join(d.group) or "-", saved, seconds, d.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(d.bytes_saved for d in self.decisions)
        sharded = sum(d.sharded for d in self.decisions)
        lines.append(f"{sharded} of {len(self.decisions)} sharded; {show_bytes(total)} less on each device")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mode": self.mode,
            "weights": [
                {
                    "weight": d.weight,
                    "shape": {dim.name: dim.size for dim in d.shape},
                    "group": list(d.group),
                    "split": {dim: list(axes) for dim, axes in d.split},
                    "sharded": d.sharded,
                    "reason": d.reason,
                    "bytes_saved": d.bytes_saved,
                    "seconds_saved": d.seconds_saved,
                }
                for d in self.decisions
            ],
        }


@dataclass(frozen=True)
class Lowered:
    """A graph with its weight updates where they run, and its program."""

    graph: Graph
    program: Program
    decided: WeightUpdate


def lower(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Sequence[str],
    gather_limit: float | None,
    mode: str,
    machine: Machine | None,
    regather: bool = False,
) -> Lowered:
    """The graph with its updates split as the mode says, its program, and the decisions.

    Raises `LayoutError` for an illegal layout, and under "sharded" when no update can be split: a flag that does
    nothing is a mistake.
    """
    plain = partition(graph, mesh, layout, results, gather_limit)
    if mode == "replicated":
        return Lowered(graph, plain, WeightUpdate(mode))
    hoisted = hoist_casts(graph, graph.ins)
    homes: dict[Var, Sharding] = {}
    program = partition(hoisted, mesh, layout, results, gather_limit, homes)
    placed = Placed(hoisted, results, homes, mesh, program.extents, layout, regather)
    worth = _always if machine is None else _by_time(placed, machine)
    split, private, decisions = shard_updates(placed, worth)
    if mode == "sharded" and not any(d.sharded for d in decisions):
        reasons = "".join(f"\n  {d.weight}: {d.reason}" for d in decisions[:8])
        raise LayoutError(
            "weight_update='sharded' has nothing to shard: no weight has an update that several devices repeat"
            + (reasons or "\n  no input of the function is replaced by a result of the same path and type")
            + "\n  use weight_update='replicated', or 'auto', which shards where it pays"
        )
    decided = WeightUpdate(mode, decisions)
    if split is hoisted:
        return Lowered(graph, plain, decided)
    return Lowered(split, partition(split, mesh, private, results, gather_limit), decided)


def _always(update: Update) -> tuple[bool, float | None, str]:
    return True, None, ""


def _by_time(placed: Placed, machine: Machine) -> Worth:
    """Whether a split update takes less time: what it saves of memory traffic against what it adds in collectives."""
    network = place(machine.network, placed.mesh)

    def seconds(kind: str, axes: Axes, size: float) -> float:
        return network.seconds(kind, axes, size) if axes else 0.0

    def worth(update: Update) -> tuple[bool, float | None, str]:
        ways, axes = update.format.ways, update.axes
        gradient = placed.bytes(update.sums[0])
        traffic = 2 * sum(map(placed.bytes, update.carried)) + gradient
        gathered = update.format.waste * sum(map(placed.bytes, _gathered(placed, update)))
        before = len(update.sums) * seconds("all_reduce", axes, gradient) + traffic / machine.hbm_bandwidth
        after = (
            len(update.sums) * seconds("reduce_scatter", axes, gradient * update.format.waste)
            + traffic * update.format.waste / ways / machine.hbm_bandwidth
            + (seconds("all_gather", axes, gathered) if gathered else 0.0)
        )
        saved = before - after
        reason = "" if saved > 0 else f"on {machine.name} the collectives cost more than the update"
        return saved > 0, saved, reason

    return worth


def _gathered(placed: Placed, update: Update) -> set[Var]:
    """Values of the update that the rest of the step reads, and that are whole for that."""
    return {v for eqn in placed.graph.eqns if eqn not in update.part.eqns for v in eqn.ins if v in update.part.inner}
