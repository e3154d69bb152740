"""Exchange by node: a token is sent once to each node that has experts for it, and spread there to these experts.

The kept choices, their slots and weights are those of the flat exchange; what crosses the network between nodes is one
copy of a token for a node instead of one for each expert (DeepSeek-V3, 2024, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import meshdsl as md

from ..precision import DimLike, new_dim
from .assignment import Assignment, Choice, Picks
from .slots import slots_of


@dataclass(frozen=True)
class NodeExchange:
    """The two assignments of an exchange by node, created by `by_node`.

    `to_nodes` assigns tokens to the slots of nodes, with weight one; their dim is called gate_node, as that of the
    experts of a gate is another one than `expert`. `sent` are two tensors [groups, gate_node, node_slot, choice]: for
    each token in a slot of a node, the expert and slot of each choice as one number, and its weight. `within`, called
    with these on `node`, is the assignment of tokens in a node's slots to its experts, whose dim is gate_node_expert.

    >>> import meshdsl as md
    >>> gates, slot = md.tensor([[0.6, 0.4], [0.3, 0.7]], "token expert"), md.Dim("slot", 1)
    >>> assignment = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch")
    >>> exchange = md.nn.moe.by_node(assignment, md.Dim("node", 2))
    >>> exchange.sent[0].dims, exchange.within(*(md.rename(x, gate_node="node") for x in exchange.sent)).tokens
    ((gate_node=2, node_slot=1, choice=1), node_slot=1)
    """

    to_nodes: Assignment
    sent: tuple[md.Tensor, md.Tensor]
    within: Callable[[md.Tensor, md.Tensor], Assignment]


def by_node(assignment: Assignment, node: DimLike) -> NodeExchange:
    """An assignment in two steps: to nodes, of consecutive experts each, and to the experts of a node.

    >>> import meshdsl as md
    >>> gates = md.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]], "token expert")
    >>> slot = md.Dim("slot", 2)
    >>> assignment = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="tutel")
    >>> exchange = md.nn.moe.by_node(assignment, md.Dim("node", 2))
    >>> exchange.to_nodes.used.numpy().tolist()  # token 0 once to node 0, which has both its experts; token 1 to both
    [2, 1]

    Raises `ShapeError` if experts choose tokens, and if the experts do not divide into that many nodes.
    """
    node = new_dim(node, "the nodes")
    token, expert, slot, by = assignment.tokens, assignment.experts, assignment.capacity, assignment.by
    if isinstance(by, Picks):
        raise md.ShapeError("nodes= is for routers where tokens choose experts; in this one, experts choose tokens")
    if expert.size % node.size:
        raise md.ShapeError(f"{expert.size} experts do not divide into {node.size} nodes of equally many")
    sizes = {f"gate_{node.name}": node.size, f"gate_{node.name}_expert": expert.size // node.size}
    sizes |= {f"{node.name}_slot": min(token.size, expert.size // node.size * slot.size), "choice": len(by)}
    taken = *by[0].expert.dims, token, expert, slot, node
    source, local, room, choice = (md.fresh_dim(md.Dim(name, size), taken) for name, size in sizes.items())
    masks: list[md.Tensor] = []  # of the first kept choice in a node
    for each in by:
        mask = md.one_hot(each.expert // local.size, source, bool) & each.kept
        masks.append(mask & ~_any(masks) if masks else mask)
    slots, keeps, used = slots_of(masks, token, source, room)
    steps = zip(by, slots, keeps, strict=True)
    first = tuple(
        Choice(c.expert // local.size, place, md.ones(place.dims, c.weight.dtype), kept) for c, place, kept in steps
    )
    holder = md.inverse_index(
        *(md.where(c.kept, c.expert * room.size + c.slot, node.size * room.size) for c in first),
        over=token, into=[source, room],
    )  # fmt: skip

    def stacked(values: list[md.Tensor]) -> md.Tensor:
        together = md.stack([md.transpose(x, first[0].slot.dims) for x in values], choice)
        return md.take(together, holder, token, drop=True)

    # 0: no expert
    places = stacked([md.where(c.kept, c.expert * slot.size + c.slot + 1, 0) for c in by])
    weights = stacked([md.where(c.kept, c.weight, 0) for c in by])

    def within(places: md.Tensor, weights: md.Tensor) -> Assignment:
        found: list[Choice] = []
        for place, weight in zip(md.unstack(places, choice), md.unstack(weights, choice), strict=True):
            index = place - 1
            mine = (place > 0) & (index // (local.size * slot.size) == md.iota(node))
            found.append(Choice(index // slot.size % local.size, index % slot.size, weight, mine))
        return replace(assignment, by=tuple(found), tokens=room, experts=local)

    to_nodes = replace(assignment, by=first, used=used, experts=source, capacity=room)
    return NodeExchange(to_nodes, (places, weights), within)


def _any(masks: list[md.Tensor]) -> md.Tensor:
    taken = masks[0]
    for mask in masks[1:]:
        taken = taken | mask
    return taken
