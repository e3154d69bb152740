"""A stored tensor is cut along every dim at the same places; its chunks are the cells of that grid, in row-major order.

Cells of a grid cover the tensor and never overlap, whatever the cuts are: a manifest cannot say otherwise. Cuts rise
strictly from 0 to the dim's size, so every cell holds something, and a dim of size 0 has no cells.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "Cuts", "boundaries", "cell", "cell_count", "cells_in", "intersect", "refine"]

Cuts = tuple[tuple[int, ...], ...]  # for each dim, where it is cut, both ends included


class Box(NamedTuple):
    """A part of a tensor: where it begins and how large it is, for each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements lie in it."""
        return math.prod(self.size)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """The part as an index into the whole, or into an array that begins at `origin`."""
        origin = origin or (0,) * len(self.start)
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.start, self.size, origin, strict=True))


def boundaries(sizes: Sequence[int], boxes: Iterable[Box]) -> Cuts:
    """The cuts of a tensor whose parts begin where these boxes do.

    >>> boundaries((5, 2), [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))])
    ((0, 3, 5), (0, 2))
    """
    starts = [{0, size} for size in sizes]
    for box in boxes:
        for found, start, size in zip(starts, box.start, sizes, strict=True):
            found.add(min(start, size))
    return tuple(tuple(sorted(found)) for found in starts)


def refine(cuts: Cuts, itemsize: int, limit: int) -> Cuts:
    """The same cuts and more, so that no cell has more than `limit` bytes; the longest dim is halved first.

    Cells stay as near to cubes as they can, so that a device that needs a slab along any dim reads few others.

    >>> refine(((0, 8), (0, 6)), itemsize=4, limit=64)
    ((0, 4, 8), (0, 3, 6))
    """
    widths = [max((b - a for a, b in itertools.pairwise(dim)), default=1) for dim in cuts]
    while math.prod(widths) * itemsize > limit and max(widths, default=1) > 1:
        longest = widths.index(max(widths))
        widths[longest] = -(-widths[longest] // 2)
    return tuple(
        (0, *(b for start, end in itertools.pairwise(dim) for b in (*range(start + width, end, width), end)))
        for dim, width in zip(cuts, widths, strict=True)
    )


def cell_count(cuts: Cuts) -> int:
    """How many cells the grid has; 1 for a tensor without dims."""
    return math.prod(len(dim) - 1 for dim in cuts)


def cell(cuts: Cuts, number: int) -> Box:
    """The cell with this number.

    >>> cell(((0, 3, 5), (0, 2)), 1)
    Box(start=(3, 0), size=(2, 2))
    """
    places: list[int] = []
    for dim in reversed(cuts):
        number, place = divmod(number, len(dim) - 1)
        places.append(place)
    chosen = list(zip(cuts, reversed(places), strict=True))
    return Box(tuple(dim[i] for dim, i in chosen), tuple(dim[i + 1] - dim[i] for dim, i in chosen))


def cells_in(cuts: Cuts, box: Box) -> Iterator[int]:
    """The numbers of the cells that share an element with the box, ascending.

    >>> list(cells_in(((0, 3, 5), (0, 1, 2)), Box((0, 1), (5, 1))))
    [1, 3]
    """
    if box.elements == 0:
        return
    ranges = [
        range(bisect.bisect_right(dim, start) - 1, bisect.bisect_left(dim, start + size))
        for dim, start, size in zip(cuts, box.start, box.size, strict=True)
    ]
    for places in itertools.product(*ranges):
        number = 0
        for dim, place in zip(cuts, places, strict=True):
            number = number * (len(dim) - 1) + place
        yield number


def intersect(a: Box, b: Box) -> Box:
    """What two boxes share; of size 0 somewhere when they share nothing."""
    start = tuple(map(max, a.start, b.start))
    ends = (min(s + n, t + m) for s, n, t, m in zip(a.start, a.size, b.start, b.size, strict=True))
    return Box(start, tuple(max(0, end - s) for end, s in zip(ends, start, strict=True)))
