"""Routing: which tokens go to which expert, into which slot, with which weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import meshdsl as md

from .assignment import Assignment, Picks, assign

__all__ = ["Routing", "masks", "route"]


class Routing(NamedTuple):
    """Where the tokens of each group go. Groups are the batch-like dims of the gates.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.4, 0.6]], "token expert")
    >>> routing = md.nn.moe.route(gates, tokens="token", experts="expert", capacity=md.Dim("slot", 1), router="switch")
    >>> routing.combine.dims, md.sum(routing.combine, "slot").numpy().round(1).tolist()
    ((token=2, expert=2, slot=1), [[0.699999988079071, 0.0], [0.0, 0.6000000238418579]])

    `combine` [groups, token, expert, capacity] holds the weight of a token in a slot, `dispatch` (boolean, same dims)
    which slots are taken: a choice of weight zero takes one too. `aux_loss` is a number; `counts` [groups, expert] are
    slots filled, `dropped` [groups, token] is true where a token has no slot, `used` [groups, expert] are the slots
    that a later part of the batch finds taken (int32).
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
    tokens: str | md.Dim,
    experts: str | md.Dim,
    capacity: str | md.Dim,
    router: str,
    uniforms: md.Tensor | None = None,
    nonpadding: md.Tensor | None = None,
    used: md.Tensor | None = None,
    **options: Any,
) -> Routing:
    """The routing of gates [groups, token, expert], which are probabilities.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]], "token expert")
    >>> routing = md.nn.moe.route(gates, tokens="token", experts="expert", capacity=md.Dim("slot", 2), router="switch")
    >>> routing.dropped.numpy().tolist(), routing.counts.numpy().tolist()
    ([False, False, True], [2, 0])

    Routers, each with its rule and, in brackets, its options:

    - "gshard_paper": GShard (Lepikhin et al., 2020), Algorithm 1; a refused second choice leaves a hole (as top2)
    - "top2": a refused second choice takes no slot (policy, threshold, normalize, aux_scale, rejected_second_uses_slot)
    - "switch": the largest probability, raw, in token order (Fedus et al., 2021) (aux_scale)
    - "top_k": all j-th choices before any (j+1)-th (k, normalize, aux_scale)
    - "batch_prioritised": top_k, tokens ordered by score (Riquelme et al., 2021) (score, and those of top_k)
    - "expert_choice": each expert takes its best tokens (Zhou et al., 2022); not causal
    - "hash": `table` [ids] of the token's id, without one the id mod experts; weight 1 (token_ids, table)
    - "random": `ids` [groups, token], drawn by the caller; weight 1 (ids)

    A preset (`md.nn.moe.PRESETS`) is named in place of a router. `policy` says which second choices are taken: "all",
    "threshold" (g2 > threshold) or "random" (g2 / threshold > u, u being `uniforms` [groups, token] and g2 the
    normalised weight); without it, "random" where uniforms are given, else "all". `normalize` divides weights by the
    sum of the chosen ones "before" or "after" capacity ("none": raw). `aux_scale` is "E2_mean" (E sum(f m), 1 when
    balanced), "paper" (that over E^2) or "none"; it is computed for each group, then averaged. Tokens where
    `nonpadding` [groups, token] is zero go nowhere, take no slot and are no part of the loss, whose means still divide
    by all places.

    `used` [groups, expert] are slots taken by earlier parts of a batch: a token keeps its place if it is less than
    capacity - used. It exists for routers of one choice in token order (switch, hash, random, top_k of 1): of others a
    part cannot be routed without the rest. The capacity is that of the whole batch. Gates narrower than float32 are
    taken as float32. Raises `ShapeError` for an unknown router, option or value, or one that does not go with others.
    """
    found = assign(
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
    combine, dispatch = masks(found)
    return Routing(combine, dispatch, found.aux_loss, found.counts, found.dropped, found.used)


def masks(found: Assignment) -> tuple[md.Tensor, md.Tensor]:
    """The weights and the taken slots as tensors [groups, token, expert, capacity] (GShard, Algorithm 2)."""
    token, expert, slot = found.tokens, found.experts, found.capacity
    if isinstance(found.by, Picks):
        picks = found.by
        groups = [d for d in picks.token.dims if d not in (expert, slot)]
        dims = [*groups, token, expert, slot]
        taken = (md.broadcast(picks.token, dims) == md.iota(token)) & picks.kept
        return md.where(taken, picks.weight, 0), taken
    first = found.by[0].expert
    dims = [*(d for d in first.dims if d != token), token, expert, slot]
    weight: Any = 0
    taken: Any = None
    for choice in found.by:
        at_expert = (md.broadcast(choice.expert, dims[:-1]) == md.iota(expert)) & choice.kept
        here = md.broadcast(at_expert, dims) & (md.broadcast(choice.slot, [*choice.slot.dims, slot]) == md.iota(slot))
        weight = md.where(here, choice.weight, weight)
        taken = here if taken is None else taken | here
    return weight, taken
