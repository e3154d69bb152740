"""Groups of devices that share a weight update: along axes of the mesh, or along a part of one.

Gradients are reduced and scattered inside a group, and their shards are summed across groups (partial sharding: Xu et
al., 2020, section on large topologies). A part of an axis is an axis of a refined mesh: `rows:2048` in groups of 32 is
`rows.outer:64 rows.inner:32`, with the same devices in the same order, so every sharding on one mesh is also one on the
other.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..cost.network import Placement, place
from ..cost.placing import AxisFactor
from ..errors import LayoutError
from ..ir import Graph
from ..layouts import Layout, Mesh, Sharding
from ..layouts.sharding import Axes
from ..ops.placement import SHARD

GroupSpec = str | Iterable[str] | Mapping[str, int] | Mapping[str, None]  # None: all devices along an axis


def group_of(mesh: Mesh, spec: GroupSpec) -> dict[str, int]:
    """The number of devices of a group along each of its axes, in the order of the mesh.

    >>> group_of(Mesh("y:32 x:32 core:2"), "core x:8")
    {'x': 8, 'core': 2}
    >>> group_of(Mesh("y:32 x:32 core:2"), {"y": 4})
    {'y': 4}

    Raises `LayoutError` for an axis that the mesh lacks, for a size that does not divide its axis, and for no group.
    """
    words = spec if isinstance(spec, Mapping) else dict(_words(spec))
    for axis, size in words.items():
        mesh.check_axis(axis)
        count = mesh.axes[axis]
        if size is not None and not (isinstance(size, int) and 0 < size <= count and count % size == 0):
            sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise LayoutError(
                f"a group cannot have {size} of the {count} devices along the mesh axis {axis!r}: groups are equal\n"
                f"  give a size that divides: {sizes}"
            )
    group = {axis: words[axis] or n for axis, n in mesh.axes.items() if axis in words}
    if math.prod(group.values()) == 1:
        raise LayoutError(
            f"group={spec!r} is one device, and a group has several\n"
            f"  give axes of the mesh '{mesh}', or leave group out; weight_update='replicated' cuts no update"
        )
    return {axis: n for axis, n in group.items() if n > 1}


def _words(spec: str | Iterable[str]) -> Iterator[tuple[str, int | None]]:
    for word in re.split(r"[\s,;+]+", spec.strip()) if isinstance(spec, str) else spec:
        axis, colon, size = word.partition(":")
        if colon and not size.isdigit():
            raise LayoutError(f"a group is written axis or axis:size, for example 'x core' or 'rows:32'; got {word!r}")
        if axis:
            yield axis, int(size) if colon else None


@dataclass(frozen=True)
class RefinedMesh:
    """A mesh in which some axes are split in two: the groups of neighbours, and the members of a group.

    >>> refined = RefinedMesh.of(Mesh("rows:8 cols:2"), {"rows": 4, "cols": 2})
    >>> print(refined.mesh, refined.layout(Layout("batch:rows io:cols")), refined.group, sep="; ")
    rows.outer:2 rows.inner:4 cols:2; batch:rows.outer,rows.inner io:cols; ('rows.inner', 'cols')
    """

    coarse: Mesh
    mesh: Mesh
    parts: Mapping[str, Axes] = field(default_factory=dict[str, Axes])  # coarse axis -> its outer and inner axis
    group: Axes = ()  # the axes of `mesh` along which the groups of the requested sizes extend

    @staticmethod
    def of(mesh: Mesh, sizes: Mapping[str, int]) -> RefinedMesh:
        """The mesh in which groups of these sizes extend along axes of their own. Sizes must divide their axes."""
        axes: dict[str, int] = {}
        parts: dict[str, Axes] = {}
        group: list[str] = []
        for axis, n in mesh.axes.items():
            size = sizes.get(axis, n)
            if size == n:
                axes[axis] = n
                group += [axis] if axis in sizes else []
            else:
                outer, inner = f"{axis}.outer", f"{axis}.inner"
                axes |= {outer: n // size, inner: size}
                parts[axis] = outer, inner
                group.append(inner)
        refined = Mesh(axes, device_order=mesh.device_order, devices=mesh.devices) if parts else mesh
        return RefinedMesh(mesh, refined, parts, tuple(group))

    def axes(self, axes: Iterable[str]) -> Axes:
        """Coarse axes as axes of the refined mesh, major to minor."""
        return tuple(part for axis in axes for part in self.parts.get(axis, (axis,)))

    def layout(self, layout: Layout) -> Layout:
        """A layout for the coarse mesh, translated to the refined mesh."""

        def fine(rules: Mapping[str, Axes]) -> dict[str, Axes]:
            return {dim: self.axes(axes) for dim, axes in rules.items()}

        return Layout(fine(layout.rules), overrides={path: fine(rule) for path, rule in layout.overrides.items()})

    def sharding(self, sharding: Sharding) -> Sharding:
        """A sharding on the coarse mesh, translated to the refined mesh."""
        split = {dim: self.axes(axes) for dim, axes in sharding.split}
        return Sharding.of(split, self.axes(sharding.partial), sharding.kind)

    def coarse_axes(self, axes: Axes) -> Axes | None:
        """Axes of the refined mesh as axes of the coarse mesh; None if they contain a part of one without the other.

        >>> refined = RefinedMesh.of(Mesh("rows:8 cols:2"), {"rows": 4})
        >>> refined.coarse_axes(("rows.outer", "rows.inner", "cols")), refined.coarse_axes(("rows.inner",))
        (('rows', 'cols'), None)
        """
        whole = {parts[0]: axis for axis, parts in self.parts.items()}
        found = tuple(whole.get(axis, axis) for axis in axes if axis not in {inner for _, inner in self.parts.values()})
        return found if self.axes(found) == axes else None

    def graph(self, graph: Graph) -> Graph:
        """The same graph and values, with every `md.shard` translated to the refined mesh's axes."""
        if not self.parts:
            return graph
        eqns = []
        for eqn in graph.eqns:
            eqn = eqn.map_graphs(self.graph)
            if eqn.op is SHARD:
                split = tuple((dim, self.axes(axes)) for dim, axes in eqn.params["split"])
                eqn = eqn.replace(params={**eqn.params, "split": split})
            eqns.append(eqn)
        return graph.replace(eqns=tuple(eqns))

    def placement(self, coarse: Placement) -> Placement:
        """The refined mesh's placement on the hardware, from the coarse mesh's: inner axes take the minor parts."""
        if not self.parts:
            return coarse
        placed = {axis: tuple(parts) for axis, parts in coarse.parts.items() if axis not in self.parts}
        for axis, (outer, inner) in self.parts.items():
            split_parts = _cut(coarse.parts.get(axis, ()), self.mesh.axes[inner])
            if split_parts is None:  # sizes that do not divide the hardware's: place it as any mesh of these sizes
                return place(coarse.network, self.mesh)
            placed |= {outer: split_parts[0], inner: split_parts[1]}
        return Placement(coarse.network, self.mesh, placed, coarse.used, coarse.notes)


def _cut(parts: tuple[AxisFactor, ...], inner: int) -> tuple[tuple[AxisFactor, ...], tuple[AxisFactor, ...]] | None:
    """Split hardware axes (major to minor) so that the minor ones have `inner` members; None if impossible."""
    minor: list[AxisFactor] = []
    major = list(parts)
    while inner > 1 and major:
        part = major.pop()
        size = math.gcd(inner, part.size)
        inner //= size
        if size > 1:
            minor.insert(0, dataclasses.replace(part, size=size))
        if size < part.size:
            if inner > 1:
                return None
            major.append(dataclasses.replace(part, size=part.size // size, stride=part.stride * size))
    return (tuple(major), tuple(minor)) if inner == 1 else None


def refined_meshes(mesh: Mesh, axes: Iterable[str]) -> Iterator[RefinedMesh]:
    """All meshes that split one of these axes in two, those with the largest groups first."""
    for axis in axes:
        n = mesh.axes[axis]
        yield from (RefinedMesh.of(mesh, {axis: size}) for size in range(n - 1, 1, -1) if n % size == 0)
