"""Choose how one attention runs, and add its equations."""

from __future__ import annotations

from ....ir import Because, Cause, Eqn, Var
from ....layouts import Sharding
from ...labels import apply
from ..scope import Reader, Scope
from .call import AttentionCall
from .choice import MethodChoice, choose_method
from .merge import merged
from .ring import around

__all__ = ["lower_attention"]


def lower_attention(scope: Scope, eqn: Eqn) -> None:
    """Add one attention, or its gradient, to the program under construction."""
    call = AttentionCall.of(scope, eqn)
    if call.count == 1 or (not call.along and call.how.method == "gather"):
        _local(call.whole_keys(), {})
        return
    if not call.along:
        _local(call, {}) if call.gradient else merged(call)
        return
    choice = choose_method(call)
    about = (call.how.length, choice.to) if choice.to else (call.how.keys,)
    match choice.method:
        case "ring":
            around(call, Cause(Because.AROUND, eqn.operation.name, about, what=choice.reason))
        case "all_to_all":
            _exchanged(call, choice, Cause(Because.INSTEAD, eqn.operation.name, about, what=choice.reason))
        case _:
            cause = Cause(Because.WHOLE, eqn.operation.name, about, what=choice.reason)
            _local(call.whole_keys(), dict.fromkeys(("k", "v", "memory_segments"), cause))


def _local(call: AttentionCall, causes: dict[str, Cause]) -> None:
    """Every device has all keys that its queries see."""
    ins = call.ins(causes)
    call.add(ins, call.outs(ins))
    for v in call.eqn.outs:
        if not call.scope.default_sharding[v].partial:
            call.scope.shard_free_dims(v, call.eqn)


def _exchanged(call: AttentionCall, choice: MethodChoice, cause: Cause) -> None:
    """Split another dim instead of the positions, and split the results as before."""
    before = call
    call = call.whole_keys(choice.assigned)
    ins = call.ins(dict.fromkeys(call.roles, cause))
    call.add(ins, call.outs(ins))
    back = Cause(Because.BACK, call.eqn.operation.name, (choice.to, call.how.length))
    reader = Reader(call.eqn.operation.name, call.eqn.where, call.eqn.backward, back)
    for v, names in zip(call.eqn.outs, before.labels.outs, strict=True):
        now = call.scope.default_sharding[v]
        target = apply(names, before.assigned)
        if not set(now.partial) & set(target.split_axes):
            _return(call.scope, v, Sharding.of(dict(target.split), now.partial, now.kind), reader)


def _return(scope: Scope, v: Var, target: Sharding, reader: Reader) -> None:
    """Make this version of a result the one that its readers start from."""
    scope.get(v, target, reader)
    scope.default_sharding[v] = target
    versions = scope.versions[v]
    scope.versions[v] = [*(x for x in versions if x.sharding == target), *(x for x in versions if x.sharding != target)]
