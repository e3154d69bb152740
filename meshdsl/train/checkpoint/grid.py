"""The grid of a stored tensor. Each dim is cut at certain indices; the chunks are the grid's cells in row-major order.

The cells of any grid cover the tensor without overlap. Cuts increase strictly from 0 to the dim's size, so no cell is
empty; a tensor with a dim of size 0 has no cells.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Cuts = tuple[tuple[int, ...], ...]  # the cut indices of each dim, including 0 and its size


class Box(NamedTuple):
    """A rectangular part of a tensor: start and size per dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """The box as an index into the tensor, or into an array whose first element is at `origin`."""
        origin = origin or (0,) * len(self.start)
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.start, self.size, origin, strict=True))


def unpadded(index: Sequence[slice], sizes: Sequence[int]) -> Box:
    """A shard's index without padding; its size is 0 if the shard is only padding."""
    start = tuple(min(s.start or 0, size) for s, size in zip(index, sizes, strict=True))
    stop = (size if s.stop is None else min(s.stop, size) for s, size in zip(index, sizes, strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def boundaries(sizes: Sequence[int], boxes: Iterable[Box]) -> Cuts:
    """The cuts of a tensor at the starts of these boxes.

    >>> boundaries((5, 2), [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))])
    ((0, 3, 5), (0, 2))
    """
    starts = [{0, size} for size in sizes]
    for box in boxes:
        for dim_cuts, start, size in zip(starts, box.start, sizes, strict=True):
            dim_cuts.add(min(start, size))
    return tuple(tuple(sorted(dim_cuts)) for dim_cuts in starts)


def refine(cuts: Cuts, itemsize: int, limit: int) -> Cuts:
    """Adds cuts so that no cell has more than `limit` bytes, halving the longest side of a cell first.

    Cells stay close to cubes, so that reading a slab along any dim touches few cells.

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
    """The number of cells; 1 for a scalar."""
    return math.prod(len(dim) - 1 for dim in cuts)


def cell(cuts: Cuts, number: int) -> Box:
    """The cell with this row-major index.

    >>> cell(((0, 3, 5), (0, 2)), 1)
    Box(start=(3, 0), size=(2, 2))
    """
    at = np.unravel_index(number, [len(dim) - 1 for dim in cuts])
    ends = [(dim[i], dim[i + 1]) for dim, i in zip(cuts, at, strict=True)]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def cells_in(cuts: Cuts, box: Box) -> list[int]:
    """The indices of the cells that overlap the box, ascending.

    >>> cells_in(((0, 3, 5), (0, 1, 2)), Box((0, 1), (5, 1)))
    [1, 3]
    """
    if box.elements == 0:
        return []
    numbers = np.arange(cell_count(cuts)).reshape([len(dim) - 1 for dim in cuts])
    overlapping = tuple(
        slice(bisect.bisect_right(dim, start) - 1, bisect.bisect_left(dim, start + size))
        for dim, start, size in zip(cuts, box.start, box.size, strict=True)
    )
    return numbers[overlapping].ravel().tolist()


def intersect(a: Box, b: Box) -> Box:
    """The intersection of two boxes; some size is 0 if they do not overlap."""
    start = tuple(map(max, a.start, b.start))
    ends = (min(s + n, t + m) for s, n, t, m in zip(a.start, a.size, b.start, b.size, strict=True))
    return Box(start, tuple(max(0, end - s) for end, s in zip(ends, start, strict=True)))
