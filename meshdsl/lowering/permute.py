"""A permutation of devices: every dim keeps its number of blocks, and each device receives its block of the new
sharding.

A device that already stores its new block keeps it; each other device receives it from one device. `Permute` is one of
the collectives; see `collectives` for their common methods.
"""

# pyright: reportUnknownMemberType=false
# (the signatures of jax.lax are only partly typed)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from jax import lax

from ..backend import varying
from ..dims import Shape
from ..errors import InternalError
from ..ir import BlockEffect, Blocks, CollectiveDefaults, Pairs
from ..layouts.mesh import Mesh
from ..layouts.sharding import Axes, Sharding
from .casts import invariant

Array = Any  # a JAX value inside shard_map


@dataclass(frozen=True)
class Permute(CollectiveDefaults):
    """For each (dim, axes before, axes after) in `moves`, split the dim over other axes into as many blocks as before.

    >>> swap = Permute((("batch", ("rows", "cols"), ("cols", "rows")),))
    >>> print(swap, swap.step(Sharding.of({"batch": ("rows", "cols")}), Mesh("rows:2 cols:4")))
    permute batch:rows,cols -> batch:cols,rows {batch:cols,rows}
    """

    name = "permute"
    sends = True
    moves: tuple[tuple[str, Axes, Axes], ...]

    @staticmethod
    def between(before: Sharding, after: Sharding) -> Permute:
        """The permutation from one sharding to another. Does not check that there is one; `step` does."""
        dims = sorted({dim for dim, _ in before.split + after.split})
        moves = ((dim, before.axes(dim), after.axes(dim)) for dim in dims)
        return Permute(tuple(move for move in moves if move[1] != move[2]))

    def __str__(self) -> str:
        old = Sharding(tuple((dim, axes) for dim, axes, _ in self.moves))
        new = Sharding(tuple((dim, axes) for dim, _, axes in self.moves))
        return f"permute {repr(old)[1:-1]} -> {repr(new)[1:-1]}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(moves=tuple(dim for dim, _, _ in self.moves))

    @property
    def axes(self) -> Axes:
        """The axes along which blocks are sent, sorted by name."""
        return tuple(sorted({axis for _, old, new in self._cores() for axis in old + new}))

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        split = {**dict(before.split), **{dim: new for dim, _, new in self.moves}}
        used = [axis for axes in split.values() for axis in axes] + list(before.partial)
        if (
            not self.moves
            or len(used) != len(set(used))
            or not all(
                before.axes(dim) == old != new and mesh.count(old) == mesh.count(new) for dim, old, new in self.moves
            )
        ):
            raise InternalError(f"'{self}' does not apply to a value laid out as {before}")
        return Sharding.of(split, before.partial, before.kind)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return local_bytes

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        # lax.ppermute numbers devices in mesh order, regardless of the order of the tuple
        axes = tuple(axis for axis in mesh.axes if axis in self.axes)
        moved = lax.ppermute(varying(x, axes), axes, self.pairs(mesh))
        after = self.step(before, mesh).varying
        return invariant(moved, tuple(axis for axis in axes if axis not in after))

    def pairs(self, mesh: Mesh) -> Pairs:
        """(sender, receiver) for every device, numbered row-major over `axes` in mesh order."""
        axes = tuple(axis for axis in mesh.axes if axis in self.axes)
        devices = coordinates(mesh, axes)
        stored = [tuple(index_along(mesh, coords, old) for _, old, _ in self._cores()) for coords in devices]
        needed = [tuple(index_along(mesh, coords, new) for _, _, new in self._cores()) for coords in devices]
        spare: dict[tuple[int, ...], list[int]] = {}
        for device, block in enumerate(stored):
            if block != needed[device]:
                spare.setdefault(block, []).append(device)
        free = {block: iter(devices) for block, devices in spare.items()}
        return [(me if stored[me] == block else next(free[block]), me) for me, block in enumerate(needed)]

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        # definition: a device receives the block at the index that its coordinates along the new axes give
        fixed_axes = [axis for axis in mesh.axes if axis not in self.axes]

        def block(coords: dict[str, int], cuts: list[Axes]) -> tuple[list[int], ...]:
            return [coords[axis] for axis in fixed_axes], [index_along(mesh, coords, axes) for axes in cuts]

        stored = [block(coords, [old for _, old, _ in self.moves]) for coords in coordinates(mesh)]
        needed = [block(coords, [new for _, _, new in self.moves]) for coords in coordinates(mesh)]
        return [blocks[stored.index(index)] for index in needed]

    def _cores(self) -> Iterator[tuple[str, Axes, Axes]]:
        # equal major or minor axes on both sides do not change: the rest of the index does not depend on them
        for dim, old, new in self.moves:
            while old and new and old[0] == new[0]:
                old, new = old[1:], new[1:]
            while old and new and old[-1] == new[-1]:
                old, new = old[:-1], new[:-1]
            yield dim, old, new


@lru_cache(maxsize=64)
def coordinates(mesh: Mesh, axes: Axes | None = None) -> tuple[dict[str, int], ...]:
    """Every device's coordinates by axis, in row-major order; of the devices along `axes`, if these are given."""
    along = tuple(mesh.axes) if axes is None else axes
    return tuple(dict(zip(along, place, strict=True)) for place in product(*(range(mesh.axes[axis]) for axis in along)))


def index_along(mesh: Mesh, coords: dict[str, int], axes: Axes) -> int:
    """A device's row-major index along these axes, the first being the major one."""
    index = 0
    for axis in axes:
        index = index * mesh.axes[axis] + coords[axis]
    return index
