"""Moving tokens to their experts' slots and back: by masks, or by index, with equal results.

The masks of GShard's Algorithm 2 cost tokens x experts x capacity x model operations. By index a slot reads the token
that it holds and a token reads the slots that hold it, forward and backward alike: work linear in slots and tokens,
and nothing is scattered but integers and weights. Gradients flow through weights and values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import meshdsl as md

from .options import near
from .routing import Assignment, Choice, Picks, masks

__all__ = ["METHODS", "Dispatch", "dispatch_by"]


@dataclass(frozen=True)
class Dispatch:
    """`send(x)`: values of tokens [groups, token, ...] to [groups, expert, capacity, ...], zeros in empty slots.

    `receive(y)` takes results back, each token's the sum of its slots' by weight; zeros for a dropped token.
    """

    send: Callable[[md.Tensor], md.Tensor]
    receive: Callable[[md.Tensor], md.Tensor]


def by_einsum(found: Assignment) -> Dispatch:
    """Both ways as products with the masks (GShard, Algorithm 2)."""
    combine, taken = masks(found)
    token, expert, slot = found.tokens, found.experts, found.capacity
    groups = [d for d in combine.dims if d not in (token, expert, slot)]

    def send(x: md.Tensor) -> md.Tensor:
        rest = [d for d in x.dims if d not in (*groups, token)]
        return md.einsum(md.cast(taken, x.dtype), x, out=[*groups, expert, slot, *rest])

    def receive(y: md.Tensor) -> md.Tensor:
        rest = [d for d in y.dims if d not in (*groups, expert, slot)]
        return md.einsum(md.cast(combine, y.dtype), y, out=[*groups, token, *rest])

    return Dispatch(send, receive)


def by_index(found: Assignment) -> Dispatch:
    """Both ways as reads by index."""
    return _picked(found, found.by) if isinstance(found.by, Picks) else _chosen(found, found.by)


METHODS: dict[str, Callable[[Assignment], Dispatch]] = {"index": by_index, "einsum": by_einsum}


def dispatch_by(method: str, found: Assignment) -> Dispatch:
    """The dispatch of an assignment by "index" or by "einsum"; raises `ShapeError` for another."""
    if method not in METHODS:
        raise md.ShapeError(f"no dispatch {method!r}; {near(method, METHODS)}there are: {', '.join(METHODS)}")
    return METHODS[method](found)


def _chosen(found: Assignment, choices: tuple[Choice, ...]) -> Dispatch:
    token, expert, slot = found.tokens, found.experts, found.capacity
    place = md.Dim(f"{expert.name}_{slot.name}", expert.size * slot.size)
    places = [md.where(c.kept, c.expert * slot.size + c.slot, place.size) for c in choices]
    groups = [d for d in choices[0].expert.dims if d != token]
    holds = md.broadcast(0, [*groups, place])  # one more than the token in each slot; 0 where it is empty
    for at in places:
        holds = md.put_add(holds, at, md.broadcast(md.iota(token) + 1, at.dims), place)
    holder = md.unflatten(holds - 1, place, [expert, slot])

    def read(y: md.Tensor, at: md.Tensor) -> md.Tensor:
        return md.take(y, at, place)

    def sent(x: md.Tensor, holder: md.Tensor, places: list[md.Tensor]) -> md.Tensor:
        return md.take(x, holder, token)

    def sent_back(saved: tuple[list[md.Tensor], tuple[md.Dim, ...]], ct: md.Tensor) -> tuple[md.Tensor, None, None]:
        places, dims = saved
        flat = md.flatten(ct, [expert, slot], place)
        parts = [read(flat, at) for at in places]
        return md.transpose(sum(parts[1:], parts[0]), dims), None, None

    send = md.custom_vjp(sent, lambda x, h, p: (sent(x, h, p), (p, x.dims)), sent_back)

    def received(y: md.Tensor, weights: list[md.Tensor], holder: md.Tensor, places: list[md.Tensor]) -> md.Tensor:
        flat = md.flatten(y, [expert, slot], place)
        parts = [read(flat, at) * md.cast(w, y.dtype) for at, w in zip(places, weights, strict=True)]
        return sum(parts[1:], parts[0])

    def received_back(saved: tuple, ct: md.Tensor) -> tuple[md.Tensor, list[md.Tensor], None, None]:
        y, weights, holder, places = saved
        flat = md.flatten(y, [expert, slot], place)
        over = [d for d in y.dims if d not in (*groups, expert, slot)]
        for_weights = [
            md.cast(md.sum(read(flat, at) * ct, over), w.dtype) for at, w in zip(places, weights, strict=True)
        ]
        each = md.broadcast(md.cast(0.0, weights[0].dtype), [*groups, place])
        for at, w in zip(places, weights, strict=True):
            each = md.put_add(each, at, w, place)
        in_slots = md.unflatten(each, place, [expert, slot])
        for_y = md.take(ct, holder, token) * md.cast(in_slots, ct.dtype)
        return md.transpose(for_y, y.dims), for_weights, None, None

    receive = md.custom_vjp(received, lambda *xs: (received(*xs), xs), received_back)
    weights = [c.weight for c in choices]
    return Dispatch(lambda x: send(x, holder, places), lambda y: receive(y, weights, holder, places))


def _picked(found: Assignment, picks: Picks) -> Dispatch:
    token = found.tokens
    holder = md.where(picks.kept, picks.token, token.size)
    groups = [d for d in picks.token.dims if d not in (found.experts, found.capacity)]

    def receive(y: md.Tensor) -> md.Tensor:
        rest = [d for d in y.dims if d not in picks.token.dims]
        zeros = md.broadcast(md.cast(0.0, y.dtype), [*groups, token, *rest])
        return md.put_add(zeros, holder, y * md.cast(picks.weight, y.dtype), token)

    return Dispatch(lambda x: md.take(x, holder, token), receive)
