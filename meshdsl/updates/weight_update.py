"""Decide which weight updates are sharded, over which device groups and with which buckets; and the table of decisions.

`shard_updates` finds and shards the updates. This module decides which ones: all of them, or those that are
faster on a machine.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import lru_cache
from typing import Any

from ..cost.machine import Machine
from ..cost.memory import memory
from ..errors import LayoutError, nearest
from ..errors.no_effect import NoEffectError, no_effect
from ..errors.tables import table
from ..errors.units import show_bytes
from ..ir import Because, Graph, Var, walk
from ..layouts import Layout, Mesh, Sharding
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.partition import partition
from ..passes.hoist import hoist_casts
from ..passes.simplify import cast_rows_in_loops
from .bucket_collectives import bucket_collectives, bucketed_tensors
from .groups import GroupSpec, RefinedMesh, group_of
from .pending import ShardedGraph, cast_each_part
from .shard_updates import Decision, Policy, Verdict, shard_updates
from .update import Update
from .update_time import all_groups, best_mesh, by_time, fastest_buckets, least_padded, on_refined, step_seconds

MODES = ("replicated", "sharded", "auto")
_Split = tuple[Graph, Layout, tuple[Decision, ...]]  # the graph with sharded updates, its layout, and the decisions


@dataclass(frozen=True)
class WeightUpdate:
    """The options of the weight update, for weights that several devices store (Xu et al., 2020).

    `mode` is "replicated": every device updates its complete copy; "sharded": each device updates one shard, and the
    weight and its optimizer state stay sharded between steps; or "auto": sharded where that is faster on the machine of
    `md.compile(machine=)`.

    `group` names the mesh axes along which devices share an update, `"x core"`, or parts of axes, `"rows:32"` or
    `{"rows": 32}`; the default is all axes over which the gradient is summed ("sharded"), or the fastest ("auto").
    Without a group, an axis is divided in two where that saves a tenth of the padded weights, so that a weight is
    sharded over two dims where none is long enough for the axis.
    Gradients are scattered inside a group, and their shards are summed across groups. Tensors of fewer than
    `bucket_bytes` bytes are gathered, scattered or summed in one collective, those of each layer together in a loop
    over layers; None means no buckets ("sharded") or the fastest buckets ("auto"). With `regather`, a sharded weight is
    gathered again for the backward pass instead of kept, and inside loops over layers one layer at a time: this needs
    less memory and sends half as many bytes again (ZeRO stage 3). Weights that the update computes from a float32 copy
    are then stored as shards too.

    >>> import meshdsl as md
    >>> md.WeightUpdate("sharded", group="rows:32", bucket_bytes=100_000)
    WeightUpdate(mode='sharded', group='rows:32', bucket_bytes=100000, regather=False)

    Raises `LayoutError` for an unknown mode, and `md.NoEffectError` for options without effect; with `strict=False`
    they are dropped with a `md.NoEffectWarning`.
    """

    mode: str = "replicated"
    group: GroupSpec | None = None
    bucket_bytes: float | None = None
    regather: bool = False
    strict: InitVar[bool] = True

    def __post_init__(self, strict: bool):
        if self.mode not in MODES:
            raise LayoutError(f"weight_update={self.mode!r} is not available; {nearest(self.mode, MODES)}")
        if self.mode == "replicated" and self.regather:
            why = "regather=True has no effect with weight_update='replicated': no weight is gathered"
            no_effect(NoEffectError(why), strict)
            object.__setattr__(self, "regather", False)
        if self.mode == "replicated" and self.group is not None:
            why = f"group={self.group!r} has no effect with weight_update='replicated': each device updates all"
            no_effect(NoEffectError(f"{why}\n  use the mode 'sharded' or 'auto'"), strict)
            object.__setattr__(self, "group", None)
        if self.bucket_bytes is not None and not self.bucket_bytes >= 0:
            raise LayoutError(
                f"bucket_bytes is a number of bytes from 0, or None for the default; got {self.bucket_bytes!r}"
            )


@dataclass(frozen=True)
class UpdateTable:
    """The decision for each weight. `print` shows a table."""

    mode: str
    decisions: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        if not self.decisions:
            return "weight update: replicated; every device updates its whole copy"
        header = ["weight", "shape", "update cut by", "group", "saved", "time", ""]
        rows = table(header, map(_row, self.decisions), "<" * len(header), indent=0, width=sys.maxsize)
        total = sum(d.bytes_saved for d in self.decisions)
        sharded = sum(d.sharded for d in self.decisions)
        return f"{rows}\n{sharded} of {len(self.decisions)} sharded; {show_bytes(total)} less on each device"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mode": self.mode,
            "weights": [
                {
                    "weight": d.weight,
                    "shape": {dim.name: dim.size for dim in d.dims},
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


def _row(d: Decision) -> tuple[str, str, str, str, str, str, str]:
    shape = " ".join(f"{dim.name}={dim.size}" for dim in d.dims)
    split = " ".join(f"{dim}:{','.join(axes)}" for dim, axes in d.split) if d.sharded else "-"
    seconds = "" if d.seconds_saved is None else f"{d.seconds_saved * 1e6:.0f} us"
    saved = show_bytes(d.bytes_saved) if d.sharded else ""
    return d.weight, shape, split, _group(d) or "-", saved, seconds, d.reason


def _group(decision: Decision) -> str:
    """`x`, or `x of y,x` if the gradient is summed over more axes than those that split the update."""
    group = ",".join(decision.group)
    return f"{group} of {','.join(decision.pending)}" if decision.group != decision.pending else group


@dataclass(frozen=True)
class ShardedUpdates:
    """A graph whose weight updates run on private dims, the layout that shards these dims, and the decisions."""

    graph: Graph
    layout: Layout
    refined: RefinedMesh  # the mesh with the axes of the groups
    table: UpdateTable
    program: Program | None = None  # of this graph, if a machine compared it with others


def shard(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Sequence[str],
    request: WeightUpdate,
    machine: Machine | None,
    strict: bool = True,
    donated: Sequence[int] = (),
) -> ShardedUpdates:
    """The graph with its weight updates sharded as requested; the same graph if no update is worth sharding.

    A machine judges each update alone. Where the whole step, with its buckets, takes longer so than with all of them
    sharded, or none, or does not fit the machine's memory, it is that one. `donated` are the numbers of inputs whose
    memory the results may reuse.

    Raises `LayoutError` for an illegal layout, and `NoEffectError` for "sharded" if no update can be sharded, and, if
    `strict`, for `regather` if that changes nothing.
    """
    hoisted = _prepared(graph, request.regather)
    shardings: dict[Var, Sharding] = {}
    program = partition(hoisted, mesh, layout, results, shardings)
    placed = ShardedGraph(hoisted, results, shardings, mesh, program.extents, layout, request.regather)
    made = _sharded(placed, request, machine, graph, layout)
    decisions = made.table.decisions
    if request.mode == "sharded" and not any(d.sharded or d.by_layout for d in decisions):
        reasons = "".join(f"\n  {d.weight}: {d.reason}" for d in decisions[:8])
        raise NoEffectError(
            "weight_update='sharded' has nothing to shard: no weight has an update that several devices repeat"
            + (reasons or "\n  no input of the function is replaced by a result of the same path and type")
            + "\n  use weight_update='replicated', or 'auto', which shards only where that is faster"
        )
    if machine is None:
        return _with_regather(made, placed, request, strict)
    every = _sharded(placed, request, None, graph, layout)
    if not any(d.sharded for d in every.table.decisions):
        return made
    reason = f"on {machine.name} the step takes longer with sharded updates"
    none = tuple(replace(d, sharded=False, reason=d.reason or reason, bytes_saved=0) for d in decisions)
    whole = ShardedUpdates(graph, layout, RefinedMesh(mesh, mesh), UpdateTable(request.mode, none))
    choices = [
        replace(choice, program=partition(choice.graph, choice.refined.mesh, choice.layout, results))
        for choice in (made, every)
    ]

    def missing_bytes_and_seconds(choice: ShardedUpdates) -> tuple[float, float]:
        bucketed = _bucketed(choice.program or program, request, machine, choice.refined)
        peak = memory(bucketed, donated=[bucketed.ins[i] for i in donated], machine=machine).peak
        return max(peak - machine.hbm, 0), step_seconds(bucketed, machine, choice.refined)

    return min(*choices, whole, key=missing_bytes_and_seconds)


@lru_cache(maxsize=8)
def _prepared(graph: Graph, regather: bool) -> Graph:
    """The graph whose updates are found, with casts where weights are sent; the same for every layout."""
    return hoist_casts(cast_rows_in_loops(cast_each_part(graph)) if regather else graph)


def _with_regather(made: ShardedUpdates, placed: ShardedGraph, request: WeightUpdate, strict: bool) -> ShardedUpdates:
    """The sharded updates; `regather` is an error if it changes nothing."""
    gathers_again = (Because.WEIGHT_AGAIN, Because.WEIGHT_IN_LAYER)
    if not request.regather or any(eqn.cause.kind in gathers_again for eqn, _ in walk(made.graph)):
        return made
    kept = _sharded(replace(placed, regather=False), request, None, made.graph, made.layout)
    if str(kept.graph) == str(made.graph):
        sharded = ", ".join(d.weight for d in made.table.decisions if d.sharded)
        why = f"the backward pass reads none of the weights whose updates are sharded ({sharded or 'none'})"
        no_effect(NoEffectError(f"regather=True has no effect: {why}\n  leave regather out"), strict)
    return made


def _sharded(
    placed: ShardedGraph, request: WeightUpdate, machine: Machine | None, graph: Graph, layout: Layout
) -> ShardedUpdates:
    """The updates that the machine, or without one the mode, chooses; the given graph if that is none."""
    refined, (sharded, private, decisions) = _shard(placed, request, machine)
    table = UpdateTable(request.mode, decisions)
    if not any(d.sharded for d in decisions):
        return ShardedUpdates(graph, layout, RefinedMesh(placed.mesh, placed.mesh), table)
    return ShardedUpdates(sharded, private, refined, table)


def _shard(placed: ShardedGraph, request: WeightUpdate, machine: Machine | None) -> tuple[RefinedMesh, _Split]:
    """The mesh with the groups' axes, and what `shard_updates` returns on it."""
    mesh, candidates = placed.mesh, list[Update]()
    sizes = {} if request.group is None else group_of(mesh, request.group)
    given = RefinedMesh.of(mesh, sizes)

    def groups(fine: RefinedMesh) -> Callable[[Axes], Sequence[Axes]]:
        if sizes:
            return _axes_in_group(given.group if fine is given else fine.axes(sizes))
        return _all_pending_axes if machine is None else all_groups

    def on(refined: RefinedMesh) -> _Split:
        fine = on_refined(refined, placed)
        worth = _always_shard if machine is None else by_time(fine, machine, refined)

        def noted(update: Update) -> Verdict:
            largest = update.group == tuple(axis for axis in update.pending if not sizes or axis in sizes)
            if largest and update not in candidates:
                candidates.append(update)
            return worth(update)

        return shard_updates(fine, Policy(groups(refined), noted))

    split = on(given)
    if _has_sizes(request.group):
        return given, split
    best = least_padded(placed, candidates) if machine is None else best_mesh(placed, machine, candidates)
    return (best, on(best)) if best.parts else (given, split)


def _has_sizes(group: GroupSpec | None) -> bool:
    """True for a group whose sizes the user gave."""
    return group is not None and not (isinstance(group, Mapping) and None in group.values())


def bucket(program: Program, request: WeightUpdate, machine: Machine | None, refined: RefinedMesh) -> Program:
    """Bucket the program's small collectives.

    The limit is `request.bucket_bytes`. If a machine decides, it is the fastest of a few limits around the bytes that a
    collective sends in the time of its latency. Raises `NoEffectError` if a limit joins nothing.
    """
    bucketed = _bucketed(program, request, machine, refined)
    if request.bucket_bytes and not bucketed_tensors(bucketed):
        raise NoEffectError(
            f"bucket_bytes={request.bucket_bytes:g} joins nothing: no two tensors of fewer bytes are gathered at "
            "the step's start, or scattered or reduced in its update, over the same axes and in one dtype\n"
            "  use a larger limit, or 0 for no buckets"
        )
    return bucketed


def _bucketed(program: Program, request: WeightUpdate, machine: Machine | None, refined: RefinedMesh) -> Program:
    if request.bucket_bytes is not None:
        return _below(program, request.bucket_bytes)
    if machine is None:
        return bucket_collectives(program)
    return fastest_buckets(lambda limit: _below(program, limit), machine, refined)


def _below(program: Program, limit: float) -> Program:
    if not limit:
        return bucket_collectives(program)
    return bucket_collectives(program, lambda kind, axes, sizes: bisect_left(sizes, limit))


def _all_pending_axes(pending: Axes) -> Sequence[Axes]:
    return [pending]


def _axes_in_group(group: Axes) -> Callable[[Axes], Sequence[Axes]]:
    return lambda pending: [shared] if (shared := tuple(axis for axis in pending if axis in group)) else []


def _always_shard(update: Update) -> Verdict:
    return True, None, ""
