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
from typing import Any

import numpy as np

from ....backend import Local
from ....backend.attention import AttentionKernel
from ....dims import Dim, show
from ....errors.units import show_bytes
from ....ir import Because, Cause, Eqn, Fuses, Labels, Op, Product, Type, Var, named
from ....layouts import Sharding
from ....layouts.sharding import Axes
from ....ops.attention.blocks import Canonical, Names, wide_dtype
from ....ops.attention.records import ATTENTION
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
        if setting.extents.padded(d) and setting.extents.padded(d) % (setting.mesh.count(own) * call.count) == 0:
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


def _part_type(*types: Type, how: Names, parts: Dim, **params: Any) -> tuple[Type, ...]:
    return tuple(Type((*t.dims, parts), t.dtype) for t in ATTENTION.infer(types, {"how": how, **params}))


def _part_kernel(
    c: Local, *ins: Any, how: Names, causal: bool, window: int | None, parts: Dim, kernel: AttentionKernel | None = None
) -> Any:
    """The attention to the device's own keys, as the one element of the dim `parts` that it stores."""
    form = Canonical.of(c, how, ins, kernel)
    out, lse = c.xp.attention(form.operands(causal, window))
    blocks = [dataclasses.replace(b, dims=b.dims[:-1], sizes=b.sizes[:-1], axes=b.axes[:-1]) for b in c.outs]
    return tuple(x[..., None] for x in form.results(out, lse, blocks))


def _part_shardings(eqn: Eqn) -> list[Sharding]:
    how, parts = eqn.params["how"], eqn.params["parts"]
    q, k = eqn.ins[:2]
    split = {**dict(q.sharding.split), parts.name: k.sharding.axes(how.keys)}
    return [Sharding.of(split)] * 2


ATTENTION_PART = Op(
    "attention_part",
    type=_part_type,
    kernel=_part_kernel,
    flops=ATTENTION.flops,
    shardings=_part_shardings,
    product=Product.ATTENTION,
)


def _weigh_kernel(c: Local, out: Any, lse: Any, *, parts: Dim, axes: Axes, dtype: Any) -> Any:
    """The device's result with the weight of its keys among all keys, and the logarithm for all keys."""
    top = lse.max(-1)
    top = c.xp.where(top == -np.inf, 0, top)
    total = c.xp.exp(lse - top[..., None]).sum(-1)
    own = c.xp.dynamic_slice(lse, c.xp.asarray(c.index(axes), np.int32), 1, lse.ndim - 1)[..., 0]
    weight = c.xp.exp(own - top) / c.xp.where(total == 0, 1, total)
    weighed = out[..., 0] * c.align(weight, c.outs[1], c.outs[0])
    return weighed.astype(dtype), c.xp.where(total == 0, -np.inf, c.xp.log(c.xp.where(total == 0, 1, total)) + top)


def _weigh_shardings(eqn: Eqn) -> list[Sharding]:
    out, parts = eqn.ins[0].sharding, eqn.params["parts"]
    split = {d: axes for d, axes in out.split if d != parts.name}
    return [Sharding.of(split, out.axes(parts)), Sharding.of(split)]


def _weigh_type(out: Type, lse: Type, *, parts: Dim, axes: Axes, dtype: Any) -> tuple[Type, ...]:
    return Type(out.dims[:-1], dtype), Type(lse.dims[:-1], lse.dtype)


def _weigh_rule(out: Type, lse: Type, *, parts: Dim, axes: Axes, dtype: Any) -> Labels:
    results = _weigh_type(out, lse, parts=parts, axes=axes, dtype=dtype)
    return Labels((named(out.dims), named(lse.dims, [parts.name])), tuple(named(t.dims) for t in results))


WEIGH_PART = Op(
    "weigh_part",
    type=_weigh_type,
    kernel=_weigh_kernel,
    rule=_weigh_rule,
    shardings=_weigh_shardings,
    fuses=Fuses.MAP,
)


def merged(call: AttentionCall) -> None:
    """Add the attention of each device to its own keys, and the sum of the results."""
    eqn, scope = call.eqn, call.scope
    ins, (out, lse) = call.ins(), eqn.outs
    parts = scope.fresh_dim(f"{call.how.keys}__parts", call.count)
    wide = {**eqn.params, "how": dataclasses.replace(call.how, wide=True), "parts": parts}
    types = [Type((*v.dims, parts), wide_dtype(v.dtype)) for v in eqn.outs]
    part_eqn = Eqn(ATTENTION_PART, tuple(ins), (), wide, eqn.where, eqn.backward)
    part, part_lse = (Var(t.dims, t.dtype, "", s) for t, s in zip(types, _part_shardings(part_eqn), strict=True))
    split = {d: axes for d, axes in part.sharding.split if d != parts.name}
    results = (scope.define(out, Sharding.of(split, call.keys)), scope.define(lse, Sharding.of(split)))
    summary = Cause(Because.SUMMARY, eqn.operation.name, (call.how.keys,), what="a logarithm of the sum for")
    scope.eqns.append(part_eqn.replace(outs=(part, part_lse)))
    every = gathered(scope, eqn, part_lse, parts, call.keys, summary)
    scope.add(WEIGH_PART, [part, every], results, eqn, parts=parts, axes=call.keys, dtype=out.dtype)
    cause = Cause(Because.REDUCES, eqn.operation.name, (call.how.keys,), what="sum")
    scope.reasons[out] = (cause, eqn.where, eqn.backward)
