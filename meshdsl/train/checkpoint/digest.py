"""Sums of the bits of tensors, which tell copies and stored values apart, whatever their layout.

Each element counts with its place in the whole tensor, as an odd number, modulo 2**32: a change of one element always
changes the sum, and elements that changed places do, too. Padding does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ...trace import Tensor
from . import processes


def sum_of_bits(x: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """The sum of a block that starts there, in a tensor of these sizes; a scalar uint32 on the block's device.

    >>> x = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> whole = sum_of_bits(x, (0, 0), (3, 4))
    >>> int(whole) == int(sum_of_bits(x[:, :3], (0, 0), (3, 4)) + sum_of_bits(x[:, 3:], (0, 3), (3, 4)))
    True
    >>> int(whole) == int(sum_of_bits(np.pad(x, 1, constant_values=9.0)[1:, 1:], (0, 0), (3, 4)))
    True
    """
    strides = [math.prod(sizes[i + 1 :]) % 2**32 for i in range(len(sizes))]
    return _sum(x, *(np.array(values, np.uint32) for values in (starts, sizes, strides)))


@jax.jit
def _sum(x: jax.Array, starts: jax.Array, sizes: jax.Array, strides: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _sum(x.real, starts, sizes, strides) + 3 * _sum(x.imag, starts, sizes, strides)
    if x.dtype == bool:
        bits = x.astype("uint32")
    else:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype("uint32")
    if bits.ndim > x.ndim:  # eight bytes, as two words
        bits = bits[..., 0] + 3 * bits[..., 1]
    place, inside = jnp.zeros(x.shape, "uint32"), jnp.ones(x.shape, bool)
    for axis in range(x.ndim):
        index = starts[axis] + jax.lax.broadcasted_iota("uint32", x.shape, axis)
        place, inside = place + index * strides[axis], inside & (index < sizes[axis])
    return jnp.sum(jnp.where(inside, bits * (2 * place + 1), 0), dtype="uint32")


def sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor, by path. All processes make this call, with the same tensors."""
    parts = []
    for x in tensors.values():
        shards = [shard for shard in x.stored.addressable_shards if shard.replica_id == 0]
        sizes = [d.size for d in x.dims]
        parts.append([sum_of_bits(s.data, [i.start or 0 for i in s.index], sizes) for s in shards])
    here = np.array([sum(map(int, found)) % 2**32 for found in parts], np.uint32)
    if processes.count() > 1:
        here = np.asarray(multihost_utils.process_allgather(here)).sum(0, dtype=np.uint32)
    return dict(zip(tensors, map(int, here), strict=True))
