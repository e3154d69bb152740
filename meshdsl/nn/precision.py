"""`Precision`: the dtypes of parameters, of matrix-product operands and of sums. Also helpers that look up dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

DimLike = str | md.Dim  # one dim
DimsLike = str | md.Dim | Iterable[str | md.Dim]  # one or several


@dataclass(frozen=True)
class Precision:
    """Parameters are stored in `param`; products take operands in `compute` and accumulate in `reduce`.

    `reduce` is also the dtype of normalisations, of softmax and of partial sums that devices all-reduce, so it
    affects the bytes sent: with "bfloat16", those of gradients are half as many. The gradient of a parameter has the
    dtype `param`; each device and each loop adds it up in that dtype, and devices in the narrower of `param` and
    `reduce`. `gradient` is the dtype to which the cotangents of products are rounded, which the products of the
    backward pass read. None is `compute`, as in mixed-precision training; with "float32" cotangents are not rounded,
    and the backward pass has the speed of float32 products. No knob of a plan changes these dtypes.

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

    def einsum(self, *xs: md.Tensor, out: DimsLike) -> md.Tensor:
        """Einsum of the operands cast to `compute`, accumulated and returned in `reduce`."""
        return self._rounded(md.einsum(*map(self._operand, xs), out=out, dtype=self.reduce))

    def grouped_dot(self, x: md.Tensor, w: md.Tensor, i: md.Tensor, by: DimLike, over: DimLike) -> md.Tensor:
        """`md.grouped_dot` of the operands cast to `compute`, accumulated and returned in `reduce`."""
        x, w = self._operand(x), self._operand(w)
        return self._rounded(md.grouped_dot(x, w, i, by=by, over=over, dtype=self.reduce))

    def _operand(self, x: md.Tensor) -> md.Tensor:
        return md.cast(x, self.compute, reduce=self.reduce)

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


def dims_of(x: md.Tensor, dims: DimsLike) -> tuple[md.Dim, ...]:
    """The dims of x that are given; raises `ShapeError` for one that x lacks, or that has another size there."""
    return md.dims(dims, of=x.dims)


def dim_of(x: md.Tensor, dim: DimLike) -> md.Dim:
    """The one dim of x that is given; raises `ShapeError` if x lacks it or has another size, and for several dims."""
    dims = dims_of(x, dim)
    if len(dims) != 1:
        raise md.ShapeError(f"expected one dim of {x.type}; got {dim!r}")
    return dims[0]


def new_dim(dim: DimLike, role: str) -> md.Dim:
    """The dim, given with its size; raises `ShapeError` with `role` for several, or if the size is missing."""
    try:
        dims = md.dims(dim)
    except md.ShapeError:
        dims = ()
    if len(dims) != 1:
        raise md.ShapeError(f"{role} must have a size, as in md.Dim('name', 8) or 'name:8'; got {dim!r}")
    return dims[0]


def name_of(dim: DimLike) -> str:
    """The name of a dim, which may have a size."""
    if isinstance(dim, str):
        return dim.partition(":")[0]
    return dim.name if isinstance(dim, md.Dim) else name_of(*dim)
