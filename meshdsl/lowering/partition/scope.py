"""A `Scope` is a program, or a loop body, under construction: the versions of each graph value, and how to get another.

A version is the value in one sharding. Reshards are shared: each step of a plan is a version that later consumers may
start from. Values without inputs (`passes.constants`) are computed where they are read, in the sharding needed there,
and are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...dims import Dim, Shape, fresh_dim
from ...errors import InternalError, Where
from ...ir import NO_CAUSE, Because, Cause, Collective, Eqn, Graph, Op, Var
from ...layouts import Extents, Layout, Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.masking import MASK, identity
from ...trace import FULL
from ..collectives import Step
from .annotations import Annotation
from .demand import Demand
from .planner import Reshard, Seconds
from .wide_copies import wide_copies

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The values shared by all scopes of one partition."""

    mesh: Mesh
    layout: Layout
    dim_names: frozenset[str]  # of the whole graph
    extents: Extents
    hints: Mapping[Var, tuple[str, ...]]  # by value, the dims that win conflicts (from md.prefer)
    problems: dict[str, Where | None]  # unique texts in order, each with its source line in the model if it has one
    whole_dims: Mapping[Var, frozenset[str]] = field(default_factory=dict[Var, frozenset[str]])  # see whole_dims.py
    counted_dims: Mapping[Var, frozenset[str]] = field(default_factory=dict[Var, frozenset[str]])  # see placement_ops
    annotations: Mapping[Var, dict[str, Annotation]] = field(default_factory=dict[Var, dict[str, Annotation]])
    wanted: Mapping[Var, Sharding] = field(default_factory=dict[Var, Sharding])  # see annotations.wanted_shardings
    regions: dict[object, Mapping[str, Axes]] = field(default_factory=dict[object, Mapping[str, Axes]])  # of md.local
    attempts: dict[object, Scope] = field(default_factory=dict[object, "Scope"])  # to lower the bodies of loops
    seconds: Seconds | None = None  # the network's times, if reshards are planned by time instead of bytes


@dataclass(frozen=True)
class Reader:
    """A reader of a value that is not an equation: a result of the graph, or of a loop body."""

    op: str
    where: Where
    backward: bool = False
    cause: Cause = NO_CAUSE


class Scope:
    """One graph's values in their sharded versions, and the equations added so far."""

    def __init__(self, setting: Setting, graph: Graph, demand: Demand | None = None):
        self.setting = setting
        self.graph = graph
        self.demand = demand or Demand(graph)
        self.eqns: list[Eqn] = []
        self.versions: dict[Var, list[Var]] = {}
        self.default_sharding: dict[Var, Sharding] = {}  # the version from which consumers with a free choice start
        self.unmaterialized: dict[Var, Eqn] = {}
        self.results: list[Sharding] = []  # of a body, those of the graph's results if no reader asks for another
        self.received: set[Var] = set()  # versions that a collective produced
        self.required_collectives: set[Var] = set()  # graph values whose lowering sent something
        self.def_sharding: dict[Var, Sharding] = {}  # sharding of each value, also inside loops, where it is computed
        self.reasons: dict[Var, tuple[Cause, Where, bool]] = {}  # why a value is pending, and that source line

    def define(self, v: Var, sharding: Sharding, name: str = "") -> Var:
        """Create the program variable for the first version of a graph value."""
        first = Var(v.dims, v.dtype, name or v.name, sharding)
        self.versions[v] = [first]
        self.default_sharding[v] = sharding
        return first

    def add(
        self,
        op: Op | Collective,
        ins: Sequence[Var],
        outs: Sequence[Var],
        eqn: Eqn,
        cause: Cause = NO_CAUSE,
        **params: object,
    ) -> None:
        """Add an operation or a collective that the lowering of an equation needs, with the equation's line."""
        self.eqns.append(Eqn(op, tuple(ins), tuple(outs), params, eqn.where, eqn.backward, cause))

    def fresh_dim(self, name: str, size: int, *taken: Shape) -> Dim:
        """A dim of this name, or nearly, that neither the model nor these shapes have."""
        return fresh_dim(Dim(name, size), self.setting.dim_names, *taken)

    def is_zero(self, v: Var) -> bool:
        """True for unmaterialized zeros, which are a pending sum over any axes."""
        eqn = self.unmaterialized.get(v)
        return eqn is not None and eqn.op is FULL and not eqn.params["value"]

    def should_defer(self, v: Var, eqn: Eqn) -> bool:
        """True if an operand with a pending sum should stay pending for the operations that accept it so."""
        pending = {
            x: self.default_sharding[x].partial if self.is_pending(x) else ()
            for x in eqn.ins
            if x in self.default_sharding
        }
        return self.demand.should_defer(v, pending, self.setting)

    def is_pending(self, v: Var) -> bool:
        """True if a value is a pending sum and has no complete version."""
        home = self.default_sharding.get(v)
        return home is not None and bool(home.partial) and home.kind == "sum" and self.whole_version(v) is None

    def whole_version(self, v: Var) -> Sharding | None:
        """The sharding of a version without pending sums, if one exists."""
        return next((x.sharding for x in self.versions.get(v, ()) if not x.sharding.partial), None)

    def price(self, v: Var, target: Sharding) -> float:
        """The bytes that one device sends to get this version, or the picoseconds that it takes."""
        if v in self.unmaterialized:
            return 0
        cost = min(self._reshard(v, x, target).cost for x in self._sources(v, target))
        copy = self._sent_narrow(v, target)
        return cost if copy is None else min(cost, sum(self.price(x, part) for x, part in copy))

    def get(self, v: Var, target: Sharding, eqn: Eqn | Reader) -> Var:
        """The value in this sharding, for this equation; adds collectives if no version has it."""
        if v in self.unmaterialized:
            return self._materialized(v, target)
        for x in self.versions[v]:
            if x.sharding == target:
                return x
        if (copy := self._sent_narrow(v, target)) is not None:
            return self._computed_again(v, target, copy, eqn)
        source = min(self._sources(v, target), key=lambda x: self._reshard(v, x, target).cost)
        x = source
        reshard = self._reshard(v, source, target)
        steps, flat = reshard.steps, reshard._replace(seconds=None).steps
        for step in steps:
            x = self._step(v, x, step, eqn, flat if steps != flat else ())
        return x

    def _sent_narrow(self, v: Var, target: Sharding) -> list[tuple[Var, Sharding]] | None:
        """The values to send instead of v, and their shardings, if v is a wide copy of them and that sends less."""
        copy = wide_copies(self.graph).get(v)
        if copy is None or target.partial or any(x.sharding.partial or x.sharding == target for x in self.versions[v]):
            return None
        if any(target.axes(d) for d in copy.whole):
            return None
        values = [(x, target.along(x.dims)) for x in (copy.source, *copy.scales)]
        if any(x not in self.unmaterialized and (x not in self.versions or self.is_pending(x)) for x, _ in values):
            return None
        cost = min(self._reshard(v, x, target).cost for x in self.versions[v])
        return values if sum(self.price(x, part) for x, part in values) < cost else None

    def _computed_again(
        self, v: Var, target: Sharding, values: Sequence[tuple[Var, Sharding]], eqn: Eqn | Reader
    ) -> Var:
        """The version of a wide copy that is computed from its source in this sharding."""
        new = {x: self.get(x, sharding, eqn) for x, sharding in values}
        for each in wide_copies(self.graph)[v].eqns:
            (x,) = each.outs
            new[x] = Var(x.dims, x.dtype, x.name, target.along(x.dims))
            self.eqns.append(each.replace(ins=tuple(new[y] for y in each.ins), outs=(new[x],)))
        self.versions[v].append(new[v])
        return new[v]

    def _sources(self, v: Var, target: Sharding) -> list[Var]:
        sources = [x for x in self.versions[v] if set(target.partial) <= set(x.sharding.partial)]
        if not sources:
            raise InternalError(f"no version of {v} can become {target}: {[x.sharding for x in self.versions[v]]}")
        return sources

    def _reshard(self, v: Var, x: Var, target: Sharding) -> Reshard:
        """The plan from a version; that of a value whose filled slots are sent leaves the dims that its counts lack."""
        s, counted = self.setting, self.setting.counted_dims.get(v)
        reshard = Reshard(x.sharding, target, x.dims, s.mesh, s.extents, x.dtype.itemsize, s.seconds)
        return reshard if counted is None else reshard.among(counted)

    def _step(self, v: Var, x: Var, step: Step, eqn: Eqn | Reader, instead: Sequence[Step]) -> Var:
        """The next version; the plan by bytes is given if it is another one."""
        sharding = step.step(x.sharding, self.setting.mesh)
        for version in self.versions[v]:
            if version.sharding == sharding:
                return version
        resharded = Var(v.dims, v.dtype, v.name, sharding)
        where, backward, cause = eqn.where, eqn.backward, self._cause(step, eqn)
        if len(sharding.partial) < len(x.sharding.partial) and v in self.reasons:  # completes a reduction
            cause, where, backward = self.reasons[v]
        if instead:
            what = " and ".join(str(each) for each in instead if each.sends)
            cause = Cause(Because.FASTER, parts=(cause,), what=what)
        self.eqns.append(Eqn(step, (x,), (resharded,), {}, where, backward, cause))
        self.versions[v].append(resharded)
        if step.sends or x in self.received:
            self.received.add(resharded)
        return resharded

    def _cause(self, step: Step, eqn: Eqn | Reader) -> Cause:
        if eqn.cause:  # a pass requested it and gives the reason
            return eqn.cause
        effect = step.effect
        if effect.exchanges:
            return Cause(Because.RESPLIT, str(eqn.op), effect.dims)
        if effect.joins is not None:
            return Cause(Because.WHOLE, str(eqn.op), effect.dims)
        return Cause(Because.OTHER_ORDER if effect.moves else Because.READ, str(eqn.op))

    def _materialized(self, v: Var, target: Sharding) -> Var:
        if target.partial and not self.is_zero(v):
            raise InternalError(f"{v} is not zero and cannot be pending over {target.partial}")
        for x in self.versions.setdefault(v, []):
            if x.sharding == target:
                return x
        eqn = self.unmaterialized.get(v) or self.demand.sums.constants[v]
        ins = tuple(self._materialized(x, target.along(x.dims)) for x in eqn.ins)
        value = Var(v.dims, v.dtype, v.name, target)
        self.eqns.append(eqn.replace(ins=ins, outs=(value,)))
        self.versions[v].append(value)
        return value

    def constant_sharding(self, v: Var) -> Sharding:
        """The layout's sharding of a value without inputs, if no operation decides; replicated if rules conflict."""
        axes_of = self.canonical(v.dims)
        used = [axis for axes in axes_of.values() for axis in axes]
        return Sharding.of(axes_of) if len(used) == len(set(used)) else Sharding()

    def masked(self, x: Var, over: tuple[Dim, ...], fill: object, eqn: Eqn) -> Var:
        """The value with the padding of these dims replaced by an identity."""
        over = tuple(d for d in over if self.setting.extents.is_padded(d, self.setting.mesh.count(x.sharding.axes(d))))
        if not over:
            return x
        masked_value = Var(x.dims, x.dtype, x.name, x.sharding)
        self.add(MASK, [x], [masked_value], eqn, over=over, fill=identity(fill, x.dtype))
        return masked_value

    def shard_free_dims(self, v: Var, eqn: Eqn) -> None:
        """Split the dims that an operation left unsplit by the layout, if their axes are free. Sends nothing.

        Dims that every reader needs whole stay unsplit.
        """
        home = self.default_sharding[v]
        split = dict(home.split)
        whole = self.setting.whole_dims.get(v, frozenset[str]())
        for d in v.dims:
            axes = self.setting.layout.axes(d.name)
            if d.name in split or d.name in whole:
                continue
            if not any(axis in cut for cut in split.values() for axis in axes):
                split[d.name] = axes
        target = Sharding.of(split)
        if target != home:
            self.start_from(v, target, eqn)

    def start_from(self, v: Var, target: Sharding, eqn: Eqn | Reader) -> None:
        """Make the version with this sharding the one from which consumers start."""
        self.get(v, target, eqn)
        self.default_sharding[v] = target
        self.versions[v] = sorted(self.versions[v], key=lambda x: x.sharding != target)

    def canonical(self, shape: tuple[Dim, ...], rules: Mapping[str, Axes] | None = None) -> dict[str, Axes]:
        """The axes that the layout requests for these dims; an axis that two dims request is listed for both."""
        rules = self.setting.layout.rules if rules is None else rules
        return {d.name: rules[d.name] for d in shape if rules.get(d.name)}
