"""The layouts worth a look: every way to give the dims of a graph axes of a mesh, less those that no program can have.

A dim takes one axis or several, and never more blocks than it has elements. What is left out here is left out for
certain: two dims of one input cannot take one axis. Whatever else makes a layout illegal, partition says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from ..errors import LayoutError, nearest
from ..ir import Graph, walk
from ..layouts import Layout, Mesh
from ..layouts.layout import matches
from ..layouts.sharding import Axes
from ..lowering.partition.partition import preferences

__all__ = ["MOST", "Space", "TooLargeError", "meshes", "sizes_of", "space"]

MOST = 4_000_000  # layouts of one mesh; a search of more would not end


class TooLargeError(LayoutError):
    """A space too large to be searched."""


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts of one mesh: an option for each dim, where no two dims that are kept apart share an axis."""

    mesh: Mesh
    fixed: Layout  # rules and overrides that are in every one
    dims: tuple[str, ...]
    options: tuple[tuple[Axes, ...], ...]  # by dim; the first is to leave it whole
    apart: frozenset[frozenset[str]]  # pairs of dims of one input
    most: int = MOST  # rows, above which nothing is listed

    @property
    def size(self) -> int:
        """All combinations of options."""
        return math.prod(map(len, self.options))

    @cached_property
    def rows(self) -> np.ndarray:
        """Every layout as the numbers of its options, int16 [layouts, dims]."""
        rows = np.zeros((1, 0), np.int16)
        for i, d in enumerate(self.dims):
            at, option = self.extended(rows, self.dims[:i], d)
            rows = np.concatenate([rows[at], option[:, None].astype(np.int16)], axis=1)
        return rows

    def extended(self, rows: np.ndarray, dims: Sequence[str], d: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows over these dims with every option of one more: which row each comes from, and its option."""
        bit = {axis: 1 << i for i, axis in enumerate(self.mesh.axes)}
        masks = {name: np.array([sum(bit[a] for a in cut) for cut in given], np.int64)
                 for name, given in zip(self.dims, self.options, strict=True)}  # fmt: skip
        taken = np.zeros(len(rows), np.int64)
        for j, other in enumerate(dims):
            if frozenset((d, other)) in self.apart:
                taken |= masks[other][rows[:, j]]
        for other, cut in self.fixed.on(self.mesh).rules.items():
            if frozenset((d, other)) in self.apart:
                taken |= sum(bit[a] for a in cut)
        at, option = np.nonzero((taken[:, None] & masks[d][None, :]) == 0)
        if len(at) > self.most:
            raise TooLargeError(
                f"there are more than {self.most:,} layouts of {', '.join((*dims, d))} on the mesh '{self.mesh}'\n"
                f"  name the dims to search, fix some rules, or allow one axis for each dim (several=False)"
            )
        return at, option

    def layout(self, row: Sequence[int] | np.ndarray) -> Layout:
        """One layout, rules in the order of the fixed ones and then of the dims."""
        found = {d: options[i] for d, options, i in zip(self.dims, self.options, row, strict=True) if options[i]}
        return Layout({**self.fixed.rules, **found}, overrides=self.fixed.overrides)

    def row(self, layout: Layout) -> tuple[int, ...]:
        """The numbers of a layout's options. Requires that it is one of this space."""
        return tuple(options.index(layout.axes(d)) for d, options in zip(self.dims, self.options, strict=True))


def space(
    graph: Graph,
    mesh: Mesh,
    *,
    fixed: Layout | None = None,
    dims: Collection[str] | None = None,
    axes: Collection[str] | None = None,
    several: bool = True,
    orders: bool = False,
    most: int = MOST,
) -> Space:
    """The layouts of a graph on a mesh.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "")
    >>> found = space(step.graph(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")), md.Mesh("rows:2 cols:4"))
    >>> found.dims, found.options[0]
    (('batch', 'io', 'hidden'), ((), ('rows',), ('cols',), ('rows', 'cols')))
    >>> found.size, len(found.rows)
    (64, 25)

    `fixed` are rules and overrides that every layout keeps. `dims` are the dims to choose for, by default all of the
    graph, and `axes` the axes to give them, by default all; `several` lets a dim take more than one, in the order of
    the mesh or, with `orders`, in every order. Raises `LayoutError` for a dim or an axis that is not there; and, when
    its layouts are listed, `TooLargeError` where there are more than `most`.
    """
    fixed = fixed or Layout()
    sizes = sizes_of(graph)
    _check(sizes, mesh, fixed, dims, axes)
    there = [a for a, n in mesh.axes.items() if n > 1 and (axes is None or a in axes)]
    chosen = tuple(d for d in sizes if d not in fixed.rules and (dims is None or d in dims))
    options = tuple(tuple(_options(sizes[d], there, mesh, several, orders)) for d in chosen)
    chosen, options = _worth(chosen, options)
    return Space(mesh, fixed, chosen, options, frozenset(_apart(graph, fixed)), most)


def sizes_of(graph: Graph) -> dict[str, int]:
    """The dims of a graph with their largest sizes, inputs first; those of size 1 cannot be split."""
    found: dict[str, int] = {}
    inner = [v for eqn, _ in walk(graph) for v in (*eqn.ins, *eqn.outs)]
    for d in (d for v in (*graph.ins, *inner) for d in v.shape):
        found[d.name] = max(d.size, found.get(d.name, 0))
    return {name: n for name, n in found.items() if n > 1}


def _check(
    sizes: Mapping[str, int], mesh: Mesh, fixed: Layout, dims: Collection[str] | None, axes: Collection[str] | None
) -> None:
    problems = [f"dim {d!r} is to be searched; {nearest(d, sizes)}" for d in dims or () if d not in sizes]
    problems += [f"axis {a!r} is to be searched; {nearest(a, mesh.axes)}" for a in axes or () if a not in mesh.axes]
    both = [d for d in dims or () if d in fixed.rules]
    problems += [f"dim {d!r} has a fixed rule, and is to be searched; give one of the two" for d in both]
    if problems:
        raise LayoutError("\n".join(problems))


def _options(size: int, axes: Sequence[str], mesh: Mesh, several: bool, orders: bool) -> Iterator[Axes]:
    for n in range(len(axes) + 1 if several else 2):
        yield from (cut for cut in (permutations if orders else combinations)(axes, n) if mesh.count(cut) <= size)


def _worth(dims: tuple[str, ...], options: tuple[tuple[Axes, ...], ...]):
    kept = [i for i, given in enumerate(options) if len(given) > 1]
    return tuple(dims[i] for i in kept), tuple(options[i] for i in kept)


def _apart(graph: Graph, fixed: Layout) -> set[frozenset[str]]:
    """The pairs of dims that some input has both of, neither overridden there: they cannot share an axis."""
    hints = preferences(graph)
    found: set[frozenset[str]] = set()
    for v in graph.ins:
        if v not in hints:  # md.prefer may settle it; partition knows
            own = {d for pattern, rule in fixed.overrides.items() if matches(v.name, pattern) for d in rule}
            found.update(map(frozenset, combinations([d.name for d in v.shape if d.name not in own], 2)))
    return found


def meshes(devices: int, most_axes: int = 3, names: Sequence[str] = ("x", "y", "z", "u", "v", "w")) -> list[Mesh]:
    """Every mesh of so many devices with at most so many axes, in every order: the minor axis lies innermost.

    >>> [str(mesh) for mesh in meshes(8)]
    ['x:8', 'x:2 y:4', 'x:4 y:2', 'x:2 y:2 z:2']
    """
    if not isinstance(devices, int) or devices < 1:
        raise LayoutError(f"a mesh has at least 1 device, got {devices!r}")
    if not 1 <= most_axes <= len(names):
        raise LayoutError(f"a mesh of the search has from 1 to {len(names)} axes, got {most_axes!r}")

    def shapes(n: int, k: int) -> Iterator[tuple[int, ...]]:
        if k == 1:
            yield (n,)
            return
        for first in range(2, n // 2 + 1):
            if n % first == 0:
                yield from ((first, *rest) for rest in shapes(n // first, k - 1))

    found = [shape for k in range(1, most_axes + 1) for shape in shapes(devices, k)]
    return [Mesh(dict(zip(names, shape, strict=False))) for shape in found]
