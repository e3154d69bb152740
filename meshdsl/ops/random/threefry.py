"""The random bits of each element: Threefry-2x32 of the key and of its global index, in row-major order of the dims."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...backend import Block, Local
from ...dims import size_of

__all__ = ["LOW_32", "element_index", "random_words", "threefry"]


LOW_32 = 0xFFFFFFFF


_LOW_16 = np.uint32(0xFFFF)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, on uint32 arrays of NumPy or JAX; sums wrap around."""
    ks = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by))) ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3], x1 + ks[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def _wide_product(p: Any, stride: int) -> tuple[Any, Any]:
    """The high and low words of the product (modulo 2**64) of a uint32 array and a 64-bit number, in 16-bit digits."""
    s0, s1 = np.uint32(stride & 0xFFFF), np.uint32(stride >> 16 & 0xFFFF)
    p0, p1 = p & _LOW_16, p >> np.uint32(16)
    middle = p1 * s0 + (p0 * s0 >> np.uint32(16))
    carry = p0 * s1 + (middle & _LOW_16)
    high = p1 * s1 + (middle >> np.uint32(16)) + (carry >> np.uint32(16)) + p * np.uint32(stride >> 32 & LOW_32)
    return high, p * np.uint32(stride & LOW_32)


def element_index(c: Local, block: Block) -> tuple[Any, Any]:
    """The global row-major index of each element of a block, as a high and a low uint32 word."""
    high = low = c.xp.zeros((1,), np.uint32)
    narrow = size_of(block.dims) <= 1 << 32
    for i, dim in enumerate(block.dims):
        stride = size_of(block.dims[i + 1 :])
        index = c.xp.arange(block.sizes[i], dtype=np.uint32) + c.xp.asarray(c.start(block, dim), np.uint32)
        index = index.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))
        if narrow:
            low = low + index * np.uint32(stride & LOW_32)
            continue
        more_high, more_low = _wide_product(index, stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(np.uint32)
    return high, low


def random_words(c: Local, key: Any, rank: int, high: Any, low: Any) -> tuple[Any, Any]:
    """The words of each element, of `rank` axes, for each key; never of scalars, since NumPy's warn on overflow."""
    k0, k1 = (key[..., i].reshape(key.shape[:-1] + (1,) * rank) for i in (0, 1))
    return c.xp.outline(threefry)(k0, k1, high, low)
