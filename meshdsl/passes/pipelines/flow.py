"""The values that the stages of a pipeline send each other, read from its loop; they are the same in every tick.

The loop's body computes something before the loop over layers, something between its forward and its backward loop,
and something after; these graphs are parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...ir import Graph, Product, Var, read_by, walk
from .find import Level, Loop, loop_of, values


@dataclass(frozen=True, eq=False)
class Flow:
    """The values that stages pass on, and the graphs that compute them."""

    loop: Loop

    @cached_property
    def given(self) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """The constants and the rows of the body."""
        consts, _, rows = loop_of(self.loop.eqn).inputs(self.loop.body.ins)
        return tuple(consts), tuple(rows)

    @cached_property
    def crossing(self) -> tuple[Var, ...]:
        """Values, computed between the loops over layers or `along`, that the backward loop or later equations read."""
        consts, _, rows = operands_of(self.loop.backward)
        saved = {*self.saved}
        read = [v for v in (*consts, *rows) if v not in saved]
        read += [v for v in read_by(self.after.eqns, self.after.outs) if self.loop.levels.get(v) is Level.BETWEEN]
        along = set(self.along)
        return tuple(v for v in dict.fromkeys(read) if v in along or self.loop.levels[v] is Level.BETWEEN)

    @cached_property
    def along(self) -> tuple[Var, ...]:
        """Constants of the loops over layers that products compute before them: they go along with the carries."""
        consts = [v for eqn in (self.loop.forward, self.loop.backward) for v in operands_of(eqn)[0]]
        before = [v for v in dict.fromkeys(consts) if self.loop.levels[v] is Level.BEFORE]
        return tuple(v for v in before if has_products(self._before([v])))

    def _before(self, wanted: Sequence[Var]) -> Graph:
        """Values that are computed before the layers, from constants and rows of the body."""
        return values(self.loop.body, [*self.given[0], *self.given[1]], wanted)

    @cached_property
    def between_values(self) -> tuple[Var, ...]:
        return tuple(v for v, level in self.loop.levels.items() if level is Level.BETWEEN)

    @cached_property
    def saved(self) -> tuple[Var, ...]:
        """Rows of the forward loop that the backward loop reads, in the ring."""
        _, rows = loop_of(self.loop.forward).results(self.loop.forward.outs)
        read = set(operands_of(self.loop.backward)[2])
        return tuple(v for v in rows if v in read)

    @cached_property
    def after(self) -> Graph:
        """The terms that are computed after the backward loop, from its carries and what comes between the loops."""
        wanted = [v for each in self.loop.terms for v in each.after]
        carries, _ = loop_of(self.loop.backward).results(self.loop.backward.outs)
        return values(self.loop.body, [*self.given[0], *self.given[1], *self.between_values, *carries], wanted)

    @cached_property
    def between_graph(self) -> Graph:
        """The graph between the loops over layers: the operands of the backward loop, and terms of the sums."""
        carries = operands_of(self.loop.backward)[1]
        wanted = [carries[i] for i in self.loop.shipped] + [*self.crossing]
        wanted += [v for each in self.loop.terms for v in each.between]
        given = [*self.given[0], *self.given[1], *self.loop.forward.outs, *self.along]
        return values(self.loop.body, given, wanted)

    @cached_property
    def collected(self) -> tuple[Var, ...]:
        """Rows of the forward loop that are read between the loops: they go from stage to stage until complete."""
        _, rows = loop_of(self.loop.forward).results(self.loop.forward.outs)
        read = read_by(self.between_graph.eqns, self.between_graph.outs)
        return tuple(v for v in rows if v in read)

    @cached_property
    def entering(self) -> Graph:
        """The computation of the first layer's inputs, and of what goes along with them."""
        return self._before([*operands_of(self.loop.forward)[1], *self.along])


def operands_of(eqn: Any) -> Any:
    """The constants, first carries and stacks of a loop's equation."""
    return loop_of(eqn).inputs(eqn.ins)


def has_products(graph: Graph) -> bool:
    """True if a graph multiplies matrices."""
    return any(eqn.operation.product is not Product.NONE for eqn, _ in walk(graph))
