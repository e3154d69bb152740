"""Lower one equation: choose how its labels are sharded, get its operands in these shardings, and add its results.

An operation takes its operands under one assignment of axes to labels (`claims`, `choose`). Pending sums pass through
linear operations while that saves bytes (`demand`). Missing shardings are produced by the cheapest plan (`planner`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...control.host import FETCH
from ...control.region import REGIONS
from ...errors.deadline import check_deadline
from ...ir import Because, Cause, Eqn, Linear, Var, walk
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.attention.records import ATTENTION, ATTENTION_GRAD
from ...ops.dtypes import CAST
from ...ops.reductions import BROADCAST
from ...ops.reshape import RENAME
from ...trace import FULL, number
from ..blocks import ON_FIRST
from ..labels import apply, labels_of, vanishing
from . import placement_ops as views
from .attention import lower_attention
from .choose import Claims, choose
from .claims import claims_of, region_blocks, settle_conflicts
from .control import lower_control
from .expansions import EXPANSIONS
from .index_map import lower_index_map
from .pending_sums import ADDITIONS
from .prices import later_bytes, reduction_bytes
from .scope import Scope

__all__ = ["lower"]


def lower(scope: Scope, eqns: Sequence[Eqn]) -> None:
    """Add the first equations of the scope's graph to the program under construction."""
    memo = scope.setting.memo
    if memo is not None:
        memo.lower(scope, eqns, _lower_now)
        return
    for eqn in eqns:
        check_deadline()
        _lower_now(scope, eqn)


def _lower_now(scope: Scope, eqn: Eqn) -> None:
    n = len(scope.eqns)
    _lower(scope, eqn)
    scope.def_sharding.update((v, scope.default_sharding[v]) for v in eqn.outs if v in scope.default_sharding)
    added = scope.eqns[n:]
    if _sends(added) or any(v in scope.received for e in added for v in e.ins):
        scope.required_collectives.update(eqn.outs)


def _sends(eqns: Sequence[Eqn]) -> bool:
    inner = [e for eqn in eqns for sub in eqn.graphs().values() for e, _ in walk(sub)]
    return any(eqn.sends for eqn in (*eqns, *inner))


def _lower(scope: Scope, eqn: Eqn) -> None:
    op = eqn.operation
    if eqn.control is not None:
        lower_control(scope, eqn, eqn.control, lower)
    elif op is BROADCAST and eqn.ins[0] in scope.unmaterialized and scope.unmaterialized[eqn.ins[0]].op is FULL:
        full = scope.unmaterialized[eqn.ins[0]]
        params = {**full.params, "shape": eqn.outs[0].dims}
        scope.unmaterialized[eqn.outs[0]] = eqn.replace(op=FULL, ins=(), params=params)
    elif op is CAST and scope.is_zero(eqn.ins[0]):
        full = scope.unmaterialized[eqn.ins[0]]
        params = {**full.params, "value": number(full.params["value"], eqn.outs[0].dtype)}
        scope.unmaterialized[eqn.outs[0]] = eqn.replace(op=FULL, ins=(), params=params)
    elif eqn.outs[0] in scope.demand.sums.unmade and (eqn.outs[0].dims or not eqn.ins):
        scope.unmaterialized[eqn.outs[0]] = eqn
    elif op in views.PLACEMENTS:
        views.PLACEMENTS[op](scope, eqn)
    elif op is RENAME and views.padded_otherwise(scope, eqn):
        views.rename_first(scope, eqn)
    elif op in (ATTENTION, ATTENTION_GRAD):
        lower_attention(scope, eqn)
    elif op is FETCH and eqn.ins[0] not in scope.unmaterialized:
        _fetch(scope, eqn)
    else:
        _operate(scope, eqn)


def _fetch(scope: Scope, eqn: Eqn) -> None:
    """Copy a value from the host's memory in the sharding that it has there; its readers reshard the copy."""
    (x,) = eqn.ins
    stored = scope.get(x, scope.default_sharding[x], eqn)
    scope.eqns.append(eqn.replace(ins=(stored,), outs=(scope.define(eqn.outs[0], stored.sharding),)))


def _pending(scope: Scope, eqn: Eqn) -> Axes:
    """The axes over which the operation's operands stay pending; empty if their sums are reduced first."""
    op = eqn.operation
    waiting = [v for v in dict.fromkeys(eqn.ins) if scope.is_pending(v)]
    if not all(scope.demand.sums.may_stay_pending(eqn, v) for v in waiting):
        return ()
    if not any(scope.should_defer(v, eqn) for v in waiting):
        return ()
    axes = scope.default_sharding[waiting[0]].partial
    if any(scope.default_sharding[v].partial != axes for v in waiting):
        return ()
    others = [v for v in eqn.ins if v not in waiting]
    joins = op.linear in (Linear.JOINT, Linear.PADDED) and op not in ADDITIONS
    if joins and not all(scope.is_zero(v) for v in others):
        return ()
    if op.linear is Linear.BRANCHES and not all(scope.is_zero(v) for v in others if v is not eqn.ins[0]):
        return ()
    if op.linear in (Linear.EACH, Linear.FIRST, Linear.RATIO, Linear.SECOND) and len(waiting) > 1:
        return ()
    split = {
        axis
        for v in others
        if v in scope.default_sharding
        for axis in scope.default_sharding[v].split_axes + scope.default_sharding[v].partial
    }
    return () if split & set(axes) else axes


def _on_first(scope: Scope, x: Var, axes: Axes, eqn: Eqn) -> Var:
    """A complete value as a pending sum to which only the first device along the axes contributes."""
    pending = Var(x.dims, x.dtype, x.name, Sharding.of(dict(x.sharding.split), axes))
    scope.eqns.append(Eqn(ON_FIRST, (x,), (pending,), {"axes": axes}, eqn.where, eqn.backward))
    return pending


def _operate(scope: Scope, eqn: Eqn) -> None:
    setting, op = scope.setting, eqn.operation
    expansion = EXPANSIONS.get(op)
    labels = expansion.labels(scope, eqn) if expansion is not None else labels_of(eqn)
    pending = _pending(scope, eqn)
    moves = op.moves(*(v.type for v in eqn.ins), **eqn.params) if op.moves is not None else None
    sent_for_nothing = (expansion is not None or moves is not None) and all(v in scope.unmaterialized for v in eqn.ins)
    claims = Claims() if sent_for_nothing else claims_of(scope, eqn, labels, pending)
    preferred = settle_conflicts(scope, eqn, labels, claims)
    gone = vanishing(labels)

    def demanded(v: Var, names: Mapping[str, str | None], assigned: Mapping[str, Axes]) -> Sharding:
        keeps = pending and (scope.is_zero(v) or scope.default_sharding.get(v, Sharding()).partial == pending)
        return apply(names, assigned, pending if keeps else ())

    def price(assigned: Mapping[str, Axes]) -> float:
        targets = {v: demanded(v, names, assigned) for v, names in zip(eqn.ins, labels.ins, strict=True)}
        bytes_sent = sum(
            scope.price(v, demanded(v, names, assigned)) for v, names in zip(eqn.ins, labels.ins, strict=True)
        )
        bytes_sent += reduction_bytes(setting, eqn.outs, labels, assigned)
        return bytes_sent if pending else bytes_sent + later_bytes(scope, eqn, targets.__getitem__)

    assigned = choose(claims, preferred, price)
    if eqn.op in REGIONS:
        assigned, eqn = region_blocks(scope, eqn, labels, assigned)
    kept = {d.name for v in eqn.outs for d in v.dims}
    expanded = expansion is not None and expansion.needed(scope, eqn, assigned)
    ins: list[Var] = []
    for k, (v, names) in enumerate(zip(eqn.ins, labels.ins, strict=True)):
        x = scope.get(v, demanded(v, names, assigned), eqn)
        if op in ADDITIONS and pending and not x.sharding.partial:
            x = _on_first(scope, x, pending, eqn)
        if op.mask is not None:
            trimmed = expansion.trimmed(eqn, k) if expansion is not None and expanded else ()
            over = (d for d in v.dims if not (d.name in trimmed and assigned.get(names[d.name] or "")))
            x = scope.masked(x, tuple(d for d in over if names[d.name] in gone or d.name not in kept), op.mask, eqn)
        ins.append(x)
    sums = expansion is None or expansion.sums
    summed = [] if not sums else [axis for label in gone for axis in assigned.get(label, ())]
    outs: list[Var] = []
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        split = apply(names, assigned)
        kind = op.reduce if summed else "sum"
        outs.append(scope.define(v, Sharding.of(dict(split.split), (*pending, *summed), kind)))
        if summed:
            over = tuple(label.rstrip("*") for label in gone if assigned.get(label))
            cause = Cause(Because.REDUCES, op.name, over, what=op.reduce)
            scope.reasons[v] = (cause, eqn.where, eqn.backward)
        elif pending:
            scope.reasons[v] = next(scope.reasons[x] for x in eqn.ins if x in scope.reasons and scope.is_pending(x))
    if expansion is not None and expanded:
        expansion.build(scope, eqn, ins, assigned, outs)
        return
    if moves is not None and assigned.get(moves.out.name):
        lower_index_map(scope, eqn, ins, moves, assigned[moves.out.name], outs[0])
    else:
        scope.eqns.append(eqn.replace(ins=tuple(ins), outs=tuple(outs)))
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        if (None in names.values() or sent_for_nothing) and not scope.default_sharding[v].partial:
            scope.shard_free_dims(v, eqn)  # every device has the complete value and takes its part
