"""Choose what is sent if the positions of queries and of keys are split over the same axes.

* `ring`: keys and values go around; every device has two blocks of each.
* `all_to_all`: positions are gathered and another dim that queries, keys and values share is split instead, for
  example heads (Jacobs et al., "DeepSpeed Ulysses", 2023).
* `gather`: keys and values are gathered. It sends what a ring sends, and every device stores all of them.

The ring and the all_to_all are compared by the bytes that one device sends for the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ....dims import show
from ....errors.units import show_bytes
from ....layouts.sharding import Axes
from .call import AttentionCall
from .ring import hops, is_zigzag

__all__ = ["MethodChoice", "choose_method"]


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
