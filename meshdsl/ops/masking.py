"""`MASK` replaces padding by the identity of the reduction that reads it, `ON_FIRST` keeps a value on one device.

Only lowering creates them.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backend import Local
from ..dims import Shape
from ..ir import Eqn, Fuses, Linear, Op
from ..layouts import Sharding
from ..layouts.sharding import Axes

__all__ = ["MASK", "ON_FIRST", "identity"]


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
        x = c.xp.where(c.positions(block, dim) < dim.size, x, c.xp.asarray(fill, x.dtype))
    return x


MASK = Op("mask", type=lambda x, *, over, fill: x, kernel=_mask_kernel, linear=Linear.JOINT, fuses=Fuses.MAP)


def _on_first_kernel(c: Local, x: Any, *, axes: Axes) -> Any:
    return c.xp.where(c.index(axes) == 0, x, c.xp.zeros((), x.dtype))


def _on_first_sharding(eqn: Eqn) -> list[Sharding]:
    before = eqn.ins[0].sharding
    return [Sharding.of(dict(before.split), (*before.partial, *eqn.params["axes"]))]


# A complete value as a partial sum: the value on the first device along the axes, and zeros on the others.
ON_FIRST = Op(
    "on_first",
    type=lambda x, *, axes: x,
    kernel=_on_first_kernel,
    shardings=_on_first_sharding,
    fuses=Fuses.MAP,
    inside_blocks=True,
)
