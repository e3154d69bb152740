"""Neighbours of a plan: layouts that give one dim other axes, and meshes that resize, reorder or divide axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ..compile.plan import Plan
from ..errors import LayoutError
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from .space import Row, Space


def rows_near(space: Space, row: Row) -> list[Row]:
    """The layouts of a space in which one dim takes other axes.

    The other dims of its inputs lose these axes, because two dims of one input cannot share an axis.
    """
    near = [_taking(space, row, i, n) for i, cuts in enumerate(space.options) for n in range(len(cuts)) if n != row[i]]
    return list(dict.fromkeys(each for each in near if space.allows(each)))


def _taking(space: Space, row: Row, i: int, n: int) -> Row:
    """The row with option `n` of dim `i`, whose axes are taken from the dims that share an input with it."""
    taken = space.options[i][n]
    options = list(row)
    options[i] = n
    for j, (dim, cuts) in enumerate(zip(space.dims, space.options, strict=True)):
        if j != i and not set(taken).isdisjoint(cuts[row[j]]) and frozenset((space.dims[i], dim)) in space.apart:
            options[j] = cuts.index(tuple(axis for axis in cuts[row[j]] if axis not in taken))
    return tuple(options)


def named_rows(space: Space, layouts: Mapping[str, tuple[str, str]]) -> Iterator[Row]:
    """A workload's named layouts, with their mesh axes renamed to those of the space's mesh, in order."""
    axes = list(space.mesh.axes)
    for layout in renamed({n: each for n, each in layouts.items() if len(Mesh(each[0]).axes) == len(axes)}, axes):
        try:
            row = space.row(Layout({d: cut for d, cut in layout.rules.items() if d in space.dims}))
        except (ValueError, LayoutError):
            continue
        if space.allows(row):
            yield row


def renamed(layouts: Mapping[str, tuple[str, str]], axes: Sequence[str]) -> Iterator[Layout]:
    """Named layouts whose last mesh axes are renamed to these, without rules for their other axes.

    >>> list(map(str, renamed({"both": ("rows:2 cols:2", "batch:rows; heads:cols")}, ["x"])))
    ['heads:x']
    """
    for mesh, rules in layouts.values():
        to = dict(zip(reversed(Mesh(mesh).axes), reversed(axes), strict=False))
        cuts = {d: tuple(to[a] for a in cut if a in to) for d, cut in Layout(rules).rules.items()}
        yield Layout({d: cut for d, cut in cuts.items() if cut})


def meshes_near(plan: Plan, meshes: Iterable[Mesh]) -> list[Plan]:
    """The plan on meshes that move a factor of 2 between two axes, or have the same axes in another order.

    >>> meshes = list(map(Mesh, ("x:16 y:4", "x:2 y:32", "x:4 y:16", "x:4 y:2 z:8")))
    >>> [f"{near.mesh}, {near.layout}" for near in meshes_near(Plan("x:8 y:8", "batch:x heads:y"), meshes)]
    ['x:16 y:4, batch:x heads:y', 'x:4 y:16, batch:x heads:y']
    >>> [f"{near.mesh}, {near.layout}" for near in meshes_near(Plan("x:16 y:4", "batch:x heads:y"), meshes)]
    ['x:4 y:16, batch:y heads:x']
    """
    near: list[Plan] = []
    for mesh in meshes:
        axes = _renamed(plan.mesh, mesh) if mesh != plan.mesh else None
        if axes is not None:
            near.append(_moved(plan, mesh, axes))
    return near


def divided(plan: Plan, meshes: Iterable[Mesh]) -> list[tuple[Plan, Axes]]:
    """The plan on meshes that divide one of its axes in two, and the parts; smallest parts first.

    A dim that has the axis takes both parts.

    >>> meshes = map(Mesh, ("x:4 y:2 z:8", "x:8 y:4 z:2", "x:64"))
    >>> for near, parts in divided(Plan("x:8 y:8", "batch:x heads:y"), meshes):
    ...     print(near.mesh, near.layout, parts, sep=", ")
    x:4 y:2 z:8, batch:x,y heads:z, ('x', 'y')
    x:8 y:4 z:2, batch:x heads:y,z, ('y', 'z')
    """
    near: list[tuple[int, Plan, Axes]] = []
    for mesh in meshes:
        old, new, names = list(plan.mesh.axes.values()), list(mesh.axes.values()), list(mesh.axes)
        if len(new) != len(old) + 1 or plan.layout.overrides:
            continue
        for i, _ in enumerate(pairwise(names)):
            if [*new[:i], new[i] * new[i + 1], *new[i + 2 :]] == old:
                parts: list[Axes] = [(name,) for name in names]
                parts[i : i + 2] = [(names[i], names[i + 1])]
                axes = dict(zip(plan.mesh.axes, parts, strict=True))
                near.append((min(new[i], new[i + 1]), _moved(plan, mesh, axes), parts[i]))
    return [(each, both) for _, each, both in sorted(near, key=lambda each: each[0])]


def _moved(plan: Plan, mesh: Mesh, axes: Mapping[str, Axes]) -> Plan:
    """The plan on another mesh, whose axes take the places of its own."""
    update = plan.weight_update
    if update.group is not None:  # its axes are those of the mesh
        plan = plan.replace(weight_update=type(update)(update.mode, bucket_bytes=update.bucket_bytes))

    def moved(rules: Mapping[str, Axes]) -> dict[str, Axes]:
        order = list(mesh.axes).index
        return {dim: tuple(sorted((a for each in cut for a in axes[each]), key=order)) for dim, cut in rules.items()}

    overrides = {path: moved(rules) for path, rules in plan.layout.overrides.items()}
    return plan.replace(mesh=mesh, layout=Layout(moved(plan.layout.rules), overrides=overrides))


def _renamed(before: Mesh, after: Mesh) -> dict[str, Axes] | None:
    """For each axis, the axis that takes its place on a mesh one step away; None if the mesh is farther."""
    old, new = before.axes, after.axes
    if list(old) != list(new):
        return None
    if sorted(old.values()) == sorted(new.values()):
        free = dict(new)
        names: dict[str, Axes] = {}
        for axis, size in old.items():
            name = next(name for name, each in free.items() if each == size)
            names[axis] = (name,)
            del free[name]
        return names
    ratios = [max(a, b) / min(a, b) for a, b in zip(old.values(), new.values(), strict=True) if a != b]
    return {axis: (axis,) for axis in old} if len(ratios) == 2 and max(ratios) <= 2 else None
