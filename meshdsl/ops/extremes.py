"""Indices of the largest and smallest element along a dim."""

from __future__ import annotations

from typing import Any

from ..dims import DimLike, find
from ..trace import Tensor, as_tensor
from .dtypes import kind
from .elementwise import stop_gradient, where
from .indexing import iota
from .reductions import max, min


def argmax(x: Any, over: DimLike) -> Tensor:
    """The lowest index (int32) of the maximum, or of the first NaN. A sharded dim is not gathered.

    >>> import meshdsl as md
    >>> md.argmax(md.tensor([1.0, 3.0, 3.0], "a"), "a")
    tensor(int32[], 1)

    Raises `ShapeError` for a dim that x lacks or whose size is 0, for several dims, and for complex numbers.
    """
    return _arg(max, x, over)


def argmin(x: Any, over: DimLike) -> Tensor:
    """The lowest index (int32) of the minimum, or of the first NaN. A sharded dim is not gathered.

    >>> import meshdsl as md
    >>> md.argmin(md.tensor([1.0, 3.0, 1.0], "a"), "a")
    tensor(int32[], 0)

    Raises `ShapeError` for a dim that x lacks or whose size is 0, for several dims, and for complex numbers.
    """
    return _arg(min, x, over)


def _arg(extreme: Any, x: Any, over: DimLike) -> Tensor:
    x = stop_gradient(as_tensor(x))
    dim = find(over, x.dims)
    is_extreme = x == extreme(x, dim)
    if kind(x.dtype) == "f":
        is_extreme = is_extreme | (x != x)  # NaN
    return min(where(is_extreme, iota(dim), dim.size), dim)
