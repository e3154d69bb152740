"""Choose how one attention runs, and add its equations.

Choose what is sent if the positions of queries and of keys are split over the same axes.

* `ring`: keys and values go around; every device has two blocks of each.
* `all_to_all`: positions are gathered and another dim that queries, keys and values share is split instead, for
  example heads (Jacobs et al., "DeepSpeed Ulysses", 2023).
* `gather`: keys and values are gathered. It sends what a ring sends, and every device stores all of them.

The ring and the all_to_all are compared by the bytes that one device sends for the result.

Attention to keys that other axes split than the queries, such as a cache: each device attends to its own keys.

The devices exchange the logarithms of their sums of exponentials. With them, each weighs its result, and the results
are a pending sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ....dims import show
from ....errors.units import show_bytes
from ....ir import Because, Cause, Eqn, Type, Var
from ....layouts import Sharding
from ....layouts.sharding import Axes
from ....ops.attention.spec import wide_dtype
from ....ops.attention.turns import ATTENTION_PART, WEIGH_PART, part_shardings
from ...labels import apply
from ..index_map import gathered
from ..scope import Reader, Scope
from .call import AttentionCall
from .ring import around, hops, is_zigzag


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
            call.scope.start_from(v, Sharding.of(dict(target.split), now.partial, now.kind), reader)


@dataclass(frozen=True)
class MethodChoice:
    """The method, its reason as text, and for `all_to_all` the dim to split and the axes of all dims."""

    method: str
    reason: str
    to: str = ""
    assigned: Mapping[str, Axes] | None = None


def choose_method(call: AttentionCall) -> MethodChoice:
    """The method that the call names, or the one that sends fewer bytes."""
    method = call.how.method
    other = _other_dim(call)
    if method in ("ring", "gather"):
        return MethodChoice(method, f", as method={method!r} says")
    if other is None:
        if method == "all_to_all":
            _report(call)
        return MethodChoice("ring", f": no shared dim has blocks that {call.count} devices can divide")
    to, assigned = other
    if method == "all_to_all":
        return MethodChoice(method, f", as method={method!r} says", to, assigned)
    ring, exchange = ring_bytes(call), exchange_bytes(call)
    if ring < exchange:
        return MethodChoice("ring", f": {show_bytes(ring)} for the result, {show_bytes(exchange)} by all_to_all")
    return MethodChoice(
        "all_to_all", f": {show_bytes(exchange)} for the result, {show_bytes(ring)} by a ring", to, assigned
    )


def _block_bytes(call: AttentionCall, role: str) -> int:
    setting, v = call.scope.setting, call.roles[role]
    sizes = setting.extents.local_shape(v.dims, call.shardings()[role], setting.mesh)
    return math.prod(sizes) * v.dtype.itemsize


def _result_bytes(call: AttentionCall) -> int:
    """The bytes of a device's block of the result: the block of q, with the size of the values' own dim."""
    head, value = (call.roles[r].dims for r in ("k", "v"))
    size = math.prod(d.size for d in head) or 1
    return _block_bytes(call, "q") * math.prod(d.size for d in value) // size


def ring_bytes(call: AttentionCall) -> int:
    """Keys and values, once for each hop; and in zigzag order, all operands and the result once."""
    moving = [_block_bytes(call, r) for r in ("k", "v", "memory_segments") if r in call.roles]
    places = 0
    if is_zigzag(call):
        own = [_block_bytes(call, r) for r in ("q", "segments") if r in call.roles]
        places = sum(moving) + sum(own) + _result_bytes(call)
    return hops(call) * sum(moving) + places


def exchange_bytes(call: AttentionCall) -> int:
    """All operands and the result, without the part that stays."""
    n = call.count
    every = sum(_block_bytes(call, r) for r in ("q", "k", "v")) + _result_bytes(call)
    return every * (n - 1) // n


def _other_dim(call: AttentionCall) -> tuple[str, Mapping[str, Axes]] | None:
    """The last dim of queries, keys and values whose blocks the devices can divide, and the axes of all dims then."""
    setting, how, axes = call.scope.setting, call.how, call.keys
    for d in reversed(how.batch(call.roles["k"].dims)):
        own = call.assigned.get(d.name, ())
        if d.size and setting.extents.divides(d, setting.mesh.count(own), call.count):
            return d.name, {**call.assigned, how.length: (), d.name: (*own, *axes)}
    return None


def _report(call: AttentionCall) -> None:
    shape, axes = show(call.roles["k"].dims), ", ".join(map(repr, call.keys))
    call.scope.setting.problems.setdefault(
        f"attention with method='all_to_all' cannot split another dim over mesh axis {axes} of {call.count} devices\n"
        f"  k has shape {shape}; no block of a dim that q, k and v share divides by {call.count}\n"
        "  use method='ring', or split fewer positions",
        call.eqn.where,
    )


def merged(call: AttentionCall) -> None:
    """Add the attention of each device to its own keys, and the sum of the results."""
    eqn, scope = call.eqn, call.scope
    ins, (out, lse) = call.ins(), eqn.outs
    parts = scope.fresh_dim(f"{call.how.keys}__parts", call.count)
    wide = {**eqn.params, "how": dataclasses.replace(call.how, wide=True), "parts": parts}
    types = [Type((*v.dims, parts), wide_dtype(v.dtype)) for v in eqn.outs]
    part_eqn = Eqn(ATTENTION_PART, tuple(ins), (), wide, eqn.where, eqn.backward)
    part, part_lse = (Var(t.dims, t.dtype, "", s) for t, s in zip(types, part_shardings(part_eqn), strict=True))
    split = {d: axes for d, axes in part.sharding.split if d != parts.name}
    results = (scope.define(out, Sharding.of(split, call.keys)), scope.define(lse, Sharding.of(split)))
    summary = Cause(Because.SUMMARY, eqn.operation.name, (call.how.keys,), what="a logarithm of the sum for")
    scope.eqns.append(part_eqn.replace(outs=(part, part_lse)))
    every = gathered(scope, eqn, part_lse, parts, call.keys, summary)
    scope.add(WEIGH_PART, [part, every], results, eqn, parts=parts, axes=call.keys, dtype=out.dtype)
    cause = Cause(Because.REDUCES, eqn.operation.name, (call.how.keys,), what="sum")
    scope.reasons[out] = (cause, eqn.where, eqn.backward)
