"""Lower one equation: choose how its labels are sharded, get its operands in these shardings, and add its results.

An operation takes its operands under one assignment of axes to labels (`claims`, `choose`). Pending sums pass through
linear operations while that saves bytes (`demand`). Missing shardings are produced by the cheapest plan (`planner`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...control.host import FETCH
from ...ir import Because, Cause, Eqn, Labels, Linear, Var, walk
from ...jax_functions.local import REGIONS
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.attention.records import ATTENTION, ATTENTION_GRAD
from ...ops.dtypes import CAST
from ...ops.index_map import IndexMap
from ...ops.reductions import BROADCAST
from ...ops.reshape import RENAME, RESHAPE
from ...trace import FULL, number
from ..blocks import ON_FIRST
from ..labels import REPLICATED, apply, index_map_of, labels_of
from . import placement_ops as views
from .annotations import Annotation, with_annotations
from .attention import lower_attention
from .choose import Claims, choose
from .claims import claims_of, region_blocks, settle_conflicts, wanted_axes
from .control import lower_control
from .expansions import EXPANSIONS, Expansion
from .index_map import exchange_price, lower_index_map
from .pending_sums import ADDITIONS
from .prices import later_price, results_price
from .reshapes import lower_by_parts
from .scope import Scope


def lower(scope: Scope, eqns: Sequence[Eqn]) -> None:
    """Add the first equations of the scope's graph to the program under construction."""
    for eqn in eqns:
        n = len(scope.eqns)
        _lower(scope, eqn)
        for v in eqn.outs:
            if v in scope.default_sharding:
                scope.def_sharding[v] = scope.default_sharding[v]
        for added in scope.eqns[n:]:
            if _sends(added) or not scope.received.isdisjoint(added.ins):
                scope.required_collectives.update(eqn.outs)


def _sends(eqn: Eqn) -> bool:
    if eqn.control is None:
        return eqn.sends
    return any(inner.sends for sub in eqn.graphs().values() for inner, _ in walk(sub))


def _as_full(scope: Scope, eqn: Eqn) -> dict[str, Any] | None:
    """The parameters of the number everywhere that an equation broadcasts, or of the zeros that it casts."""
    full = scope.unmaterialized.get(eqn.ins[0]) if eqn.operation in (BROADCAST, CAST) else None
    if full is None or full.op is not FULL:
        return None
    if eqn.operation is BROADCAST:
        return {**full.params, "shape": eqn.outs[0].dims}
    is_zero = scope.is_zero(eqn.ins[0])
    return {**full.params, "value": number(full.params["value"], eqn.outs[0].dtype)} if is_zero else None


def _lower(scope: Scope, eqn: Eqn) -> None:
    op = eqn.operation
    if eqn.control is not None:
        lower_control(scope, eqn, eqn.control, lower)
    elif (params := _as_full(scope, eqn)) is not None:
        scope.unmaterialized[eqn.outs[0]] = eqn.replace(op=FULL, ins=(), params=params)
    elif eqn.outs[0] in scope.demand.sums.constants and (eqn.outs[0].dims or not eqn.ins):
        scope.unmaterialized[eqn.outs[0]] = eqn
    elif op in views.PLACEMENTS:
        views.PLACEMENTS[op](scope, eqn)
    elif op is RENAME and views.padded_otherwise(scope, eqn):
        views.rename_first(scope, eqn)
    elif op in (ATTENTION, ATTENTION_GRAD):
        lower_attention(scope, eqn)
    elif op is FETCH and eqn.ins[0] not in scope.unmaterialized:
        _fetch(scope, eqn)
    elif _is_whole(scope, eqn):
        _operate_on_whole(scope, eqn)
    else:
        _operate(scope, eqn)


def _operate_on_whole(scope: Scope, eqn: Eqn) -> None:
    """Add the equation on complete operands, with complete results."""
    ins = [scope.get(v, REPLICATED, eqn) for v in eqn.ins]
    scope.eqns.append(eqn.on(tuple(ins), tuple([scope.define(v, REPLICATED) for v in eqn.outs])))


def _fetch(scope: Scope, eqn: Eqn) -> None:
    """Copy a value from the host's memory in the sharding that it has there; its readers reshard the copy."""
    (x,) = eqn.ins
    stored = scope.get(x, scope.default_sharding[x], eqn)
    scope.eqns.append(eqn.replace(ins=(stored,), outs=(scope.define(eqn.outs[0], stored.sharding),)))


def _pending(scope: Scope, eqn: Eqn) -> Axes:
    """The axes over which the operation's operands stay pending; empty if their sums are reduced first."""
    waiting = [v for v in dict.fromkeys(eqn.ins) if scope.is_pending(v)]
    if not all(scope.demand.sums.may_stay_pending(eqn, v) for v in waiting):
        return ()
    if not any(scope.should_defer(v, eqn) for v in waiting):
        return ()
    axes = scope.default_sharding[waiting[0]].partial
    if any(scope.default_sharding[v].partial != axes for v in waiting) or not _is_linear_in(scope, eqn, waiting):
        return ()
    complete = [scope.default_sharding[v] for v in eqn.ins if v not in waiting and v in scope.default_sharding]
    used = {axis for sharding in complete for axis in sharding.split_axes + sharding.partial}
    return () if used & set(axes) else axes


def _is_linear_in(scope: Scope, eqn: Eqn, waiting: Sequence[Var]) -> bool:
    """True if the operation may run on unreduced operands: the sum of its results is the result on the sum."""
    op, complete = eqn.operation, [v for v in eqn.ins if v not in waiting]
    match op.linear:
        case Linear.JOINT | Linear.PADDED:
            return op in ADDITIONS or all(scope.is_zero(v) for v in complete)
        case Linear.UPDATE:
            return all(scope.is_zero(v) for v in complete if v in eqn.ins[:2])
        case Linear.BRANCHES:
            return all(scope.is_zero(v) for v in complete if v is not eqn.ins[0])
        case Linear.EACH | Linear.FIRST | Linear.RATIO | Linear.SECOND:
            return len(waiting) == 1
        case _:
            return True


def _on_first(scope: Scope, x: Var, axes: Axes, eqn: Eqn) -> Var:
    """A complete value as a pending sum to which only the first device along the axes contributes."""
    pending = Var(x.dims, x.dtype, x.name, Sharding.of(dict(x.sharding.split), axes))
    scope.add(ON_FIRST, [x], [pending], eqn, axes=axes)
    return pending


class _Choice(NamedTuple):
    """The decision about one equation: the mesh axes of each label, and the axes over which sums stay pending."""

    eqn: Eqn
    labels: Labels
    assigned: Mapping[str, Axes]
    pending: Axes
    expansion: Expansion | None  # its lowering along split dims, if it has one
    expanded: bool  # whether this assignment needs it
    moves: IndexMap | None
    annotations: Mapping[str, Annotation]  # those that decided, by dim of the first result
    free: bool  # whether every device computes the operands itself, so that no sharding of them costs anything

    def operands(self) -> Iterator[tuple[int, Var, Mapping[str, str | None]]]:
        return ((k, v, names) for k, (v, names) in enumerate(zip(self.eqn.ins, self.labels.ins, strict=True)))


def _operate(scope: Scope, eqn: Eqn) -> None:
    """Choose how the operands are sharded, take them so, define the results, and add the operation's equations."""
    choice = _choose(scope, eqn)
    if eqn.op is RESHAPE and not choice.pending:
        price = _price(scope, eqn, choice.labels, (), None, choice.assigned)
        if lower_by_parts(scope, eqn, price, apply(choice.labels.outs[0], choice.assigned)):
            return
    eqn = choice.eqn
    ins = [_operand(scope, choice, *operand) for operand in choice.operands()]
    outs, start = _results(scope, choice), len(scope.eqns)
    if choice.expansion is not None and choice.expanded:
        choice.expansion.build(scope, eqn, ins, choice.assigned, outs)
        with_annotations(scope.eqns, start, outs[0], choice.annotations)
        return
    moves = choice.moves
    if moves is not None and choice.assigned.get(moves.out.name):
        lower_index_map(scope, eqn, ins, moves, choice.assigned[moves.out.name], outs[0])
    else:
        scope.eqns.append(eqn.on(tuple(ins), tuple(outs)))
    with_annotations(scope.eqns, start, outs[0], choice.annotations)
    for v, names in zip(eqn.outs, choice.labels.outs, strict=True):
        if (None in names.values() or choice.free) and not scope.default_sharding[v].partial:
            scope.shard_free_dims(v, eqn)  # every device has the complete value and takes its part


def _choose(scope: Scope, eqn: Eqn) -> _Choice:
    """The cheapest axes of the labels, among those that the operands and the layout request."""
    expansion = EXPANSIONS.get(eqn.operation)
    labels = expansion.labels(scope, eqn) if expansion is not None else labels_of(eqn)
    pending = _pending(scope, eqn)
    moves = index_map_of(eqn)
    free = (expansion is not None or moves is not None) and all(v in scope.unmaterialized for v in eqn.ins)
    claims = Claims() if free else claims_of(scope, eqn, labels, pending)
    claims, preferred = settle_conflicts(scope, eqn, labels, claims)
    wanted = wanted_axes(scope, eqn, labels)
    price = functools.partial(_price, scope, eqn, labels, pending, moves)
    assigned: Mapping[str, Axes] = choose(claims, preferred, price)
    if any(v in scope.setting.wanted for v in eqn.outs):
        others = [choose(claims.beside(wanted), preferred, price), *([wanted] if moves is not None else [])]
        assigned = min([assigned, *others], key=price)
    if eqn.op in REGIONS:
        assigned, eqn = region_blocks(scope, eqn, labels, assigned)
    expanded = expansion is not None and expansion.needed(scope, eqn, assigned)
    decided = {
        d: claims.annotations[label]
        for d, label in labels.outs[0].items()
        if label in claims.annotations and assigned.get(label) == claims.annotations[label].axes
    }
    return _Choice(eqn, labels, assigned, pending, expansion, expanded, moves, decided, free)


def _is_whole(scope: Scope, eqn: Eqn) -> bool:
    """True if nothing asks for an axis: no operand is split or pending, and no rule or annotation splits a result.

    Operations with a lowering of their own along split dims are left to it.
    """
    setting, stored = scope.setting, [v for v in eqn.ins if v not in scope.unmaterialized]
    if eqn.op in EXPANSIONS or eqn.op in REGIONS or not stored:
        return False
    if any(d.name in setting.layout.rules for v in eqn.outs for d in v.dims):
        return False
    asked = (setting.hints, setting.annotations, setting.wanted)
    return all(each.keys().isdisjoint(eqn.outs) for each in asked) and all(
        scope.default_sharding[v] == REPLICATED == scope.whole_version(v) for v in stored
    )


def _price(
    scope: Scope, eqn: Eqn, labels: Labels, pending: Axes, moves: IndexMap | None, assigned: Mapping[str, Axes]
) -> float:
    """The bytes that one device sends for an equation whose labels have these axes, now and where its sums are read."""
    wanted = [(v, _wanted(scope, v, names, assigned, pending)) for v, names in zip(eqn.ins, labels.ins, strict=True)]
    sent = sum(scope.price(v, sharding) for v, sharding in wanted)
    sent += results_price(scope.setting, eqn, labels, assigned)
    if moves is not None and eqn.outs[0] in scope.setting.wanted:
        sent += exchange_price(scope, [sharding for _, sharding in wanted], eqn.ins, moves, assigned)
    return sent if pending else sent + later_price(scope, eqn, dict(wanted).__getitem__)


def _wanted(
    scope: Scope, v: Var, names: Mapping[str, str | None], assigned: Mapping[str, Axes], pending: Axes
) -> Sharding:
    """The sharding in which the operation reads an operand."""
    keeps = pending and (scope.is_zero(v) or scope.default_sharding.get(v, Sharding()).partial == pending)
    return apply(names, assigned, pending if keeps else ())


def _operand(scope: Scope, choice: _Choice, k: int, v: Var, names: Mapping[str, str | None]) -> Var:
    """Operand number k in the sharding that the operation reads, with its padding masked where it would be counted."""
    eqn, op = choice.eqn, choice.eqn.operation
    x = scope.get(v, _wanted(scope, v, names, choice.assigned, choice.pending), eqn)
    if op in ADDITIONS and choice.pending and not x.sharding.partial:
        x = _on_first(scope, x, choice.pending, eqn)
    if op.mask is None:
        return x
    gone, kept = choice.labels.vanishing, {d.name for v in eqn.outs for d in v.dims}
    trimmed = choice.expansion.trimmed(eqn, k) if choice.expansion is not None and choice.expanded else ()
    masked = (d for d in v.dims if not (d.name in trimmed and choice.assigned.get(names[d.name] or "")))
    return scope.masked(x, tuple(d for d in masked if names[d.name] in gone or d.name not in kept), op.mask, eqn)


def _results(scope: Scope, choice: _Choice) -> list[Var]:
    """The results, partial over the axes of labels that vanish, with the reason for the sum that is then pending."""
    eqn, assigned, reduce = choice.eqn, choice.assigned, choice.eqn.operation.reduce
    summed_labels = choice.labels.vanishing if choice.expansion is None or choice.expansion.sums else ()
    summed = [axis for label in summed_labels for axis in assigned.get(label, ())]
    outs: list[Var] = []
    for v, names in zip(eqn.outs, choice.labels.outs, strict=True):
        sharding = apply(names, assigned, (*choice.pending, *summed), reduce if summed else "sum")
        outs.append(scope.define(v, sharding))
        if summed:
            over = tuple(label.rstrip("*") for label in summed_labels if assigned.get(label))
            cause = Cause(Because.REDUCES, eqn.operation.name, over, what=reduce)
            scope.reasons[v] = (cause, eqn.where, eqn.backward)
        elif choice.pending:
            scope.reasons[v] = next(scope.reasons[x] for x in eqn.ins if x in scope.reasons and scope.is_pending(x))
    return outs
