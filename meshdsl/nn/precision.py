"""Dtypes, chosen separately: of parameters, of the operands of products and of their gradients, and of sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["FLOAT32", "Precision", "dim_of", "dims_of", "new_dim"]


@dataclass(frozen=True)
class Precision:
    """Parameters are stored in `param`, products take operands in `compute`, and add up in `reduce`.

    `reduce` is also the dtype of normalisations and softmax, and that in which devices add their parts, so it
    decides bytes sent. `gradient` is the dtype in which cotangents enter the products of the backward pass, which add
    up in float32 on each device: `compute` where it is None, as mixed-precision training does; "float32" for exact
    cotangents and products at float32 speed.

    >>> import meshdsl as md
    >>> md.nn.Precision(compute="bfloat16")
    Precision(param='float32', compute='bfloat16', reduce='float32', gradient=None)
    """

    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    gradient: str | None = None

    def einsum(self, *xs: md.Tensor, out: Iterable[md.Dim]) -> md.Tensor:
        """The product of operands in `compute`, with the sum in `reduce`; the result is in `reduce`."""
        y = md.einsum(*(md.cast(x, self.compute) for x in xs), out=out, dtype=self.reduce)
        gradient = md.spec([], self.gradient or self.compute).dtype
        return _with_cotangent_in(y, gradient) if gradient.itemsize < y.dtype.itemsize else y


def _with_cotangent_in(y: md.Tensor, dtype: Any) -> md.Tensor:
    """The same tensor, with its cotangent rounded to a dtype."""

    def rounded(_: None, ct: md.Tensor) -> tuple[md.Tensor]:
        return (md.cast(md.cast(ct, dtype), ct.dtype),)

    return md.custom_vjp(lambda y: y, lambda y: (y, None), rounded)(y)


FLOAT32 = Precision()


def dims_of(x: md.Tensor, asked: str | md.Dim | Iterable[str | md.Dim]) -> tuple[md.Dim, ...]:
    """The dims of x with these names; raises `ShapeError` for one that x lacks."""
    items = asked.split() if isinstance(asked, str) else [asked] if isinstance(asked, md.Dim) else list(asked)
    return tuple(dim_of(x, item) for item in items)


def dim_of(x: md.Tensor, asked: str | md.Dim) -> md.Dim:
    """The dim of x with this name, and with this size where one is given; raises `ShapeError` where x has none."""
    dim = new_dim(asked, "a dim") if not isinstance(asked, str) or ":" in asked else None
    name = asked if dim is None else dim.name
    there = next((d for d in x.dims if d.name == name), None)
    if there is None:
        raise md.ShapeError(f"no dim {name!r} in {x.type}; name one of its dims")
    if dim is not None and dim != there:
        raise md.ShapeError(
            f"dim {name!r} has size {there.size} in {x.type}, and size {dim.size} was asked for\n"
            "  give the name alone, or rename one of the two with md.rename"
        )
    return there


def new_dim(asked: str | md.Dim, what: str) -> md.Dim:
    """A dim that is made, from a dim or from text such as "slot:2"; raises `ShapeError` for anything else."""
    dims = md.dims(asked) if isinstance(asked, str) and ":" in asked else (asked,)
    if len(dims) != 1 or not isinstance(dims[0], md.Dim):
        raise md.ShapeError(f"{what} is a dim with its size, such as md.Dim('name', 8) or 'name:8'; got {asked!r}")
    return dims[0]
