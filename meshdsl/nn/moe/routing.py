"""Routing: the expert, slot and weight of each token, as dense tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import meshdsl as md

from ..precision import DimLike
from .assignment import Assignment, Picks, assign


class Routing(NamedTuple):
    """The result of `route`. "groups" are the dims of the gates other than the token and the expert dim.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.4, 0.6]], "token expert")
    >>> routing = md.nn.moe.route(gates, tokens="token", experts="expert", capacity=md.Dim("slot", 1), router="switch")
    >>> routing.combine.dims, md.sum(routing.combine, "slot").numpy().round(1).tolist()
    ((token=2, expert=2, slot=1), [[0.699999988079071, 0.0], [0.0, 0.6000000238418579]])

    `combine` [groups, token, expert, capacity] holds the weight of each token in each slot. `dispatch` (boolean, same
    dims) is true if the token has the slot, even with weight zero. `aux_loss` is a scalar. `counts` [groups, expert] is
    the number of filled slots. `dropped` [groups, token] is true for tokens without a slot. `used` [groups, expert] is
    the number of slots in use (int32), to pass to `route` with the next part of the batch.
    """

    combine: md.Tensor
    dispatch: md.Tensor
    aux_loss: md.Tensor
    counts: md.Tensor
    dropped: md.Tensor
    used: md.Tensor


def route(
    gates: md.Tensor | None,
    *,
    tokens: DimLike,
    experts: DimLike,
    capacity: DimLike,
    router: str,
    uniforms: md.Tensor | None = None,
    nonpadding: md.Tensor | None = None,
    used: md.Tensor | None = None,
    **options: Any,
) -> Routing:
    """Routes tokens to experts, given their gate probabilities [groups, token, expert].

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]], "token expert")
    >>> routing = md.nn.moe.route(gates, tokens="token", experts="expert", capacity=md.Dim("slot", 2), router="switch")
    >>> routing.dropped.numpy().tolist(), routing.counts.numpy().tolist()
    ([False, False, True], [2, 0])

    Routers, with their options in brackets:

    - "gshard_paper": GShard (Lepikhin et al., 2020), Algorithm 1; a rejected second choice uses a slot (as top2)
    - "top2": a rejected second choice uses no slot (policy, threshold, normalize, aux_scale, rejected_second_uses_slot)
    - "switch": the expert of largest probability, in token order (Fedus et al., 2021) (aux_scale)
    - "top_k": k choices per token; all j-th choices get slots before any (j+1)-th (k, normalize, aux_scale, bias,
      groups, best_groups, scale)
    - "batch_prioritised": top_k with tokens ordered by score (Riquelme et al., 2021) (score, and those of top_k)
    - "expert_choice": each expert chooses its best tokens (Zhou et al., 2022); not causal
    - "hash": expert `table[id]` of the token's id, or id mod experts without a table; weight 1 (token_ids, table)
    - "random": expert `ids` [groups, token], drawn by the caller; weight 1 (ids)

    `router` may also be a preset of `md.nn.moe.PRESETS`. `policy` selects which second choices are accepted: "all",
    "threshold" (if g2 > threshold, g2 being the normalised weight) or "random" (if g2 / threshold > u, u being
    `uniforms` [groups, token]). The default is "random" if `uniforms` are given, else "all". `normalize` divides each
    weight by the sum of the token's chosen weights, "before" or "after" the capacity limit, or not ("none").
    `bias` [expert] is added to the gates for the choice, not in the weights. With `groups`, experts are chosen from the
    `best_groups` of this many groups of consecutive experts, those of the largest sum of their best two. `scale`
    multiplies the weights (DeepSeek-V3, 2024).
    `aux_scale` is "E2_mean" (E sum(f m), 1 if balanced), "paper" (that divided by E^2) or "none"; the loss is averaged
    over groups. Tokens with `nonpadding` [groups, token] zero are not routed: they use no slot and add nothing to the
    loss, but its means still divide by the number of all tokens.

    `used` [groups, expert] counts slots used by earlier parts of the batch: a token is kept if its slot index in this
    part is less than capacity - used. Only routers with one choice in token order support it (switch, hash, random,
    top_k with k=1). `capacity` is the capacity for the whole batch. Gates narrower than float32 are cast to float32.
    Raises `ShapeError` for an unknown router, option or value, and for arguments that do not fit together.
    """
    assignment = assign(
        gates,
        tokens=tokens,
        experts=experts,
        capacity=capacity,
        router=router,
        uniforms=uniforms,
        nonpadding=nonpadding,
        used=used,
        **options,
    )
    combine, dispatch = masks(assignment)
    return Routing(combine, dispatch, assignment.aux_loss, assignment.counts, assignment.dropped, assignment.used)


def masks(assignment: Assignment) -> tuple[md.Tensor, md.Tensor]:
    """The weights and the dispatch mask, both [groups, token, expert, capacity] (GShard, Algorithm 2)."""
    token, expert, slot = assignment.tokens, assignment.experts, assignment.capacity
    if isinstance(assignment.by, Picks):
        picks = assignment.by
        groups = [d for d in picks.token.dims if d not in (expert, slot)]
        dims = [*groups, token, expert, slot]
        taken = (md.broadcast(picks.token, dims) == md.iota(token)) & picks.kept
        return md.where(taken, picks.weight, 0), taken
    first = assignment.by[0].expert
    dims = [*(d for d in first.dims if d != token), token, expert, slot]
    weight: Any = 0
    taken: Any = None
    all_slots = md.fresh_dim(md.Dim(f"{expert.name}_{slot.name}", expert.size * slot.size), dims)
    places = md.unflatten(md.iota(all_slots), all_slots, [expert, slot])
    for choice in assignment.by:
        place = md.where(choice.kept, choice.expert * slot.size + choice.slot, all_slots.size)
        slot_mask = md.broadcast(place, dims) == places
        weight = md.where(slot_mask, choice.weight, weight)
        taken = slot_mask if taken is None else taken | slot_mask
    return weight, taken
