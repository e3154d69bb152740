"""Casts that change the JAX type of a block, or how its bits are read. No value changes; nothing is sent.

Inside `jax.shard_map`, JAX types a block as varying or invariant along each mesh axis. `invariant` changes that type,
as `backend.varying` does. `ordered` reads floats as integers with the same order; `restored` is its inverse.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (JAX's signatures are only partly typed)

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from ..layouts.sharding import Axes

Array = Any  # a JAX value inside shard_map
DType = np.dtype[Any]


def invariant(x: Array, axes: Axes) -> Array:
    """The block, typed as equal along the axes. Requires that the blocks are equal: nothing checks it.

    A permutation can make blocks equal (batch:rows -> batch:cols no longer varies along rows), but JAX types the result
    of every ppermute as varying and has no public cast back.
    """
    return _invariant.bind(x, axes=axes) if axes else x


def ordered(x: Array, wire: DType, nan_is_largest: bool) -> Array:
    """The block as integers in the same order. -0.0 is below +0.0; NaN is above all, or below all."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x.astype(wire)
    limits = jnp.iinfo(wire)
    nan = np.array(limits.max if nan_is_largest else limits.min, wire)
    return jnp.where(jnp.isnan(x), nan, _flip(lax.bitcast_convert_type(x, wire)))


def restored(bits: Array, dtype: DType) -> Array:
    """The inverse of `ordered`. The largest and the smallest integer become NaN."""
    if not jnp.issubdtype(dtype, np.floating):
        return bits.astype(dtype)
    return lax.bitcast_convert_type(_flip(bits), dtype)


def _flip(bits: Array) -> Array:
    """Convert sign and magnitude to two's complement, or back."""
    return jnp.where(bits < 0, bits ^ np.array(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


_invariant = jax.extend.core.Primitive("meshdsl_invariant")


@_invariant.def_impl
def _invariant_impl(x: Array, *, axes: Axes) -> Array:
    return x


@_invariant.def_abstract_eval
def _invariant_type(x: Any, *, axes: Axes) -> Any:
    return x.update(manual_axis_type=x.mat.update(varying=frozenset(x.mat.varying).difference(axes)))


def _invariant_lowering(ctx: Any, x: Any, *, axes: Axes) -> list[Any]:
    return [x]


mlir.register_lowering(_invariant, _invariant_lowering)
