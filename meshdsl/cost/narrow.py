"""What a search leaves out by itself where a mesh has too many layouts: several axes for a dim, then single dims.

Nothing is left out that was asked for by name, and what is left out is said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ..ir import Graph
from ..layouts import Layout, Mesh
from .space import MOST, Space, TooLargeError, sizes_of, space

__all__ = ["Asked", "narrowed"]

FEW = 20_000  # layouts of one mesh, with none illegal but by its arguments, up to which nothing is left out

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The layouts that a search was asked for. None: as many as can be searched."""

    fixed: Layout | None = None
    dims: Collection[str] | None = None
    axes: Collection[str] | None = None
    several: bool | None = None
    orders: bool = False


def narrowed(graph: Graph, mesh: Mesh, asked: Asked, use: Callable[[Space], T]) -> tuple[Space, T, str]:
    """The largest space of these that can be used, what using it gave, and what was left out (or nothing).

    `use` raises `TooLargeError` where its space is too large; so does this where every space is.
    """
    attempts = list(_attempts(graph, mesh, asked))
    for k, (several, dims, left_out) in enumerate(attempts, 1):
        last = k == len(attempts)
        most = MOST if last or asked.several is not None else FEW
        found = space(
            graph, mesh, fixed=asked.fixed, dims=dims, axes=asked.axes, several=several, orders=asked.orders, most=most
        )
        try:
            return found, use(found), left_out
        except TooLargeError:
            if last:
                raise
    raise AssertionError("there is always a space to try")


def _attempts(graph: Graph, mesh: Mesh, asked: Asked) -> Iterator[tuple[bool, Collection[str] | None, str]]:
    """Whether a dim may take several axes, the dims to choose for, and what that leaves out."""
    split = [a for a, n in mesh.axes.items() if n > 1 and (asked.axes is None or a in asked.axes)]
    one = "several axes for one dim" if asked.several is None and len(split) > 1 else ""
    if asked.several is not False and (asked.several or one):
        yield True, asked.dims, ""
    if not asked.several:
        yield False, asked.dims, one
    if asked.dims is None and split:
        least = min(mesh.axes[a] for a in split)
        rules = asked.fixed.rules if asked.fixed is not None else {}
        given = {d.name: d.size for v in graph.ins for d in v.shape if d.name not in rules and d.size >= least}
        others = [d for d, n in sizes_of(graph).items() if d not in given and d not in rules and n >= least]
        if others:
            dims = f"the dims of no argument: {', '.join(others)}"
            yield bool(asked.several), tuple(given), "; ".join(filter(None, (one, dims)))
