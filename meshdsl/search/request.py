"""The options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..cost.machine import Machine
from ..ir import Graph
from ..layouts import Layout, Mesh
from .evaluate import Assignment
from .result import SearchProgress
from .space import Space, space

EVERY = 0.5  # seconds between two progress reports
ROUNDING = 1e-9  # relative tolerance: a bound sums the same numbers in another order


@dataclass(frozen=True)
class SearchRequest:
    """The machine and the objective of a search, its candidates, and its limits."""

    machine: Machine
    assignment: Assignment | None = None
    objective: str = "seconds"
    limit: float = math.inf  # bytes per device
    fixed: Layout = field(default_factory=Layout)
    dims: Collection[str] | None = None
    axes: Collection[str] | None = None
    several: bool | None = None
    orders: bool = False
    runners_up: int = 4
    front: bool = False
    time_limit: float | None = 60.0  # seconds
    patience: float | None = None  # stop after this many processor seconds without improvement
    progress: Callable[[SearchProgress], None] | None = None
    started: float | None = None  # by `time.perf_counter`; default: when the search begins

    def space(self, graph: Graph, mesh: Mesh) -> Space:
        """The layouts of a graph on a mesh that are candidates."""
        several = self.several is not False
        return space(graph, mesh, fixed=self.fixed, dims=self.dims, axes=self.axes, several=several, orders=self.orders)
