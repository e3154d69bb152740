"""Values that a program contains: constant arrays, and one number everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Local, NumPy
from ..ir import Fuses, Op, Type

CONSTANT = Op(
    "constant",
    type=lambda *, value, shape: Type(shape, value.dtype),
    kernel=lambda c, *, value, shape: _block_of(c, value),
    fuses=Fuses.VIEW,
)
FULL = Op(
    "full",
    type=lambda *, value, shape: Type(shape, value.dtype),
    kernel=lambda c, *, value, shape: c.xp.full(c.outs[0].sizes, value, value.dtype),
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
    literal=True,
)


def number(value: Any, dtype: Any) -> Any:
    """A number as the NumPy scalar of a dtype, converted as by `md.cast`: the value of a `FULL`, of a padding.

    >>> number(300, "int16"), number(1e5, "float16")
    (np.int16(300), np.float16(inf))
    """
    with np.errstate(all="ignore"):  # infinity is a number too
        return NumPy.astype(np.asarray(value), np.dtype(dtype))[()]


def _block_of(c: Local, value: np.ndarray) -> Any:
    """This device's block of a constant array; padding is zero."""
    block = c.outs[0]
    counts = [c.count(axes) for axes in block.axes]
    pads = [(0, size * n - real) for size, n, real in zip(block.sizes, counts, value.shape, strict=True)]
    x = c.xp.asarray(np.pad(value, pads) if any(high for _, high in pads) else value)  # np.pad fails on a 0-d array
    for i, dim in enumerate(block.dims):
        if block.axes[i]:
            x = c.xp.dynamic_slice(x, c.start(block, dim), block.sizes[i], i)
    return x
