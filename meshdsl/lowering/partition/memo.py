"""A `Memo` lowers equal equations once for many layouts of one graph on one mesh.

The lowering of an equation depends on the equation, on the axes of the dims that it mentions, and on the state of its
operands: their versions, default sharding, whether they are unmaterialized, and whether a pending sum should be
deferred. That of a product also depends on the operands of later products that read the same value. It changes only the
scope. A memo records that change and replays it. The layouts share program variables, so states compare by identity.

Requires that the layouts differ only in their rules (same overrides, `gather_limit` and hints), and that the graph has
no operation that reads other state; see `memoisable`. The first problem of a layout stops its lowering with
`IllegalError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...control import KEEP
from ...control.region import REGIONS
from ...ir import Eqn, Graph, Var, walk
from ...layouts import Layout, Sharding
from ...layouts.sharding import Axes
from ...ops.ragged import RAGGED
from .prices import later_products
from .scope import Scope

__all__ = ["IllegalError", "Memo", "memoisable"]

T = TypeVar("T")


class IllegalError(Exception):
    """The layout is illegal for the graph. Run `partition` to get the problem's text."""


@dataclass(frozen=True, eq=False)
class _Change:
    """The changes that lowering one equation made to its scope."""

    eqns: tuple[Eqn, ...]
    values: tuple[tuple[Var, Any], ...]  # states of operands and results after the lowering
    received: tuple[Var, ...]
    sends: bool


def memoisable(graph: Graph) -> bool:
    """True if the lowering of every equation depends on its operands only.

    `md.local` reads the blocks of an earlier region; `keep` shares versions of two values and leaves dead equations.
    """
    return not any(eqn.op in (*REGIONS, KEEP, RAGGED) for eqn, _ in walk(graph))


class Memo:
    """The recorded changes and variables; None marks an illegal layout."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._changes: dict[Any, _Change | None] = {}
        self._names: dict[Eqn, tuple[str, ...]] = {}
        self._operands: dict[Eqn, tuple[Var, ...]] = {}
        self._beside: dict[Eqn, tuple[Var, ...]] = {}

    def once(self, scope: Scope, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for each key; raises `IllegalError` if `make` reports a problem."""
        value = self._made.get(key, self)
        if value is self:
            self._made[key] = None
            value = self._made[key] = _legal(scope, make)
        if value is None:
            raise IllegalError
        return value

    def rules(self, eqn: Eqn, layout: Layout) -> tuple[Axes | None, ...]:
        """The axes of every dim that an equation or its bodies mention."""
        names = self._names.get(eqn)
        if names is None:
            inner = [e for sub in eqn.graphs().values() for e, _ in walk(sub)]
            shapes = [v.shape for e in (eqn, *inner) for v in (*e.ins, *e.outs)]
            names = self._names[eqn] = tuple(dict.fromkeys(d.name for shape in shapes for d in shape))
        return tuple([layout.rules.get(d) for d in names])

    def operands(self, scope: Scope, eqn: Eqn) -> tuple[Var, ...]:
        """The operands of an equation, and the unmaterialized values that they may be computed from."""
        found = self._operands.get(eqn)
        if found is None:
            values = list(dict.fromkeys(eqn.ins))
            for v in values:  # the list grows during iteration
                maker = scope.demand.unmade.get(v)
                values += [x for x in maker.ins if x not in values] if maker is not None else []
            found = self._operands[eqn] = tuple(values)
        return found

    def beside(self, scope: Scope, eqn: Eqn) -> tuple[Var, ...]:
        """The other operands of later products that share an operand with this one; they decide what it gathers."""
        found = self._beside.get(eqn)
        if found is None:
            others = (x for v, other in later_products(scope.demand, eqn) for x in other.ins if x is not v)
            found = self._beside[eqn] = tuple(dict.fromkeys(others))
        return found

    def lower(self, scope: Scope, eqn: Eqn, lower: Callable[[Scope, Eqn], None]) -> None:
        """Lower an equation, or replay the recorded change if it was lowered from the same state before.

        Raises `IllegalError` if the layout has a problem there.
        """
        if eqn.control is not None:  # a memo records the bodies' equations, not the loop or branch itself
            _legal(scope, lambda: lower(scope, eqn))
            return
        defers = [scope.is_pending(v) and scope.should_defer(v, eqn) for v in eqn.ins]
        beside = self.beside(scope, eqn)
        states = [_state(scope, v) for v in (*self.operands(scope, eqn), *beside)]
        rules = [scope.setting.layout.rules.get(d.name) for v in beside for d in v.shape]
        key = (eqn, self.rules(eqn, scope.setting.layout), *rules, *defers, *states)
        if key not in self._changes:
            self._changes[key] = None
            self._changes[key] = _watched(scope, eqn, (*self.operands(scope, eqn), *eqn.outs), lower)
            return
        change = self._changes[key]
        if change is None:
            raise IllegalError
        scope.eqns.extend(change.eqns)
        for v, state in change.values:
            _restore(scope, v, state)
        scope.received.update(change.received)
        scope.def_sharding.update((v, scope.default_sharding[v]) for v in eqn.outs if v in scope.default_sharding)
        if change.sends:
            scope.required_collectives.update(eqn.outs)


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


def _watched(scope: Scope, eqn: Eqn, touched: Sequence[Var], lower: Callable[[Scope, Eqn], None]) -> _Change:
    n, received = len(scope.eqns), set(scope.received)
    _legal(scope, lambda: lower(scope, eqn))
    values = tuple((v, _state(scope, v)) for v in dict.fromkeys(touched))
    sends = any(v in scope.required_collectives for v in eqn.outs)
    return _Change(tuple(scope.eqns[n:]), values, tuple(scope.received - received), sends)
