"""Collectives that the device's compiler combines: together they take the time of one.

A compiler combines collectives of one kind, over the same axes and of one dtype, if none depends on another, up to the
bytes of `network.combine` for that kind. The first of them pays the launch and the latency, each later one for its
bytes. The order of the steps stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..lowering import CollectiveRecord
from ..lowering.asynchrony import Start
from .fusion import Send
from .network import Placement, full_bytes


def combine(items: Sequence[Any], record_of: Callable[[Send], CollectiveRecord], placement: Placement) -> None:
    """Set the `work` of collectives among the items of a schedule to their part of a combined collective."""
    limits = placement.network.combine
    if not limits:
        return
    depends: dict[Any, int] = defaultdict(int)  # bits: the collectives that an item depends on
    buckets: dict[tuple[str, tuple[str, ...], str], tuple[int, float]] = {}  # the latest: its bits, and its bytes
    for number, item in enumerate(items):
        if isinstance(item.step, Send) and not isinstance(item.step.eqn.op, Start):
            record = record_of(item.step)
            kind, size = record.op.timed_as, full_bytes(record, placement.mesh.count(record.axes))
            key = kind, record.axes, record.dtype.name
            bits, before = buckets.get(key, (0, 0.0))
            if depends[item] & bits or before + size > limits.get(kind, 0.0):
                bits, before = 0, 0.0
            if bits:
                together = placement.seconds(kind, record.axes, before + size)
                item.work = max(0.0, together - placement.seconds(kind, record.axes, before))
                item.least = dict.fromkeys(item.least, item.work)
            buckets[key] = bits | 1 << number, before + size
            depends[item] |= 1 << number
        for reader in item.readers:
            depends[reader] |= depends[item]
