"""`Precision`: the dtypes of parameters, of matrix-product operands and of sums. Also helpers that look up dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["FLOAT32", "Precision", "dim_of", "dims_of", "new_dim"]


@dataclass(frozen=True)
class Precision:
    """Parameters are stored in `param`; products take operands in `compute` and accumulate in `reduce`.

    `reduce` is also the dtype of normalisations, of softmax and of partial sums that devices all-reduce, so it
    affects the bytes sent. `gradient` is the dtype to which the cotangents of products are rounded; the products of
    the backward pass accumulate in float32. None is `compute`, as in mixed-precision training; with "float32"
    cotangents are not rounded, and the backward pass has the speed of float32 products.

    >>> import meshdsl as md
    >>> md.nn.Precision(compute="bfloat16")
    Precision(param='float32', compute='bfloat16', reduce='float32', gradient=None)
    """

    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    gradient: str | None = None

    def __post_init__(self) -> None:
        for dtype in (self.param, self.compute, self.reduce, self.gradient or self.compute):
            if not md.spec([], dtype).dtype.name.startswith(("float", "bfloat")):
                raise md.ShapeError(f"md.nn.Precision takes floating dtypes, got {dtype!r}")

    def einsum(self, *xs: md.Tensor, out: Iterable[md.Dim]) -> md.Tensor:
        """Einsum of the operands cast to `compute`, accumulated and returned in `reduce`."""
        return self._rounded(md.einsum(*(md.cast(x, self.compute) for x in xs), out=out, dtype=self.reduce))

    def grouped_dot(self, x: md.Tensor, w: md.Tensor, i: md.Tensor, by: md.Dim, over: md.Dim) -> md.Tensor:
        """`md.grouped_dot` of the operands cast to `compute`, accumulated and returned in `reduce`."""
        x, w = md.cast(x, self.compute), md.cast(w, self.compute)
        return self._rounded(md.grouped_dot(x, w, i, by=by, over=over, dtype=self.reduce))

    def _rounded(self, y: md.Tensor) -> md.Tensor:
        """The product; its cotangent is rounded to `gradient`."""
        gradient = md.spec([], self.gradient or self.compute).dtype
        return _with_cotangent_in(y, gradient) if gradient.itemsize < y.dtype.itemsize else y


def _with_cotangent_in(y: md.Tensor, dtype: Any) -> md.Tensor:
    """The same tensor; in the backward pass its cotangent is rounded to `dtype`."""

    def rounded(_: None, ct: md.Tensor) -> tuple[md.Tensor]:
        return (md.cast(md.cast(ct, dtype), ct.dtype),)

    return md.custom_vjp(lambda y: y, lambda y: (y, None), rounded)(y)


FLOAT32 = Precision()


def dims_of(x: md.Tensor, names: str | md.Dim | Iterable[str | md.Dim]) -> tuple[md.Dim, ...]:
    """The dims of x with these names; raises `ShapeError` for a name that x lacks."""
    items = names.split() if isinstance(names, str) else [names] if isinstance(names, md.Dim) else list(names)
    return tuple(dim_of(x, item) for item in items)


def dim_of(x: md.Tensor, name_or_dim: str | md.Dim) -> md.Dim:
    """The dim of x with this name; raises `ShapeError` if x lacks it, or if a size is given and differs."""
    sized_dim = new_dim(name_or_dim, "a dim") if not isinstance(name_or_dim, str) or ":" in name_or_dim else None
    name = name_or_dim if sized_dim is None else sized_dim.name
    dim = next((d for d in x.dims if d.name == name), None)
    if dim is None:
        raise md.ShapeError(f"no dim {name!r} in {x.type}; name one of its dims")
    if sized_dim is not None and sized_dim != dim:
        raise md.ShapeError(
            f"dim {name!r} has size {dim.size} in {x.type}, but size {sized_dim.size} was given\n"
            "  give only the name, or rename one of the two dims with md.rename"
        )
    return dim


def new_dim(dim: str | md.Dim, role: str) -> md.Dim:
    """The dim, given as `md.Dim` or as text such as "slot:2"; raises `ShapeError` with `role` for anything else."""
    dims = md.dims(dim) if isinstance(dim, str) and ":" in dim else (dim,)
    if len(dims) != 1 or not isinstance(dims[0], md.Dim):
        raise md.ShapeError(f"{role} must have a size, as in md.Dim('name', 8) or 'name:8'; got {dim!r}")
    return dims[0]
