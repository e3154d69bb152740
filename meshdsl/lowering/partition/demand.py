"""Decide when to reduce a pending sum: at once, or after the linear operations that follow.

Deferring saves bytes if the value reduced later is smaller (it is summed again), shared (two pending sums are added),
or outside a loop. It costs bytes if several consumers would each reduce a value, if an operation makes the value
larger, or if the other operand of a product is sharded over the same axes and so needs the complete sum anyway.

`pending_sums` has the facts of a graph under any layout; `reduction_cut` finds the cheapest choice under one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

from ...ir import Eqn, Graph, Scan, Var
from .pending_sums import Body, PendingSums, SumRegion
from .reduction_cut import AxisSet, CutSetting, ReductionCut

NONE: AxisSet = frozenset()
_sums = lru_cache(maxsize=128)(PendingSums)  # the same facts for every layout


class Demand:
    """For each pending sum of a graph: reduce it where it is computed, or later.

    The arguments are those of `PendingSums`. Splits are estimated from the layout's rules; every question is about the
    same layout. A wrong estimate costs bytes, never correctness.
    """

    def __init__(
        self,
        graph: Graph,
        body: Body | None = None,
        zero: Collection[Var] = (),
        pending: Mapping[Var, Sequence[str]] | None = None,
        inner: dict[object, Demand] | None = None,
    ):
        self.sums = _sums(graph, body, tuple(zero), tuple((v, tuple(axes)) for v, axes in (pending or {}).items()))
        self.inner: dict[object, Demand] = {} if inner is None else inner  # of all bodies, shared by their demands
        self._cuts: dict[object, ReductionCut] = {}
        self._bodies: dict[Eqn, Demand] = {}

    def should_defer(self, v: Var, pending: Mapping[Var, Sequence[str]], setting: CutSetting) -> bool:
        """True if v should stay a pending sum for the linear operations that read it.

        `pending` gives the axes over which v and other values are known to be pending; empty axes mean that a value is
        complete.
        """
        region = self.sums.regions.get(v)
        if region is None or self.sums.is_needed(v):
            return False
        cut = self._cut(region, setting)
        known = {x: frozenset(axes) for x, axes in pending.items() if x in region.values}
        if any(cut.axes.get(x, NONE) != axes for x, axes in known.items()):
            key = (cut, *known.items())
            cut = self._remembered(key, lambda: self._new_cut(region, setting, known))
        return v in cut.deferred

    def deferred_results(self, loop: Eqn, scan: Scan, setting: CutSetting) -> frozenset[int]:
        """Indices of the scan's results that the loop should return as pending sums, as their readers allow."""
        inside = self._of_body(loop, scan)
        deferred: set[int] = set()
        for i, out in enumerate(loop.outs):
            axes = inside._axes_of_result(i, setting)
            if axes and self.should_defer(out, {out: tuple(axes)}, setting):
                deferred.add(i)
        return frozenset(deferred)

    def _cut(self, region: SumRegion, setting: CutSetting) -> ReductionCut:
        """The cut of a region, if nothing else is known of its values."""
        return self._remembered(region, lambda: self._new_cut(region, setting, {}))

    def _new_cut(self, region: SumRegion, setting: CutSetting, known: Mapping[Var, AxisSet]) -> ReductionCut:
        def leaving(loop: Eqn, i: int) -> AxisSet:
            if loop.scan is None:
                return NONE
            return self._of_body(loop, loop.scan)._axes_of_result(i, setting)

        return ReductionCut(self.sums, region, setting, known, leaving)

    def _remembered(self, key: object, make: Callable[[], ReductionCut]) -> ReductionCut:
        if key not in self._cuts:
            self._cuts[key] = make()
        return self._cuts[key]

    def _of_body(self, loop: Eqn, scan: Scan) -> Demand:
        """The demand of a scan's body, with carries that start as the loop's operands do."""
        if loop not in self._bodies:
            body, consts = scan.body, scan.consts
            zero = [v for v, x in zip(body.ins[consts:], loop.ins[consts:], strict=True) if x in self.sums.zero]
            self._bodies[loop] = self.of_body(body, Body(consts, scan.carries, scan.trips), zero, {})
        return self._bodies[loop]

    def of_body(
        self, graph: Graph, body: Body | None, zero: Sequence[Var], pending: Mapping[Var, Sequence[str]]
    ) -> Demand:
        """The demand of a body, at any depth; attempts to lower it that begin alike share it."""
        key = (graph, body, *zero, None, *pending.items())
        if key not in self.inner:
            self.inner[key] = Demand(graph, body, zero, pending, self.inner)
        return self.inner[key]

    def _axes_of_result(self, i: int, setting: CutSetting) -> AxisSet:
        """The axes over which result i of the graph can be pending under a layout."""
        v = self.sums.graph.outs[i]
        region = self.sums.regions.get(v)
        return self._cut(region, setting).axes.get(v, NONE) if region is not None else NONE
