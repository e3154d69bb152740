"""Statistics that are a few other operations: standard deviations, quantiles, counts, sums of segments, without NaN."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..dims import DimLike, DimsLike, find, fresh_dim, size_of
from ..errors import ShapeError
from ..trace import Tensor, as_tensor
from .creation import full, linspace
from .dtypes import cast, check_kind, check_ordered, mean_dtype, promote, wide_dtype
from .elementwise import ceil, floor, isnan, logical_not, sqrt, where
from .indexing import gather, new_dim, put_add
from .masking import identity
from .ordering import sort
from .reductions import any, broadcast, max, mean, min, over_dims, prod, sum, var
from .reshape import flatten
from .scattering import scatter_max, scatter_min


def std(x: Any, over: DimsLike | None = None, where: Any = None, ddof: int = 0) -> Tensor:
    """The standard deviation over one or several dims, or all (default): the root of `md.var`.

    >>> import meshdsl as md
    >>> md.std(md.tensor([1.0, 3.0], "a"))
    tensor(float32[], 1.)

    `where` and `ddof` are those of `md.var`. Raises `ShapeError` for a dim that x lacks.
    """
    return sqrt(var(x, over, where, ddof))


def _without_nan(f: Callable[..., Tensor], example: str) -> Callable[..., Tensor]:
    def reduce(x: Any, over: DimsLike | None = None) -> Tensor:
        x = as_tensor(x)
        check_kind(reduce.__name__, x.dtype, "f")
        numbers = logical_not(isnan(x))
        y = f(x, over, numbers)
        return y if f in (sum, prod) else where(any(numbers, over), y, cast(float("nan"), y.dtype))

    name = f.__name__
    reduce.__name__ = reduce.__qualname__ = f"nan{name}"
    reduce.__doc__ = f"""`md.{name}` of the elements that are not NaN, over one or several dims, or all (default).

    >>> import meshdsl as md
    >>> md.nan{name}(md.tensor([1.0, float("nan"), 3.0], "a"))
    tensor(float32[], {example})

    Of NaN alone it is {"that of no elements" if f in (sum, prod) else "NaN"}. Raises `ShapeError` for a dim that x
    lacks, and for other dtypes than floats.
    """
    return reduce


nansum, nanprod, nanmean = _without_nan(sum, "4."), _without_nan(prod, "3."), _without_nan(mean, "2.")
nanmax, nanmin = _without_nan(max, "3."), _without_nan(min, "1.")
nanvar, nanstd = _without_nan(var, "1."), _without_nan(std, "1.")


def nan_to_num(x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Tensor:
    """x with NaN replaced by `nan`, and infinities by the dtype's largest finite numbers or `posinf` and `neginf`.

    >>> import meshdsl as md
    >>> md.nan_to_num(md.tensor([float("nan"), float("inf"), 1.0], "a"), posinf=9)
    tensor(float32[a=3], [0. 9. 1.])

    Raises `ShapeError` for complex numbers.
    """
    x = as_tensor(x)
    check_ordered("nan_to_num", x.dtype)
    if x.dtype.kind in "iub":
        return x
    limits = jnp.finfo(x.dtype)
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    return where(isnan(x), nan, where(x == float("inf"), high, where(x == -float("inf"), low, x)))


def quantile(x: Any, q: Any, over: DimsLike | None = None) -> Tensor:
    """The elements at the fractions `q` of the sorted dims `over` (default: all), interpolated; NaN propagates.

    >>> import meshdsl as md
    >>> x = md.tensor([1.0, 2.0, 4.0, 8.0], "a")
    >>> md.quantile(x, 0.5), md.quantile(x, md.tensor([0.0, 1.0], "q"))
    (tensor(float32[], 3.), tensor(float32[q=2], [1. 8.]))

    q is a number or a tensor, from 0 to 1; the result has its dims first. Raises `ShapeError` for a dim that x lacks,
    for no elements, and for complex numbers.
    """
    x = as_tensor(x)
    check_ordered("quantile", x.dtype)
    dims = over_dims(x, over)
    dtype = mean_dtype(x.dtype)
    q = cast(as_tensor(q), wide_dtype(dtype))
    dim = fresh_dim(f"sorted:{builtins.max(1, size_of(dims))}", x.dims, q.dims)
    if not size_of(dims):
        raise ShapeError(f"md.quantile of no elements: {x.type}")
    y = cast(x, wide_dtype(dtype))
    order = sort(flatten(y, dims, into=dim) if dims else broadcast(y, (dim, *y.dims)), dim)
    place = q * (dim.size - 1)
    low, high = floor(place), ceil(place)
    below, above = (gather(order, cast(i, "int32"), dim) for i in (low, high))
    part = broadcast(place - low, below.dims)
    result = below * (1 - part) + above * part
    missing = any(isnan(y), dims)
    return cast(where(missing, float("nan"), result), dtype)


def median(x: Any, over: DimsLike | None = None) -> Tensor:
    """The middle of the sorted elements, or the mean of the two in the middle, over dims or all (default).

    >>> import meshdsl as md
    >>> md.median(md.tensor([3.0, 1.0, 2.0], "a"))
    tensor(float32[], 2.)

    NaN propagates. Raises `ShapeError` for a dim that x lacks, for no elements, and for complex numbers.
    """
    return quantile(x, 0.5, over)


def searchsorted(x: Any, values: Any, over: DimLike, side: str = "left") -> Tensor:
    """The indices (int32) in the sorted dim of x at which `values` would be inserted; after equal ones if "right".

    >>> import meshdsl as md
    >>> md.searchsorted(md.tensor([1.0, 2.0, 4.0], "a"), md.tensor([2.0, 3.0], "n"), "a")
    tensor(int32[n=2], [1 2])

    Dims that both have are paired. Every element is compared with every value, and the comparisons are counted, in one
    fused loop; a sharded dim is not gathered. NaN is the largest. Raises `ShapeError` for a dim that x lacks, for
    another `side`, and for complex numbers.
    """
    if side not in ("left", "right"):
        raise ShapeError(f"side of md.searchsorted is 'left' or 'right', not {side!r}")
    x, values = promote(x, values)
    check_ordered("searchsorted", x.dtype)
    dim = find(over, x.dims)
    if dim in values.dims:
        raise ShapeError(f"the values have the dim {dim.name!r} that is searched\n  md.rename it in one of the two")
    shape = (*values.dims, *(d for d in x.dims if d not in values.dims))
    table, value = broadcast(x, shape), broadcast(values, shape)
    before = table < value if side == "left" else table <= value
    if x.dtype.kind not in "iub":
        last = isnan(value) if side == "right" else isnan(value) & logical_not(isnan(table))
        before = before | last
    return sum(cast(before, "int32"), dim)


def _into(i: Any, into: DimLike, values: Any, over: DimsLike | None, fill: Any, scatter: Any) -> Tensor:
    """A table of `fill` along the dim `into`, combined with the values at indices i; other dims than `over` stay."""
    i, values, dim = as_tensor(i), as_tensor(values), new_dim(into)
    stay = [d for d in i.dims if d not in over_dims(i, over)]
    rest = [d for d in values.dims if d not in i.dims]
    table = full((*stay, dim, *rest), as_tensor(identity(fill, values.dtype), values.dtype))
    return scatter(table, i, values, dim, drop=True)


def bincount(i: Any, into: DimLike, weights: Any = 1, over: DimsLike | None = None) -> Tensor:
    """The count of each index along `into` in i (int32), or the sum of its `weights`, over dims of i (default: all).

    >>> import meshdsl as md
    >>> md.bincount(md.tensor([2, 0, 2], "n"), "class:3")
    tensor(int32[class=3], [1 0 2])

    Indices out of range are not counted. Raises `ShapeError` if i is no tensor of integers, and for a dim without size.
    """
    return _into(i, into, weights, over, 0, put_add)


def histogram(x: Any, bins: DimLike, low: float, high: float, over: DimsLike | None = None, weights: Any = 1) -> Tensor:
    """The number of elements in each of the equal bins from `low` to `high` (int32), or the sum of their `weights`.

    >>> import meshdsl as md
    >>> md.histogram(md.tensor([0.1, 0.9, 1.0, 7.0], "n"), "bin:2", 0, 1)
    tensor(int32[bin=2], [1 2])

    A bin includes its lower end, the last one both. The dims `over` are counted, by default all of x. Raises
    `ShapeError` for a dim without a size, and unless low < high.
    """
    if not low < high:
        raise ShapeError(f"md.histogram needs low < high, got {low} and {high}")
    x, dim = as_tensor(x), new_dim(bins)
    check_ordered("histogram", x.dtype)
    x = cast(x, mean_dtype(x.dtype))
    edge = fresh_dim(f"edge:{dim.size + 1}", x.dims)
    place = searchsorted(linspace(edge, low, high, dtype=x.dtype), x, edge, side="right") - 1
    return bincount(where(x == high, dim.size - 1, place), dim, weights, over)


def _segment(f: Callable[..., Tensor], scatter: Any, fill: Any, example: str, what: str) -> Callable[..., Tensor]:
    def segment(x: Any, i: Any, into: DimLike) -> Tensor:
        return _into(i, into, x, None, fill, scatter)

    name = f.__name__
    segment.__name__ = segment.__qualname__ = f"segment_{name}"
    segment.__doc__ = f"""`md.{name}` of the elements of each segment: those of x whose index i is equal.

    >>> import meshdsl as md
    >>> x, i = md.tensor([5.0, 7.0, 1.0], "n"), md.tensor([0, 0, 1], "n")
    >>> md.segment_{name}(x, i, "segment:2")
    tensor(float32[segment=2], {example})

    The dims of i are replaced by `into`; other dims of x stay. An empty segment is {what}; indices out of range are
    left out. Raises `ShapeError` if i is no tensor of integers, and for a dim without a size.
    """
    return segment


segment_sum = _segment(sum, put_add, 0, "[12.  1.]", "0")
segment_max = _segment(max, scatter_max, "low", "[7. 1.]", "the smallest number of the dtype")
segment_min = _segment(min, scatter_min, "high", "[5. 1.]", "the largest number of the dtype")
