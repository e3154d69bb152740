"""The device that a kernel runs on: its blocks of the operands and results, and its index along mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dims import Dim, Shape


@dataclass(frozen=True)
class Block:
    """The part of a value that one device stores: dims, stored local sizes, and the mesh axes that shard each dim."""

    dims: Shape
    sizes: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    def position(self, dim: Dim | str) -> int:
        """The index of a dim in storage order."""
        name = dim if isinstance(dim, str) else dim.name
        return [d.name for d in self.dims].index(name)

    def size(self, dim: Dim | str) -> int:
        """The stored local size of a dim."""
        return self.sizes[self.position(dim)]


def whole(shape: Shape) -> Block:
    """Describe the one block of an unsharded value of this shape: it has every element."""
    return Block(shape, tuple(d.size for d in shape), ((),) * len(shape))


@dataclass(frozen=True)
class Local:
    """The device a kernel runs on: array library, blocks of operands and results, and index along mesh axes."""

    xp: Any
    ins: tuple[Block, ...]
    outs: tuple[Block, ...]
    index: Callable[[tuple[str, ...]], Any] = lambda axes: 0  # row-major index along these axes
    count: Callable[[tuple[str, ...]], int] = lambda axes: 1  # number of devices along these axes

    def start(self, block: Block, dim: Dim | str) -> Any:
        """The global index, along a dim, of the block's first element."""
        i = block.position(dim)
        return self.index(block.axes[i]) * block.sizes[i] if block.axes[i] else 0

    def positions(self, block: Block, dim: Dim | str) -> Any:
        """The global indices (int32) of the block's elements along a dim, shaped to broadcast against the block."""
        i = block.position(dim)
        along = self.xp.arange(block.sizes[i], dtype=np.int32) + self.xp.asarray(self.start(block, dim), np.int32)
        return along.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))

    def align(self, x: Any, source: Block, target: Block) -> Any:
        """Transpose and reshape an array with the source's dims so that it broadcasts against the target's dims."""
        if source.dims == target.dims:
            return x
        order = [source.position(d) for d in target.dims if d in source.dims]
        sizes = [source.size(d) if d in source.dims else 1 for d in target.dims]
        if order != list(range(len(order))):
            x = self.xp.transpose(x, order)
        return x if x.shape == tuple(sizes) else self.xp.reshape(x, sizes)
