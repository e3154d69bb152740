"""Sums of the bits of tensors, which tell copies and stored values apart, whatever their layout.

Each element counts with its place in the whole tensor, as an odd number, modulo 2**32: a change of one element always
changes the sum, and elements that changed places do, too. Padding does not count. A program computes the sums of
the blocks that the devices store, and sends nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ...trace import Tensor
from . import processes

Sizes = tuple[int, ...]


class BlockSum(NamedTuple):
    """The sum of a block: where the block is, which of its copies this is, from 0, and the sum."""

    place: str
    replica: int
    value: int


def block_sums(tensors: Mapping[str, Tensor]) -> dict[str, list[BlockSum]]:
    """The sums of the blocks of this process, by path. All processes make this call, with the same tensors.

    >>> import meshdsl as md
    >>> block_sums({"w": md.tensor([1.0, 2.0], "io")})
    {'w': [BlockSum(place='[0:2]', replica=0, value=4286578688)]}
    """
    started = {
        path: _program(_sharding(x.stored), tuple(d.size for d in x.dims))(x.stored) for path, x in tensors.items()
    }
    found: dict[str, list[BlockSum]] = {}
    for path, result in started.items():
        values = {shard.device: int(np.asarray(shard.data).item()) for shard in result.addressable_shards}
        shards = tensors[path].stored.addressable_shards
        found[path] = [BlockSum(_shown(s), s.replica_id, values[s.device]) for s in shards]
    return found


def sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each whole tensor, by path. All processes make this call, with the same tensors."""
    blocks = block_sums(tensors)
    here = [sum(block.value for block in blocks[path] if block.replica == 0) % 2**32 for path in tensors]
    every = [np.frombuffer(raw, np.uint32) for raw in processes.gathered(np.array(here, np.uint32).tobytes())]
    return dict(zip(tensors, np.array(every).sum(0, dtype=np.uint32).tolist(), strict=True))


def _shown(shard: Any) -> str:
    """The place of a block, as text."""
    ranges = [f"{i.start or 0}:{(i.start or 0) + n}" for i, n in zip(shard.index, shard.data.shape, strict=True)]
    return f"[{', '.join(ranges)}]"


def _sharding(array: jax.Array) -> NamedSharding:
    if isinstance(array.sharding, NamedSharding):
        return array.sharding
    (device,) = array.devices()
    return NamedSharding(jax.sharding.Mesh(np.array([device]), ("all",)), PartitionSpec())


@functools.lru_cache(maxsize=256)
def _program(sharding: NamedSharding, sizes: Sizes) -> Callable[[jax.Array], jax.Array]:
    """A program from a tensor of these sizes to the sums of its blocks, one for each device of the mesh."""
    mesh = sharding.mesh
    split = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in sharding.spec]
    split += [()] * (len(sizes) - len(split))

    def device(block: jax.Array) -> jax.Array:
        starts = [lax.axis_index(axes) * n if axes else 0 for axes, n in zip(split, block.shape, strict=True)]
        return _sum(block, starts, sizes).reshape([1] * len(mesh.axis_names))

    whole = PartitionSpec(*mesh.axis_names)
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=sharding.spec, out_specs=whole, check_vma=False))


def _sum(x: jax.Array, starts: list[Any], sizes: Sizes) -> jax.Array:
    """The sum of a block that starts there, in a tensor of these sizes."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _sum(x.real, starts, sizes) + 3 * _sum(x.imag, starts, sizes)
    if x.dtype == bool:
        bits = x.astype("uint32")
    else:
        bits = lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype("uint32")
    if bits.ndim > x.ndim:  # eight bytes, as two words
        bits = bits[..., 0] + 3 * bits[..., 1]
    place, inside = jnp.zeros(x.shape, "uint32"), jnp.ones(x.shape, bool)
    for axis, size in enumerate(sizes):
        index = jnp.uint32(starts[axis]) + lax.broadcasted_iota("uint32", x.shape, axis)
        place = place + index * jnp.uint32(math.prod(sizes[axis + 1 :]) % 2**32)
        inside = inside & (index < jnp.uint32(min(size, 2**32 - 1)))
    return jnp.sum(jnp.where(inside, bits * (2 * place + 1), 0), dtype="uint32")
