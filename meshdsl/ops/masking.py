"""`MASK` replaces padding by the identity of the reduction that reads it. Only lowering creates it."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backend import Local
from ..dims import Shape
from ..ir import Fuses, Linear, Op


def identity(fill: Any, dtype: np.dtype) -> Any:
    """The number for a value of `Op.mask`: "low" and "high" are the extremes of the dtype."""
    if fill not in ("low", "high"):
        return fill
    if dtype == np.dtype(bool):
        return fill == "high"
    if jnp.issubdtype(dtype, jnp.floating):
        limits = jnp.finfo(dtype)  # some 8-bit floats have no infinity
        lowest, highest = -math.inf, math.inf
        if not np.isinf(np.asarray(math.inf).astype(dtype).astype(np.float32)):
            lowest, highest = float(limits.min), float(limits.max)
        return lowest if fill == "low" else highest
    info = jnp.iinfo(dtype)
    return info.min if fill == "low" else info.max


def _mask_kernel(c: Local, x: Any, *, over: Shape, fill: Any) -> Any:
    block = c.ins[0]
    for dim in over:
        x = c.xp.keep(x, block.position(dim), 0, dim.size - c.start(block, dim), fill)
    return x


MASK = Op("mask", type=lambda x, *, over, fill: x, kernel=_mask_kernel, linear=Linear.JOINT, fuses=Fuses.MAP)
