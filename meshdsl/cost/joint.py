"""Partition of one graph under all layouts of a space at once.

How an equation is lowered depends on the axes of the dims that it mentions and on how its operands lie, and on nothing
else. So the rows of a table, one for each layout, fall into few classes at each equation; each class is lowered once,
by the very functions of `lowering`, and its rows share what comes out. The table grows by a dim when an equation first
mentions it, and loses the rows for which an equation is illegal: the product of all options is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Graph
from ..layouts.sharding import Axes
from ..lowering.partition.demand import Demand
from ..lowering.partition.partition import add_input, add_output
from ..lowering.partition.scope import Scope
from .body import Body
from .classes import Classes
from .columns import Table
from .space import Space

__all__ = ["Joint"]


class Joint(Classes):
    """One graph under all layouts of a space. `body` is the outcome, `table` its rows."""

    def __init__(
        self, graph: Graph, space: Space, *, results: Sequence[str] | None = None, gather_limit: float | None = None
    ):
        super().__init__(graph, space, gather_limit)
        self.table = Table(space)
        demand = self.table.constant(Demand(graph))
        self.body = Body(self, self.table, graph, demand)
        for v in graph.ins:
            self.body.point(("input", v), [], [v], lambda scope, v=v: add_input(scope, v, _rules(scope, v.name)))
        self.body.run()
        for v, path in zip(graph.outs, results or [""] * len(graph.outs), strict=True):
            self.body.point(("output", v, path), [v], [], lambda s, v=v, path=path: add_output(s, v, path).sharding)


def _rules(scope: Scope, path: str) -> dict[str, Axes]:
    return scope.setting.layout.for_path(path)
