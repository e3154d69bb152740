"""The devices of a mesh as a grid: the last axis runs to the right, the one before down, further axes side by side.

In small, they are dots with the groups that a collective joins, or with the arrows of a permutation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost.report.svg import element
from ...errors.markup import axis_number
from ...layouts import Mesh
from ...lowering.permute import index_along
from ...lowering.program import CollectiveRecord
from .frames import Rect

DOT = 17  # distance between devices that are dots, in pixels


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

    @property
    def width(self) -> float:
        """The width of the devices as dots, in pixels."""
        return len(self.drawn[0]) * (len(self.drawn[2]) * DOT + 10)

    @property
    def height(self) -> float:
        """The height of the devices as dots, in pixels."""
        return len(self.drawn[1]) * DOT

    def _at(self, x: float, y: float, i: int, j: int, k: int) -> tuple[float, float]:
        plane = len(self.drawn[2]) * DOT + 10
        return x + i * plane + k * DOT + DOT / 2, y + j * DOT + DOT / 2

    def dots(self, x: float, y: float) -> str:
        """The devices alone."""
        return "".join(
            element("circle", cx=cx, cy=cy, r=3.2, stroke_width=1.2, cls="dot outline")
            for i, j, k, _ in self.places()
            for cx, cy in [self._at(x, y, i, j, k)]
        )

    def bands(self, x: float, y: float, record: CollectiveRecord) -> str:
        """The groups of devices that exchange, or the arrows of a permutation."""
        colour = axis_number(self.mesh.axes, record.axes[0])
        pairs = record.op.pairs(self.mesh)
        if pairs is not None:
            return self.dots(x, y) + self._arrows(x, y, record, pairs, colour)
        groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for i, j, k, coords in self.places():
            key = tuple(at for axis, at in coords.items() if axis not in record.axes)
            groups.setdefault(key, []).append((i, j, k))
        tip = f"groups of {self.mesh.count(record.axes)} devices exchange"
        drawn = [self._group(x, y, members, colour, tip) for members in groups.values()]
        return "".join(drawn) + self.dots(x, y)

    def _group(self, x: float, y: float, members: list[tuple[int, int, int]], colour: int, tip: str) -> str:
        """A band around the members in each plane, and a line between the planes."""
        parts: list[str] = []
        ends: list[tuple[float, float]] = []
        for plane in sorted({i for i, _, _ in members}):
            places = [self._at(x, y, i, j, k) for i, j, k in members if i == plane]
            left, right = min(p[0] for p in places) - 6.5, max(p[0] for p in places) + 6.5
            top, bottom = min(p[1] for p in places) - 6.5, max(p[1] for p in places) + 6.5
            box = Rect(left, top, right - left, bottom - top)
            parts += [box.draw(f"axis-{colour} faint", tip, rx=6.5), box.draw(f"band line-{colour}", rx=6.5)]
            ends.append(((left + right) / 2, top))
        for (x1, y1), (x2, y2) in itertools.pairwise(ends):
            d = f"M{x1:.1f} {y1:.1f}Q{(x1 + x2) / 2:.1f} {min(y1, y2) - 7:.1f} {x2:.1f} {y2:.1f}"
            parts.append(element("path", d=d, cls=f"band line-{colour}"))
        return "".join(parts)

    def _arrows(self, x: float, y: float, record: CollectiveRecord, pairs: list[tuple[int, int]], colour: int) -> str:
        """Sender to receiver for each pair whose two devices are drawn; pairs number the devices along the axes."""
        axes = tuple(axis for axis in self.mesh.axes if axis in record.axes)
        by_group: dict[tuple[int, ...], dict[int, tuple[float, float]]] = {}
        for i, j, k, coords in self.places():
            key = tuple(at for axis, at in coords.items() if axis not in axes)
            by_group.setdefault(key, {})[index_along(self.mesh, coords, axes)] = self._at(x, y, i, j, k)
        parts: list[str] = []
        for places in by_group.values():
            for sender, receiver in pairs:
                if sender != receiver and sender in places and receiver in places:
                    parts.append(_arrow(places[sender], places[receiver], colour))
        return "".join(parts)


def grid_of(mesh: Mesh) -> Grid:
    """The devices that a picture has room for; one axis may use the room of two."""
    flat = sum(size > 1 for size in mesh.axes.values()) == 1
    return Grid(mesh, across=8 if flat else 4, down=4)


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: int) -> str:
    """A curved arrow; opposite arrows bend to opposite sides, so that both can be seen."""
    (x1, y1), (x2, y2) = start, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    bend = min(3 + length * 0.28, 34)
    cx, cy = (x1 + x2) / 2 + uy * bend, (y1 + y2) / 2 - ux * bend
    ex, ey = x2 - ux * 4, y2 - uy * 4
    bx, by = ex - 4 * ux, ey - 4 * uy  # behind the tip
    tip = f"M{bx + 3 * uy:.1f} {by - 3 * ux:.1f}L{ex:.1f} {ey:.1f}L{bx - 3 * uy:.1f} {by + 3 * ux:.1f}"
    curve = f"M{x1 + 4 * ux:.1f} {y1 + 4 * uy:.1f}Q{cx:.1f} {cy:.1f} {ex:.1f} {ey:.1f}"
    return element("path", d=f"{curve}{tip}", cls=f"band line-{colour}")
