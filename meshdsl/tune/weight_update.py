"""Where each weight's update runs: on every device that holds the weight, or on one shard of it each.

`passes.shard_updates` finds the updates and splits them; here is which of them it splits (all that it can, or those
that a machine says are worth it), and the table that tells the user what was decided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cost.machine import Machine
from ..errors import LayoutError, nearest
from ..ir import Graph, Var, verify
from ..layouts import Layout, Mesh, Sharding
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.partition import partition
from ..lowering.program import check
from ..passes.hoist import hoist_casts
from ..passes.weight_update.pending import Placed
from ..passes.weight_update.shard_updates import Decision, Policy, Verdict, shard_updates
from ..passes.weight_update.updates import Update
from ..schedule.bucket_collectives import batch, joined_tensors
from ..units import show_bytes
from .groups import Asked, Finer, group_of
from .update_time import all_groups, best_mesh, by_time, fastest, on_finer

__all__ = ["MODES", "Lowered", "Wanted", "WeightUpdate", "lower"]

MODES = ("replicated", "sharded", "auto")


@dataclass(frozen=True)
class Wanted:
    """What was asked for: a mode of `MODES`, and how. `machine` decides under "auto", and only there."""

    mode: str = "replicated"
    machine: Machine | None = None
    regather: bool = False
    group: Asked | None = None  # mesh axes, or parts of them; None: all, or the best ones
    batch_bytes: float | None = None  # tensors of fewer bytes travel together; None: none, or as is best

    def __post_init__(self):
        """Raises `LayoutError` for what says nothing, or cannot be."""
        if self.mode not in MODES:
            raise LayoutError(f"weight_update={self.mode!r} is not available; {nearest(self.mode, MODES)}")
        if self.mode == "replicated" and self.regather:
            raise LayoutError("regather=True does nothing with weight_update='replicated': no weight is gathered")
        if self.mode == "replicated" and self.group is not None:
            raise LayoutError(
                f"update_group={self.group!r} does nothing with weight_update='replicated': each device updates all\n"
                "  use weight_update='sharded' or 'auto'"
            )
        if self.batch_bytes is not None and not self.batch_bytes >= 0:
            raise LayoutError(
                f"batch_bytes is a number of bytes from 0, or None for what is best; got {self.batch_bytes!r}"
            )


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
            rows.append((d.weight, shape, cut, _group(d) or "-", saved, seconds, d.reason))
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
                    "pending": list(d.pending),
                    "split": {dim: list(axes) for dim, axes in d.split},
                    "sharded": d.sharded,
                    "reason": d.reason,
                    "bytes_saved": d.bytes_saved,
                    "seconds_saved": d.seconds_saved,
                }
                for d in self.decisions
            ],
        }


def _group(decision: Decision) -> str:
    """`x`, or `x of y,x` where the gradient is a sum over more axes than the update is cut over."""
    group = ",".join(decision.group)
    return f"{group} of {','.join(decision.pending)}" if decision.group != decision.pending else group


@dataclass(frozen=True)
class Lowered:
    """A graph with its weight updates where they run, and its program."""

    graph: Graph
    program: Program
    decided: WeightUpdate
    finer: Finer | None = None  # the mesh of the program, where that is not the user's


def lower(
    graph: Graph, mesh: Mesh, layout: Layout, results: Sequence[str], gather_limit: float | None, wanted: Wanted
) -> Lowered:
    """The graph with its updates split as wanted, its program, and the decisions.

    Raises `LayoutError` for an illegal layout, and for a wish that changes nothing: "sharded" when no update can be
    split, `batch_bytes` when no two tensors travel together. A flag that does nothing is a mistake.
    """
    plain = partition(graph, mesh, layout, results, gather_limit, batched=False)
    if wanted.mode == "replicated":
        return Lowered(graph, _batched(plain, wanted), WeightUpdate(wanted.mode))
    hoisted = hoist_casts(graph, graph.ins)
    homes: dict[Var, Sharding] = {}
    program = partition(hoisted, mesh, layout, results, gather_limit, homes)
    placed = Placed(hoisted, results, homes, mesh, program.extents, layout, wanted.regather)
    finer, (split, private, decisions) = _split(placed, wanted)
    if wanted.mode == "sharded" and not any(d.sharded for d in decisions):
        reasons = "".join(f"\n  {d.weight}: {d.reason}" for d in decisions[:8])
        raise LayoutError(
            "weight_update='sharded' has nothing to shard: no weight has an update that several devices repeat"
            + (reasons or "\n  no input of the function is replaced by a result of the same path and type")
            + "\n  use weight_update='replicated', or 'auto', which shards where it pays"
        )
    decided = WeightUpdate(wanted.mode, decisions)
    if not any(d.sharded for d in decisions):
        return Lowered(graph, _batched(plain, wanted), decided)
    program = partition(split, finer.mesh, private, results, gather_limit, batched=False)
    return Lowered(split, _batched(program, wanted, finer), decided, finer)


def _split(placed: Placed, wanted: Wanted) -> tuple[Finer, tuple[Graph, Layout, tuple[Decision, ...]]]:
    """The graph with its updates split, its layout and the decisions, and the mesh that their groups are axes of."""
    mesh, machine = placed.mesh, wanted.machine
    if wanted.group is not None:
        finer = Finer.of(mesh, group_of(mesh, wanted.group))
        placed = on_finer(finer, placed)
        worth = _always if machine is None else by_time(placed, machine, finer)
        return finer, shard_updates(placed, Policy(_within(finer.group), worth))
    finer = Finer(mesh, mesh)
    if machine is None:
        return finer, shard_updates(placed, Policy(_only_all, _always))
    found: list[Update] = []
    worth = by_time(placed, machine, finer)

    def noted(update: Update) -> Verdict:
        found.extend([update] if update.group == update.pending and update not in found else [])
        return worth(update)

    split = shard_updates(placed, Policy(all_groups, noted))
    best = best_mesh(placed, machine, found)
    if not best.parts:
        return finer, split
    placed = on_finer(best, placed)
    return best, shard_updates(placed, Policy(all_groups, by_time(placed, machine, best)))


def _batched(program: Program, wanted: Wanted, finer: Finer | None = None) -> Program:
    """The program with small tensors travelling together: those below a limit, or, where a machine decides, as is best
    for the time of the step, of a few limits around the bytes that a collective moves while its latency passes.
    """
    if wanted.batch_bytes is not None:
        made = _joined(program, wanted.batch_bytes)
        if wanted.batch_bytes and not joined_tensors(made):
            raise LayoutError(
                f"batch_bytes={wanted.batch_bytes:g} joins nothing: no two tensors of fewer bytes are gathered at the "
                "step's start, or scattered or reduced in its update, over the same axes and in one dtype\n"
                "  use a larger limit, or 0 to join none"
            )
        return made
    if wanted.machine is None:
        return _joined(program, 0)
    return fastest(lambda limit: _joined(program, limit), wanted.machine, finer or Finer(program.mesh, program.mesh))


def _joined(program: Program, limit: float) -> Program:
    made = batch(program, lambda kind, axes, sizes: bisect_left(sizes, limit)) if limit else batch(program)
    return check(verify(made, "batch"), "batch")


def _only_all(pending: Axes) -> Sequence[Axes]:
    return [pending]


def _within(group: Axes) -> Callable[[Axes], Sequence[Axes]]:
    return lambda pending: [mine] if (mine := tuple(axis for axis in pending if axis in group)) else []


def _always(update: Update) -> Verdict:
    return True, None, ""
