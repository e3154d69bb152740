"""Lower the operations that only change a value's sharding or dim names, not its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ...control import KEEP
from ...ir import Eqn, Op, Var
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.placement import PREFER, SHARD
from ...ops.ragged import RAGGED
from ...ops.reshape import RENAME
from ...passes.weight_update.pending import stages
from ...passes.weight_update.shard_updates import RESHARD_TO_PRIVATE_DIM
from .scope import Scope

__all__ = ["PLACEMENTS", "padded_otherwise", "rename_first"]


def shard(scope: Scope, eqn: Eqn) -> None:
    """Split exactly by the axes that `md.shard` names, without axes of size 1."""
    sizes = scope.setting.mesh.axes
    target = Sharding.of({d: [a for a in axes if sizes[a] > 1] for d, axes in eqn.params["split"]})
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
    return target


def _place(scope: Scope, eqn: Eqn, target: Callable[[Var], Sharding]) -> None:
    (v,), (out,) = eqn.ins, eqn.outs
    if v in scope.unmaterialized:
        scope.unmaterialized[out] = scope.unmaterialized[v]
        return
    x = scope.get(v, target(v), eqn)
    scope.versions[out] = [requested, *(x for x in scope.versions[out] if x is not requested)]
    scope.default_sharding[out] = requested.sharding


def _wanted(scope: Scope, eqn: Eqn) -> dict[str, Axes]:
    """The layout's axes for the renamed dims; the other dims keep their axes unless a renamed dim takes them."""
    (v,), (out,), layout = eqn.ins, eqn.outs, scope.setting.layout
    home = scope.whole_version(v) or scope.default_sharding[v]
    wanted = {to.name: layout.axes(to.name) for d, to in zip(v.shape, out.shape, strict=True) if d.name != to.name}
    used = {axis for axes in wanted.values() for axis in axes}
    kept = {d.name: home.axes(d.name) for d, to in zip(v.shape, out.shape, strict=True) if d.name == to.name}
    return wanted | {d: tuple(axis for axis in axes if axis not in used) for d, axes in kept.items()}


# Lowering of each operation that only places or marks a value: by versions of the value, without a kernel
PLACEMENTS: dict[Op, Callable[[Scope, Eqn], None]] = {
    PREFER: prefer,
    SHARD: shard,
    KEEP: keep,
    RESHARD_TO_PRIVATE_DIM: cut,
    RAGGED: mark,
}
