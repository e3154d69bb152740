"""Lower a reshape: on blocks that hold the same elements, as a reshard of the parts of its dims, or as an exchange.

Where the sizes of one shape divide those of the other, both are products of the same parts, in row-major order:
[batch:2 length:16] and [token:4 model:8] of parts of 2, 2 and 8 elements. A dim that is split over axes is a split of
its first parts, all but the last of them completely. So blocks of parts are blocks of the dims of either side, and a
reshard of the parts is one of the reshape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...dims import Dim, Shape, names, size_of
from ...ir import Eqn, Labels, Var
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.index_map import IndexMap, Piece
from ...ops.reshape import RESHAPE, long_groups
from .. import blocks
from ..labels import labels_of
from .index_map import lower_index_map, resized
from .planner import Reshard
from .scope import Scope

Owners = tuple[tuple[Dim, Shape], ...]  # each dim of one side, and the parts of which it is a product


class _Parts(NamedTuple):
    """The parts of a reshape, and the dims of either side that are products of them, without dims of size 1."""

    scope: Scope
    shape: Shape
    before: Owners
    after: Owners

    def spread(self, owners: Owners, sharding: Sharding) -> Sharding:
        """The split of the parts of dims that are split so, as far as blocks of the parts are blocks of the dims."""
        split: dict[str, Axes] = {}
        for dim, parts in owners:
            split |= self._spread(dim, parts, sharding.axes(dim.name))
        return Sharding.of(split, sharding.partial, sharding.kind)

    def _spread(self, dim: Dim, parts: Shape, axes: Axes) -> dict[str, Axes]:
        count = self.scope.setting.mesh.count
        if parts == (dim,):
            return {dim.name: axes}
        left, split = axes, dict[str, Axes]()
        for part in parts:
            fitting = (left[:n] for n in range(len(left), -1, -1) if part.size % count(left[:n]) == 0)
            own = split[part.name] = next(fitting)
            left = left[len(own) :]
            if count(own) != part.size:
                break
        used = tuple(axis for own in split.values() for axis in own)
        return split if self._divides(dim, used) else {}

    def _divides(self, dim: Dim, axes: Axes) -> bool:
        """True if a dim that is split over these axes holds no padding."""
        extents, n = self.scope.setting.extents, self.scope.setting.mesh.count(axes)
        return extents.padded(dim) % n == 0 and not extents.is_padded(dim, n)

    def collected(self, owners: Owners, sharding: Sharding) -> Sharding:
        """The split of dims whose parts are split so; without the axes of parts behind one that is not completely."""
        split: dict[str, Axes] = {}
        for dim, parts in owners:
            axes: Axes = ()
            for part in parts:
                axes += sharding.axes(part.name)
                if self.scope.setting.mesh.count(sharding.axes(part.name)) != part.size:
                    break
            divides = parts == (dim,) or self._divides(dim, axes)
            split[dim.name] = axes if divides else ()
        return Sharding.of(split, sharding.partial, sharding.kind)


def _parts(scope: Scope, left: Shape, right: Shape) -> _Parts | None:
    """The fewest parts of both sides of a reshape; None if the sizes of one side do not divide those of the other."""
    shape, before, after = list[Dim](), list[tuple[Dim, Shape]](), list[tuple[Dim, Shape]]()
    for sides in long_groups(left, right):
        sizes = {math.prod(d.size for d in side[i:]) for side in sides for i in range(len(side) + 1)}
        bounds = sorted(sizes, reverse=True)
        if any(more % less for more, less in pairwise(bounds)):
            return None
        name = f"{sides[0][0].name}__part"
        parts = [
            scope.fresh_dim(f"{name}{i}", a // b, left, right) for i, (a, b) in enumerate(pairwise(bounds), len(shape))
        ]
        if sides[0] == sides[1]:
            parts = list(sides[0])
        shape += parts
        for side, owners in zip(sides, (before, after), strict=True):
            at = 0
            for i, dim in enumerate(side):
                end = bounds.index(math.prod(d.size for d in side[i + 1 :]))
                owners.append((dim, tuple(parts[at:end])))
                at = end
    return _Parts(scope, tuple(shape), tuple(before), tuple(after))


def lower_by_parts(scope: Scope, eqn: Eqn, price: float, assigned: Sharding) -> bool:
    """Lower a reshape as a reshard of its parts, if this sends less than `price`, for a result that is then `assigned`.

    Returns whether it did.
    """
    (x,), (out,), setting = eqn.ins, eqn.outs, scope.setting
    parts = _parts(scope, x.dims, out.dims) if x not in scope.unmaterialized else None
    if parts is None or not price:
        return False
    home = scope.whole_version(x) or scope.default_sharding[x]
    source = parts.spread(parts.before, home)
    target = _target(scope, eqn, parts, parts.collected(parts.after, source.whole()))
    start = parts.collected(parts.before, source)

    def cost(dims: Shape, one: Sharding, other: Sharding) -> float:
        return Reshard(one, other, dims, setting.mesh, setting.extents, x.dtype.itemsize, setting.seconds).cost

    def through(middle: Sharding) -> float:
        after = parts.collected(parts.after, middle)
        return cost(parts.shape, source, middle) + cost(out.dims, after, target)

    kept = parts.spread(parts.after, parts.collected(parts.after, source.whole()))
    middle = min((parts.spread(parts.after, target), kept), key=through)
    if scope.price(x, start) + through(middle) >= price + cost(out.dims, assigned, target):
        return False
    stored = scope.get(x, start, eqn)
    if source != middle:
        between = Var(parts.shape, x.dtype, x.name)
        scope.add(blocks.RELABEL, [stored], [scope.define(between, source)], eqn, shape=parts.shape)
        if x in scope.reasons:
            scope.reasons[between] = scope.reasons[x]
        stored = scope.get(between, middle, eqn)
    result = scope.define(out, parts.collected(parts.after, middle))
    scope.add(blocks.RELABEL, [stored], [result], eqn, shape=out.dims)
    scope.start_from(out, target, eqn)
    return True


def _target(scope: Scope, eqn: Eqn, parts: _Parts, kept: Sharding) -> Sharding:
    """The sharding of the result: the one that is wanted; else the layout's for new dims, and `kept` for the others."""
    (x,), (out,) = eqn.ins, eqn.outs
    if out in scope.setting.wanted:
        return scope.setting.wanted[out]
    layout, whole = scope.setting.layout, scope.setting.whole_dims.get(out, frozenset[str]())
    ruled = [d for d in out.dims if d.name in layout.rules and d not in x.dims]
    axes_of = {d: kept.axes(d.name) for d in out.dims if d in x.dims}
    axes_of |= {d: layout.axes(d.name) if d.name not in whole else () for d in ruled}
    axes_of |= {d: kept.axes(d.name) for d in out.dims if d not in axes_of}
    split, used = dict[str, Axes](), set[str]()
    for d, axes in axes_of.items():
        if used.isdisjoint(axes):
            split[d.name] = axes
            used.update(axes)
    return Sharding.of(split)


def labels(scope: Scope, eqn: Eqn) -> Labels:
    """Those of the operation; blocks that do not match are exchanged."""
    return dataclasses.replace(labels_of(eqn), must_divide=frozenset())


def _aligned(scope: Scope, left: Shape, right: Shape, axes: Axes) -> bool:
    """True if the blocks of both sides hold the same elements, so that a local reshape suffices."""
    extents, n = scope.setting.extents, scope.setting.mesh.count(axes)
    heads = (left[0], right[0])
    if left == right or (len(left) == len(right) == 1 and extents.local(left[0], n) == extents.local(right[0], n)):
        return True
    return all(d.size % n == 0 and not extents.is_padded(d, n) for d in heads)


def needed(scope: Scope, eqn: Eqn, assigned: Mapping[str, Axes]) -> bool:
    return any(
        assigned.get(right[0].name) and not _aligned(scope, left, right, assigned[right[0].name])
        for left, right in long_groups(eqn.ins[0].dims, eqn.outs[0].dims)
    )


def build(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Mapping[str, Axes], outs: Sequence[Var]) -> None:
    """For each group: flatten the block to one run, exchange it into the target's runs, and restore the target's dims.

    Dims of size 1 are removed first: they may have the name of a dim of the target. A group
    with the name of another group's target becomes a run too, so that its name is free when that target is restored.
    """
    (x,), (out,) = ins, outs
    extents = scope.setting.extents
    longer = tuple(d for d in x.dims if d.size > 1)
    if longer != x.dims:
        longer_x = Var(longer, x.dtype, "", x.sharding)
        scope.add(RESHAPE, [x], [longer_x], eqn, shape=longer)
        x = longer_x
    pairs, restored = long_groups(x.dims, out.dims), list[tuple[Dim, Shape, Axes]]()
    for left, right in pairs:
        axes = assigned.get(right[0].name, ())
        reused = {d.name for _, other in pairs if other is not right for d in other} & set(names(left))
        if not reused and (not axes or _aligned(scope, left, right, axes)):
            continue
        n = scope.setting.mesh.count(axes)
        if not axes:
            x = _relabel(scope, eqn, x, left, (scope.fresh_dim(f"{left[0].name}__run", size_of(left), x.dims),), ())
            continue
        runs = [
            scope.fresh_dim(f"{side[0].name}__run{i}", n * extents.local(side[0], n) * size_of(side[1:]), x.dims)
            for i, side in enumerate((left, right))
        ]
        x = _relabel(scope, eqn, x, left, (runs[0],), axes)
        y = resized(x, runs[0], runs[1], axes)
        lower_index_map(scope, eqn, [x], IndexMap((runs[0],), runs[1], (Piece(0, 0, 0, size_of(left)),)), axes, y)
        x = y
        restored.append((runs[1], right, axes))
    for run, right, axes in restored:
        x = _relabel(scope, eqn, x, (run,), right, axes)
    scope.add(eqn.operation, [x], outs, eqn, **eqn.params)


def _relabel(scope: Scope, eqn: Eqn, x: Var, old: Shape, new: Shape, axes: Axes) -> Var:
    at = x.dims.index(old[0])
    rest = [d for d in x.dims if d not in old]
    shape = (*rest[: sum(d not in old for d in x.dims[:at])], *new, *rest[sum(d not in old for d in x.dims[:at]) :])
    relabelled = Var(shape, x.dtype, "", x.sharding.with_split(old[0].name, ()).with_split(new[0].name, axes))
    scope.add(blocks.RELABEL, [x], [relabelled], eqn, shape=shape)
    return relabelled
