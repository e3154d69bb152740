"""The slots of choices: how many before it went to the same expert.

Slots are counted in int32, so they depend on no layout and on no order of additions (a bfloat16 count stops at 256).
"""

from __future__ import annotations

import meshdsl as md

__all__ = ["slots_of"]


def slots_of(
    wanted: list[md.Tensor],
    token: md.Dim,
    expert: md.Dim,
    capacity: md.Dim,
    used: md.Tensor | None = None,
    order: md.Tensor | None = None,
) -> tuple[list[md.Tensor], list[md.Tensor], md.Tensor]:
    """The slot of each choice and whether it exists [groups, token], and the slots used then [groups, expert].

    >>> import meshdsl as md
    >>> from meshdsl.nn.moe.slots import slots_of
    >>> token, expert, slot = md.dims("token:3 expert:2 slot:2")
    >>> wanted = md.one_hot(md.tensor([0, 0, 0], [token]), expert, "bool")
    >>> (slots,), (kept,), used = slots_of([wanted], token, expert, slot)
    >>> slots.numpy().tolist(), kept.numpy().tolist(), used.numpy().tolist()
    ([0, 1, 2], [True, True, False], [2, 0])

    `wanted` has for each choice a mask [groups, token, expert] with at most one expert a token. All j-th choices come
    before any (j+1)-th; a choice that finds no slot is counted too. Tokens come in their own order, or in that of
    `order` [groups, token], the token that comes first, second, and so on.
    """
    room = capacity.size if used is None else capacity.size - md.cast(used, "int32")
    before: md.Tensor | None = None
    slots: list[md.Tensor] = []
    keeps: list[md.Tensor] = []
    for mask in wanted:
        ones = md.cast(mask, "int32")
        place = _running(ones, token, order) - 1
        place = place if before is None else place + before
        total = md.sum(ones, token)
        before = total if before is None else before + total
        slots.append(md.sum(md.where(mask, place, 0), expert))
        keeps.append(md.any(mask & (place < room), expert))
    assert before is not None
    after = before if used is None else before + md.cast(used, "int32")
    return slots, keeps, md.minimum(after, capacity.size)


def _running(ones: md.Tensor, token: md.Dim, order: md.Tensor | None) -> md.Tensor:
    """Running counts over the tokens, each counted with those before it."""
    if order is None:
        return md.cumsum(ones, token)
    rank = f"{token.name}_rank"
    counts = md.cumsum(md.take(ones, md.rename(order, **{token.name: rank}), token), rank)
    return md.transpose(md.take(counts, md.argsort(order, token), rank), ones.dims)
