"""Classes of rows that are lowered alike, and what the lowering of each came to; each is lowered once.

What decides a class is the axes of the dims that an equation mentions, and how its operands lie: a `State` each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import Where
from ..ir import NO_CAUSE, Eqn, Graph, Var, walk
from ..layouts import Extents, Layout, Sharding
from ..layouts.sharding import Axes
from ..lowering.partition import control
from ..lowering.partition.control import Given
from ..lowering.partition.demand import Body as LoopBody
from ..lowering.partition.demand import Demand
from ..lowering.partition.partition import preferences
from ..lowering.partition.row_dims import row_dims
from ..lowering.partition.scope import Scope, Setting
from ..ops.indexing import SORT
from ..ops.placement import SHARD
from .space import Space

__all__ = ["HIDDEN", "Classes", "Made", "Sent", "State"]


@dataclass(frozen=True, eq=False)
class State:
    """How one value lies so far: what a `Scope` knows of it. Equal states are the same object."""

    versions: tuple[tuple[Sharding, bool], ...]  # with whether a collective made it
    home: Sharding | None
    lazy: Eqn | None
    sent: bool


@dataclass(frozen=True)
class Sent:
    """A collective that sends something, for one device and one trip."""

    operand: int  # the number, among the distinct operands, of the value that it is of; -1: of something made here
    kind: str
    axes: Axes
    full: int  # V of the formulas of time
    wire: int  # bytes sent by one device
    number: bool  # the sum of a single number, which may travel with others


@dataclass(frozen=True, eq=False)
class Made:
    """One class of rows at one point: what lowering it added, and how its operands and results lie afterwards."""

    problem: bool
    came: tuple[State, ...]  # of the distinct operands
    states: tuple[State, ...]  # of the distinct operands, then of the results, afterwards
    sends: tuple[Sent, ...] = ()
    eqns: tuple[Eqn, ...] = ()
    before: tuple[tuple[Var, ...], ...] = ()  # the versions of each operand, as `eqns` read them
    after: tuple[tuple[Var, ...], ...] = ()  # and those of each operand and result afterwards
    wanted: Sharding | None = None  # of a point that asks for a value: how it gets it
    extents: Mapping[str, int] = field(default_factory=dict[str, int])  # of the dims concerned
    pieces: bool = False  # there is more in `eqns` than versions of the operands, their padding masked, and one result


class Classes:
    """What one graph's classes share under all layouts of a space: settings, states, and everything made so far."""

    def __init__(self, graph: Graph, space: Space, gather_limit: float | None = None):
        self.graph, self.space, self.mesh = graph, space, space.mesh
        self.fixed = space.fixed.on(space.mesh)
        self.hints = preferences(graph)
        self.row_dims = row_dims(graph)
        self.gather_limit = gather_limit
        self.pinned = {d: set(cut) for d, cut in self._pinned(graph).items()}
        self.settings: dict[Any, tuple[Layout, Extents]] = {}
        self.states: dict[Any, State] = {}
        self.lazies: dict[Any, Eqn] = {}
        self.memo: dict[Any, Made] = {}
        self.signatures: dict[Eqn, int] = {}
        self.numbers: dict[Any, int] = {}
        self.demands: dict[Any, Demand] = {}

    def _pinned(self, graph: Graph) -> dict[str, tuple[str, ...]]:
        """The axes that cut a dim somewhere whatever the row says: by an override, or by md.shard."""
        found: dict[str, tuple[str, ...]] = {}
        rules = [*self.fixed.overrides.values()]
        rules += [dict(eqn.params["split"]) for eqn, _ in walk(graph) if eqn.op is SHARD]
        for rule in rules:
            for d, cut in rule.items():
                found[d] = (*found.get(d, ()), *cut)
        return found

    def setting(self, names: tuple[str, ...], cuts: tuple[Axes, ...]) -> Setting:
        """The layout as far as these dims go; a look at any other dim of the space is an error."""
        key = names, cuts
        if key not in self.settings:
            hidden = frozenset(self.space.dims) - set(names)
            rules = {**self.fixed.rules, **{d: cut for d, cut in zip(names, cuts, strict=True) if cut}}
            layout = Layout({}, overrides=self.fixed.overrides)
            layout.rules = {**_hidden(hidden), **rules}
            cut_by = {d: self.pinned.get(d, set()) | set(rules.get(d, ())) for d in {*rules, *self.pinned}}
            multiple = {d: self.mesh.count(tuple(axes)) for d, axes in cut_by.items()}
            self.settings[key] = layout, Extents({**_hidden(hidden), **multiple})
        layout, extents = self.settings[key]
        return Setting(self.mesh, layout, extents, self.hints, self.gather_limit, {}, self.row_dims)

    def canonical(self, eqn: Eqn) -> Eqn:
        """One equation for all that make the same value without operands."""
        if eqn.ins:
            return eqn
        out = eqn.outs[0]
        params = tuple((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in sorted(eqn.params.items()))
        key = (eqn.op, params, out.shape, out.dtype)
        try:
            return self.lazies.setdefault(key, eqn)
        except TypeError:
            return eqn

    def row(self, given: Given, inner: Var) -> Given:
        """What a body sees of one stacked input."""
        row = control.row_of(given, inner)
        return self.canonical(dataclasses.replace(row, outs=(inner,))) if isinstance(row, Eqn) else row

    def demand(
        self, graph: Graph, use: LoopBody, zero: tuple[int, ...], pending: tuple[tuple[int, Axes], ...]
    ) -> Demand:
        """The demand of a loop body whose inputs of these numbers are zeros, or pending over these axes."""
        key = graph.ins, use, zero, pending
        if key not in self.demands:
            ins = graph.ins
            self.demands[key] = Demand(graph, use, [ins[i] for i in zero], {ins[i]: axes for i, axes in pending})
        return self.demands[key]

    def state(self, versions: tuple[tuple[Sharding, bool], ...], home: Any, lazy: Eqn | None, sent: bool) -> State:
        """The one state with these fields."""
        key = versions, home, lazy, sent
        found = self.states.get(key)
        if found is None:
            found = self.states[key] = State(*key)
        return found

    def given(self, v: Var, how: Given) -> State:
        """The state of a body's input that arrives so."""
        if isinstance(how, Eqn):
            return self.state((), None, self.canonical(dataclasses.replace(how, outs=(v,))), False)
        return self.state(((how, False),), how, None, False)

    def read(self, scope: Scope, v: Var) -> State:
        """The state of a value in a scope."""
        versions = tuple((x.sharding, x in scope.received) for x in scope.versions.get(v, ()))
        lazy = self.canonical(scope.lazy[v]) if v in scope.lazy else None
        return self.state(versions, scope.home.get(v), lazy, v in scope.sent_for)

    def installed(self, setting: Setting, graph: Graph, demand: Any, values: Sequence[tuple[Var, State]]) -> Scope:
        """A scope in which these values lie so, and nothing has been made."""
        scope = Scope(setting, graph, demand)
        for v, state in values:
            if state.lazy is not None:
                scope.lazy[v] = state.lazy
            if state.home is not None:
                scope.home[v] = state.home
                if state.home.partial:
                    scope.reasons[v] = (NO_CAUSE, Where("", 0), True)
            if state.versions:
                made = [Var(v.shape, v.dtype, v.name, sharding) for sharding, _ in state.versions]
                scope.versions[v] = made
                scope.received.update(x for x, (_, got) in zip(made, state.versions, strict=True) if got)
            if state.sent:
                scope.sent_for.add(v)
        return scope

    def signature(self, eqn: Eqn) -> int:
        """Equal for equations that are lowered alike from operands that lie alike."""
        if eqn not in self.signatures:
            number = {v: i for i, v in enumerate(dict.fromkeys(eqn.ins))}
            params = tuple((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in sorted(eqn.params.items()))
            hints = tuple((self.hints.get(v, ()), self.row_dims.get(v, ())) for v in (*eqn.ins, *eqn.outs))
            types = tuple((v.shape, v.dtype) for v in (*number, *eqn.outs))
            key: Any = (eqn.op, tuple(number[v] for v in eqn.ins), params, types, eqn.backward, hints)
            try:
                hash(key)
            except TypeError:
                key = eqn
            key = eqn if eqn.control is not None or eqn.op is SORT else key
            self.signatures[eqn] = self.numbers.setdefault(key, len(self.numbers))
        return self.signatures[eqn]


def _hidden(names: Iterable[str]) -> dict[str, Any]:
    """Entries that nothing can be done with: to look at the axes of a dim that is not in a class is an error."""
    return dict.fromkeys(names, HIDDEN)


HIDDEN = object()
