"""One graph, or the body of a loop, lowered for all rows of a table at once.

Loops go as in `lowering.control`, for all rows together: those whose carry has not settled are built again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import NOWHERE, MeshdslError, Where
from ..ir import NO_CAUSE, Eqn, Graph, Op, Scan, Var, walk
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..lowering import Program
from ..lowering.partition import control
from ..lowering.partition.control import Given
from ..lowering.partition.demand import Body as LoopBody
from ..lowering.partition.demand import Demand
from ..lowering.partition.partition import lower
from ..lowering.partition.scope import Reader, Scope
from ..ops.masking import MASK
from ..ops.placement import PREFER
from ..trace import FULL
from .classes import HIDDEN, Classes, Made, Sent, State
from .columns import Column, Table
from .network import full_bytes

__all__ = ["Body", "Loop", "Plain"]


@dataclass(frozen=True, eq=False)
class Plain:
    """An equation, or another point at which values are brought into the sharding that is asked for."""

    eqn: Eqn | None
    ins: tuple[Var, ...]  # distinct
    outs: tuple[Var, ...]
    made: Column[Made]

    def merged(self, rows: np.ndarray, other: Plain | Loop) -> Plain:
        """With the rows given replaced by those of a subset."""
        assert isinstance(other, Plain)
        return dataclasses.replace(self, made=self.made.merged(rows, other.made))

    def at(self, table: Table, rows: np.ndarray) -> Plain:
        """For a subset of the rows."""
        return dataclasses.replace(self, made=table.take(self.made, rows))


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan: its operands as it takes them, its body, and its results as they are cut afterwards."""

    eqn: Eqn
    gets: tuple[Plain, ...]
    body: Body
    settled: tuple[Plain, ...]

    def merged(self, rows: np.ndarray, other: Plain | Loop) -> Loop:
        """With the rows given replaced by those of a subset."""
        assert isinstance(other, Loop)
        body = self.body.at(np.arange(self.body.table.size))
        body.table = self.body.table
        body.redo(rows, other.body)
        gets = tuple(a.merged(rows, b) for a, b in zip(self.gets, other.gets, strict=True))
        settled = tuple(a.merged(rows, b) for a, b in zip(self.settled, other.settled, strict=True))
        return Loop(self.eqn, gets, body, settled)

    def at(self, table: Table, rows: np.ndarray) -> Loop:
        """For a subset of the rows."""
        gets = tuple(plain.at(table, rows) for plain in self.gets)
        return Loop(self.eqn, gets, self.body.at(rows), tuple(plain.at(table, rows) for plain in self.settled))


@dataclass(eq=False)
class Body:
    """One graph being lowered for the rows of a table: a scope for all of them."""

    classes: Classes
    table: Table
    graph: Graph
    demand: Column[Demand]
    states: dict[Var, Column[State]] = field(default_factory=dict[Var, Any])
    steps: list[Plain | Loop] = field(default_factory=list[Any])
    ends: list[Plain] = field(default_factory=list[Plain])  # the results as they are wanted

    def run(self) -> None:
        """Lower every equation."""
        for eqn in self.graph.eqns:
            if isinstance(eqn.control, Scan):
                self.scan(eqn, eqn.control)
            else:
                self.steps.append(self.equation(eqn))

    def equation(self, eqn: Eqn) -> Plain:
        ins, outs = tuple(dict.fromkeys(eqn.ins)), eqn.outs
        key = self.classes.signature(eqn)
        made = self.made(key, _names(eqn), ins, outs, lambda scope: lower(scope, eqn))
        return Plain(eqn, ins, outs, made)

    def point(self, key: Any, ins: Sequence[Var], outs: Sequence[Var], action: Callable[..., Any]) -> Plain:
        """A point that is no equation: inputs, results, operands of loops."""
        names = tuple(dict.fromkeys(d.name for v in (*ins, *outs) for d in v.shape))
        plain = Plain(None, tuple(ins), tuple(outs), self.made(key, names, ins, outs, action))
        (self.ends if not outs else self.steps).append(plain)
        return plain

    def made(
        self,
        key: Any,
        names: Sequence[str],
        ins: Sequence[Var],
        outs: Sequence[Var],
        action: Callable[..., Any],
        *asked: Column[Any],
    ) -> Column[Made]:
        """Do something for every class of rows, and keep how operands and results lie afterwards.

        What `asked` holds of a row is part of its class, and an argument of the action.
        """
        table = self.table
        table.need([*names, *(d for v in ins for demand in self.demand.values for d in demand.dims(v))])
        dims = tuple(d for d in table.dims if d in names)
        cuts = table.cuts(dims)
        columns = [cuts, self._deferred(ins), *(self.states[v] for v in ins), *asked]
        found = table.map(lambda cut, *rest: self._class(key, dims, cut, ins, outs, rest, action), *columns)
        for i, v in enumerate((*ins, *outs)):
            self.states[v] = found.to(lambda made, i=i: made.states[i])
        table.drop(found, lambda made: made.problem)
        return found

    def _class(
        self,
        key: Any,
        dims: tuple[str, ...],
        cut: tuple[Axes, ...],
        ins: Sequence[Var],
        outs: Sequence[Var],
        rest: Sequence[Any],
        action: Callable[..., Any],
    ) -> Made:
        classes, deferred = self.classes, rest[0]
        states, asked = rest[1 : len(ins) + 1], rest[len(ins) + 1 :]
        memo = (key, dims, cut, *rest)
        if memo not in classes.memo:
            setting = classes.setting(dims, cut)
            demand = _Decided(deferred, self.demand.values[0].users, self.demand.values[0].unmade)
            scope = classes.installed(setting, self.graph, demand, list(zip(ins, states, strict=True)))
            before = tuple(tuple(scope.versions.get(v, ())) for v in ins)
            try:
                wanted = action(scope, *asked)
            except MeshdslError:
                whole = classes.state(((Sharding(), False),), Sharding(), None, False)
                classes.memo[memo] = Made(True, tuple(states), (*states, *(whole for _ in outs)))
                return classes.memo[memo]
            operand = {x: k for k, versions in enumerate(before) for x in versions}
            known = {x for v in (*ins, *outs) for x in scope.versions.get(v, ())}
            pieces = [e for e in scope.eqns if e.op is not MASK and not known.issuperset(e.outs)]
            classes.memo[memo] = Made(
                bool(setting.problems),
                tuple(states),
                tuple(classes.read(scope, v) for v in (*ins, *outs)),
                tuple(_sends(scope, operand)),
                tuple(scope.eqns),
                before,
                tuple(tuple(scope.versions.get(v, ())) for v in (*ins, *outs)),
                wanted if isinstance(wanted, Sharding) else None,
                extents={d: n for d, n in setting.extents.multiple.items() if n is not HIDDEN and n != 1},
                pieces=bool(pieces),
            )
        return classes.memo[memo]

    def _deferred(self, ins: Sequence[Var]) -> Column[frozenset[Var]]:
        """The operands whose sums are left pending: a minimum cut of their region, which depends on all its dims."""
        table, states = self.table, [self.states[v] for v in ins]
        unsure = [v for v, column in zip(ins, states, strict=True) if any(map(_pending, column.values))]
        names = {d for v in unsure for demand in self.demand.values for d in demand.dims(v)}
        if not names:
            return table.constant(frozenset())
        dims = tuple(d for d in table.dims if d in names)

        def decided(cut: tuple[Axes, ...], demand: Demand, *states: State) -> frozenset[Var]:
            setting = self.classes.setting(dims, cut)
            known = {
                v: state.home.partial if _pending(state) else ()
                for v, state in zip(ins, states, strict=True)
                if state.home is not None
            }
            return frozenset(v for v, axes in known.items() if axes and demand.should_defer(v, known, setting))

        return table.map(decided, table.cuts(dims), self.demand, *states)

    def seen(self, v: Var, f: Callable[[Scope, Var], Any]) -> Column[Any]:
        """What a function of a scope and a value says of this one."""
        return self.states[v].to(lambda state: f(self._with(v, state), v))

    def _with(self, v: Var, state: State) -> Scope:
        setting = self.classes.setting((), ())
        return self.classes.installed(setting, self.graph, self.demand.values[0], [(v, state)])

    def at(self, rows: np.ndarray) -> Body:
        """Some of the rows, on a table of their own."""
        table = self.table.subset(rows)
        demand = table.take(self.demand, rows)
        states = {v: table.take(column, rows) for v, column in self.states.items()}
        return Body(
            self.classes,
            table,
            self.graph,
            demand,
            states,
            [step.at(table, rows) for step in self.steps],
            [end.at(table, rows) for end in self.ends],
        )

    def redo(self, rows: np.ndarray, other: Body) -> None:
        """Put what was built for some of the rows in place of what there is."""
        if len(rows):
            self.demand = self.demand.merged(rows, other.demand)
            self.states = {v: column.merged(rows, other.states[v]) for v, column in self.states.items()}
            self.steps = [a.merged(rows, b) for a, b in zip(self.steps, other.steps, strict=True)]
            if self.ends or other.ends:
                self.ends = [a.merged(rows, b) for a, b in zip(self.ends, other.ends, strict=True)]
            self.table.bad[rows] |= other.table.bad

    def _use(self, loop: Eqn, scan: Scan) -> Column[LoopBody]:
        """How a scan uses its body."""
        names = {d for demand in self.demand.values for d in demand.loop_dims(loop, scan)}
        self.table.need(names)
        dims = tuple(d for d in self.table.dims if d in names)

        def use(cut: tuple[Axes, ...], demand: Demand) -> LoopBody:
            deferred = demand.deferred_results(loop, scan, self.classes.setting(dims, cut))
            return LoopBody(scan.consts, scan.carries, scan.trips, deferred)

        return self.table.map(use, self.table.cuts(dims), self.demand)

    def inner(self, graph: Graph, use: Column[LoopBody], table: Table, given: Sequence[Column[Given]]) -> Body:
        """A body lowered from inputs that arrive so."""
        arrives = table.constant(((), ()))
        for i, how in enumerate(given):
            if any(_kind(value) for value in how.values):
                arrives = table.map(lambda so_far, g, i=i: _arriving(so_far, g, i), arrives, how)
        demand = table.map(lambda found, use: self.classes.demand(graph, use, *found), arrives, use)
        states = {v: how.to(lambda g, v=v: self.classes.given(v, g)) for v, how in zip(graph.ins, given, strict=True)}
        body = Body(self.classes, table, graph, demand, states)
        body.run()
        return body

    def finish(self, carry: Sequence[Column[Sharding]]) -> None:
        """Bring the results into the shardings that the loop has for them: its carry's, and the others' own."""
        outs = self.graph.outs
        own = [self.seen(v, control.natural) for v in outs[len(carry) :]]
        self.ends += [self.get(v, how) for v, how in zip(outs, [*carry, *own], strict=True)]

    def get(self, v: Var, how: Column[Any]) -> Plain:
        """A value in another sharding; what is born inside a loop is not asked for."""

        def action(scope: Scope, target: Given) -> Given:
            if isinstance(target, Sharding):
                scope.get(v, target, Reader("get", NOWHERE))
            return target

        key = ("get", v.shape, v.dtype)
        return Plain(None, (v,), (), self.made(key, [d.name for d in v.shape], [v], [], action, how))

    @property
    def repeated(self) -> set[Plain | Loop]:
        """Steps that work on parts of an operand which another step may make as well: equal parts are made once."""
        shared: dict[Var, list[Plain]] = {}
        for step in self.steps:
            if isinstance(step, Plain) and any(made.pieces for made in step.made.values):
                for v in step.ins:
                    shared.setdefault(v, []).append(step)
        return {step for steps in shared.values() if len(steps) > 1 for step in steps}

    def sent(self) -> np.ndarray:
        """The bytes that one device sends in one run, by row; at least, where steps may share what they send."""
        total, repeated = np.zeros(self.table.size), self.repeated
        for step in (*self.steps, *self.ends):
            if isinstance(step, Loop):
                total += step.body.sent() * step.eqn.trips
            for plain in [step] if isinstance(step, Plain) else [*step.gets, *step.settled]:
                if any(made.sends for made in plain.made.values) and plain not in repeated:
                    total += plain.made.array(lambda made: sum(sent.wire for sent in made.sends))
        return total

    def scan(self, eqn: Eqn, loop: Scan) -> None:
        """As `lowering.control.lower_scan`, for all rows."""
        body, consts, n = loop.body, loop.consts, loop.carries
        init, stacked = eqn.ins[consts : consts + n], eqn.ins[consts + n :]
        held = [self.seen(v, control.as_given) for v in eqn.ins[:consts]]
        rows = [self.seen(v, control.as_stacked) for v in stacked]
        inner = [g.to(lambda g, v=v: self.classes.row(g, v)) for g, v in zip(rows, body.ins[consts + n :], strict=True)]

        use = self._use(eqn, loop)

        def attempt(carry: Sequence[Column[Any]], only: np.ndarray | None = None) -> Body:
            given, table = [*held, *carry, *inner], self.table
            if only is None:
                return self.inner(body, use, table, given)
            table = self.table.subset(only)
            return self.inner(body, table.take(use, only), table, [table.take(c, only) for c in given])

        carry: list[Column[Given]] = [self.seen(v, control.as_given) for v in init]
        built = attempt(carry)
        active = np.arange(self.table.size)
        for _ in range(4):
            after = [built.seen(v, control.natural) for v in body.outs[:n]]
            settled = [self.next_carry(*x) for x in zip(init, carry, after, strict=True)]
            active = active[~self.table.all_equal(carry, settled)[active]]
            carry = settled
            if not len(active):
                break
            built.redo(active, attempt(carry, active))
        else:
            whole = [c.to(lambda now: (now if isinstance(now, Sharding) else Sharding()).whole()) for c in carry]
            carry = [c.merged(active, self.table.subset(active).take(w, active))
                     for c, w in zip(carry, whole, strict=True)]  # fmt: skip
            built.redo(active, attempt(carry, active))
        unborn = self.table.where(carry, lambda now: isinstance(now, Eqn))
        fixed = [c.to(lambda now: now if isinstance(now, Sharding) else Sharding()) for c in carry]
        if len(unborn):
            built.redo(unborn, attempt(fixed, unborn))
        built.finish(fixed)
        waiting = self.table.where(fixed, _partial)
        if len(waiting):  # pending through the loop must not cost more than finishing inside
            fixed = self.finished_inside(built, attempt, fixed, waiting)
        self.loop(eqn, built, [*held, *fixed, *rows], fixed)

    def finished_inside(
        self,
        built: Body,
        attempt: Callable[..., Body],
        fixed: Sequence[Column[Sharding]],
        waiting: np.ndarray,
    ) -> list[Column[Sharding]]:
        """Settle, for the rows whose carry is pending, whether it stays so; the carry's shardings."""
        whole = [s.to(lambda s: s.whole()) for s in fixed]
        other = attempt(whole, waiting)
        other.finish([other.table.take(w, waiting) for w in whole])
        less = other.sent() < built.sent()[waiting]
        chosen = waiting[less]
        if len(chosen):
            built.redo(chosen, other.at(np.flatnonzero(less)))
            part = self.table.subset(chosen)
            fixed = [f.merged(chosen, part.take(w, chosen)) for f, w in zip(fixed, whole, strict=True)]
        own = [end.made.to(lambda made: made.wanted) for end in built.ends[len(fixed) :]]
        later = [built.seen(v, control.natural) for v in built.graph.outs[len(fixed) :]]
        part = self.table.subset(waiting)
        own = [a.merged(waiting, part.take(b, waiting)) for a, b in zip(own, later, strict=True)]
        built.ends += [built.get(v, how) for v, how in zip(built.graph.outs, [*fixed, *own], strict=True)]
        return list(fixed)

    def next_carry(self, v: Var, now: Column[Given], then: Column[Sharding]) -> Column[Given]:
        """How a carry should arrive at the next attempt."""
        return self.table.map(
            lambda state, now, then: control.next_carry(self._with(v, state), v, now, then), self.states[v], now, then
        )

    def loop(self, eqn: Eqn, built: Body, given: Sequence[Column[Any]], fixed: Sequence[Column[Sharding]]) -> None:
        """The loop itself, its operands before it and its results after it."""
        gets = [self.get(v, how) for v, how in zip(eqn.ins, given, strict=True)]
        outs = built.graph.outs
        results = [*fixed, *(built.seen(v, control.natural) for v in outs[len(fixed) :])]
        settled = [
            self._result(eqn, v, result, stacked=k >= len(fixed))
            for k, (v, result) in enumerate(zip(eqn.outs, results, strict=True))
        ]
        self.steps.append(Loop(eqn, tuple(gets), built, tuple(settled)))

    def _result(self, eqn: Eqn, v: Var, result: Column[Sharding], stacked: bool) -> Plain:
        def define(scope: Scope, sharding: Sharding) -> None:
            scope.define(v, sharding)
            if sharding.partial:
                scope.reasons[v] = (NO_CAUSE, Where("", 0), True)
            elif stacked:
                scope.shard_free_dims(v, eqn)

        key = ("result", v.shape, v.dtype, stacked, self.classes.row_dims.get(v, ()))
        return Plain(None, (), (v,), self.made(key, [d.name for d in v.shape], [], [v], define, result))


@dataclass(frozen=True)
class _Decided:
    """A demand whose answers are known."""

    deferred: frozenset[Var]
    users: Mapping[Var, list[Eqn]]
    unmade: Mapping[Var, Eqn]

    def should_defer(self, v: Var, pending: Any, setting: Any) -> bool:
        """As decided."""
        return v in self.deferred


def _partial(s: Sharding) -> bool:
    return bool(s.partial)


def _kind(given: Given) -> str:
    """Zeros not yet stored, and sums that arrive pending: what decides where else sums may wait."""
    if isinstance(given, Eqn):
        return "zero" if given.op is FULL and given.params["value"] == 0 else ""
    return "pending" if given.partial else ""


def _arriving(so_far: tuple[Any, Any], given: Given, i: int) -> tuple[Any, Any]:
    zero, pending = so_far
    what = _kind(given)
    if isinstance(given, Sharding):
        return zero, (*pending, (i, given.partial)) if what == "pending" else pending
    return (*zero, i) if what == "zero" else zero, pending


def _pending(state: State) -> bool:
    home = state.home
    return home is not None and bool(home.partial) and home.kind == "sum" and all(s.partial for s, _ in state.versions)


def _names(eqn: Eqn) -> list[str]:
    """The dims that an equation mentions, those inside its graphs included."""
    inner = [e for sub in eqn.graphs().values() for e, _ in walk(sub)]
    found = [d.name for e in (eqn, *inner) for v in (*e.ins, *e.outs) for d in v.shape]
    return list(dict.fromkeys([*found, *(eqn.params["names"] if eqn.op is PREFER else ())]))


def _sends(scope: Scope, operand: Mapping[Var, int]) -> Iterator[Sent]:
    """What the equations that a scope has been given send."""
    program = Program((), (), (), mesh=scope.setting.mesh, extents=scope.setting.extents)
    of = dict(operand)  # of a version, the number of the operand that it is of
    for made in scope.eqns:
        if isinstance(made.op, Op):
            continue
        of.update((v, of[made.ins[0]]) for v in made.outs if made.ins[0] in of)
        if made.sends:
            record = program.record(made, 1)
            full = full_bytes(record, program.mesh.count(record.axes))
            number = not made.ins[0].shape and record.kind == "all_reduce"
            yield Sent(of.get(made.ins[0], -1), record.kind, record.axes, full, record.wire_bytes, number)
