"""A `Memo` lowers equal equations once for many layouts of one graph on one mesh.

Lowering an equation depends on the equation, on the axes of the dims that it mentions, and on the state of its operands
(versions, default sharding, unmaterialized or not, whether a pending sum should be deferred). It changes the scope and
nothing else. A memo keeps that change and applies it again. Program variables are shared between the layouts, so states
compare by identity.

Requires that the layouts differ in their rules only (same overrides, `gather_limit` and hints), and that the graph has
none of the operations that read more than that: see `memoisable`. The first problem of a layout ends its lowering:
`IllegalError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...control import KEEP
from ...control.region import LOCAL
from ...ir import Eqn, Graph, Var, walk
from ...layouts import Layout, Sharding
from ...layouts.sharding import Axes
from ...ops.ragged import RAGGED
from .scope import Scope

__all__ = ["IllegalError", "Memo", "memoisable"]

T = TypeVar("T")


class IllegalError(Exception):
    """The layout is illegal for the graph; which problem it has, `partition` says."""


@dataclass(frozen=True, eq=False)
class _Change:
    """What lowering one equation did to its scope."""

    eqns: tuple[Eqn, ...]
    values: tuple[tuple[Var, Any], ...]  # states of operands and results afterwards
    received: tuple[Var, ...]
    sends: bool


def memoisable(graph: Graph) -> bool:
    """Whether every equation is lowered from its operands alone.

    `md.local` reads the blocks of an earlier region; `keep` shares versions of two values, and leaves equations dead.
    """
    return not any(eqn.op in (LOCAL, KEEP, RAGGED) for eqn, _ in walk(graph))


class Memo:
    """Changes and variables made so far; None where a layout was illegal."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._changes: dict[Any, _Change | None] = {}
        self._names: dict[Eqn, tuple[str, ...]] = {}
        self._operands: dict[Eqn, tuple[Var, ...]] = {}

    def once(self, scope: Scope, key: Any, make: Callable[[], T]) -> T:
        """The value of `make` for this key; raises `IllegalError` where making it finds a problem."""
        value = self._made.get(key, self)
        if value is self:
            self._made[key] = None
            value = self._made[key] = _legal(scope, make)
        if value is None:
            raise IllegalError
        return value

    def rules(self, eqn: Eqn, layout: Layout) -> tuple[Axes | None, ...]:
        """The axes of every dim that an equation mentions, inside its bodies too."""
        names = self._names.get(eqn)
        if names is None:
            inner = [e for sub in eqn.graphs().values() for e, _ in walk(sub)]
            shapes = [v.shape for e in (eqn, *inner) for v in (*e.ins, *e.outs)]
            names = self._names[eqn] = tuple(dict.fromkeys(d.name for shape in shapes for d in shape))
        return tuple([layout.rules.get(d) for d in names])

    def operands(self, scope: Scope, eqn: Eqn) -> tuple[Var, ...]:
        """The operands of an equation, and the values made of nothing that they may be computed from."""
        found = self._operands.get(eqn)
        if found is None:
            values = list(dict.fromkeys(eqn.ins))
            for v in values:  # grows
                maker = scope.demand.unmade.get(v)
                values += [x for x in maker.ins if x not in values] if maker is not None else []
            found = self._operands[eqn] = tuple(values)
        return found

    def lower(self, scope: Scope, eqn: Eqn, lower: Callable[[Scope, Eqn], None]) -> None:
        """Lower an equation, or apply what lowering it did before from the same state.

        Raises `IllegalError` where that finds a problem of the layout.
        """
        if eqn.control is not None:  # its bodies are remembered, not what is around them
            _legal(scope, lambda: lower(scope, eqn))
            return
        defers = [scope.is_pending(v) and scope.should_defer(v, eqn) for v in eqn.ins]
        states = [_state(scope, v) for v in self.operands(scope, eqn)]
        key = (eqn, self.rules(eqn, scope.setting.layout), *defers, *states)
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
