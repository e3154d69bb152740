"""Where a dim has its largest and smallest element."""

from __future__ import annotations

from typing import Any

from ..dims import DimLike, find
from ..errors import located
from ..trace import as_tensor
from ..values import Tensor
from .contraction import max, min
from .elementwise import kind, stop_gradient, where
from .indexing import iota

__all__ = ["argmax", "argmin"]


def argmax(x: Any, over: DimLike) -> Tensor:
    """The lowest index of a maximum (int32); the first NaN if there is one. Over a split dim nothing is gathered.

    >>> import meshdsl as md
    >>> md.argmax(md.tensor([1.0, 3.0, 3.0], "a"), "a")
    tensor(int32[], 1)

    Raises `ShapeError` for a dim that x lacks or whose size is 0, for several dims, and for complex numbers.
    """
    return _arg(max, x, over)


def argmin(x: Any, over: DimLike) -> Tensor:
    """The lowest index of a minimum (int32); the first NaN if there is one.

    >>> import meshdsl as md
    >>> md.argmin(md.tensor([1.0, 3.0, 1.0], "a"), "a")
    tensor(int32[], 0)

    Raises `ShapeError` for a dim that x lacks or whose size is 0, for several dims, and for complex numbers.
    """
    return _arg(min, x, over)


def _arg(extreme: Any, x: Any, over: DimLike) -> Tensor:
    x = stop_gradient(as_tensor(x))
    dim = located(lambda: find(over, x.dims))
    hit = x == extreme(x, dim)
    if kind(x.dtype) == "f":
        hit = hit | (x != x)  # NaN
    return min(where(hit, iota(dim), dim.size), dim)
