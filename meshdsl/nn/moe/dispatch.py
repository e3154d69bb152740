"""Dispatch: copies tokens into their experts' slots and combines the results, by mask products or by index.

Both methods give equal results. The mask products of GShard's Algorithm 2 take tokens x experts x capacity x model
operations. By index, each slot reads its token and each token reads its slots, in the forward and the backward pass;
the work is linear in slots and tokens, and only integers and weights are scattered. Gradients flow through weights and
values. Values are sent in their own dtype. Weights are rounded to that dtype; the sum over a token's slots is
accumulated in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import meshdsl as md

from .assignment import Assignment, Choice, Picks
from .options import check_known
from .routing import masks

# "auto" uses index if a group's mask has at least this many elements (tokens x experts x capacity), by platform, from
# benchmarks/dispatch.py, forward and backward. Measured on CPU: from 1024 to 4096 both take equal time, below that
# einsum is faster. For TPU, the compiler's cycles on v5e (`--tpu`); equal at 2**20. GPUs were not measured.
INDEX_FROM = {"cpu": 4096, "gpu": 4096, "tpu": 2**20}


@dataclass(frozen=True)
class Dispatch:
    """Two functions, created by `dispatch_by`: `send` copies tokens to slots, `receive` combines slots to tokens.

    `send(x)` maps [groups, token, ...] to [groups, expert, capacity, ...], with zeros in empty slots. `receive(y)` maps
    back: each token is the weighted sum of its slots, and zero if the token was dropped.

    >>> import meshdsl as md
    >>> same = md.nn.moe.Dispatch(lambda x: x, lambda y: y)  # no experts
    >>> same.receive(same.send(md.tensor([[1.0]], "token model"))).dims
    (token=1, model=1)
    """

    send: Callable[[md.Tensor], md.Tensor]
    receive: Callable[[md.Tensor], md.Tensor]


def dispatch_by(method: str, assignment: Assignment) -> Dispatch:
    """The dispatch functions for an assignment; `method` is "index", "einsum" or "auto".

    >>> import meshdsl as md
    >>> gates, x = md.tensor([[0.7, 0.3], [0.6, 0.4]], "token expert"), md.tensor([[1.0], [2.0]], "token model")
    >>> slot = md.Dim("slot", 1)
    >>> assignment = md.nn.moe.assign(gates, tokens="token", experts="expert", capacity=slot, router="switch")
    >>> dispatch = md.nn.moe.dispatch_by("index", assignment)
    >>> dispatch.send(x).numpy().tolist()  # expert 0 has token 0, expert 1 has none
    [[[1.0]], [[0.0]]]
    >>> dispatch.receive(dispatch.send(x))
    tensor(float32[token=2 model=1], [[0.7]
     [0. ]])

    "auto" is "index" if tokens x experts x capacity of one group is at least `INDEX_FROM[md.platform()]`, else
    "einsum". Raises `ShapeError` for an unknown method.
    """
    if method == "auto":
        mask_size = assignment.tokens.size * assignment.experts.size * assignment.capacity.size
        method = "index" if mask_size >= INDEX_FROM.get(md.platform(), INDEX_FROM["cpu"]) else "einsum"
    check_known("dispatch", method, ("auto", *METHODS))
    return METHODS[method](assignment)


def unweighted(assignment: Assignment) -> tuple[Assignment, md.Tensor]:
    """The assignment with weights of one, and the weight of each slot [groups, expert, capacity]; 0 if it is empty."""
    by, expert, slot = assignment.by, assignment.experts, assignment.capacity
    if isinstance(by, Picks):
        ones = md.ones(by.weight.dims, by.weight.dtype)
        return replace(assignment, by=replace(by, weight=ones)), md.where(by.kept, by.weight, 0)
    groups = [d for d in by[0].weight.dims if d != assignment.tokens]
    slots = md.fresh_dim(md.Dim(f"{expert.name}_{slot.name}", expert.size * slot.size), by[0].weight.dims)
    weights = md.zeros([*groups, slots], by[0].weight.dtype)
    for choice in by:
        index = md.where(choice.kept, choice.expert * slot.size + choice.slot, slots.size)
        weights = md.put_add(weights, index, choice.weight, slots, drop=True)
    ones = md.ones(by[0].weight.dims, by[0].weight.dtype)
    return replace(assignment, by=tuple(replace(c, weight=ones) for c in by)), md.unflatten(
        weights, slots, [expert, slot]
    )


def by_einsum(assignment: Assignment) -> Dispatch:
    """Sends and receives by products with masks (GShard, Algorithm 2)."""
    combine, taken = masks(assignment)
    token, expert, slot = assignment.tokens, assignment.experts, assignment.capacity
    groups = [d for d in combine.dims if d not in (token, expert, slot)]

    def copied(x: md.Tensor, taken: md.Tensor) -> md.Tensor:
        rest = [d for d in x.dims if d not in (*groups, token)]
        return md.einsum(md.cast(taken, x.dtype), x, out=[*groups, expert, slot, *rest])

    def copied_back(saved: tuple[Any, ...], ct: md.Tensor) -> tuple[md.Tensor, None]:
        taken, dims = saved  # booleans: known to be finite, so that a partial sum in ct stays partial
        return md.einsum(md.cast(taken, ct.dtype), ct, out=dims), None

    def send(x: md.Tensor) -> md.Tensor:
        copy = md.custom_vjp(copied, lambda x, taken: (copied(x, taken), (taken, x.dims)), copied_back)
        return copy(x, taken)

    def receive(y: md.Tensor) -> md.Tensor:
        rest = [d for d in y.dims if d not in (*groups, expert, slot)]
        out = md.einsum(md.cast(combine, y.dtype), y, out=[*groups, token, *rest], dtype=_wide(y))
        return md.cast(out, y.dtype)

    return Dispatch(send, receive)


def by_index(assignment: Assignment) -> Dispatch:
    """Sends and receives by reading at indices."""
    return (
        _picked(assignment, assignment.by) if isinstance(assignment.by, Picks) else _chosen(assignment, assignment.by)
    )


METHODS: dict[str, Callable[[Assignment], Dispatch]] = {"index": by_index, "einsum": by_einsum}


def _wide(x: md.Tensor) -> Any:
    """The dtype in which values are summed."""
    return x.dtype if x.dtype.itemsize > 4 else "float32"  # JAX promotes no 8-bit floats


def _sum(terms: Sequence[md.Tensor], dtype: Any) -> md.Tensor:
    """The sum of the terms, accumulated in at least float32 and cast to `dtype`."""
    widened = [md.cast(term, _wide(term)) for term in terms]
    return md.cast(sum(widened[1:], widened[0]), dtype)


def _chosen(assignment: Assignment, choices: tuple[Choice, ...]) -> Dispatch:
    """Dispatch for routers where tokens choose: a token has one slot per kept choice, and a slot holds one token."""
    token, expert, slot = assignment.tokens, assignment.experts, assignment.capacity
    slot_dim = md.Dim(f"{expert.name}_{slot.name}", expert.size * slot.size)  # all slots of all experts
    slot_dim = md.fresh_dim(slot_dim, choices[0].expert.dims)
    slot_indices = [md.where(c.kept, c.expert * slot.size + c.slot, slot_dim.size) for c in choices]
    weights = [c.weight for c in choices]
    groups = [d for d in slot_indices[0].dims if d != token]

    def in_slots(values: Sequence[md.Tensor], slot_indices: Sequence[md.Tensor]) -> md.Tensor:
        """The value of each slot's choice [groups, expert, slot]; 0 for an empty slot."""
        slots = md.broadcast(md.cast(0, values[0].dtype), [*groups, slot_dim])
        for index, value in zip(slot_indices, values, strict=True):
            slots = md.put_add(slots, index, value, slot_dim, drop=True)
        return md.unflatten(slots, slot_dim, [expert, slot])

    def read(y: md.Tensor, slot_indices: Sequence[md.Tensor]) -> list[md.Tensor]:
        """The contents of each choice's slot [groups, token, ...]; zero for a choice without a slot."""
        every = md.fresh_dim(slot_dim, y.dims)
        flat = md.flatten(y, [expert, slot], every)
        return [md.take(flat, index, every, drop=True) for index in slot_indices]

    def weighted(y: md.Tensor, weight: md.Tensor) -> md.Tensor:
        return md.cast(y, _wide(y)) * md.cast(md.cast(weight, y.dtype), _wide(y))

    holder = md.inverse_index(*slot_indices, over=token, into=[expert, slot])  # the token in each slot; -1 if empty

    def send(x: md.Tensor, holder: md.Tensor, slot_indices: list[md.Tensor]) -> md.Tensor:
        return md.take(x, holder, token, drop=True)

    def send_back(saved: tuple[Any, ...], ct: md.Tensor) -> tuple[md.Tensor, None, None]:
        slot_indices, dims = saved
        return md.transpose(_sum(read(ct, slot_indices), ct.dtype), dims), None, None

    def receive(y: md.Tensor, weights: list[md.Tensor], holder: md.Tensor, slot_indices: list[md.Tensor]) -> md.Tensor:
        return _sum([weighted(v, w) for v, w in zip(read(y, slot_indices), weights, strict=True)], y.dtype)

    def receive_back(saved: tuple[Any, ...], ct: md.Tensor) -> tuple[md.Tensor, list[md.Tensor], None, None]:
        y, weights, holder, slot_indices = saved
        rest = [d for d in y.dims if d not in (*groups, expert, slot)]
        products = [md.cast(v, _wide(v)) * md.cast(ct, _wide(v)) for v in read(y, slot_indices)]
        for_weights = [md.cast(md.sum(p, rest), w.dtype) for p, w in zip(products, weights, strict=True)]
        for_y = md.cast(weighted(md.take(ct, holder, token, drop=True), in_slots(weights, slot_indices)), y.dtype)
        return md.transpose(for_y, y.dims), for_weights, None, None

    sends = md.custom_vjp(send, lambda x, *args: (send(x, *args), (args[1], x.dims)), send_back)
    receives = md.custom_vjp(receive, lambda *xs: (receive(*xs), xs), receive_back)
    return Dispatch(lambda x: sends(x, holder, slot_indices), lambda y: receives(y, weights, holder, slot_indices))


def _picked(assignment: Assignment, picks: Picks) -> Dispatch:
    """Dispatch for routers where experts choose: several experts may choose a token, so `receive` scatter-adds."""
    token = assignment.tokens
    holder = md.where(picks.kept, picks.token, token.size)
    groups = [d for d in picks.token.dims if d not in (assignment.experts, assignment.capacity)]

    def receive(y: md.Tensor) -> md.Tensor:
        rest = [d for d in y.dims if d not in picks.token.dims]
        each = md.cast(y, _wide(y)) * md.cast(md.cast(picks.weight, y.dtype), _wide(y))
        zeros = md.broadcast(md.cast(0, each.dtype), [*groups, token, *rest])
        return md.cast(md.put_add(zeros, holder, each, token, drop=True), y.dtype)

    return Dispatch(lambda x: md.take(x, holder, token, drop=True), receive)
