"""Moving tokens to their experts' slots and back: by masks, or by index, with equal results.

The masks of GShard's Algorithm 2 cost tokens x experts x capacity x model operations. By index a slot reads the token
that it holds and a token reads the slots that hold it, forward and backward alike: work linear in slots and tokens,
and nothing is scattered but integers and weights. Gradients flow through weights and values only. What travels is in
the dtype of the values; weights are rounded to it, and a token's slots are added in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import meshdsl as md

from .assignment import Assignment, Choice, Picks
from .options import near
from .routing import masks

__all__ = ["INDEX_FROM", "METHODS", "Dispatch", "dispatch_by"]

# Places of the masks, tokens x experts x capacity of one group, from which index is faster: measured on CPU, forward
# and backward, by benchmarks/dispatch.py. From 1024 to here neither is; below, einsum is.
INDEX_FROM = 4096


@dataclass(frozen=True)
class Dispatch:
    """`send(x)`: values of tokens [groups, token, ...] to [groups, expert, capacity, ...], zeros in empty slots.

    `receive(y)` takes results back, each token's the sum of its slots' by weight; zeros for a dropped token.
    `dispatch_by` makes it, and its example shows both.

    >>> import meshdsl as md
    >>> same = md.nn.moe.Dispatch(lambda x: x, lambda y: y)  # no experts
    >>> same.receive(same.send(md.tensor([[1.0]], "token model"))).dims
    (token=1, model=1)
    """

    send: Callable[[md.Tensor], md.Tensor]
    receive: Callable[[md.Tensor], md.Tensor]


def dispatch_by(method: str, found: Assignment) -> Dispatch:
    """The dispatch of an assignment by "index", by "einsum", or by the faster of the two ("auto").

    >>> import meshdsl as md
    >>> gates, x = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert"), md.tensor([[1.0], [2.0]], "token model")
    >>> slot = md.Dim("slot", 1)
    >>> found = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch")
    >>> way = md.nn.moe.dispatch_by("index", found)
    >>> way.send(x).numpy().tolist()  # expert 0 has token 0, expert 1 has none
    [[[1.0]], [[0.0]]]
    >>> way.receive(way.send(x))
    tensor(float32[token=2 model=1], [[0.7]
     [0. ]])

    "auto" is index from `INDEX_FROM` places of the masks (tokens x experts x capacity of one group) on, einsum for
    fewer. Raises `ShapeError` for another method.
    """
    if method == "auto":
        places = found.tokens.size * found.experts.size * found.capacity.size
        method = "index" if places >= INDEX_FROM else "einsum"
    if method not in METHODS:
        known = ("auto", *METHODS)
        raise md.ShapeError(f"no dispatch {method!r}; {near(method, known)}there are: {', '.join(known)}")
    return METHODS[method](found)


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
        out = md.einsum(md.cast(combine, y.dtype), y, out=[*groups, token, *rest], dtype=_wide(y))
        return md.cast(out, y.dtype)

    return Dispatch(send, receive)


def by_index(found: Assignment) -> Dispatch:
    """Both ways as reads by index."""
    return _picked(found, found.by) if isinstance(found.by, Picks) else _chosen(found, found.by)


METHODS: dict[str, Callable[[Assignment], Dispatch]] = {"index": by_index, "einsum": by_einsum}


def _wide(x: md.Tensor) -> Any:
    """The dtype in which values are added."""
    return jnp.promote_types(x.dtype, "float32")


def _sum(terms: Sequence[md.Tensor], dtype: Any) -> md.Tensor:
    """Added in float32 at least, in a dtype of choice."""
    wide = [md.cast(term, _wide(term)) for term in terms]
    return md.cast(sum(wide[1:], wide[0]), dtype)


def _chosen(found: Assignment, choices: tuple[Choice, ...]) -> Dispatch:
    """Where tokens choose: a token is in as many slots as it has choices, and a slot holds one token."""
    token, expert, slot = found.tokens, found.experts, found.capacity
    place = md.Dim(f"{expert.name}_{slot.name}", expert.size * slot.size)  # a slot of an expert
    places = [md.where(c.kept, c.expert * slot.size + c.slot, place.size) for c in choices]
    weights = [c.weight for c in choices]
    groups = [d for d in places[0].dims if d != token]

    def in_slots(values: Sequence[md.Tensor], places: Sequence[md.Tensor]) -> md.Tensor:
        """[groups, expert, slot]: for each slot the value of the choice that holds it, 0 in an empty one."""
        slots = md.broadcast(md.cast(0, values[0].dtype), [*groups, place])
        for at, value in zip(places, values, strict=True):
            slots = md.put_add(slots, at, value, place)
        return md.unflatten(slots, place, [expert, slot])

    def read(y: md.Tensor, places: Sequence[md.Tensor]) -> list[md.Tensor]:
        """For each choice what its slot holds [groups, token, ...]; the last index reads zero."""
        flat = md.flatten(y, [expert, slot], place)
        return [md.take(flat, at, place) for at in places]

    def weighted(y: md.Tensor, weight: md.Tensor) -> md.Tensor:
        return md.cast(y, _wide(y)) * md.cast(md.cast(weight, y.dtype), _wide(y))

    numbers = md.broadcast(md.iota(token) + 1, places[0].dims)
    holder = in_slots([numbers] * len(places), places) - 1  # the token in each slot; -1 in an empty one

    def send(x: md.Tensor, holder: md.Tensor, places: list[md.Tensor]) -> md.Tensor:
        return md.take(x, holder, token)

    def send_back(saved: tuple[Any, ...], ct: md.Tensor) -> tuple[md.Tensor, None, None]:
        places, dims = saved
        return md.transpose(_sum(read(ct, places), ct.dtype), dims), None, None

    def receive(y: md.Tensor, weights: list[md.Tensor], holder: md.Tensor, places: list[md.Tensor]) -> md.Tensor:
        return _sum([weighted(v, w) for v, w in zip(read(y, places), weights, strict=True)], y.dtype)

    def receive_back(saved: tuple[Any, ...], ct: md.Tensor) -> tuple[md.Tensor, list[md.Tensor], None, None]:
        y, weights, holder, places = saved
        over = [d for d in y.dims if d not in (*groups, expert, slot)]
        products = [md.cast(v, _wide(v)) * md.cast(ct, _wide(v)) for v in read(y, places)]
        for_weights = [md.cast(md.sum(p, over), w.dtype) for p, w in zip(products, weights, strict=True)]
        for_y = md.cast(weighted(md.take(ct, holder, token), in_slots(weights, places)), y.dtype)
        return md.transpose(for_y, y.dims), for_weights, None, None

    sends = md.custom_vjp(send, lambda x, *at: (send(x, *at), (at[1], x.dims)), send_back)
    receives = md.custom_vjp(receive, lambda *xs: (receive(*xs), xs), receive_back)
    return Dispatch(lambda x: sends(x, holder, places), lambda y: receives(y, weights, holder, places))


def _picked(found: Assignment, picks: Picks) -> Dispatch:
    """Where experts choose: a token may be in the slots of any number of experts, so results are added to it."""
    token = found.tokens
    holder = md.where(picks.kept, picks.token, token.size)
    groups = [d for d in picks.token.dims if d not in (found.experts, found.capacity)]

    def receive(y: md.Tensor) -> md.Tensor:
        rest = [d for d in y.dims if d not in picks.token.dims]
        each = md.cast(y, _wide(y)) * md.cast(md.cast(picks.weight, y.dtype), _wide(y))
        zeros = md.broadcast(md.cast(0, each.dtype), [*groups, token, *rest])
        return md.cast(md.put_add(zeros, holder, each, token), y.dtype)

    return Dispatch(lambda x: md.take(x, holder, token), receive)
