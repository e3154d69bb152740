"""Formulas that both array libraries need: letters of an einsum, dtypes of its sums, and windows along a dim."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dims import Shape


def letters(shapes: Sequence[Shape], out: Shape) -> str:
    """The einsum formula for operands and a result with named dims, such as "ab,bc->ac"."""
    table: dict[str, str] = {}
    for shape in (*shapes, out):
        for dim in shape:
            table.setdefault(dim.name, string.ascii_letters[len(table)])
    side = ["".join(table[d.name] for d in shape) for shape in (*shapes, out)]
    return f"{','.join(side[:-1])}->{side[-1]}"


@cache
def widens(of: Any, dtype: Any) -> bool:
    """True if products of operands with the dtype `of` are added in `dtype`, which is at least as wide."""
    if any(np.dtype(x).itemsize == 1 and jnp.issubdtype(x, jnp.floating) for x in (of, dtype)):  # JAX promotes none
        return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize >= np.dtype(of).itemsize
    return jnp.promote_types(of, dtype) == dtype and np.dtype(dtype).itemsize >= np.dtype(of).itemsize


Numbers = tuple[int, ...]  # one window: size, stride, dilation, base dilation, low and high padding


def window_count(n: int, window: Numbers) -> int:
    """The number of windows that fit into n elements plus padding."""
    size, stride, dilation, base, low, high = window
    span, extent = ((m - 1) * apart + 1 if m else 0 for m, apart in ((n, base), (size, dilation)))
    return max(0, (low + span + high - extent) // stride + 1)
