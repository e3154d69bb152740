"""Functions known from NumPy that are a few other operations: clip, norm, tril and triu."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from ..dims import DimLike, DimsLike, find
from ..errors import ShapeError
from ..trace import Tensor, as_tensor
from .dtypes import check_kind, in_wide, mean_dtype
from .elementwise import abs, equal, maximum, minimum, sqrt, square, where
from .indexing import iota
from .reductions import broadcast, max, over_dims, sum


def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """`x` limited to the range from `low` to `high`, numbers or tensors; None is no limit.

    >>> import meshdsl as md
    >>> md.clip(md.tensor([-2.0, 0.5, 9.0], "a"), 0, 1)
    tensor(float32[a=3], [0.  0.5 1. ])

    Where `low` exceeds `high`, the result is `high`. Raises `ShapeError` without a limit, and for complex numbers.
    """
    if low is None and high is None:
        raise ShapeError("md.clip needs a limit: low=, high= or both")
    x = as_tensor(x) if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def norm(x: Any, over: DimsLike | None = None, ord: int | float = 2) -> Tensor:
    """The norm over one or several dims, or all (default): `ord` is 2 (Euclidean), 1 or infinity.

    >>> import meshdsl as md
    >>> x = md.tensor([3.0, -4.0], "a")
    >>> md.norm(x), md.norm(x, ord=1), md.norm(x, ord=float("inf"))
    (tensor(float32[], 5.), tensor(float32[], 7.), tensor(float32[], 4.))

    The dtype is that of `jnp.linalg.norm`: float32 for integers and booleans (float64 for those of 64 bits). Floats of
    8 and 16 bits are summed in float32. The gradient of the Euclidean norm of zeros is zero. The squares can overflow;
    `md.optim.global_norm` avoids that. Raises `ShapeError` for a dim that x lacks, for another `ord`, and for complex
    numbers.
    """
    x = as_tensor(x)
    check_kind("norm", x.dtype, "fib")
    dims = over_dims(x, over)
    norms: dict[float, Callable[[Tensor], Tensor]] = {
        1: lambda x: sum(abs(x), dims),
        2: lambda x: _root(sum(square(x), dims)),
        math.inf: lambda x: max(abs(x), dims),
    }
    if ord not in norms:
        raise ShapeError(f"md.norm has ord=1, 2 and float('inf'), not {ord!r}")
    return in_wide(norms[ord], x, mean_dtype(x.dtype))


def _root(x: Tensor) -> Tensor:
    """The square root; its gradient at zero, where the slope is infinite, is zero."""
    zero = equal(x, 0)
    return where(zero, 0, sqrt(where(zero, 1, x)))


def _triangle(x: Any, rows: DimLike, columns: DimLike, k: int, lower: bool) -> Tensor:
    x = as_tensor(x)
    row, column = find(rows, x.dims), find(columns, x.dims)
    if row == column:
        raise ShapeError(f"a triangle has two dims, and both are {row.name!r}\n  md.rename one of them")
    reach = builtins.max(-column.size - row.size, builtins.min(column.size + row.size, int(k)))
    line, place = broadcast(iota(row) + reach, (row, column)), iota(column)
    return where(line >= place if lower else line <= place, x, as_tensor(0, x.dtype))


def tril(x: Any, rows: DimLike, columns: DimLike, k: int = 0) -> Tensor:
    """The lower triangle over two dims: zero where the column exceeds the row by more than `k`.

    >>> import meshdsl as md
    >>> md.tril(md.ones("query:2 key:3"), "query", "key")
    tensor(float32[query=2 key=3], [[1. 0. 0.]
     [1. 1. 0.]])

    Other dims of x are batch dims. Raises `ShapeError` for a dim that x lacks.
    """
    return _triangle(x, rows, columns, k, lower=True)


def triu(x: Any, rows: DimLike, columns: DimLike, k: int = 0) -> Tensor:
    """The upper triangle over two dims: zero where the column is less than the row plus `k`.

    >>> import meshdsl as md
    >>> md.triu(md.ones("query:2 key:3"), "query", "key", k=1)
    tensor(float32[query=2 key=3], [[0. 1. 1.]
     [0. 0. 1.]])

    Other dims of x are batch dims. Raises `ShapeError` for a dim that x lacks.
    """
    return _triangle(x, rows, columns, k, lower=False)
