"""Three dtypes, chosen separately: of parameters, of the operands of products, and of sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import meshdsl as md

__all__ = ["FLOAT32", "Precision", "dim_of", "dims_of"]


@dataclass(frozen=True)
class Precision:
    """Parameters are stored in `param`, products take operands in `compute`, and add up in `reduce`.

    `reduce` is also the dtype of normalisations and softmax, and that in which devices add their parts, so it
    decides bytes sent.

    >>> import meshdsl as md
    >>> md.nn.Precision(compute="bfloat16")
    Precision(param='float32', compute='bfloat16', reduce='float32')
    """

    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"

    def einsum(self, *xs: md.Tensor, out: Iterable[md.Dim]) -> md.Tensor:
        """The product of operands in `compute`, with the sum in `reduce`; the result is in `reduce`."""
        return md.einsum(*(md.cast(x, self.compute) for x in xs), out=out, dtype=self.reduce)


FLOAT32 = Precision()


def dims_of(x: md.Tensor, asked: str | md.Dim | Iterable[str | md.Dim]) -> tuple[md.Dim, ...]:
    """The dims of x with these names; raises `ShapeError` for one that x lacks."""
    items = asked.split() if isinstance(asked, str) else [asked] if isinstance(asked, md.Dim) else list(asked)
    return tuple(dim_of(x, item) for item in items)


def dim_of(x: md.Tensor, asked: str | md.Dim) -> md.Dim:
    """The dim of x with this name."""
    name = asked if isinstance(asked, str) else asked.name
    for dim in x.dims:
        if dim.name == name:
            return dim
    raise md.ShapeError(f"no dim {name!r} in {x.type}; name one of its dims")
