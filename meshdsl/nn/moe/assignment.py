"""The routers. An `Assignment` stores each token's experts, slots and weights, or each expert's tokens.

Its size is linear in the number of tokens or slots. Gradients flow only through the weights and the auxiliary loss.
Ties go to the lowest index. Every dim of the gates other than the token and the expert dim is a group dim: each of its
elements is a group of tokens with its own slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import meshdsl as md

from ..precision import DimLike
from .options import choices_of
from .router_args import RouterArgs, router_args
from .slots import slots_of


@dataclass(frozen=True)
class Choice:
    """The j-th choice of every token, all [groups, token]: expert and slot (int32), weight, and `kept` (boolean).

    `kept` is false if the expert had no free slot, or if the choice was rejected.

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
    """The tokens chosen by each expert, all [groups, expert, capacity]: token (int32), weight, and `kept` (boolean).

    `kept` is true for slots that hold a token.

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
    """The result of `assign`; `by` is a tuple with a `Choice` per choice of the tokens, or the `Picks` of the experts.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert")
    >>> slot = md.Dim("slot", 2)
    >>> assignment = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="mesh_tf")
    >>> [choice.expert.numpy().tolist() for choice in assignment.by]
    [[0, 0], [1, 1]]

    `demand` [groups, expert] counts the first choices before the capacity limit (int32; zeros if experts choose). The
    other fields are those of `Routing`.
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
    tokens: DimLike,
    experts: DimLike,
    capacity: DimLike,
    router: str,
    uniforms: md.Tensor | None = None,
    nonpadding: md.Tensor | None = None,
    used: md.Tensor | None = None,
    **options: Any,
) -> Assignment:
    """Like `route`, without creating tensors of size tokens x experts x capacity.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]], "token expert")
    >>> slot = md.Dim("slot", 1)
    >>> assignment = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch")
    >>> assignment.demand.numpy().tolist(), assignment.counts.numpy().tolist(), assignment.dropped.numpy().tolist()
    ([2, 1], [1, 1], [False, True, False])

    Takes the arguments of `route`, also `uniforms`, `nonpadding` and `used`, and raises the same errors.
    """
    args = router_args(gates, tokens, experts, capacity, router, uniforms, nonpadding, used, options)
    if args.ids is not None:
        return _by_ids(args, args.ids)
    assert args.gates is not None
    return (_expert_choice if args.router == "expert_choice" else _token_choice)(args, args.gates)


def choices(assignment: Assignment) -> tuple[md.Tensor, md.Tensor]:
    """The expert and the weight of every choice [groups, token, choice]; 0 is the weight of a choice without a slot."""
    if isinstance(assignment.by, Picks):
        raise md.ShapeError(
            "dispatch='grouped' is for routers where tokens choose experts; in this one, experts choose tokens\n"
            "  use dispatch='auto'"
        )
    weights = [md.where(each.kept, each.weight, 0) for each in assignment.by]
    dims = assignment.by[0].expert.dims
    choice = md.fresh_dim(md.Dim("choice", len(assignment.by)), dims)
    index, weight = (
        md.stack([md.transpose(x, dims) for x in xs], choice) for xs in ([c.expert for c in assignment.by], weights)
    )
    return md.transpose(index, [*dims, choice]), md.transpose(weight, [*dims, choice])


def _chosen(args: RouterArgs, scores: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    """The best expert of each token [groups, token], and its mask [groups, token, expert]."""
    best = md.argmax(scores, args.expert)
    return best, _expert_mask(args, best)


def _expert_mask(args: RouterArgs, ids: md.Tensor) -> md.Tensor:
    return md.one_hot(ids, args.expert, bool)


def _token_choice(args: RouterArgs, gates: md.Tensor) -> Assignment:
    options, uniforms = args.options, args.uniforms
    top2 = args.router in ("gshard_paper", "top2")
    policy = _policy(options, uniforms) if top2 else ""
    ids, chosen, raw = _best_experts(args, gates)
    weights = _shares(raw) if options.get("normalize") == "before" else raw
    weights = [w * options["scale"] for w in weights] if options.get("scale", 1.0) != 1 else weights

    masks = [mask if args.real is None else mask & args.real for mask in chosen]
    first_choice = masks[0]
    accepted: md.Tensor | None = None
    if top2:
        accepted = _accepted(policy, options["threshold"], md.stop_gradient(_shares(raw)[1]), uniforms)
        if accepted is not None and not options["rejected_second_uses_slot"]:
            masks[1], accepted = masks[1] & accepted, None

    slots, keeps, used = slots_of(masks, args.token, args.expert, args.capacity, args.used, _priority(args, raw))
    if accepted is not None:
        keeps[1] = keeps[1] & accepted
    if options.get("normalize") == "after":
        weights = _shares([md.where(kept, w, 0) for kept, w in zip(keeps, raw, strict=True)])
    loss = _balance(args, first_choice, gates)
    by = tuple(Choice(*parts) for parts in zip(ids, slots, weights, keeps, strict=True))
    return _assignment(args, by, masks, loss, first_choice, used)


def _priority(args: RouterArgs, raw: list[md.Tensor]) -> md.Tensor | None:
    """The tokens in the order in which they take slots; None: in that of their positions."""
    if args.router != "batch_prioritised":
        return None
    score = raw[0] if args.options["score"] == "top1" else sum(raw[1:], raw[0])
    return md.argsort(-md.stop_gradient(score), args.token)


def _best_experts(args: RouterArgs, gates: md.Tensor) -> tuple[list[md.Tensor], list[md.Tensor], list[md.Tensor]]:
    """The experts that each token chooses, best first: their numbers, their masks, and their gates."""
    expert, k = args.expert, choices_of(args.router, args.options)
    if not 1 <= k <= expert.size:
        raise md.ShapeError(
            f"the router {args.router!r} chooses {k} experts per token, and {expert!r} has {expert.size}\n"
            f"  choose from 1 to {expert.size}"
        )
    ids: list[md.Tensor] = []
    masks: list[md.Tensor] = []
    remaining = _scores(args, gates)
    for _ in range(k):
        best, mask = _chosen(args, remaining)
        remaining = md.where(mask, float("-inf"), remaining)
        ids.append(best)
        masks.append(mask)
    return ids, masks, [md.sum(md.where(mask, gates, 0), expert) for mask in masks]


def _scores(args: RouterArgs, gates: md.Tensor) -> md.Tensor:
    """The gates with their bias, without gradient; -inf outside the best groups of experts."""
    options, expert, scores = args.options, args.expert, md.stop_gradient(gates)
    bias, groups, best = options.get("bias"), options.get("groups", 1), options.get("best_groups", 1)
    if bias is not None:
        scores = scores + md.stop_gradient(md.cast(bias, scores.dtype))
    if groups == best:
        return scores
    if not 0 < best < groups or expert.size % groups or expert.size // groups * best < options["k"]:
        raise md.ShapeError(
            f"the best {best} of {groups} equal groups of {expert!r} must have the {options['k']} experts of a token"
        )
    sizes = {f"{expert.name}_group": groups, f"{expert.name}_member": expert.size // groups}
    sizes |= {"two": min(2, expert.size // groups), "best_group": best}
    group, member, pair, best_group = (md.fresh_dim(md.Dim(d, size), scores.dims) for d, size in sizes.items())
    split = md.unflatten(scores, expert, [group, member])
    two = md.top_k(split, member, pair)[0]
    _, chosen = md.top_k(md.sum(two, pair), group, best_group)
    outer = [d for d in scores.dims if d != expert]
    kept = md.any(md.broadcast(chosen, [*outer, group, best_group]) == md.iota(group), best_group)
    return md.flatten(
        md.where(kept, md.transpose(split, [*outer, group, member]), float("-inf")), [group, member], expert
    )


def _by_ids(args: RouterArgs, ids: md.Tensor) -> Assignment:
    mask = _expert_mask(args, ids)
    mask = mask if args.real is None else mask & args.real
    slots, keeps, used = slots_of([mask], args.token, args.expert, args.capacity, args.used)
    one = md.broadcast(1.0, ids.dims)
    return _assignment(args, (Choice(ids, slots[0], one, keeps[0]),), [mask], md.cast(0.0, one.dtype), mask, used)


def _policy(options: Mapping[str, Any], uniforms: md.Tensor | None) -> str:
    """The policy for second choices: the option, or "random" if uniforms are given, else "all"."""
    policy = options["policy"] or ("all" if uniforms is None else "random")
    if policy == "random" and uniforms is None:
        raise md.ShapeError(
            "the policy 'random' needs uniforms=, a number in [0, 1) for each token\n"
            "  draw them with md.random.uniform(key, [*groups, token]), or use policy='all'"
        )
    return policy


def _accepted(policy: str, threshold: float, second: md.Tensor, uniforms: md.Tensor | None) -> md.Tensor | None:
    """Mask of the accepted second choices, given their normalised weights; None if all are accepted."""
    if policy == "all":
        return None
    if policy == "threshold":
        return second > threshold
    return second / threshold > md.cast(cast(md.Tensor, uniforms), second.dtype)


def _shares(weights: list[md.Tensor]) -> list[md.Tensor]:
    """The weights divided by their sum; zeros if the sum is zero."""
    total = sum(weights[1:], weights[0])
    nonzero = total > 0
    total = md.where(nonzero, total, 1)
    return [md.where(nonzero, w / total, 0) for w in weights]


def _balance(args: RouterArgs, first_choice: md.Tensor, gates: md.Tensor) -> md.Tensor:
    """The auxiliary loss, averaged over groups: E sum_e f_e m_e, f the share of first choices, m the mean gate."""
    scale = args.options["aux_scale"]
    share = md.mean(md.cast(first_choice, gates.dtype), args.token)
    mean = md.mean(gates if args.real is None else md.where(args.real, gates, 0), args.token)
    factor = {"E2_mean": args.expert.size, "paper": 1 / args.expert.size, "none": 0.0}[scale]
    return md.mean(md.sum(share * mean, args.expert)) * factor


def _assignment(
    args: RouterArgs,
    by: tuple[Choice, ...],
    masks: list[md.Tensor],
    loss: md.Tensor,
    first_choice: md.Tensor,
    used: md.Tensor,
) -> Assignment:
    placed = by[0].kept
    counts: Any = 0
    for choice, mask in zip(by, masks, strict=True):
        counts = counts + _number_of(mask & choice.kept, args.token)
        placed = placed | choice.kept
    demand = _number_of(first_choice, args.token)
    return Assignment(by, loss, counts, ~placed, used, demand, args.token, args.expert, args.capacity)


def _number_of(mask: md.Tensor, over: md.Dim) -> md.Tensor:
    """The number of true elements along a dim, as int32 even where JAX has 64-bit integers."""
    return md.cast(md.sum(mask, over), "int32")


def _expert_choice(args: RouterArgs, gates: md.Tensor) -> Assignment:
    """Each expert chooses its best tokens (Zhou et al., "Mixture-of-Experts with Expert Choice Routing", 2022)."""
    token, expert, slot = args.token, args.expert, args.capacity
    scores = gates if args.real is None else md.where(args.real, gates, -1)
    groups = [d for d in gates.dims if d not in (token, expert)]
    taken_slots = md.Dim(slot.name, min(slot.size, token.size))
    best = md.top_k(md.transpose(scores, [*groups, expert, token]), token, taken_slots)
    weight, tokens = (md.pad(x, slot.name, 0, slot.size - taken_slots.size, value=-1) for x in best)
    kept = weight >= 0
    picks = Picks(tokens, md.where(kept, weight, 0), kept)
    counts = _number_of(kept, slot)
    reads = md.where(kept, tokens, token.size)
    chosen = md.any(md.broadcast(reads, [*groups, token, expert, slot]) == md.iota(token), [expert, slot])
    none = md.broadcast(0, counts.dims)
    return Assignment(picks, md.cast(0.0, gates.dtype), counts, ~chosen, counts, none, token, expert, slot)
