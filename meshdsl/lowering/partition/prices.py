"""The price of an assignment of axes to labels: at one equation, and at the later products that share operands.

Equations are lowered one at a time. If a product gathers an operand, later products read the gathered version for
nothing: the three gradients of query, key and value weights read the same activation. So the price of an assignment
includes the least that these products pay once its versions exist. Operands that are not lowered yet are assumed to be
sharded like the equation's own operand of equal dims, otherwise by the layout. A wrong assumption costs bytes, never
correctness. Prices are the bytes that a device sends, or picoseconds, as the planner counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ...ir import Eqn, Labels, Var
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.contraction import EINSUM
from ..collectives import AllReduce
from ..labels import apply, labels_of
from .choose import Claims, choose
from .demand import Demand
from .planner import Reshard, picoseconds
from .scope import Scope, Setting

Assigned = Mapping[str, Axes]


def results_price(setting: Setting, eqn: Eqn, labels: Labels, assigned: Assigned) -> float:
    """The price of an all_reduce of the results over the axes of vanishing labels.

    For a result whose only reader takes it in a known sharding, that of bringing it there.
    """
    axes = tuple(axis for label in labels.vanishing for axis in assigned.get(label, ()))
    n, total = setting.mesh.count(axes), 0.0
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        if v in setting.wanted:
            here = apply(names, assigned, axes, eqn.operation.reduce or "sum")
            reshard = Reshard(
                here, setting.wanted[v], v.dims, setting.mesh, setting.extents, v.dtype.itemsize, setting.seconds
            )
            total += reshard.cost
            continue
        size = v.dtype.itemsize * math.prod(setting.extents.local_shape(v.dims, apply(names, assigned), setting.mesh))
        timed = setting.seconds
        total += picoseconds(AllReduce(axes), size, setting.mesh, timed) if timed else 2 * (n - 1) / n * size
    return total


def later_products(demand: Demand, eqn: Eqn) -> Iterator[tuple[Var, Eqn]]:
    """The products of two operands that come after a product and read one of its operands, with that operand."""
    if not _is_product(eqn):
        return
    for v in eqn.ins:
        users = demand.sums.users.get(v, [])
        for other in users[users.index(eqn) + 1 :]:
            if _is_product(other) and set(other.ins) != set(eqn.ins):
                yield v, other


def _is_product(eqn: Eqn) -> bool:
    return eqn.op is EINSUM and len(set(eqn.ins)) == len(eqn.ins) == 2


def later_price(scope: Scope, eqn: Eqn, assigned: Callable[[Var], Sharding]) -> float:
    """The least that later products pay if this product reads its operands in the `assigned` shardings."""
    total = 0.0
    for v, other in later_products(scope.demand, eqn):
        if v not in scope.unmaterialized:
            (mine,) = (x for x in eqn.ins if x is not v)
            (theirs,) = (x for x in other.ins if x is not v)
            total += _least(scope, other, v, assigned(v), _expected(scope, theirs, mine))
    return total


def _whole(scope: Scope, v: Var) -> Sharding | None:
    """The sharding of a lowered value once its sum is reduced."""
    if v not in scope.default_sharding:
        return None
    return scope.whole_version(v) or scope.default_sharding[v].whole()


def _expected(scope: Scope, v: Var, like: Var) -> Sharding:
    """The sharding in which a later product's other operand will be computed."""
    known = _whole(scope, v)
    if known is not None:
        return known
    alike = _whole(scope, like) or Sharding()
    split: dict[str, Axes] = {d.name: alike.axes(d.name) for d in v.dims if d in like.dims}
    used = {axis for axes in split.values() for axis in axes}
    for d in v.dims:
        axes = scope.setting.layout.axes(d.name)
        if d.name not in split and used.isdisjoint(axes):
            split[d.name] = axes
            used.update(axes)
    return Sharding.of(split)


def _least(scope: Scope, eqn: Eqn, v: Var, version: Sharding, expected: Sharding) -> float:
    """The price of a later product's cheapest assignment, with one operand also available in `version`."""
    setting, labels = scope.setting, labels_of(eqn)
    mesh, extents = setting.mesh, setting.extents
    home = _whole(scope, v) or version
    claims = Claims()
    for x, names in zip(eqn.ins, labels.ins, strict=True):
        for d, label in names.items():
            for sharding in (home, version) if x is v else (expected,):
                claims.add(str(label), sharding.axes(d))  # every dim of a product has a label

    def price(assigned: Assigned) -> float:
        total = results_price(setting, eqn, labels, assigned)
        for x, names in zip(eqn.ins, labels.ins, strict=True):
            target = apply(names, assigned)
            if x is not v and x not in scope.unmaterialized:
                total += Reshard(expected, target, x.dims, mesh, extents, x.dtype.itemsize, setting.seconds).cost
            elif x is v and target != version:
                total += scope.price(x, target)
        return total

    return price(choose(claims, (), price))
