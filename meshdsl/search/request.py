"""The options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..cost.machine import Machine
from ..ir import Graph
from ..layouts import Layout
from .result import SearchProgress
from .space import Space, space


@dataclass(frozen=True)
class SearchRequest:
    """The machine of a search, its candidates, and its limits."""

    machine: Machine
    limit: float = math.inf  # bytes per device
    fixed: Layout = field(default_factory=Layout)
    dims: Collection[str] | None = None
    plans: int | None = None  # that are costed exactly, at most
    progress: Callable[[SearchProgress], None] | None = None

    def space(self, graph: Graph) -> Space:
        """The layouts of a graph that are candidates."""
        return space(graph, fixed=self.fixed, dims=self.dims)
