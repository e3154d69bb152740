"""Tensors made of numbers: constants, and evenly spaced values along one dim.

They cost no communication: each device makes its own block. `dims` are those of the result, with sizes, by default
none; `dtype` is that of its elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dims import DimLike, DimsLike, pick
from ..errors import ShapeError
from ..ir import Fuses, Op, Type
from ..trace import Tensor, as_tensor
from .dtypes import as_dtype, cast, check_kind, kind
from .indexing import iota, new_dim
from .reductions import broadcast


def full(dims: DimsLike, value: Any, dtype: Any = None) -> Tensor:
    """A tensor with every element equal to `value`, a number or a tensor with some of the dims.

    >>> import meshdsl as md
    >>> md.full("batch:2 io:3", 7.0)
    tensor(float32[batch=2 io=3], [[7. 7. 7.]
     [7. 7. 7.]])

    `dtype` is by default that of the value. Raises `ShapeError` for a dim without a size, and for an integer that the
    dtype cannot hold.
    """
    x = value if isinstance(value, Tensor) else as_tensor(value, None if dtype is None else as_dtype(dtype))
    shape = pick(dims, x.dims, new=True)
    return broadcast(x if dtype is None else cast(x, dtype), shape)


def zeros(dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """A tensor of zeros.

    >>> import meshdsl as md
    >>> md.zeros("batch:2 io:3").dims
    (batch=2, io=3)

    Raises `ShapeError` for a dim without a size.
    """
    return full(dims, 0, dtype)


# memory that nothing has written yet, for values that are overwritten before they are read; arrays of different
# `number` are never merged, so that each can be written in place
EMPTY = Op(
    "empty",
    type=lambda *, dtype, shape, number: Type(shape, dtype),
    kernel=lambda c, *, dtype, shape, number: c.xp.empty(c.outs[0].sizes, dtype),
    fuses=Fuses.VIEW,
)


def zeros_like(x: Type | Tensor) -> Tensor:
    """A tensor of zeros with the dims and dtype of x: a scalar constant and a broadcast."""
    return broadcast(as_tensor(0, x.dtype), x.dims)


def ones(dims: DimsLike = (), dtype: Any = "float32") -> Tensor:
    """A tensor of ones.

    >>> import meshdsl as md
    >>> md.ones("io:3", "int32")
    tensor(int32[io=3], [1 1 1])

    Raises `ShapeError` for a dim without a size.
    """
    return full(dims, 1, dtype)


def arange(dim: DimLike, start: Any = 0, step: Any = 1, dtype: Any = None) -> Tensor:
    """The values start, start + step, start + 2 step, ... along a dim; the dim's size is their number.

    >>> import meshdsl as md
    >>> md.arange("length:4"), md.arange("length:3", 1.0, 0.5)
    (tensor(int32[length=4], [0 1 2 3]), tensor(float32[length=3], [1.  1.5 2. ]))

    `dtype` is by default int32, or float32 if start or step is a float. Raises `ShapeError` for a dim without a size,
    and for integers that the dtype cannot hold.
    """
    n, start, step = new_dim(dim), _number(start), _number(step)
    whole = all(isinstance(x, int | np.integer) or _integral(x) for x in (start, step))
    dtype = as_dtype(dtype or ("int32" if whole else "float32"))
    wide = _computed_in(dtype)
    if whole and kind(dtype) == "i" and not isinstance(start, Tensor) and not isinstance(step, Tensor):
        _check_limits(start, start + step * max(0, n.size - 1), dtype)
        step = step % (1 << 8 * wide.itemsize) if wide.kind == "u" else step  # sums of unsigned integers wrap around
    line = iota(n, wide)
    line = line if isinstance(step, int) and step == 1 else line * step
    return cast(line if isinstance(start, int) and start == 0 else line + start, dtype)


def _check_limits(first: int, last: int, dtype: np.dtype) -> None:
    limits = np.iinfo(dtype)
    if not all(limits.min <= x <= limits.max for x in (first, last)):
        problem = f"md.arange from {first} to {last} does not fit into {dtype.name}: {limits.min} to {limits.max}"
        raise ShapeError(f"{problem}\n  take a wider dtype, for example dtype='int64'")


def _number(x: Any) -> Any:
    """Python's integers stay as they are, so that sums cannot wrap; anything else becomes a tensor or an error."""
    return x if isinstance(x, int | float | np.integer) else as_tensor(x)


def _integral(x: Any) -> bool:
    return isinstance(x, Tensor) and kind(x.dtype) == "i"


def _computed_in(dtype: np.dtype) -> np.dtype:
    """Values along a dim are computed in at least 32 bits: narrower floats and integers cannot count so far."""
    if dtype.itemsize >= 4:
        return dtype
    return np.dtype(np.float32 if kind(dtype) == "f" else np.int32)


def linspace(dim: DimLike, start: Any, stop: Any, endpoint: bool = True, dtype: Any = "float32") -> Tensor:
    """Evenly spaced values from `start` to `stop` along a dim; without `endpoint`, `stop` is left out.

    >>> import meshdsl as md
    >>> md.linspace("x:5", 0, 1)
    tensor(float32[x=5], [0.   0.25 0.5  0.75 1.  ])

    Raises `ShapeError` for a dim without a size, and for a dtype that is not floating.
    """
    n, dtype = new_dim(dim), as_dtype(dtype)
    check_kind("linspace", dtype, "f")
    start, stop = (as_tensor(x) for x in (start, stop))
    share = iota(n, _computed_in(dtype)) / max(1, n.size - endpoint)
    return cast((1 - share) * start + share * stop, dtype)
