"""Decide when to reduce a pending sum: at once, or after the linear operations that follow.

Deferring saves bytes if the value reduced later is smaller (it is summed again), shared (two pending sums are added),
or outside a loop. It costs bytes if several consumers would each reduce a value, if an operation makes the value
larger, or if the other operand of a product is sharded over the same axes and so needs the complete sum anyway.

A minimum cut finds the cheapest choice for all values of a graph at once. Each value is either needed complete, and
reduced there at the price of its bytes, or computed from complete operands, which are then needed complete themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ...control import KEEP
from ...dims import Shape
from ...ir import Eqn, Graph, Linear, Reduce, Scan, Var, walk
from ...ir.min_cut import INFINITE, FlowGraph
from ...layouts import Extents, Layout, Mesh
from ...ops.dtypes import CAST
from ...ops.elementwise import ADD, SUBTRACT
from ...ops.reductions import BROADCAST
from ...passes.magnitude import magnitudes
from ...passes.narrow_products import widens
from ...passes.unmade import unmade_values
from ...trace import FULL
from ..labels import labels_of, vanishing

__all__ = ["ADDITIONS", "Body", "Demand"]

AxisSet = frozenset[str]
NONE: AxisSet = frozenset()
ADDITIONS = (ADD, SUBTRACT)  # one device adds a complete operand to its part of a pending sum
UNIT = 4  # capacity of one byte; each additional collective counts as one more byte


class Setting(Protocol):
    """The fields of `scope.Setting` that determine where sums are reduced."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def extents(self) -> Extents: ...


@dataclass(frozen=True)
class Body:
    """How a loop uses its body.

    The inputs are constants, then carries, then rows. The first `carries` results replace the carries after each of
    `trips` trips; the other results are stacked. Results whose numbers are in `deferred` stay pending outside the loop
    too.
    """

    consts: int
    carries: int
    trips: int
    deferred: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class _Region:
    """Values connected by operations through which a sum can stay pending, under any layout."""

    eqns: list[Eqn] = field(default_factory=list[Eqn])  # equations that compute or read one of the values, in order
    values: set[Var] = field(default_factory=set[Var])

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """All dims whose axes affect the region."""
        bodies = [eqn for eqn in self.eqns if not self.values.isdisjoint(eqn.outs)]
        inner = [e for eqn in bodies for sub in eqn.graphs().values() for e, _ in walk(sub)]
        return tuple(dict.fromkeys(d.name for e in (*self.eqns, *inner) for v in (*e.ins, *e.outs) for d in v.shape))


class Demand:
    """For each pending sum of a graph: reduce it where it is computed, or later.

    `body` is set for a loop body. `zero` lists inputs that are known to be unmaterialized zeros; `pending` gives the
    pending axes of inputs. Splits are estimated from the layout's rules, so a decision depends only on the axes of
    `dims(v)`. A wrong estimate costs bytes, never correctness.
    """

    def __init__(
        self,
        graph: Graph,
        body: Body | None = None,
        zero: Collection[Var] = (),
        pending: Mapping[Var, Sequence[str]] | None = None,
    ):
        self.graph, self.body = graph, body
        self.zero = set(zero)
        self.arriving = {v: frozenset(axes) for v, axes in (pending or {}).items()}
        self.bounds = magnitudes(graph)
        self.numbers: dict[Var, Any] = {}  # values whose elements are all this number
        self.unmade = unmade_values(graph)  # each device computes its own part of these, in any sharding
        self.users: dict[Var, list[Eqn]] = {}
        for eqn in graph.eqns:
            for v in dict.fromkeys(eqn.ins):
                self.users.setdefault(v, []).append(eqn)
            number = self._number(eqn)
            if number is not None:
                self.numbers[eqn.outs[0]] = number
            if number == 0:
                self.zero.update(eqn.outs)
        self._regions: dict[Var, _Region] | None = None
        self._estimates: dict[object, _Estimate] = {}
        self._bodies: dict[Eqn, Demand] = {}
        self._deferred: dict[tuple[Any, ...], frozenset[int]] = {}  # results of loops
        self._loop_dims: dict[Eqn, tuple[str, ...]] = {}

    def _number(self, eqn: Eqn) -> Any:
        """The number that all elements of an equation's result equal, if it is known."""
        if eqn.op is FULL:
            return np.asarray(eqn.params["value"]).astype(eqn.outs[0].dtype)[()]
        if eqn.op not in (BROADCAST, CAST):
            return None
        number = 0 if eqn.ins[0] in self.zero else self.numbers.get(eqn.ins[0])
        return None if number is None else np.asarray(number).astype(eqn.outs[0].dtype)[()]

    def may_stay_pending(self, eqn: Eqn, v: Var) -> bool:
        """True if an operation may take this operand as a pending sum, as far as the graph tells.

        The operation must be linear in it. The other factors of a product must be finite, and a divisor not zero:
        otherwise the parts may add up to NaN where the complete sum gives infinity.
        """
        if not _is_linear(eqn, v):
            return False
        match eqn.operation.linear:
            case Linear.EACH:
                return all(x in self.bounds for x in eqn.ins if x is not v)
            case Linear.RATIO:
                return self.numbers.get(eqn.ins[1], 0) != 0
            case _:
                return True

    def should_defer(self, v: Var, pending: Mapping[Var, Sequence[str]], setting: Setting) -> bool:
        """True if v should stay a pending sum for the linear operations that read it.

        `pending` gives the axes over which v and other values are known to be pending; empty axes mean that a value is
        complete.
        """
        region = self.regions.get(v)
        if region is None:
            return False
        estimate = self.estimate(region, setting)
        known = {x: frozenset(axes) for x, axes in pending.items() if x in region.values}
        if any(estimate.axes.get(x, NONE) != axes for x, axes in known.items()):
            key = (estimate, *known.items())
            estimate = self._remembered(key, lambda: _Estimate(self, region, setting, known))
        return v in estimate.deferred

    def estimate(self, region: _Region, setting: Setting) -> _Estimate:
        """The axes over which the values of a region can be pending under a layout."""
        key = (region, tuple([setting.layout.axes(d) for d in region.dims]))
        return self._remembered(key, lambda: _Estimate(self, region, setting, {}))

    def _remembered(self, key: object, make: Callable[[], _Estimate]) -> _Estimate:
        if key not in self._estimates:
            self._estimates[key] = make()
        return self._estimates[key]

    def of_body(self, loop: Eqn, scan: Scan) -> Demand:
        """The demand of a scan's body, with carries that start as the loop's operands do."""
        if loop not in self._bodies:
            body, consts = scan.body, scan.consts
            zero = [v for v, x in zip(body.ins[consts:], loop.ins[consts:], strict=True) if x in self.zero]
            self._bodies[loop] = Demand(body, Body(consts, scan.carries, scan.trips), zero)
        return self._bodies[loop]

    def deferred_results(self, loop: Eqn, scan: Scan, setting: Setting) -> frozenset[int]:
        """The numbers of the scan's stacked results that would stay pending here if the loop left them pending."""
        key = (loop, *[setting.layout.axes(d) for d in self.loop_dims(loop, scan)])
        if key not in self._deferred:
            self._deferred[key] = self._deferred_results(loop, scan, setting)
        return self._deferred[key]

    def _deferred_results(self, loop: Eqn, scan: Scan, setting: Setting) -> frozenset[int]:
        inside = self.of_body(loop, scan)
        found: set[int] = set()
        for i, (v, out) in enumerate(zip(inside.graph.outs, loop.outs, strict=True)):
            region = inside.regions.get(v) if i >= scan.carries else None
            axes = inside.estimate(region, setting).axes.get(v, NONE) if region is not None else NONE
            if axes and self.should_defer(out, {out: tuple(axes)}, setting):
                found.add(i)
        return frozenset(found)

    def loop_dims(self, loop: Eqn, scan: Scan) -> tuple[str, ...]:
        """The dims whose axes determine `deferred_results`."""
        if loop not in self._loop_dims:
            inside = self.of_body(loop, scan)
            dims = [d for v in inside.graph.outs for d in inside.dims(v)]
            dims += [d for v in loop.outs for d in self.dims(v)]
            self._loop_dims[loop] = tuple(dict.fromkeys(dims))
        return self._loop_dims[loop]

    def dims(self, v: Var) -> tuple[str, ...]:
        """The dims whose axes determine the decision about a value."""
        region = self.regions.get(v)
        return region.dims if region is not None else ()

    @property
    def regions(self) -> dict[Var, _Region]:
        """The region of every value that can be pending under some layout."""
        if self._regions is None:
            self._regions = self._connected()
        return self._regions

    def _connected(self) -> dict[Var, _Region]:
        leader: dict[Var, Var] = {v: v for v in self.arriving}

        def find(v: Var) -> Var:
            while leader[v] is not v:
                leader[v] = leader[leader[v]]
                v = leader[v]
            return v

        for eqn in self.graph.eqns:
            through = [v for v in dict.fromkeys(eqn.ins) if v in leader and self.may_stay_pending(eqn, v)]
            if through or eqn.operation.reduce is Reduce.SUM or eqn.control is not None:
                for v in eqn.outs:
                    leader[v] = find(through[0]) if through else v
                for v in through:
                    leader[find(v)] = find(eqn.outs[0])
        regions: dict[Var, _Region] = {}
        for v in leader:
            regions.setdefault(find(v), _Region()).values.add(v)
        of = {v: region for region in regions.values() for v in region.values}
        for eqn in self.graph.eqns:
            for region in dict.fromkeys(of[v] for v in (*eqn.ins, *eqn.outs) if v in of):
                region.eqns.append(eqn)
        return of


class _Estimate:
    """One region under one layout: the axes over which each value can be pending, and the bytes to reduce it."""

    def __init__(self, demand: Demand, region: _Region, setting: Setting, known: Mapping[Var, AxisSet]):
        self.demand, self.region, self.setting = demand, region, setting
        self.axes: dict[Var, AxisSet] = {v: axes for v, axes in demand.arriving.items() if v in region.values}
        self.maker: dict[Var, Eqn] = {}
        self.through: dict[Eqn, tuple[Var, ...]] = {}  # operands that may stay pending
        self.gone: dict[Eqn, AxisSet] = {}  # axes over which the operation itself creates a pending sum
        for eqn in region.eqns:
            self.through[eqn] = through = self._through(eqn)
            self.gone[eqn] = gone = self._gone(eqn)
            for i, v in enumerate(eqn.outs):
                inner = self._leaving(eqn, i) if isinstance(eqn.control, Scan) else NONE
                axes = known.get(v, gone.union(inner, *(self.axes[x] for x in through)))
                if v in region.values and axes:
                    self.axes[v] = axes
                    self.maker[v] = eqn
        self.axes |= {v: axes for v, axes in known.items() if axes}

    @cached_property
    def deferred(self) -> frozenset[Var]:
        """The values that stay pending where they may, by a minimum cut.

        Nodes on the source's side are values that are needed complete. The result of a linear operation has a second
        node; it is on the source's side if the operation runs on complete operands, and then reducing the result costs
        nothing.
        """
        flow = FlowGraph()
        for v, axes in self.axes.items():
            eqn = self.maker.get(v)
            through = self.through[eqn] if eqn is not None else ()
            if through and eqn is not None:
                own = self.cost(v, self.gone[eqn])
                flow.add(v, (eqn, v), max(self.cost(v, axes) - own, 1))
                for x in through:
                    flow.add((eqn, v), x)
                if own:
                    flow.add(v, "paid", own)
            else:
                flow.add(v, "paid", self.cost(v, axes))
        for v in self.axes:
            if self._needed(v):
                flow.add("needed", v)
        for i, v, price in self._leaves_body():
            flow.add("needed", ("result", i))
            flow.add(("result", i), v, price)
        side = flow.sink_side("needed", "paid")
        return frozenset(v for v in self.axes if v in side)

    def _needed(self, v: Var) -> bool:
        if self.demand.body is None and v in self.demand.graph.outs:
            return True
        return any(v not in self.through[eqn] for eqn in self.demand.users.get(v, ()) if not _ignores(eqn, v))

    def _leaves_body(self) -> Iterator[tuple[int, Var, int]]:
        """The results of a loop body that may leave it pending: (number, value, price per trip of reducing it
        outside).
        """
        body, graph = self.demand.body, self.demand.graph
        for i, v in enumerate(graph.outs) if body is not None else ():
            if v not in self.axes or body is None:
                continue
            price = self.cost(v, self.axes[v])
            if i >= body.carries:  # outside: as many bytes in fewer collectives, or added to others first
                yield i, v, 1 if i in body.deferred else max(price - UNIT // 2, 1)
                continue
            start = graph.ins[body.consts + i]
            adds_up = start in self.demand.zero or start in self.demand.arriving
            yield i, v, max(price // max(body.trips, 1), 1) if adds_up else INFINITE

    def _through(self, eqn: Eqn) -> tuple[Var, ...]:
        """The operands that can stay pending through an operation; if two exclude each other, the larger one."""
        can = [v for v in dict.fromkeys(eqn.ins) if v in self.axes and self.demand.may_stay_pending(eqn, v)]
        if not can:
            return ()
        linear = eqn.operation.linear
        if linear in (Linear.JOINT, Linear.PADDED, Linear.BRANCHES):
            others = eqn.ins[1:] if linear is Linear.BRANCHES else eqn.ins
            if len({self.axes[v] for v in can}) > 1:
                return ()
            rest = [v for v in others if v not in can and v not in self.demand.zero]
            joins = self._adds_up(eqn) and not any(self.axes[can[0]] & self._split(v.shape) for v in rest)
            return tuple(can) if joins or not rest else ()
        chosen = max(can, key=lambda v: self.cost(v, self.axes[v]))
        axes = self.axes[chosen]
        others = [v for v in eqn.ins if v is not chosen and v not in self.demand.unmade]
        if any(axes & self._split(v.shape) for v in others):
            return ()
        contracts = eqn.operation.reduce is Reduce.SUM and len(eqn.ins) > 1
        if contracts and any(axes & self._split(v.shape) for v in (chosen, *eqn.outs)):
            return ()  # the complete sum is sharded over these axes, and so are the FLOPs of the contraction
        return (chosen,)

    def _adds_up(self, eqn: Eqn) -> bool:
        """True if an equation adds a value to a sum to which another addition follows, as in x + a + b.

        The pending parts of a and b are then reduced once. Elsewhere the reduction would only be later, and apart from
        those beside it.
        """
        return eqn.op in ADDITIONS and any(user.op in ADDITIONS for user in self.demand.users.get(eqn.outs[0], ()))

    def _split(self, shape: Shape) -> AxisSet:
        """The axes that the layout assigns to these dims."""
        return frozenset(axis for d in shape for axis in self.setting.layout.axes(d.name))

    def _gone(self, eqn: Eqn) -> AxisSet:
        if eqn.operation.reduce is not Reduce.SUM or eqn.control is not None:
            return NONE
        labels = labels_of(eqn)
        gone = set(vanishing(labels))
        return self._split(
            tuple(d for v, names in zip(eqn.ins, labels.ins, strict=True) for d in v.shape if names.get(d.name) in gone)
        )

    def _leaving(self, eqn: Eqn, i: int) -> AxisSet:
        """The axes over which a loop may leave this result pending."""
        if not isinstance(eqn.control, Scan):
            return NONE
        inside = self.demand.of_body(eqn, eqn.control)
        out = inside.graph.outs[i]
        region = inside.regions.get(out)
        return inside.estimate(region, self.setting).axes.get(out, NONE) if region is not None else NONE

    def cost(self, v: Var, axes: AxisSet) -> int:
        """The bytes that one device sends to reduce v, in units of `1 / UNIT` byte.

        The sum is scattered over the axes that the layout assigns to v's dims, and all-reduced over the others.
        """
        if not axes:
            return 0
        mesh, extents, layout = self.setting.mesh, self.setting.extents, self.setting.layout
        used: set[str] = set(axes)
        size = v.dtype.itemsize
        scattered = 1
        for d in v.shape:
            cut = layout.axes(d.name)
            free = [axis for axis in cut if axis not in used]
            used.update(free)
            size *= -(-extents.padded(d) // mesh.count(tuple(free)))
            scattered *= mesh.count(tuple(axis for axis in cut if axis in axes))
        n = mesh.count(tuple(axes))
        scattered = min(scattered, n)
        left = n // scattered
        sent = (scattered - 1) / scattered * size + 2 * (left - 1) / left * (size / scattered)
        return int(UNIT * (sent + 1))


def _ignores(eqn: Eqn, v: Var) -> bool:
    """True if v is the stored operand of a `keep`, which reads the recomputed one instead."""
    return eqn.op is KEEP and eqn.ins[1] is not v


def _is_linear(eqn: Eqn, v: Var) -> bool:
    """True if the operation is linear in this operand."""
    match eqn.operation.linear:
        case Linear.JOINT:
            return True
        case Linear.PADDED:
            return eqn.params["value"] == 0
        case Linear.EACH:
            return sum(x is v for x in eqn.ins) == 1
        case Linear.FIRST | Linear.RATIO:
            return eqn.ins[0] is v and v not in eqn.ins[1:]
        case Linear.SECOND:
            return eqn.ins[1] is v and eqn.ins[0] is not v
        case Linear.BRANCHES:
            return eqn.ins[0] is not v
        case Linear.WIDENING:
            return widens(v.dtype, eqn.outs[0].dtype)
        case _:
            return False
