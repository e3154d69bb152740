"""`Precision`: the dtypes of parameters, of matrix-product operands and of sums. Also helpers that look up dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

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

    With `products="float8"`, products take both operands in 8 bits: e4m3 forward, and e5m2 for the cotangent in the
    backward pass. Each tensor is scaled so that its largest element is the largest of the format (current scaling,
    Micikevicius et al., 2022; the largest element over all devices, so no layout changes a result). Parameters stay in
    `param`; a parameter that is stored sharded is gathered in 8 bits, with its scale.

    >>> import meshdsl as md
    >>> md.nn.Precision(compute="bfloat16")
    Precision(param='float32', compute='bfloat16', reduce='float32', gradient=None, products=None)

    Raises `ShapeError` for dtypes that are not floating, and for other `products`.
    """

    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    gradient: str | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        for dtype in (self.param, self.compute, self.reduce, self.gradient or self.compute):
            if not md.spec([], dtype).dtype.name.startswith(("float", "bfloat")):
                raise md.ShapeError(f"md.nn.Precision takes floating dtypes, got {dtype!r}")
        if self.products not in (None, "float8"):
            raise md.ShapeError(f"products of md.nn.Precision is None or 'float8', got {self.products!r}")

    def einsum(self, *xs: md.Tensor, out: DimsLike) -> md.Tensor:
        """Einsum of the operands cast to `compute`, accumulated and returned in `reduce`."""
        if self.products and len(xs) == 2:
            return _float8_product(*(md.cast(x, x.dtype, reduce=self.reduce) for x in xs), out=out, dtype=self.reduce)
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


def _float8_product(x: md.Tensor, y: md.Tensor, out: DimsLike, dtype: str) -> md.Tensor:
    """The einsum of two tensors in 8 bits, summed in `dtype`; its gradient multiplies in 8 bits too."""

    def product(x: md.Tensor, y: md.Tensor) -> md.Tensor:
        return forward(x, y)[0]

    def forward(x: md.Tensor, y: md.Tensor) -> Any:
        (a, of_a), (b, of_b) = _in_float8(x, "float8_e4m3fn"), _in_float8(y, "float8_e4m3fn")
        return md.einsum(a, b, out=out, dtype=dtype) * of_a * of_b, (a, of_a, b, of_b)

    def backward(residuals: Any, ct: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        a, of_a, b, of_b = residuals
        c, of_c = _in_float8(ct, "float8_e5m2")
        return _product_for(x, c, b) * of_c * of_b, _product_for(y, a, c) * of_a * of_c

    return md.custom_vjp(product, forward, backward)(x, y)


def _in_float8(x: md.Tensor, dtype: str) -> tuple[md.Tensor, md.Tensor]:
    """The tensor in 8 bits, scaled so that its largest element is the largest of the format; and what undoes that."""
    largest = float(jnp.finfo(dtype).max)
    x = md.cast(x, "float32")
    if not all(d.size for d in x.dims):
        return md.cast(x, dtype), md.cast(1, "float32")
    scale = md.max(md.abs(md.stop_gradient(x))) / largest
    finite = md.where(md.isfinite(scale), scale, 1.0)  # so that a pending sum may be multiplied by it
    scale = md.where(finite > 0, finite, 1.0)
    return md.cast(x / scale, dtype), scale


def _product_for(x: md.Tensor, *factors: md.Tensor) -> md.Tensor:
    """The product of two factors as a cotangent of x, in float32."""
    names = {d.name for y in factors for d in y.dims}
    product = md.einsum(*factors, out=[d for d in x.dims if d.name in names], dtype="float32")
    return md.broadcast(product, x.dims)  # over the dims that x alone has, which the product sums


FLOAT32 = Precision()


def dims_of(x: md.Tensor, dims: DimsLike) -> tuple[md.Dim, ...]:
    """The dims of x that are given; raises `ShapeError` for one that x lacks, or that has another size there."""
    if not hasattr(x, "dims"):
        raise md.ShapeError(
            f"a layer takes a tensor, got {type(x).__name__}\n  give an array's dims names: md.tensor(array, dims)"
        )
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
