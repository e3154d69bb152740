"""The options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..cost.machine import Machine
from ..ir import Graph
from ..layouts import Layout, Mesh
from .result import SearchProgress
from .space import Space, space


@dataclass(frozen=True)
class SearchRequest:
    """The machine of a search, its candidates, and its limits."""

    machine: Machine
    limit: float = math.inf  # bytes per device
    fixed: Layout = field(default_factory=Layout)
    dims: Collection[str] | None = None
    time_limit: float | None = 60.0  # seconds
    patience: float | None = None  # stop after this many processor seconds without improvement
    progress: Callable[[SearchProgress], None] | None = None
    started: float | None = None  # by `time.perf_counter`; default: when the search begins

    def space(self, graph: Graph, mesh: Mesh) -> Space:
        """The layouts of a graph on a mesh that are candidates."""
        return space(graph, mesh, fixed=self.fixed, dims=self.dims)
