"""Capacity passing: the tokens of a group are routed in parts, and each part knows the slots that earlier ones used.

A token is kept if its slot index in its part is less than capacity - used, so the kept tokens are those of the whole
group (Jiang et al., 2024, section 4.3). The slots of each part start at 0 and are as many as those of the group,
because all tokens of a part may choose one expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import meshdsl as md

from .assignment import Assignment, assign
from .options import resolve
from .router_args import passes_capacity

__all__ = ["RoutedPart", "check_parts", "cut", "join", "route_parts"]


@dataclass(frozen=True)
class RoutedPart:
    """One part of a group's tokens: its assignment, and the slots that it fills [groups, expert] (int32)."""

    assignment: Assignment
    filled: md.Tensor


def check_parts(parts: int, token: md.Dim, router: str, options: Mapping[str, Any]) -> None:
    """Raise `ShapeError` unless the tokens of a group can be routed in so many parts."""
    if not isinstance(parts, int) or parts < 1 or token.size % parts:
        raise md.ShapeError(f"parts={parts!r}: the {token.size} tokens of {token!r} are cut into equal parts")
    name, resolved = resolve(router, options)
    if parts > 1 and not passes_capacity(name, resolved):
        raise md.ShapeError(
            f"parts={parts}: the router {name!r} orders the tokens of the whole group\n"
            "  use parts=1, or a router with one choice in token order: switch, hash, random, or top_k with k=1"
        )


def cut(x: md.Tensor, token: md.Dim, parts: int) -> list[md.Tensor]:
    """The parts of x along the tokens; the gradient joins the parts' gradients, instead of adding padded ones."""
    if parts == 1:
        return [x]
    pieces = md.custom_vjp(
        lambda x: tuple(_unstacked(x, token, parts)),
        lambda x: (tuple(_unstacked(x, token, parts)), x.dims),
        lambda dims, cts: (md.transpose(join(list(cts), token), dims),),
    )
    return list(pieces(x))


def _unstacked(x: md.Tensor, token: md.Dim, parts: int) -> list[md.Tensor]:
    dim = md.Dim(f"{token.name}_part", parts)
    return md.unstack(md.unflatten(x, token, [dim, md.Dim(token.name, token.size // parts)]), dim)


def join(xs: Sequence[md.Tensor], token: md.Dim) -> md.Tensor:
    """The inverse of `cut`."""
    if len(xs) == 1:
        return xs[0]
    stacked = md.stack(xs, f"{token.name}_part")
    return md.flatten(stacked, [stacked.dims[0], token.name], token)


def route_parts(
    gates: md.Tensor,
    parts: int,
    *,
    tokens: md.Dim,
    experts: md.Dim,
    capacity: md.Dim,
    router: str,
    nonpadding: md.Tensor | None,
    options: Mapping[str, Any],
) -> list[RoutedPart]:
    """Route each part of the tokens, with the slots that the parts before it used."""
    part = md.Dim(tokens.name, tokens.size // parts)

    def of_parts(value: Any) -> list[Any]:
        return cut(value, tokens, parts) if isinstance(value, md.Tensor) and tokens in value.dims else [value] * parts

    own = {name: of_parts(value) for name, value in options.items()}
    used: md.Tensor | None = None
    routed: list[RoutedPart] = []
    for i, (gates_of, real) in enumerate(zip(of_parts(gates), of_parts(nonpadding), strict=True)):
        assignment = assign(
            gates_of,
            tokens=part,
            experts=experts,
            capacity=capacity,
            router=router,
            nonpadding=real,
            used=used,
            **{name: values[i] for name, values in own.items()},
        )
        routed.append(RoutedPart(assignment, assignment.used if used is None else assignment.used - used))
        used = assignment.used
    return routed
