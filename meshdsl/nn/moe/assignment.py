"""The routers: each token's experts, slots and weights, or each expert's tokens, in linear size.

Gradients flow through the weights and the auxiliary loss only. Ties go to the lowest index. A dim of the gates that is
neither the token nor the expert dim is batch-like: each of its places is a group with slots of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import meshdsl as md

from .asked import Asked, asked_of
from .options import choices_of
from .slots import slots_of

__all__ = ["Assignment", "Choice", "Picks", "assign"]


@dataclass(frozen=True)
class Choice:
    """One choice of every token, all [groups, token]: expert and slot (int32), weight, and whether it has the slot.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert")
    >>> slot = md.Dim("slot", 1)
    >>> (choice,) = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch").by
    >>> choice.expert.numpy().tolist(), choice.slot.numpy().tolist(), choice.kept.numpy().tolist()
    ([0, 0], [0, 1], [True, False])
    """

    expert: md.Tensor
    slot: md.Tensor
    weight: md.Tensor
    kept: md.Tensor


@dataclass(frozen=True)
class Picks:
    """What experts choose, all [groups, expert, capacity]: token (int32), weight, and whether the slot is taken.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert")
    >>> slot = md.Dim("slot", 1)
    >>> picks = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="expert_choice").by
    >>> picks.token.numpy().tolist(), picks.kept.numpy().tolist()
    ([[0], [1]], [[True], [True]])
    """

    token: md.Tensor
    weight: md.Tensor
    kept: md.Tensor


@dataclass(frozen=True)
class Assignment:
    """A routing in linear size, which `assign` makes: `by` holds each choice of the tokens, or what the experts picked.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert")
    >>> slot = md.Dim("slot", 2)
    >>> found = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="mesh_tf")
    >>> [choice.expert.numpy().tolist() for choice in found.by]
    [[0, 0], [1, 1]]

    `demand` [groups, expert] counts first choices, before capacity (int32; zeros where experts choose).
    """

    by: tuple[Choice, ...] | Picks
    aux_loss: md.Tensor
    counts: md.Tensor
    dropped: md.Tensor
    used: md.Tensor
    demand: md.Tensor
    tokens: md.Dim
    experts: md.Dim
    capacity: md.Dim


def assign(
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
) -> Assignment:
    """`route`, with its arguments, without the tensors of size tokens x experts x capacity.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]], "token expert")
    >>> slot = md.Dim("slot", 1)
    >>> found = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch")
    >>> found.demand.numpy().tolist(), found.counts.numpy().tolist(), found.dropped.numpy().tolist()
    ([2, 1], [1, 1], [False, True, False])

    Raises `ShapeError` as `route` does.
    """
    asked = asked_of(gates, tokens, experts, capacity, router, uniforms, nonpadding, used, options)
    if asked.ids is not None:
        return _by_ids(asked, asked.ids)
    assert asked.gates is not None
    return (_expert_choice if asked.router == "expert_choice" else _token_choice)(asked, asked.gates)


def _chosen(case: Asked, scores: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    """The best expert of every token [groups, token], and it as a mask [groups, token, expert]."""
    best = md.argmax(scores, case.expert)
    return best, _at(case, best)


def _at(case: Asked, ids: md.Tensor) -> md.Tensor:
    return md.one_hot(ids, case.expert, bool)


def _token_choice(case: Asked, gates: md.Tensor) -> Assignment:
    options, expert, uniforms = case.options, case.expert, case.uniforms
    top2 = case.router in ("gshard_paper", "top2")
    k = choices_of(case.router, options)
    if not 1 <= k <= expert.size:
        raise md.ShapeError(f"the router {case.router!r} makes {k} choices of {expert!r}; that many there are not")
    policy = _policy(options, uniforms) if top2 else ""
    ids: list[md.Tensor] = []
    chosen: list[md.Tensor] = []
    raw: list[md.Tensor] = []
    left = md.stop_gradient(gates)
    for _ in range(k):
        best, mask = _chosen(case, left)
        left = md.where(mask, float("-inf"), left)
        ids.append(best)
        chosen.append(mask)
        raw.append(md.sum(md.where(mask, gates, 0), expert))
    weights = _shares(raw) if options.get("normalize") == "before" else raw

    wanted = [mask if case.real is None else mask & case.real for mask in chosen]
    first = wanted[0]
    accepted: md.Tensor | None = None
    if top2:
        accepted = _accepted(policy, options["threshold"], md.stop_gradient(_shares(raw)[1]), uniforms)
        if accepted is not None and not options["rejected_second_uses_slot"]:
            wanted[1], accepted = wanted[1] & accepted, None

    order = None
    if case.router == "batch_prioritised":
        score = raw[0] if options["score"] == "top1" else sum(raw[1:], raw[0])
        order = md.argsort(-md.stop_gradient(score), case.token)
    slots, keeps, used = slots_of(wanted, case.token, case.expert, case.capacity, case.used, order)
    if accepted is not None:
        keeps[1] = keeps[1] & accepted
    if options.get("normalize") == "after":
        weights = _shares([md.where(kept, w, 0) for kept, w in zip(keeps, raw, strict=True)])
    loss = _balance(case, first, gates)
    by = tuple(Choice(*parts) for parts in zip(ids, slots, weights, keeps, strict=True))
    return _assignment(case, by, wanted, loss, first, used)


def _by_ids(case: Asked, ids: md.Tensor) -> Assignment:
    mask = _at(case, ids)
    mask = mask if case.real is None else mask & case.real
    slots, keeps, used = slots_of([mask], case.token, case.expert, case.capacity, case.used)
    one = md.broadcast(1.0, ids.dims)
    return _assignment(case, (Choice(ids, slots[0], one, keeps[0]),), [mask], md.cast(0.0, one.dtype), mask, used)


def _policy(options: Mapping[str, Any], uniforms: md.Tensor | None) -> str:
    """Which second choices are taken: as asked, else by the coins where there are any."""
    policy = options["policy"] or ("all" if uniforms is None else "random")
    if policy == "random" and uniforms is None:
        raise md.ShapeError(
            "the policy 'random' needs uniforms=, a number in [0, 1) for each token\n"
            "  draw them with md.random.uniform(key, [*groups, token]), or take policy='all'"
        )
    return policy


def _accepted(policy: str, threshold: float, second: md.Tensor, uniforms: md.Tensor | None) -> md.Tensor | None:
    """Where the second choice is taken, given its normalised weight; None for everywhere."""
    if policy == "all":
        return None
    if policy == "threshold":
        return second > threshold
    return second / threshold > md.cast(cast(md.Tensor, uniforms), second.dtype)


def _shares(weights: list[md.Tensor]) -> list[md.Tensor]:
    """Weights divided by their sum; zeros where it is zero."""
    total = sum(weights[1:], weights[0])
    some = total > 0
    total = md.where(some, total, 1)
    return [md.where(some, w / total, 0) for w in weights]


def _balance(case: Asked, first: md.Tensor, gates: md.Tensor) -> md.Tensor:
    """The auxiliary loss: E sum_e f_e m_e of each group, f the share of first choices and m the mean gate; averaged."""
    scale = case.options["aux_scale"]
    share = md.mean(md.cast(first, gates.dtype), case.token)
    mean = md.mean(gates if case.real is None else md.where(case.real, gates, 0), case.token)
    factor = {"E2_mean": case.expert.size, "paper": 1 / case.expert.size, "none": 0.0}[scale]
    return md.mean(md.sum(share * mean, case.expert)) * factor


def _assignment(
    case: Asked,
    by: tuple[Choice, ...],
    wanted: list[md.Tensor],
    loss: md.Tensor,
    first: md.Tensor,
    used: md.Tensor,
) -> Assignment:
    placed = by[0].kept
    counts: Any = 0
    for choice, mask in zip(by, wanted, strict=True):
        counts = counts + md.sum(md.cast(mask & choice.kept, "int32"), case.token)
        placed = placed | choice.kept
    demand = md.sum(md.cast(first, "int32"), case.token)
    return Assignment(by, loss, counts, ~placed, used, demand, case.token, case.expert, case.capacity)


def _expert_choice(case: Asked, gates: md.Tensor) -> Assignment:
    """Each expert takes its best tokens (Zhou et al., "Mixture-of-Experts with Expert Choice Routing", 2022)."""
    token, expert, slot = case.token, case.expert, case.capacity
    scores = gates if case.real is None else md.where(case.real, gates, -1)
    groups = [d for d in gates.dims if d not in (token, expert)]
    most = md.Dim(slot.name, min(slot.size, token.size))
    best = md.top_k(md.transpose(scores, [*groups, expert, token]), token, most)
    weight, picked = (md.pad(x, slot.name, 0, slot.size - most.size, value=-1) for x in best)
    kept = weight >= 0
    picks = Picks(picked, md.where(kept, weight, 0), kept)
    counts = md.sum(md.cast(kept, "int32"), slot)
    reads = md.where(kept, picked, token.size)
    chosen = md.any(md.broadcast(reads, [*groups, token, expert, slot]) == md.iota(token), [expert, slot])
    none = md.broadcast(0, counts.dims)
    return Assignment(picks, md.cast(0.0, gates.dtype), counts, ~chosen, counts, none, token, expert, slot)
