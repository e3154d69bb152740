"""The layouts that a search may choose: the dims that take axes, the meshes, and every layout of a small space.

A dim takes one axis or several, and is never split into more blocks than it has elements. The space omits layouts that
give one axis to two dims of one input. Partition detects all other illegal layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from ..errors import LayoutError, nearest
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..layouts.layout import matches
from ..lowering.partition.partition import preferences

AXES = "x", "y", "z"  # of generated meshes
Role = tuple[str, ...]  # the dims that have one axis of a mesh, sorted


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts of a graph: `sizes` of the dims to choose axes for, and the pairs of dims that share an input."""

    fixed: Layout  # rules and overrides of every layout
    sizes: Mapping[str, int]
    apart: frozenset[frozenset[str]]

    def role(self, mesh: Mesh, axis: str) -> Role:
        """The dims that have an axis by the fixed rules."""
        return tuple(sorted(d for d, axes in self.fixed.on(mesh).rules.items() if axis in axes))

    def allows(self, mesh: Mesh, roles: Sequence[Iterable[str]]) -> bool:
        """True if no dim has more blocks than elements, and no two dims of one input share an axis."""
        blocks: dict[str, int] = {}
        for n, role in zip(mesh.axes.values(), roles, strict=True):
            for dim in role:
                blocks[dim] = blocks.get(dim, 1) * n
        return all(blocks[d] <= self.sizes.get(d, math.inf) for d in blocks if d not in self.fixed.rules) and all(
            not (a in self.sizes or b in self.sizes) or frozenset((a, b)) not in self.apart
            for role in roles
            for a, b in combinations(role, 2)
        )

    def layout(self, mesh: Mesh, roles: Sequence[Collection[str]]) -> Layout:
        """The layout of these roles: fixed rules first, then rules in the order of the dims."""
        axes = list(mesh.axes)
        rules = {d: tuple(a for a, role in zip(axes, roles, strict=True) if d in role) for d in self.sizes}
        return Layout(
            {**self.fixed.rules, **{d: cut for d, cut in rules.items() if cut}}, overrides=self.fixed.overrides
        )

    def size(self, mesh: Mesh) -> int:
        """The number of combinations of axes for the dims, illegal ones included."""
        return math.prod(len(cuts) for cuts in self._cuts(mesh).values())

    def every(self, mesh: Mesh) -> Iterator[Layout]:
        """Every layout on a mesh."""
        cuts = self._cuts(mesh)
        for picks in product(*cuts.values()):
            own = dict(zip(cuts, picks, strict=True))
            roles = [[d for d in own if axis in own[d]] for axis in mesh.axes]
            roles = [{*role, *self.role(mesh, axis)} for role, axis in zip(roles, mesh.axes, strict=True)]
            if self.allows(mesh, [sorted(role) for role in roles]):
                yield self.layout(mesh, roles)

    def _cuts(self, mesh: Mesh) -> dict[str, list[tuple[str, ...]]]:
        """The axes that each dim may take, in mesh order; dims that can take none are omitted."""
        axes = [a for a, n in mesh.axes.items() if n > 1]
        cuts = [cut for n in range(len(axes) + 1) for cut in combinations(axes, n)]
        each = {d: [cut for cut in cuts if mesh.count(cut) <= size] for d, size in self.sizes.items()}
        return {d: options for d, options in each.items() if len(options) > 1}


def space(graph: Graph, *, fixed: Layout | None = None, dims: Collection[str] | None = None) -> Space:
    """The layouts of a graph.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "")
    >>> candidates = space(step.graph(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")))
    >>> dict(candidates.sizes)
    {'batch': 8, 'io': 16, 'hidden': 32}
    >>> candidates.size(md.Mesh("rows:2 cols:4")), len(list(candidates.every(md.Mesh("rows:2 cols:4"))))
    (64, 25)

    Every layout keeps the rules and overrides of `fixed`. `dims` are the dims to choose for; default: all but private
    dims such as `batch__parts` that no input has. Raises `LayoutError` for unknown dims.
    """
    fixed = fixed or Layout()
    sizes = _sizes_of(graph)
    _check(sizes, fixed, dims)
    given = {d.name for v in graph.ins for d in v.dims}
    free = [d for d in sizes if d not in fixed.rules and (d in given or "__" not in d if dims is None else d in dims)]
    return Space(fixed, {d: sizes[d] for d in free}, frozenset(_apart(graph, fixed)))


def _sizes_of(graph: Graph) -> dict[str, int]:
    """The dims of a graph with their largest sizes, inputs first; dims of size 1 cannot be split and are omitted."""
    sizes: dict[str, int] = {}
    inner = [v for eqn, _ in walk(graph) for v in (*eqn.ins, *eqn.outs)]
    for d in (d for v in (*graph.ins, *inner) for d in v.dims):
        sizes[d.name] = max(d.size, sizes.get(d.name, 0))
    return {name: n for name, n in sizes.items() if n > 1}


def _check(sizes: Mapping[str, int], fixed: Layout, dims: Collection[str] | None) -> None:
    problems = [f"dim {d!r} is to be searched; {nearest(d, sizes)}" for d in dims or () if d not in sizes]
    both = [d for d in dims or () if d in fixed.rules]
    problems += [f"dim {d!r} has a fixed rule, and is to be searched; give one of the two" for d in both]
    if problems:
        raise LayoutError("\n".join(problems))


def _apart(graph: Graph, fixed: Layout) -> set[frozenset[str]]:
    """Pairs of dims that occur in one input, neither overridden there: they cannot share an axis."""
    hints = preferences(graph)
    pairs: set[frozenset[str]] = set()
    for v in graph.ins:
        if v not in hints:  # md.prefer may resolve the conflict; partition decides
            own = {d for pattern, rule in fixed.overrides.items() if matches(v.name, pattern) for d in rule}
            pairs.update(map(frozenset, combinations([d.name for d in v.dims if d.name not in own], 2)))
    return pairs


def meshes(devices: int) -> list[Mesh]:
    """Every mesh of `devices` devices with at most three axes, in every order.

    >>> [str(mesh) for mesh in meshes(8)]
    ['x:8', 'x:2 y:4', 'x:4 y:2', 'x:2 y:2 z:2']
    """
    if not isinstance(devices, int) or devices < 1:
        raise LayoutError(f"a mesh has at least 1 device, got {devices!r}")

    def shapes(n: int, k: int) -> Iterator[tuple[int, ...]]:
        if k == 1:
            yield (n,)
            return
        for first in range(2, n // 2 + 1):
            if n % first == 0:
                yield from ((first, *rest) for rest in shapes(n // first, k - 1))

    every = [shape for k in range(1, len(AXES) + 1) for shape in shapes(devices, k)]
    return [Mesh(dict(zip(AXES, shape, strict=False))) for shape in every]
