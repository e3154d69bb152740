"""Collectives that the device's compiler combines: together they take the time of one, and wait for all operands.

A compiler combines collectives of one kind, over the same axes and of one dtype, if none depends on another, up to a
number of bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar, cast

from ..lowering import CollectiveRecord, Program
from ..lowering.asynchrony import Start
from .fusion import Send, Step, readers_of
from .network import Placement, full_bytes

Item = TypeVar("Item", bound=Hashable)


class Part(NamedTuple):
    """A collective as a part of a combined one."""

    kind: Hashable  # equal for all parts
    bytes: float
    limit: float  # bytes of all parts


def groups(
    items: Sequence[Item], part_of: Callable[[Item], Part | None], readers_of: Callable[[Item], Sequence[Item]]
) -> list[list[tuple[Item, Part]]]:
    """The items of each combined collective, in their order; `part_of` is None for what is never combined."""
    found: list[list[tuple[Item, Part]]] = []
    latest: dict[Hashable, int] = {}  # of each kind, the group that takes further items
    needs: list[set[int]] = []  # the groups that items of each group depend on
    depends: dict[Item, set[int]] = defaultdict(set)  # the same of each item

    for item in items:
        if part := part_of(item):
            group = latest.get(part.kind)
            full = group is not None and sum(other.bytes for _, other in found[group]) + part.bytes > part.limit
            if group is None or full or group in _closure(depends[item], needs):
                group = latest[part.kind] = len(found)
                found.append([])
                needs.append(set())
            found[group].append((item, part))
            needs[group] |= depends[item]
            depends[item] = {group}
        for reader in readers_of(item):
            depends[reader] |= depends[item]
    return found


def _closure(direct: set[int], needs: Sequence[set[int]]) -> set[int]:
    """The groups that an item depends on, directly or through other groups."""
    found: set[int] = set()
    new = direct
    while new:
        found |= new
        new = set[int]().union(*(needs[group] for group in new)) - found
    return found


def combine(items: Sequence[Any], record_of: Callable[[Send], CollectiveRecord], placement: Placement) -> None:
    """Set the `work` of collectives among the items of a schedule to their part of a combined collective.

    The limits are `network.combine`, by kind. The first of a group pays the launch and the latency, each later one for
    its bytes. The order of the steps stays as it is.
    """
    limits = placement.network.combine
    if not limits:
        return

    def part_of(item: Any) -> Part | None:
        if not isinstance(item.step, Send) or isinstance(item.step.eqn.op, Start):
            return None
        record = record_of(item.step)
        kind, size = record.op.timed_as, full_bytes(record, placement.mesh.count(record.axes))
        return Part((kind, record.axes, record.dtype.name), size, limits.get(kind, 0.0))

    for (first, part), *later in groups(items, part_of, lambda item: item.readers):
        kind, axes, before = record_of(first.step).op.timed_as, first.step.axes, part.bytes
        for item, part in later:
            together = placement.seconds(kind, axes, before + part.bytes)
            item.work = max(0.0, together - placement.seconds(kind, axes, before))
            item.least = dict.fromkeys(item.least, item.work)
            before += part.bytes


def combined_sums(program: Program, order: Sequence[Step], limit: float) -> list[Step]:
    """The steps with one `Send` for all_reduces that are combined, up to `limit` bytes, where the last of them was.

    What reads one of them comes after it.
    """
    if not limit:
        return list(order)
    readers = readers_of(order)

    def part_of(step: Step) -> Part | None:
        if not isinstance(step, Send) or not step.eqn.effect.reduces or step.eqn.effect.dims:
            return None
        (out,) = step.writes
        return Part((step.eqn.op, out.dtype), program.local_bytes(out), limit)

    found = groups(order, part_of, lambda step: [reader for v in step.writes for reader in readers[v]])
    return _after_their_operands(_joined(order, [[step for step, _ in group] for group in found if len(group) > 1]))


def _joined(order: Sequence[Step], sends: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps with one `Send` for all sends of a group, where the last of them was."""
    last: dict[Step, Step] = {}
    for group in sends:
        reads, writes = [v for step in group for v in step.reads], [v for step in group for v in step.writes]
        last[group[-1]] = Send(cast(Send, group[-1]).eqn, tuple(reads), tuple(writes))
    earlier = {step for group in sends for step in group[:-1]}
    return [last.get(step, step) for step in order if step not in earlier]


def _after_their_operands(order: Sequence[Step]) -> list[Step]:
    """The steps in their order, except that each comes after those that make its operands."""
    makers = {v: i for i, step in enumerate(order) for v in step.writes}
    needs = [{makers[v] for v in step.reads if v in makers} for step in order]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, needed in enumerate(needs):
        for maker in needed:
            readers[maker].append(i)
    ready, result = [i for i, needed in enumerate(needs) if not needed], list[Step]()
    while ready:
        i = heappop(ready)
        result.append(order[i])
        for reader in readers[i]:
            needs[reader].discard(i)
            if not needs[reader]:
                heappush(ready, reader)
    return result
