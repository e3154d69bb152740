"""Neighbours of a plan: layouts that change one dim, and meshes that move a factor between axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from ..compile.plan import Plan
from ..errors import LayoutError
from ..layouts import Layout, Mesh
from .space import Row, Space

__all__ = ["meshes_near", "named_rows", "rows_near"]


def rows_near(space: Space, row: Row) -> list[Row]:
    """The layouts of a space that differ in one dim."""
    near = [
        (*row[:i], n, *row[i + 1 :]) for i, cuts in enumerate(space.options) for n in range(len(cuts)) if n != row[i]
    ]
    return [each for each in near if space.allows(each)]


def named_rows(space: Space, layouts: Mapping[str, tuple[str, str]]) -> Iterator[Row]:
    """A workload's named layouts, with their mesh axes renamed to those of the space's mesh, in order."""
    axes = list(space.mesh.axes)
    for mesh_text, rules in layouts.values():
        named = list(Mesh(mesh_text).axes)
        if len(named) != len(axes):
            continue
        to = dict(zip(named, axes, strict=True))
        layout = {d: tuple(to[a] for a in cut if a in to) for d, cut in Layout(rules).rules.items()}
        try:
            row = space.row(Layout({d: cut for d, cut in layout.items() if d in space.dims}))
        except (ValueError, LayoutError):
            continue
        if space.allows(row):
            yield row


def meshes_near(plan: Plan, meshes: Iterable[Mesh]) -> list[Plan]:
    """The plan on meshes that move a factor of 2 between axes, swap axes, or divide an axis in two.

    >>> meshes = map(Mesh, ("x:16 y:4", "x:2 y:32", "x:8 y:4 z:2"))
    >>> [f"{near.mesh}, {near.layout}" for near in meshes_near(Plan("x:8 y:8", "batch:x heads:y"), meshes)]
    ['x:16 y:4, batch:x heads:y', 'x:8 y:4 z:2, batch:x heads:y,z']
    """
    update = plan.weight_update
    if update.group is not None:  # its axes are those of the mesh
        plan = plan.replace(weight_update=type(update)(update.mode, bucket_bytes=update.bucket_bytes))
    near: list[Plan] = []
    for mesh in meshes:
        layout = _kept(plan.mesh, mesh, plan.layout)
        if mesh != plan.mesh and layout is not None:
            near.append(plan.replace(mesh=mesh, layout=layout))
    return near


def _kept(before: Mesh, after: Mesh, layout: Layout) -> Layout | None:
    """The layout on a mesh one step away; None if the mesh is farther."""
    old, new = list(before.axes.values()), list(after.axes.values())
    if list(before.axes) == list(after.axes):
        ratios = [max(a, b) / min(a, b) for a, b in zip(old, new, strict=True)]
        changed = [ratio for ratio in ratios if ratio != 1]
        near = (len(changed) == 2 and max(changed) <= 2) or sorted(old) == sorted(new)
        return layout if near else None
    if len(new) != len(old) + 1 or list(after.axes)[:-1] != list(before.axes):
        return None
    for i, (axis, _) in enumerate(pairwise(after.axes)):
        if [*new[:i], new[i] * new[i + 1], *new[i + 2 :]] == old:
            names = list(after.axes)
            to: dict[str, tuple[str, ...]] = {
                name: (names[j] if j <= i else names[j + 1],) for j, name in enumerate(before.axes)
            }
            to[axis] = (names[i], names[i + 1])
            rules = {d: tuple(a for each in cut for a in to[each]) for d, cut in layout.rules.items()}
            return Layout(rules, overrides=layout.overrides) if not layout.overrides else None
    return None
