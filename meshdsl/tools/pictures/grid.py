"""The devices of a mesh as a grid: the last axis runs to the right, the one before down, further axes side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...layouts import Mesh
from ...lowering.permute import index_along


@dataclass(frozen=True)
class Grid:
    """The devices drawn of a mesh, and their places: at most `across` columns, `down` rows and `planes` planes."""

    mesh: Mesh
    across: int
    down: int
    planes: int = 2

    @cached_property
    def axes(self) -> tuple[tuple[str, ...], str | None, str | None]:
        """The axes of the planes, of the rows and of the columns; axes of size 1 are left out."""
        used = [name for name, size in self.mesh.axes.items() if size > 1]
        right = used.pop() if used else None
        down = used.pop() if used else None
        return tuple(used), down, right

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of planes, rows and columns of the mesh."""
        outer, down, right = self.axes
        return self.mesh.count(outer), self.mesh.axes.get(down or "", 1), self.mesh.axes.get(right or "", 1)

    def _drawn(self, size: int, most: int) -> list[int]:
        return list(range(size)) if size <= most else [*range(most - 1), size - 1]

    @cached_property
    def drawn(self) -> tuple[list[int], list[int], list[int]]:
        """The indices that are drawn: the first ones, and the last one if some are left out."""
        outer, rows, cols = self.sizes
        return self._drawn(outer, self.planes), self._drawn(rows, self.down), self._drawn(cols, self.across)

    @property
    def count(self) -> int:
        """Number of devices drawn."""
        return math.prod(map(len, self.drawn))

    def places(self) -> Iterator[tuple[int, int, int, dict[str, int]]]:
        """Each drawn device: its plane, row and column in the picture, and its coordinates in the mesh."""
        for (i, plane), (j, row), (k, col) in itertools.product(*map(enumerate, self.drawn)):
            yield i, j, k, self.coordinates(plane, row, col)

    def coordinates(self, plane: int, row: int, col: int) -> dict[str, int]:
        """The coordinates of a device by axis."""
        outer, down, right = self.axes
        coords = dict.fromkeys(self.mesh.axes, 0)
        sizes = tuple(self.mesh.axes[axis] for axis in outer)
        coords.update(zip(outer, map(int, np.unravel_index(plane, sizes)) if sizes else (), strict=True))
        if down is not None:
            coords[down] = row
        if right is not None:
            coords[right] = col
        return coords

    def device(self, coords: Mapping[str, int]) -> int:
        """The id of a device: its row-major number, or what `device_order` says."""
        number = index_along(self.mesh, dict(coords), tuple(self.mesh.axes))
        order = self.mesh.device_order
        return number if order is None else int(order[number])

    def names(self, plane: int) -> list[tuple[str, int]]:
        """The axes of a plane with its coordinates along them."""
        coords = self.coordinates(plane, 0, 0)
        return [(axis, coords[axis]) for axis in self.axes[0]]


def grid_of(mesh: Mesh) -> Grid:
    """The devices that a picture has room for; one axis may use the room of two."""
    flat = sum(size > 1 for size in mesh.axes.values()) == 1
    return Grid(mesh, across=8 if flat else 4, down=4)
