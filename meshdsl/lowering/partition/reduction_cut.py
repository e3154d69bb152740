"""The values of a region at which pending sums are reduced under a layout: a minimum cut.

Each value is either needed complete, and reduced there at the price of its bytes, or computed from complete operands,
which are then needed complete themselves. The cheapest choice for all values at once is a minimum cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from ...dims import Shape
from ...ir import Eqn, Reduce, Var
from ...ir.min_cut import INFINITE, FlowGraph
from ...layouts import Extents, Layout, Mesh
from ...ops.dtypes import CAST, CAST_PARTS
from ...ops.linear import together
from ...ops.reshape import RENAME, RESHAPE
from ..labels import labels_of
from .pending_sums import ADDITIONS, PendingSums, SumRegion, ignores

AxisSet = frozenset[str]
NONE: AxisSet = frozenset()
UNIT = 4  # capacity of one byte; each additional collective counts as one more byte


class CutSetting(Protocol):
    """The fields of `scope.Setting` that determine where sums are reduced."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def extents(self) -> Extents: ...


class ReductionCut:
    """One region under one layout: the axes over which each value can be pending, and those that are reduced later.

    `known` gives the axes of values that are already computed, so that their sums are not reduced in operands;
    `leaving(loop, i)` those over which a loop may leave result i pending.
    """

    def __init__(
        self,
        sums: PendingSums,
        region: SumRegion,
        setting: CutSetting,
        known: Mapping[Var, AxisSet],
        leaving: Callable[[Eqn, int], AxisSet],
    ):
        self.sums, self.setting, self.known = sums, setting, known
        self.axes: dict[Var, AxisSet] = {v: axes for v, axes in sums.arriving.items() if v in region.values}
        self.maker: dict[Var, Eqn] = {}
        self.through: dict[Eqn, tuple[Var, ...]] = {}  # operands that may stay pending
        self.gone: dict[Eqn, AxisSet] = {}  # axes over which the operation itself creates a pending sum
        for eqn in region.eqns:
            self.through[eqn] = through = self._through(eqn)
            self.gone[eqn] = gone = self._gone(eqn)
            for i, v in enumerate(eqn.outs):
                inner = leaving(eqn, i) if eqn.scan is not None else NONE
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
            through = self.through[eqn] if eqn is not None and v not in self.known else ()
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
        return v in self.sums.results or any(
            v not in self.through[eqn] for eqn in self.sums.users.get(v, ()) if not ignores(eqn, v)
        )

    def _leaves_body(self) -> Iterator[tuple[int, Var, int]]:
        """The results of a loop body that may leave it pending: (number, value, price per trip of reducing it
        outside).
        """
        body, graph = self.sums.body, self.sums.graph
        for i, v in enumerate(graph.outs) if body is not None else ():
            if v not in self.axes or body is None:
                continue
            price = self.cost(v, self.axes[v])
            start = graph.ins[body.consts + i] if i < body.carries else None
            if start is not None and start not in self.sums.zero and start not in self.sums.arriving:
                yield i, v, INFINITE
            elif i in body.deferred:
                yield i, v, 1
            else:  # outside, rows are as many bytes in fewer collectives, and an update reads the sum of one trip
                yield i, v, max((price - UNIT // 2) // (1 if start is None else max(body.trips, 1)), 1)

    def _through(self, eqn: Eqn) -> tuple[Var, ...]:
        """The operands that can stay pending through an operation; if two exclude each other, the larger one."""
        can = [v for v in dict.fromkeys(eqn.ins) if v in self.axes and self.sums.may_stay_pending(eqn, v)]
        can = [v for v in can if not self.sums.is_needed(v)]
        if not can:
            return ()
        if together(eqn):
            return tuple(can) if self._stay_together(eqn, can) else ()
        chosen = max(can, key=lambda v: self.cost(v, self.axes[v]))
        return (chosen,) if self._stays_alone(eqn, chosen) else ()

    def _stay_together(self, eqn: Eqn, can: Sequence[Var]) -> bool:
        """True if an operation that adds or joins its operands may leave these pending, and the others complete."""
        rest = [v for v in together(eqn) if v not in can and v not in self.sums.zero]
        if len({self.axes[v] for v in can}) > 1:
            return False
        axes = self.axes[can[0]]
        useful = (
            not rest or self._adds_up(eqn) or (eqn.op in ADDITIONS and self._is_scattered_as_view(eqn.outs[0], axes))
        )
        return useful and not self._any_split(rest, axes)

    def _stays_alone(self, eqn: Eqn, chosen: Var) -> bool:
        """True if an operation that is linear in one operand may leave it pending."""
        axes = self.axes[chosen]
        if self._any_split([v for v in eqn.ins if v is not chosen and v not in self.sums.constants], axes):
            return False
        # the complete sum may be sharded over these axes, and then so are the FLOPs of a contraction
        contracts = eqn.operation.reduce is Reduce.SUM and len(eqn.ins) > 1
        return not (contracts and self._any_split([chosen, *eqn.outs], axes))

    def _any_split(self, values: Sequence[Var], axes: AxisSet) -> bool:
        """True if the layout assigns one of these axes to a dim of these values."""
        return any(axes & self._split(v.dims) for v in values)

    def _adds_up(self, eqn: Eqn) -> bool:
        """True if an equation adds a value to a sum to which another addition follows, as in x + a + b, also cast.

        The pending parts of a and b are then reduced once. Elsewhere the reduction would only be later, and apart from
        those beside it.
        """
        if eqn.op not in ADDITIONS:
            return False
        users = self.sums.users.get(eqn.outs[0], ())
        while len(users) == 1 and next(iter(users)).op in (CAST, CAST_PARTS):
            users = self.sums.users.get(next(iter(users)).outs[0], ())
        return any(user.op in ADDITIONS for user in users)

    def _is_scattered_as_view(self, v: Var, axes: AxisSet) -> bool:
        """True if the only reader of a value renames or reshapes it to dims that the layout splits over these axes."""
        if axes & self._split(v.dims):
            return False
        while len(users := self.sums.users.get(v, ())) == 1:
            (eqn,) = users
            if eqn.op not in (RENAME, RESHAPE):
                return False
            v = eqn.outs[0]
            if axes & self._split(v.dims):
                return True
        return False

    def _split(self, shape: Shape) -> AxisSet:
        """The axes that the layout assigns to these dims."""
        return frozenset(axis for d in shape for axis in self.setting.layout.axes(d.name))

    def _gone(self, eqn: Eqn) -> AxisSet:
        if eqn.operation.reduce is not Reduce.SUM or eqn.control is not None:
            return NONE
        labels = labels_of(eqn)
        gone = set(labels.vanishing)
        given = zip(eqn.ins, labels.ins, strict=True)
        summed = tuple(d for v, names in given for d in v.dims if names.get(d.name) in gone)
        kept = tuple(d for v in eqn.outs for d in v.dims)  # their axes split the result, so the sum is whole over them
        return self._split(summed) - self._split(kept)

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
        for d in v.dims:
            cut = layout.axes(d.name)
            free = [axis for axis in cut if axis not in used]
            used.update(free)
            size *= extents.local(d, mesh.count(tuple(free)))
            scattered *= mesh.count(tuple(axis for axis in cut if axis in axes))
        n = mesh.count(tuple(axes))
        scattered = min(scattered, n)
        left = n // scattered
        sent = (scattered - 1) / scattered * size + 2 * (left - 1) / left * (size / scattered)
        return int(UNIT * (sent + 1))
