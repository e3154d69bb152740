"""Estimate on a machine which choice is fastest: sharding an update or not, its group, and the bucket limit.

An update is judged alone: an all-reduce of its gradient and all of its memory traffic against a reduce-scatter, one
shard's traffic and an all-gather, by the machine's network. Bucket limits are judged by the time of the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import combinations

from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement, place
from ..cost.timeline import timeline
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.partition.placement_ops import stages
from .bucket_collectives import bucketed_tensors
from .groups import RefinedMesh, refined_meshes
from .pending import ShardedGraph
from .regions import UpdateRegion
from .shard_updates import Verdict
from .update import Update, recut

LESS = 0.1  # share of padded weights that a divided axis must save


def all_groups(pending: Axes) -> Sequence[Axes]:
    """Every group of these axes, the largest first."""
    return [group for n in range(len(pending), 0, -1) for group in combinations(pending, n)]


def by_time(placed: ShardedGraph, machine: Machine, refined: RefinedMesh) -> Callable[[Update], Verdict]:
    """A function that judges whether sharding an update is faster: saved memory traffic against added collectives."""
    network = _network(machine, refined)

    def seconds(kind: str, axes: Axes, size: float) -> float:
        return network.seconds(kind, axes, size) if axes and size else 0.0

    traffic_of: dict[UpdateRegion, tuple[int, int, float]] = {}

    def moved(update: Update) -> tuple[int, int, float]:
        """Bytes of the gradient, of the update's reads and writes, and of its results that the rest of the step
        reads.
        """
        if update.part not in traffic_of:
            gradient = placed.bytes(update.sums[0])
            gathered = sum(placed.bytes(v) * often for v, often in update.part.gathered)
            traffic_of[update.part] = gradient, 2 * sum(map(placed.bytes, update.carried)) + gradient, gathered
        return traffic_of[update.part]

    def worth(update: Update) -> Verdict:
        ways, padding_ratio = update.format.ways, update.format.padding_ratio
        gradient, traffic, gathered = moved(update)
        before = len(update.sums) * seconds("all_reduce", update.pending, gradient) + traffic / machine.hbm_bandwidth

        def in_steps(kind: str, size: float) -> float:
            return sum(seconds(kind, axes, size * fraction) for axes, fraction in _steps(placed, update))

        inside = in_steps("reduce_scatter", gradient * padding_ratio)
        across = seconds("all_reduce", update.across, gradient * padding_ratio / ways)
        kept = traffic * padding_ratio / ways / machine.hbm_bandwidth
        after = len(update.sums) * (inside + across) + kept + in_steps("all_gather", gathered * padding_ratio)
        saved = before - after
        reason = "" if saved > 0 else f"on {machine.name} the collectives cost more than the update"
        return saved > 0, saved, reason

    return worth


def _steps(placed: ShardedGraph, update: Update) -> list[tuple[Axes, float]]:
    """The axes of each reduce_scatter of a gradient, with the fraction of the gradient that it scatters."""
    cuts = (tuple(axis for axis in by if axis in update.group) for _, _, by in update.format.dims)
    steps: list[tuple[Axes, float]] = []
    fraction = 1.0
    for axes in stages(placed.mesh, cuts):
        steps.append((axes, fraction))
        fraction /= placed.mesh.count(axes)
    return steps


def best_mesh(placed: ShardedGraph, machine: Machine, updates: Sequence[Update]) -> RefinedMesh:
    """The refined mesh in whose groups these updates are fastest; the mesh itself unless that saves over 1 % more."""

    def saved(refined: RefinedMesh) -> float:
        fine = on_refined(refined, placed)
        worth, total = by_time(fine, machine, refined), 0.0
        for update in updates:
            update = dataclasses.replace(update, pending=refined.axes(update.pending))
            groups = [recut(fine, update, group) for group in all_groups(update.pending)]
            total += max(0.0, *(worth(candidate)[1] or 0.0 for candidate in groups))
        return total

    mesh = placed.mesh
    coarse, axes = RefinedMesh(mesh, mesh), [a for a in mesh.axes if any(a in update.pending for update in updates)]
    best = max(refined_meshes(mesh, axes), key=saved, default=coarse)
    return best if saved(best) > 1.01 * saved(coarse) else coarse


def least_padded(placed: ShardedGraph, updates: Sequence[Update]) -> RefinedMesh:
    """The refined mesh on which these updates have least padding; the mesh itself unless that saves a tenth of them.

    Where no dim of a weight is long enough for an axis, two dims are for the two parts of a divided one: the update is
    sharded over the product of both (Xu et al., 2020, section on sharding representation, combines such dims).
    """

    def stored(refined: RefinedMesh) -> float:
        fine, total = on_refined(refined, placed), 0.0
        for update in updates:
            form = recut(fine, update, refined.axes(update.group)).format
            total += placed.bytes(update.weight) * form.padding_ratio
        return total

    mesh = placed.mesh
    coarse, axes = RefinedMesh(mesh, mesh), [a for a in mesh.axes if any(a in update.group for update in updates)]
    before, sizes = stored(coarse), [(stored(refined), refined) for refined in refined_meshes(mesh, axes)]
    least = min((size for size, _ in sizes), default=before)
    if least >= (1 - LESS) * before:
        return coarse
    return [refined for size, refined in sizes if size <= 1.01 * least][-1]  # that with the smallest groups


def on_refined(refined: RefinedMesh, placed: ShardedGraph) -> ShardedGraph:
    """The same graph, with all shardings in the refined mesh's axes."""
    if not refined.parts:
        return placed
    shardings = {v: refined.sharding(sharding) for v, sharding in placed.shardings.items()}
    graph, layout = refined.graph(placed.graph), refined.layout(placed.layout)
    return dataclasses.replace(placed, graph=graph, shardings=shardings, mesh=refined.mesh, layout=layout)


def fastest_buckets(joined: Callable[[float], Program], machine: Machine, refined: RefinedMesh) -> Program:
    """The program with the bucket limit that gives the shortest step.

    `joined` builds the program for a limit. The limits tried are 0 (no buckets), and a few around the bytes that a
    collective sends in the time of its latency.
    """
    network, none = _network(machine, refined), joined(0)
    most = max((_latent_bytes(network, r.op.timed_as, r.axes) for r in none.collectives), default=0.0)
    programs = {
        bucketed_tensors(program): program for program in (none, *(joined(most / part) for part in (256, 16, 1, 0.25)))
    }
    if len(programs) == 1:
        return none
    return min(programs.values(), key=lambda program: step_seconds(program, machine, refined))


def step_seconds(program: Program, machine: Machine, refined: RefinedMesh) -> float:
    """The predicted seconds of a step."""
    return timeline(ledger(program), machine, _network(machine, refined)).seconds


def _latent_bytes(network: Placement, kind: str, axes: Axes) -> float:
    """The bytes of a collective that spends half of its time on latency, to a power of two."""
    size = 1.0
    while network.seconds(kind, axes, size) < 2 * network.seconds(kind, axes, 1.0):
        size *= 2
    return size


def _network(machine: Machine, refined: RefinedMesh) -> Placement:
    return refined.placement(place(machine.network, refined.coarse))
