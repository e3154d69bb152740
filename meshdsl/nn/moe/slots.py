"""Slot indices: a choice's slot is the number of earlier choices of the same expert.

Counts are int32, so they are exact and the same under every layout (a bfloat16 count would stop at 256).
"""

from __future__ import annotations

import meshdsl as md


def slots_of(
    masks: list[md.Tensor],
    token: md.Dim,
    expert: md.Dim,
    capacity: md.Dim,
    used: md.Tensor | None = None,
    order: md.Tensor | None = None,
) -> tuple[list[md.Tensor], list[md.Tensor], md.Tensor]:
    """The slot and `kept` mask of each choice, both [groups, token], and the slots used afterwards [groups, expert].

    >>> import meshdsl as md
    >>> from meshdsl.nn.moe.slots import slots_of
    >>> token, expert, slot = md.dims("token:3 expert:2 slot:2")
    >>> mask = md.one_hot(md.tensor([0, 0, 0], [token]), expert, "bool")
    >>> (slots,), (kept,), used = slots_of([mask], token, expert, slot)
    >>> slots.numpy().tolist(), kept.numpy().tolist(), used.numpy().tolist()
    ([0, 1, 2], [True, True, False], [2, 0])

    `masks` holds a mask [groups, token, expert] per choice, with at most one expert per token. All j-th choices come
    before any (j+1)-th. A choice beyond the capacity counts too; its slot index, like that of a token without an
    expert, is at least the capacity. Tokens are taken by index, or in the order of the token indices `order`
    [groups, token].
    """
    room = None if used is None else capacity.size - md.cast(used, "int32")
    before: md.Tensor | None = None
    slots: list[md.Tensor] = []
    keeps: list[md.Tensor] = []
    for mask in masks:
        ones = md.cast(mask, "int32")
        slot_index = _running(ones, token, order) - 1
        slot_index = slot_index if before is None else slot_index + before
        total = md.cast(md.sum(ones, token), ones.dtype)
        before = total if before is None else before + total
        taken = mask if room is None else mask & (slot_index < room)
        slots.append(md.min(md.where(taken, slot_index, capacity.size), expert))
        keeps.append(slots[-1] < capacity.size)
    assert before is not None
    after = before if used is None else before + md.cast(used, "int32")
    return slots, keeps, md.minimum(after, capacity.size)


def _running(ones: md.Tensor, token: md.Dim, order: md.Tensor | None) -> md.Tensor:
    """Inclusive cumulative counts over the tokens, in the given order."""
    if order is None:
        return md.cumsum(ones, token)
    rank = f"{token.name}_rank"
    counts = md.cumsum(md.take(ones, md.rename(order, **{token.name: rank}), token), rank)
    return md.transpose(md.take(counts, md.argsort(order, token), rank), ones.dims)
