"""Search space: every assignment of mesh axes to the dims of a graph, except assignments that are surely illegal.

A dim takes one axis or several, and is never split into more blocks than it has elements. The space omits layouts that
give one axis to two dims of one input. Partition detects all other illegal layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

from ..errors import LayoutError, nearest
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..layouts.layout import matches
from ..layouts.sharding import Axes
from ..lowering.partition.partition import preferences

AXES = "x", "y", "z"  # of generated meshes
Row = tuple[int, ...]  # a layout: an option number for each dim of its space


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts of one mesh: one option per dim, such that no two dims of one input share an axis."""

    mesh: Mesh
    fixed: Layout  # rules and overrides of every layout
    dims: tuple[str, ...]
    options: tuple[tuple[Axes, ...], ...]  # by dim; the first option replicates it
    apart: frozenset[frozenset[str]]  # pairs of dims of one input

    @property
    def size(self) -> int:
        """Number of combinations of options."""
        return math.prod(map(len, self.options))

    def rows(self) -> Iterator[Row]:
        """Every layout."""
        return filter(self.allows, product(*(range(len(cuts)) for cuts in self.options)))

    def allows(self, row: Row) -> bool:
        """True if no two dims of one input share an axis in this layout."""
        own = [(d, cuts[n]) for d, cuts, n in zip(self.dims, self.options, row, strict=True) if n]
        ruled = [*self.fixed.on(self.mesh).rules.items(), *own]
        return not any(
            b in self.dims and frozenset((a, b)) in self.apart and not set(cut).isdisjoint(other)
            for (a, cut), (b, other) in combinations(ruled, 2)
        )

    def layout(self, row: Row) -> Layout:
        """The layout of a row: fixed rules first, then rules in the order of the dims."""
        rules = {d: options[i] for d, options, i in zip(self.dims, self.options, row, strict=True) if options[i]}
        return Layout({**self.fixed.rules, **rules}, overrides=self.fixed.overrides)

    def contains(self, layout: Layout) -> bool:
        """True if a layout is one of these, or one that only partition knows to be illegal."""
        own = {d: cut for d, cut in layout.rules.items() if self.fixed.rules.get(d) != cut}
        chosen = dict(zip(self.dims, self.options, strict=True))
        return layout.overrides == self.fixed.overrides and all(cut in chosen.get(d, ()) for d, cut in own.items())

    def row(self, layout: Layout) -> Row:
        """The option numbers of a layout, which must be in this space."""
        return tuple(options.index(layout.axes(d)) for d, options in zip(self.dims, self.options, strict=True))


def space(
    graph: Graph,
    mesh: Mesh,
    *,
    fixed: Layout | None = None,
    dims: Collection[str] | None = None,
) -> Space:
    """The layouts of a graph on a mesh.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "")
    >>> graph = step.graph(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32"))
    >>> candidates = space(graph, md.Mesh("rows:2 cols:4"))
    >>> candidates.dims, candidates.options[0]
    (('batch', 'io', 'hidden'), ((), ('rows',), ('cols',), ('rows', 'cols')))
    >>> candidates.size, len(list(candidates.rows()))
    (64, 25)

    Every layout keeps the rules and overrides of `fixed`. `dims` are the dims to choose for; default: all but private
    dims such as `batch__parts` that no input has. A dim takes one axis or more, in mesh order.
    Raises `LayoutError` for unknown dims.
    """
    fixed = fixed or Layout()
    sizes = _sizes_of(graph)
    _check(sizes, fixed, dims)
    axes = [a for a, n in mesh.axes.items() if n > 1]
    given = {d.name for v in graph.ins for d in v.dims}
    free = [d for d in sizes if d not in fixed.rules and (d in given or "__" not in d if dims is None else d in dims)]
    cuts = [cut for n in range(len(axes) + 1) for cut in combinations(axes, n)]
    options = {d: tuple(cut for cut in cuts if mesh.count(cut) <= sizes[d]) for d in free}
    options = {d: cuts for d, cuts in options.items() if len(cuts) > 1}
    return Space(mesh, fixed, tuple(options), tuple(options.values()), frozenset(_apart(graph, fixed)))


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
