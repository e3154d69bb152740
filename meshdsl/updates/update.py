"""Find the weight updates of a train step: their gradients, their equations, and how each could be split.

An update starts from pending sums (gradients) and computes the new weight and the new optimizer state. All devices
along the axes of those sums compute the same update, so it is redundant. Shardings of values come from the partitioner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ..dims import Dim, Shape, fresh_dim
from ..ir import Eqn, Graph, Scan, Var, While
from ..layouts import Mesh, Sharding
from ..layouts.sharding import Axes
from .grow import Region, Replaced, Step
from .pending import ShardedGraph, pending_sums
from .regions import CannotShardError, Format, UpdateRegion


@dataclass(frozen=True, eq=False)
class Update:
    """The update of one weight: its equations, and how it would be split."""

    graph: Graph  # the step, or the body of a loop over steps
    weight: Var
    sums: tuple[Var, ...]
    pending: Axes  # the axes over which the sums are pending, so the update is redundant along them
    group: Axes  # the axes over which it would be split; over the others the shards are summed
    format: Format
    part: UpdateRegion
    carried: tuple[Var, ...]  # inputs of the step that stay split between steps

    @property
    def across(self) -> Axes:
        """The axes between groups: the shards are summed over them, and every group computes the complete update."""
        return tuple(axis for axis in self.pending if axis not in self.group)


def carried(placed: ShardedGraph) -> list[tuple[Var, Var]]:
    """Match each input to the result that replaces it.

    The result has the same type and the same path, apart from the first name (the argument's or the result's). If
    several results match, the one in the argument's position is used. Arguments that are single tensors are matched to
    the single result of their name, else to those left of the same type, in order.
    """
    results = list(zip(placed.results, placed.graph.outs, strict=True))
    named = {path: out for path, out in results if "/" not in path}
    inputs = [v for v in placed.graph.ins if v.dims]
    matches = _in_trees(placed, results)
    matches |= {v: named[v.name] for v in inputs if v.name in named and named[v.name].type == v.type}
    single = [out for out in named.values() if out not in matches.values()]
    for v in (v for v in inputs if v not in matches and "/" not in v.name):
        if same_type := [out for out in single if out.type == v.type]:
            matches[v] = same_type[0]
            single.remove(same_type[0])
    return [(v, matches[v]) for v in inputs if v in matches]


def _in_trees(placed: ShardedGraph, results: Sequence[tuple[str, Var]]) -> dict[Var, Var]:
    """The inputs inside trees, with the results of the same path and type, apart from the path's first name."""
    names = dict.fromkeys(v.name.partition("/")[0] for v in placed.graph.ins)
    position = {argument: i for i, argument in enumerate(names)}
    by_tail: dict[str, dict[str, Var]] = {}
    for path, out in results:
        for tail in dict.fromkeys((path, path.partition("/")[2])):
            by_tail.setdefault(tail, {})[path] = out
    matches: dict[Var, Var] = {}
    for v in placed.graph.ins:
        argument, _, tail = v.name.partition("/")
        if not v.dims or not tail:
            continue
        candidates = {path: out for path, out in by_tail.get(tail, {}).items() if out.type == v.type}
        by_path = [candidates[path] for path in (v.name, f"{position[argument]}/{tail}") if path in candidates]
        if by_path or len(candidates) == 1:
            matches[v] = (by_path or list(candidates.values()))[0]
    return matches


def _why_no_sums(placed: ShardedGraph, out: Var) -> str:
    """The reason why no gradient that is summed over devices reaches this result."""
    loop = placed.graph.producers.get(out)
    if loop is not None and isinstance(loop.control, Scan | While):
        body = loop.control.body
        summed = any(pending_sums(placed, body, body.outs[loop.outs.index(out)]).all())
        if summed or isinstance(loop.control, While):
            return f"its update is inside a {loop.op.name} at {loop.where}"
    return "its gradient is not a sum over devices"


def find_update(
    placed: ShardedGraph,
    v: Var,
    out: Var,
    replaced: Replaced,
    owners: Mapping[Eqn | Var, str],
    groups: Callable[[Axes], Sequence[Axes]],
    seconds_saved: Callable[[Update], float],
) -> Update:
    """The update of one weight, split over the group of its pending axes that saves the most.

    Raises `CannotShardError` if no group can split it.
    """
    pending_gradient = pending_sums(placed, placed.graph, out)
    sums = tuple(pending_gradient.all())
    axes = _pending_axes(placed, v, out, sums)

    def along(form: Format, group: Axes) -> Update:
        region = Region(Step(placed, form, group, owners), placed.graph, pending_gradient, replaced).grow()
        if not region.holds(out):
            raise CannotShardError(region.reason(out) or "its update needs all of its gradient")
        return Update(placed.graph, v, sums, axes, group, form, region.update(), tuple(region.carried))

    def cut(group: Axes) -> Update:
        form = _format(placed, v, sums, group)
        try:
            return along(form, group)
        except CannotShardError as problem:  # along another dim, its equations may be split
            for d in (d for d in _dims(v, sums) if all(d != old for old, _, _ in form.dims)):
                other = _format(placed, v, sums, group, (d,))
                with contextlib.suppress(CannotShardError):
                    if other.padding_ratio == 1:
                        return along(other, group)
            raise problem

    first, *other_groups = groups(axes) or [()]
    if not first:
        raise CannotShardError(f"its gradient is a sum over {', '.join(axes)}, and no axis of the group is among them")
    update = cut(first)
    best = max((update, *(recut(placed, update, group) for group in other_groups)), key=seconds_saved)
    return update if best is update else cut(best.group)


def _pending_axes(placed: ShardedGraph, v: Var, out: Var, sums: Sequence[Var]) -> Axes:
    """The axes over which the gradient of a weight is summed and its update can be split; else `CannotShardError`."""
    if not sums:
        raise CannotShardError(_why_no_sums(placed, out))
    if out in sums:
        raise CannotShardError("it is replaced by its gradient, so there is no update")
    pending = {placed.shardings[g].partial for g in sums}
    if len(pending) > 1:
        raise CannotShardError("its gradients are pending over different axes")
    stored = placed.shardings.get(v, Sharding()).split_axes
    axes = tuple(a for a in placed.mesh.axes if a in next(iter(pending)) and a not in stored)
    if not axes:
        raise CannotShardError("the layout splits it, and so its update, over all devices that sum its gradient", True)
    if not _dims(v, sums):
        raise CannotShardError("it has no dim to cut")
    return axes


def recut(placed: ShardedGraph, update: Update, group: Axes) -> Update:
    """The update split over another group, for counting bytes only: its equations are not checked."""
    form = _format(placed, update.weight, update.sums, group)
    return dataclasses.replace(update, group=group, format=form)


def _dims(weight: Var, sums: Sequence[Var]) -> Shape:
    """The dims that can be split: without the layer dim, if the gradient is computed layer by layer."""
    return tuple(d for d in weight.dims if all(d in g.dims for g in sums))


def _format(placed: ShardedGraph, weight: Var, sums: Sequence[Var], axes: Axes, among: Shape | None = None) -> Format:
    """Choose the dims to split: the first dim that divides; otherwise the least padding, then the fewest dims.

    A dim that the layout splits is used last if it does not divide: its blocks under the private name would differ.
    `among` are the dims to choose from, if not all.
    """
    mesh, extents, shape = placed.mesh, placed.extents, _dims(weight, sums) if among is None else among
    gradient = placed.shardings[sums[0]]
    split = dict(gradient.split)  # and as the weight is stored, which the sum is scattered to anyway
    split |= {
        d: by
        for d, by in placed.shardings.get(weight, Sharding()).split
        if set(by) <= {*gradient.partial, *gradient.axes(d)}
    }
    padded = tuple(extents.padded(d) for d in shape)
    return _least_padded(
        mesh, shape, padded, Sharding.of(split), tuple(split.items()), axes, placed.graph.known_dim_names
    )


def least_padded(mesh: Mesh, shape: Shape, sharding: Sharding, axes: Axes, taken: frozenset[str]) -> Format:
    """The dims of a value to split further over `axes`, and private names for them that are not taken."""
    return _least_padded(mesh, shape, tuple(d.size for d in shape), sharding, sharding.split, axes, taken)


@lru_cache(maxsize=4096)
def _least_padded(
    mesh: Mesh,
    shape: Shape,
    padded: tuple[int, ...],
    sharding: Sharding,
    split: Sequence[tuple[str, Axes]],
    axes: Axes,
    taken: frozenset[str],
) -> Format:
    sizes = dict(zip(shape, padded, strict=True))

    def name(d: Dim, by: Axes) -> Dim:
        return fresh_dim(Dim(f"{d.name}__{'_'.join(by).replace('.', '__')}", d.size), taken)

    def cut(assignment: Sequence[Dim]) -> tuple[int, Format]:
        cuts: dict[Dim, Axes] = {}
        for axis, d in zip(axes, assignment, strict=True):
            cuts[d] = (*cuts.get(d, sharding.axes(d)), axis)
        stored = {d: -(-d.size // mesh.count(by)) * mesh.count(by) for d, by in cuts.items()}
        moved = sum(bool(sharding.axes(d)) and n != sizes[d] for d, n in stored.items())
        padding_ratio = math.prod(n / max(d.size, 1) for d, n in stored.items())
        dims = tuple((d, name(d, by), by) for d, by in cuts.items())
        kept = tuple((d, by) for d, by in split if all(d != old.name for old in cuts))
        return moved, Format(dims, padding_ratio, mesh.count(axes), kept)

    for d in shape:
        moved, form = cut([d] * len(axes))
        if not moved and form.padding_ratio == 1:
            return form
    every = (cut(assignment) for assignment in product(shape, repeat=len(axes)))
    return min(every, key=lambda option: (option[0], option[1].padding_ratio, len(option[1].dims)))[1]
