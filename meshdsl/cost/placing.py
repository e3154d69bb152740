"""Map mesh axes to hardware axes: each mesh axis is a product of factors, and all factors together fill a slice.

This is the arithmetic behind `network.place`; see there for the caller's options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..errors import LayoutError, nearest

Levels = tuple[dict[str, int], ...]  # per level: hardware axis -> maximum size, major to minor


@dataclass(frozen=True)
class AxisFactor:
    """`size` members along one hardware axis, `stride` apart."""

    level: int
    axis: str
    size: int
    stride: int

    def __str__(self) -> str:
        return f"{self.axis}:{self.size}" + (f" step {self.stride}" if self.stride > 1 else "")


Parts = Mapping[str, tuple[AxisFactor, ...]]
AxisAssignment = tuple[dict[str, tuple[AxisFactor, ...]], Levels, tuple[str, ...]]  # factors, the slice in use, notes


def by_default(levels: Levels, sizes: Mapping[str, int]) -> AxisAssignment:
    """The default placement of mesh axes: row-major, the minor axis along the innermost hardware axis.

    Of the boxes of devices that have the right number, it takes one that divides the fewest hardware axes.
    """
    candidates = [_fill(used, sizes) for used in _slices(levels, math.prod(sizes.values()))]
    if not candidates:
        raise LayoutError(
            f"{math.prod(sizes.values())} devices cannot be placed as a grid on {_show(levels)}\n"
            f"  take a number of devices that is a product of sizes along those axes"
        )
    parts, used, notes = min(candidates, key=lambda placed: sum(map(len, placed[0].values())))
    return parts, used, notes + _unfilled(levels, used)


def _slices(levels: Levels, n: int) -> Iterator[Levels]:
    """Candidate slices of n members: inner levels as full as possible, each as nearly cubic as possible."""
    if not levels:
        if n == 1:
            yield ()
        return
    for members in sorted((d for d in _divisors(n) if d <= math.prod(levels[0].values())), reverse=True):
        shapes = _shapes(tuple(levels[0].values()), members)
        fits = False
        for outer in _slices(levels[1:], n // members) if shapes else ():
            least = min(map(sum, shapes))
            for shape in shapes:
                if sum(shape) == least:
                    fits = True
                    yield (dict(zip(levels[0], shape, strict=True)), *outer)
        if fits:
            return


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _shapes(greatest: tuple[int, ...], members: int) -> list[tuple[int, ...]]:
    along = [[d for d in _divisors(members) if d <= most] for most in greatest]
    return [shape for shape in product(*along) if math.prod(shape) == members]


def _fill(used: Levels, sizes: Mapping[str, int]) -> AxisAssignment:
    """Divide the slice among the mesh axes, minor axis first, from the innermost hardware axis outwards."""
    hardware = [(level, axis) for level, axes in enumerate(used) for axis in reversed(axes)]
    free = {hw_axis: used[hw_axis[0]][hw_axis[1]] for hw_axis in hardware}
    strides = dict.fromkeys(hardware, 1)
    parts: dict[str, tuple[AxisFactor, ...]] = {}
    notes: list[str] = []
    for name, size in reversed(list(sizes.items())):
        factors: list[AxisFactor] = []
        remaining = size
        for hw_axis in hardware:
            common = math.gcd(remaining, free[hw_axis])
            if common == 1:
                continue
            if common < min(remaining, free[hw_axis]):
                notes.append(f"mesh axis {name}:{size} does not factor the hardware axis {hw_axis[1]}: a best effort")
            factors.append(AxisFactor(*hw_axis, size=common, stride=strides[hw_axis]))
            remaining, free[hw_axis], strides[hw_axis] = (
                remaining // common,
                free[hw_axis] // common,
                strides[hw_axis] * common,
            )
        parts[name] = tuple(reversed(factors))
    return {name: parts[name] for name in sizes}, used, tuple(notes)


def assigned(levels: Levels, sizes: Mapping[str, int], assignment: Mapping[str, str | Sequence[str]]) -> AxisAssignment:
    """The placement that the user wrote; raises `LayoutError` with every problem."""
    level_of = {axis: level for level, axes in enumerate(levels) for axis in axes}
    problems = [f"the mesh has no axis {name!r} of more than one device; {nearest(name, sizes)}" for name in assignment
                if name not in sizes]  # fmt: skip
    missing = [name for name in sizes if name not in assignment]
    if missing:
        problems.append(f"mesh axes without a place: {', '.join(missing)}; assign each to hardware axes")
    given = {name: text for name, text in assignment.items() if name in sizes}
    factors: list[tuple[str, str, int]] = []  # mesh axis, hardware axis, size; major to minor
    for name, text in given.items():
        words = _words(name, text, sizes[name], problems)
        factors += [(name, axis, size) for axis, size in words if axis in level_of]
        problems += [f"mesh axis {name!r}: the machine has no hardware axis {axis!r}; {nearest(axis, level_of)}"
                     for axis, _ in words if axis not in level_of]  # fmt: skip
    counts = dict.fromkeys(level_of, 1)
    parts: dict[str, tuple[AxisFactor, ...]] = dict.fromkeys(sizes, ())
    for name, axis, size in reversed(factors):
        parts[name] = (AxisFactor(level_of[axis], axis, size, counts[axis]), *parts[name])
        counts[axis] *= size
    problems += [
        f"hardware axis {axis!r} has {there} members, the assignment uses {counts[axis]}"
        for axes in levels for axis, there in axes.items() if counts[axis] > there
    ]  # fmt: skip
    if problems:
        raise LayoutError("the assignment of mesh axes to hardware axes does not fit\n  " + "\n  ".join(problems))
    used = tuple({axis: counts[axis] for axis in axes} for axes in levels)
    return parts, used, _unfilled(levels, used)


def _words(name: str, text: str | Sequence[str], size: int, problems: list[str]) -> list[tuple[str, int]]:
    """The factors of one mesh axis; a single word without a size gets the remaining devices."""
    words = text.split() if isinstance(text, str) else list(text)
    bad = [word for word in words if not re.fullmatch("[^:]*(:0*[1-9][0-9]*)?", word)]
    if bad:
        problems.append(f"mesh axis {name!r}: a part is written axis or axis:size, got {', '.join(map(repr, bad))}")
        return []
    split = [word.partition(":") for word in words]
    assigned_size = math.prod(int(n) for _, _, n in split if n)
    open_words = [axis for axis, _, n in split if not n]
    if len(open_words) > 1:
        problems.append(f"mesh axis {name!r}: only one part may leave its size out, got {', '.join(open_words)}")
    elif size % assigned_size or (not open_words and size != assigned_size):
        problems.append(f"mesh axis {name!r} has {size} devices, the parts {' '.join(words)!r} make {assigned_size}")
    else:
        return [(axis, int(n or size // assigned_size)) for axis, _, n in split]
    return []


def _unfilled(levels: Levels, used: Levels) -> tuple[str, ...]:
    notes: list[str] = []
    for level in range(len(levels) - 1):
        members, available = math.prod(used[level].values()), math.prod(levels[level].values())
        if members < available and any(n > 1 for outer in used[level + 1 :] for n in outer.values()):
            notes.append(f"{members} of {available} devices in use along {' '.join(levels[level])}")
    return tuple(notes)


def _show(levels: Levels) -> str:
    return ", ".join(f"{axis}:{n}" for axes in levels for axis, n in axes.items())
