"""A `Memo` lowers equal equations once for many layouts of one graph on one mesh.

The lowering of an equation depends on the equation, on the axes of the dims that it mentions, and on the state of its
operands: their versions, default sharding, whether they are unmaterialized, and whether a pending sum should be
deferred. That of a product also depends on the operands of later products that read the same value. It changes only the
scope. A memo records that change and replays it. The layouts share program variables, so states compare by identity.

Changes are also recorded for runs of equations that mention few dims. Where a run's dims and the values that it reads
are as before, one lookup lowers all of it. A run depends on more dims than its equations do: whether a pending sum is
deferred depends on the dims of all linear operations that it reaches (`Demand.dims`).

Requires that the layouts differ only in their rules (same overrides and hints), and that the graph has
no operation that reads other state; see `memoisable`. The first problem of a layout stops its lowering with
`IllegalError`. `Scope.def_sharding` is not filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...control import KEEP
from ...errors.deadline import check_deadline
from ...ir import Eqn, Graph, Var, walk
from ...jax_functions.local import REGIONS
from ...layouts import Layout, Sharding
from ...layouts.sharding import Axes
from ...ops.placement import SHARD
from ...ops.ragged import RAGGED
from .demand import Demand
from .prices import later_products
from .scope import Scope
from .wide_copies import wide_copies

T = TypeVar("T")
Lower = Callable[[Scope, Eqn], None]
FEW = 5  # dims of a run
MISSING = object()


class IllegalError(Exception):
    """The layout is illegal for the graph. Run `partition` to get the problem's text.

    The problem depends only on the first `lowered` of the equations that were being lowered; on inputs or results if 0.
    """

    def __init__(self, lowered: int = 0):
        super().__init__(lowered)
        self.lowered = lowered


@dataclass(frozen=True, eq=False)
class _Change:
    """The changes that lowering made to its scope."""

    eqns: tuple[Eqn, ...]
    values: tuple[tuple[Var, Any], ...]  # states of operands and results after the lowering
    received: tuple[Var, ...]
    sends: tuple[Var, ...]  # results whose lowering sends something


@dataclass(frozen=True, eq=False)
class _Run:
    """Consecutive equations of a graph, and everything that their lowering depends on."""

    eqns: tuple[Eqn, ...]
    dims: tuple[str, ...]
    operands: tuple[Var, ...]  # computed before the run, also by equations without inputs
    beside: tuple[Var, ...]  # read by later products of the same operands
    results: tuple[Var, ...]


def memoisable(graph: Graph) -> bool:
    """True if the lowering of every equation depends on its operands only.

    Three operations are exceptions. `md.local` reads the blocks of an earlier `md.local`. `keep` lets two values share
    their copies in other shardings, and leaves equations that nothing reads. The sharding that `md.shard` asks of the
    values before it depends on the rules of later dims.
    """
    return not any(eqn.op in (*REGIONS, KEEP, RAGGED, SHARD) for eqn, _ in walk(graph))


class Memo:
    """The recorded changes and variables; None marks an illegal layout."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._changes: dict[Any, _Change | None] = {}
        self._slices: dict[tuple[Demand, Eqn, int], list[_Run]] = {}
        self._runs: dict[tuple[Eqn, int, Demand | None], _Run] = {}
        self._mentions: dict[Eqn, tuple[str, ...]] = {}

    def once(self, scope: Scope, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for each key; raises `IllegalError` if `make` reports a problem."""
        value = self._made.get(key, MISSING)
        if value is MISSING:
            try:
                value = self._made[key] = _legal(scope, make)
            except IllegalError:
                self._made[key] = None
                raise
        if value is None:
            raise IllegalError
        return value

    def rules(self, eqn: Eqn, layout: Layout) -> tuple[Axes | None, ...]:
        """The axes of every dim that an equation or its bodies mention."""
        dims = self._mentions.get(eqn)
        if dims is None:
            dims = self._mentions[eqn] = tuple(dict.fromkeys(d.name for v in _values(eqn) for d in v.dims))
        return tuple([layout.rules.get(d) for d in dims])

    def lower(self, scope: Scope, eqns: Sequence[Eqn], lower: Lower) -> None:
        """Lower consecutive equations of the scope's graph, or replay the recorded changes.

        Raises `IllegalError` if the layout has a problem there.
        """
        if not eqns:
            return
        where = scope.demand, eqns[0], len(eqns)
        if where not in self._slices:
            self._slices[where] = [self._run(scope.demand, each) for each in runs(eqns)]
        lowered = 0
        for run in self._slices[where]:
            check_deadline()
            lowered += len(run.eqns)
            try:
                self._lower(scope, run, lower)
            except IllegalError:
                raise IllegalError(lowered) from None

    def dims(self, demand: Demand, eqns: Sequence[Eqn]) -> tuple[str, ...]:
        """The dims whose axes determine the lowering of the first equations of a graph."""
        return _run_of(demand, tuple(eqns), deferred=True).dims

    def _lower(self, scope: Scope, run: _Run, lower: Lower) -> None:
        """Lower consecutive equations, or replay the changes recorded when they were first lowered."""
        rules = scope.setting.layout.rules
        states = [_state(scope, v) for v in run.operands]
        states += [_state(scope, v) for v in run.beside]
        eqn, *others = run.eqns
        defers: list[Any] = []
        if eqn.scan is not None:
            defers = [scope.demand.deferred_results(eqn, eqn.scan, scope.setting)]
        elif not others:
            defers = [scope.is_pending(v) and scope.should_defer(v, eqn) for v in eqn.ins]
        key = (run, *[rules.get(d) for d in run.dims], *defers, *states)
        change = self._changes.get(key, MISSING)
        if change is None:
            raise IllegalError
        if change is MISSING:
            try:
                self._changes[key] = self._watched(scope, run, lower)
            except IllegalError:
                self._changes[key] = None
                raise
            return
        assert isinstance(change, _Change)
        scope.eqns.extend(change.eqns)
        for v, state in change.values:
            _restore(scope, v, state)
        scope.received.update(change.received)
        scope.required_collectives.update(change.sends)

    def _watched(self, scope: Scope, run: _Run, lower: Lower) -> _Change:
        n = len(scope.eqns)
        if len(run.eqns) == 1:
            _legal(scope, lambda: lower(scope, run.eqns[0]))
        else:
            for eqn in run.eqns:
                self._lower(scope, self._run(scope.demand, (eqn,)), lower)
        values = tuple((v, _state(scope, v)) for v in (*run.operands, *run.results))
        sends = tuple(v for v in run.results if v in scope.required_collectives)
        added = tuple(scope.eqns[n:])
        return _Change(added, values, tuple(v for eqn in added for v in eqn.outs if v in scope.received), sends)

    def _run(self, demand: Demand, eqns: tuple[Eqn, ...]) -> _Run:
        """The run of these equations. Demands share it unless what they defer is not part of the key of a change."""
        alone = len(eqns) == 1
        key = eqns[0], len(eqns), None if alone else demand
        if key not in self._runs:
            self._runs[key] = _run_of(demand, eqns, deferred=not alone)
        return self._runs[key]


def _beside(demand: Demand, eqns: Sequence[Eqn]) -> dict[Var, None]:
    """The other operands of the products that read the results later."""
    products = [pair for eqn in eqns for pair in later_products(demand, eqn)]
    return dict.fromkeys(x for v, other in products for x in other.ins if x is not v)


def _dims_that_defer(demand: Demand, eqns: Sequence[Eqn]) -> Iterator[str]:
    for eqn in eqns:
        for v in eqn.ins:
            yield from demand.dims(v)
        if eqn.scan is not None:
            yield from demand.loop_dims(eqn, eqn.scan)


def _run_of(demand: Demand, eqns: tuple[Eqn, ...], deferred: bool) -> _Run:
    """The run of these equations. `deferred`: its dims include those that decide which sums are deferred."""
    results = dict.fromkeys(v for eqn in eqns for v in eqn.outs)
    before = [v for v in _operands(demand, eqns) if v not in results]
    beside = _beside(demand, eqns)
    mentioned = [v for eqn in eqns for v in _values(eqn)]
    dims = [d.name for v in (*mentioned, *beside) for d in v.dims]
    dims += _dims_that_defer(demand, eqns) if deferred else ()
    others = [v for v in beside if v not in results and v not in before]
    return _Run(eqns, tuple(dict.fromkeys(dims)), tuple(before), tuple(others), tuple(results))


def _operands(demand: Demand, eqns: Iterable[Eqn]) -> list[Var]:
    """The operands of equations, and for those without a value of their own, what they are computed from."""
    operands = list(dict.fromkeys(v for eqn in eqns for v in eqn.ins))
    for v in operands:  # the list grows during iteration
        maker = demand.sums.constants.get(v)
        before = maker.ins if maker is not None else ()
        if (copy := wide_copies(demand.sums.graph).get(v)) is not None:
            before = (*before, copy.source, *copy.scales)
        operands += [x for x in dict.fromkeys(before) if x not in operands]
    return operands


def runs(eqns: Iterable[Eqn]) -> Iterator[tuple[Eqn, ...]]:
    """Consecutive equations that mention few dims; loops and branches are runs of their own."""
    run: list[Eqn] = []
    dims: set[str] = set()
    for eqn in eqns:
        own = {d.name for v in _values(eqn) for d in v.dims}
        if run and (eqn.control is not None or run[-1].control is not None or len(dims | own) > FEW):
            yield tuple(run)
            run, dims = [], set()
        run.append(eqn)
        dims |= own
    if run:
        yield tuple(run)


def _values(eqn: Eqn) -> Iterator[Var]:
    """The values of an equation and of its bodies."""
    yield from (*eqn.ins, *eqn.outs)
    for sub in eqn.graphs().values():
        for inner, _ in walk(sub):
            yield from (*inner.ins, *inner.outs)


def _legal(scope: Scope, make: Callable[[], T]) -> T:
    problems = len(scope.setting.problems)
    value = make()
    if len(scope.setting.problems) > problems:
        raise IllegalError
    return value


def _state(scope: Scope, v: Var) -> Any:
    home: Sharding | None = scope.default_sharding.get(v)
    return tuple(scope.versions.get(v, ())), home, scope.unmaterialized.get(v), scope.reasons.get(v)


def _restore(scope: Scope, v: Var, state: Any) -> None:
    versions, home, lazy, reason = state
    if versions:
        scope.versions[v] = list(versions)
    if home is not None:
        scope.default_sharding[v] = home
    if lazy is not None:
        scope.unmaterialized[v] = lazy
    if reason is not None:
        scope.reasons[v] = reason
