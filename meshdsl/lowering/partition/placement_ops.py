"""Lower the operations that only change a value's sharding or dim names, not its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ...control import KEEP
from ...dims import names
from ...ir import Eqn, Graph, Op, Var, walk
from ...layouts import Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.placement import PREFER, RESHARD_TO_PRIVATE_DIM, SHARD
from ...ops.ragged import RAGGED
from ...ops.reshape import RENAME
from .annotations import annotated
from .scope import Scope


def shard(scope: Scope, eqn: Eqn) -> None:
    """Split exactly by the axes that `md.shard` names."""
    target = annotated(eqn, scope.setting.mesh)
    _place(scope, eqn, lambda v: target)


def prefer(scope: Scope, eqn: Eqn) -> None:
    """Split the preferred dims by the layout, and the other dims by the remaining axes.

    A sum stays pending if that is cheaper.
    """
    _place(scope, eqn, lambda v: _preferred(scope, eqn, v))


def _preferred(scope: Scope, eqn: Eqn, v: Var) -> Sharding:
    home = scope.default_sharding[v]
    whole = scope.whole_version(v) or home.whole()
    wins = {d: scope.setting.layout.axes(d) for d in eqn.params["names"]}
    split: dict[str, Axes] = {}
    for d, axes in (*wins.items(), *((d, axes) for d, axes in whole.split if d not in wins)):
        used = {axis for cut in split.values() for axis in cut}
        split[d] = tuple(axis for axis in axes if axis not in used)
    target = Sharding.of(split)
    pending = scope.is_pending(v) and scope.should_defer(v, eqn)
    if pending and not set(home.partial) & set(target.split_axes):
        return Sharding.of(dict(target.split), home.partial, home.kind)
    return _scatters(scope, v, target) if home.kind == "sum" else target


def _scatters(scope: Scope, v: Var, target: Sharding) -> Sharding:
    """The target, with other dims split over the pending axes that the layout gives them: a reduce-scatter and an
    all-gather send no more than the all-reduce.
    """
    pending, split = set(scope.default_sharding[v].partial), dict(target.split)
    for d in v.dims:
        axes = scope.setting.layout.axes(d.name)
        if not split.get(d.name) and axes and set(axes) <= pending - {axis for cut in split.values() for axis in cut}:
            split[d.name] = axes
    return Sharding.of(split)


def _place(scope: Scope, eqn: Eqn, target: Callable[[Var], Sharding]) -> None:
    (v,), (out,) = eqn.ins, eqn.outs
    if _inherited(scope, v, out):
        return
    x = scope.get(v, target(v), eqn)
    scope.versions[out] = [x]
    scope.default_sharding[out] = x.sharding


def _inherited(scope: Scope, v: Var, out: Var) -> bool:
    """Give a result the reason of a pending operand; True if it is unmaterialized too, and nothing is to be done."""
    if v in scope.unmaterialized:
        scope.unmaterialized[out] = scope.unmaterialized[v]
    elif v in scope.reasons:
        scope.reasons[out] = scope.reasons[v]
    return v in scope.unmaterialized


def keep(scope: Scope, eqn: Eqn) -> None:
    """Choose between a kept value and its recomputation.

    The kept value is used if the recomputation would send something or leave a sum to reduce; otherwise the recomputed
    one.
    """
    kept, again = eqn.ins
    chosen = kept if again in scope.required_collectives else again
    if again in scope.default_sharding and scope.default_sharding[again].partial:
        chosen = again if scope.is_pending(again) and scope.should_defer(again, eqn) else kept
    (out,) = eqn.outs
    if not _inherited(scope, chosen, out):
        scope.versions[out] = scope.versions[chosen]
        scope.default_sharding[out] = scope.default_sharding[chosen]


def cut(scope: Scope, eqn: Eqn) -> None:
    """Reduce-scatter a pending sum and rename its dims; dims whose padding depends on the name are renamed first."""
    (v,), (out,), extents = eqn.ins, eqn.outs, scope.setting.extents
    split: dict[str, Axes] = dict(eqn.params["split"])
    home, count = scope.default_sharding[v], scope.setting.mesh.count
    alike = {
        d: all(extents.alike(d, to, count(axes)) for axes in (home.axes(d), split.get(to.name, ())))
        for d, to in zip(v.dims, out.dims, strict=True)
    }
    if all(alike.values()):
        axes = {d.name: split.get(to.name, ()) for d, to in zip(v.dims, out.dims, strict=True)}
        target = Sharding.of(axes)
    else:
        target = Sharding.of({d.name: home.axes(d) for d in v.dims if alike[d]}, home.partial, home.kind)
    x = _scattered(scope, v, target, eqn)
    renamed = {d.name: to.name for d, to in zip(v.dims, out.dims, strict=True)}
    result = scope.define(out, Sharding.of({renamed[d]: axes for d, axes in target.split}, target.partial, target.kind))
    scope.add(RENAME, [x], [result], eqn, shape=out.dims)
    if v in scope.reasons:
        scope.reasons[out] = scope.reasons[v]
    scope.default_sharding[out] = _scattered(scope, out, Sharding.of(split), eqn).sharding


def stages(mesh: Mesh, cuts: Iterable[Axes]) -> list[Axes]:
    """The order of the axis groups along which a sum is scattered: the largest first, to leave less for the others.

    If two groups have as many devices, the one with the more minor axes comes first: its devices are closer together.
    """
    axis_order = list(mesh.axes)
    return sorted(cuts, key=lambda axes: (-mesh.count(axes), -max(map(axis_order.index, axes))))


def _scattered(scope: Scope, v: Var, target: Sharding, eqn: Eqn) -> Var:
    """Reduce-scatter a sum to a sharding, within the groups first, so that only shards are reduced across groups."""
    home, mesh = scope.default_sharding[v], scope.setting.mesh
    cuts = {d: tuple(axis for axis in axes if axis in home.partial) for d, axes in target.split}
    order = stages(mesh, filter(None, cuts.values())) if home.kind == "sum" else []
    split = {d: tuple(axis for axis in axes if axis not in home.partial) for d, axes in target.split}
    left = set(home.partial)
    for axes in order:
        left -= set(axes)
        split |= {d: target.axes(d) for d, cut in cuts.items() if cut == axes}
        scope.get(v, Sharding.of(split, left, home.kind), eqn)
    return scope.get(v, target, eqn)


def mark(scope: Scope, eqn: Eqn) -> None:
    """A marked value keeps its sharding and its pending sums; its counts get the same sharding."""
    (v, counts), (out,) = eqn.ins, eqn.outs
    if _inherited(scope, v, out):
        return
    home = scope.default_sharding[v]
    x = next(x for x in scope.versions[v] if x.sharding == home)
    alike = scope.get(counts, home.along(counts.dims), eqn)
    result = scope.define(out, home, v.name)
    scope.eqns.append(dataclasses.replace(eqn, ins=(x, alike), outs=(result,)))


def counted_dims(graph: Graph) -> dict[Var, frozenset[str]]:
    """For values whose filled slots are sent (`md.ragged`), under all their names, the dims that their counts have.

    What is sent are whole runs of slots, so an exchange of such a value cuts and joins only these dims.
    """
    counted: dict[Var, frozenset[str]] = {}
    if RAGGED not in graph.kinds:
        return counted
    eqns = [eqn for eqn, _ in walk(graph) if eqn.op in (RAGGED, RENAME, PREFER, SHARD)]
    for eqn in eqns:
        if eqn.op is RAGGED:
            counted |= dict.fromkeys((eqn.ins[0], eqn.outs[0]), frozenset(names(eqn.ins[1].dims)))
    pairs = [(eqn.ins[0], eqn.outs[0]) for eqn in eqns]
    for x, y in (*pairs, *((y, x) for x, y in reversed(pairs))):
        if x in counted:
            renamed = {d.name: to.name for d, to in zip(x.dims, y.dims, strict=True)}
            counted.setdefault(y, frozenset(renamed[d] for d in counted[x]))
    return counted


def padded_otherwise(scope: Scope, eqn: Eqn) -> bool:
    """True if a rename moves an axis from another dim to a new name that is padded differently; see `rename_first`."""
    (v,), (out,), extents = eqn.ins, eqn.outs, scope.setting.extents
    if v in scope.unmaterialized or (scope.default_sharding[v].partial and scope.whole_version(v) is None):
        return False
    home, axes_of = scope.whole_version(v) or scope.default_sharding[v], _renamed_axes(scope, eqn)
    count = scope.setting.mesh.count
    unlike = [
        (d, to)
        for d, to in zip(v.dims, out.dims, strict=True)
        if not all(extents.alike(d, to, count(axes)) for axes in (home.axes(d), axes_of[to.name]))
    ]
    if any(home.axes(d.name) for d, _ in unlike):
        return False
    axes_used = [axis for axes in axes_of.values() for axis in axes]
    taken = any(axis in home.split_axes for _, to in unlike for axis in axes_of[to.name])
    return taken and len(set(axes_used)) == len(axes_used)


def rename_first(scope: Scope, eqn: Eqn) -> None:
    """Rename the value in its current sharding, then reshard it: an all-to-all instead of an all-gather."""
    (v,), (out,) = eqn.ins, eqn.outs
    home = scope.whole_version(v) or scope.default_sharding[v]
    x = scope.get(v, home, eqn)
    renamed = {d.name: to.name for d, to in zip(v.dims, out.dims, strict=True)}
    result = scope.define(out, Sharding.of({renamed[d]: axes for d, axes in home.split}))
    scope.eqns.append(dataclasses.replace(eqn, ins=(x,), outs=(result,)))
    scope.start_from(out, Sharding.of(_renamed_axes(scope, eqn)), eqn)


def _renamed_axes(scope: Scope, eqn: Eqn) -> dict[str, Axes]:
    """The layout's axes for the renamed dims; the other dims keep their axes unless a renamed dim takes them."""
    (v,), (out,), layout = eqn.ins, eqn.outs, scope.setting.layout
    home = scope.whole_version(v) or scope.default_sharding[v]
    axes_of = {to.name: layout.axes(to.name) for d, to in zip(v.dims, out.dims, strict=True) if d.name != to.name}
    used = {axis for axes in axes_of.values() for axis in axes}
    kept = {d.name: home.axes(d.name) for d, to in zip(v.dims, out.dims, strict=True) if d.name == to.name}
    return axes_of | {d: tuple(axis for axis in axes if axis not in used) for d, axes in kept.items()}


# Lowering of each operation that only places or marks a value: by versions of the value, without a kernel
PLACEMENTS: dict[Op, Callable[[Scope, Eqn], None]] = {
    PREFER: prefer,
    SHARD: shard,
    KEEP: keep,
    RESHARD_TO_PRIVATE_DIM: cut,
    RAGGED: mark,
}
