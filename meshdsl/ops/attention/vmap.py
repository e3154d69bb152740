"""Attention over all places of one more dim, for `md.vmap`.

A dim that only queries have shares keys and values, so queries alone may be mapped. A mapped offset puts the queries of
each place at other positions; positions are not arrays with places, so the causal mask and the window become a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...dims import Dim
from ...ir import Op
from ...trace import Tensor, bind
from ..indexing import iota
from ..reductions import broadcast, spread
from .blocks import RESIDUALS, Names

__all__ = ["vectorised"]


def vectorised(
    op: Op, ins: Sequence[Tensor], new: Dim, how: Names, causal: bool, window: int | None
) -> tuple[Tensor, ...]:
    """The results of attention, or of its gradient, on operands some of which have the dim `new`, first."""
    roles = how.roles(ins)
    together = {"k", "v"} if new in (*roles["k"].dims, *roles["v"].dims) else set[str]()
    if "ct" in roles:  # the cotangent of an operand that all places share differs by place
        together = {"k", "v", "bias", *RESIDUALS}
    for role in ("q", *(r for r in roles if r in together)):
        roles[role] = spread([roles[role]], new)[0]
    if "offset" in roles and new in roles["offset"].dims:
        roles, how = _masked(roles, how, causal, window)
        causal, window = False, None
    return bind(op, *roles.values(), how=how, causal=causal, window=window)


def _masked(roles: dict[str, Tensor], how: Names, causal: bool, window: int | None) -> tuple[dict[str, Tensor], Names]:
    """The operands with a mask in the place of the offset."""
    keys = next(d for d in roles["k"].dims if d.name == how.keys)
    memory = Dim(how.memory if how.memory != how.length else f"{how.memory}__keys", keys.size)
    length = tuple(d for d in roles["q"].dims if d.name == how.length)
    start = roles["offset"]
    pair = (*start.dims, *length, memory)
    at = broadcast(start, pair) - broadcast(iota(memory, start.dtype), pair)
    at = at + broadcast(iota(length[0], start.dtype), pair) if length else at
    conditions = [at >= 0] if causal else []
    conditions += [at < window] if window is not None else []
    conditions += [at > -window] if window is not None and not causal else []
    if "mask" in roles:
        conditions.append(roles["mask"])
    every = [d for d in (*roles["q"].dims, memory) if any(d in c.dims for c in conditions)]
    mask = broadcast(conditions[0], every)
    for condition in conditions[1:]:
        mask = mask & broadcast(condition, every)
    order = ("q", "k", "v", "bias", "mask", "segments", "memory_segments", *RESIDUALS)
    batched_roles = {**roles, "mask": mask}
    extras = tuple(role for role in order[3:7] if role in batched_roles)
    return {r: batched_roles[r] for r in order if r in batched_roles}, dataclasses.replace(
        how, extras=extras, memory=memory.name
    )
