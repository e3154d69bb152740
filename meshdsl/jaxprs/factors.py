"""The axes of a value as products of factors: dims that are split, other sizes, and sizes with equal values.

The check traces a function twice, at the full sizes (`full`) and at those of a block (`block`). A factor has both
sizes. An axis whose sizes differ contains a split dim, or has equal values everywhere: nothing else is the same on a
block as on the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "Axis",
    "Factor",
    "MixesError",
    "Value",
    "dims_of",
    "free",
    "join",
    "plain",
    "regroup",
    "sizes",
    "tied",
    "uniform",
]

PLAIN, EQUAL = "", "="  # the kinds of a factor that is no dim


class MixesError(Exception):
    """An equation mixes places; the text says how."""


class Factor(NamedTuple):
    """Part of an axis: a dim's name, or PLAIN, or EQUAL for values that are equal along it; its two sizes."""

    kind: str
    full: int
    block: int

    @property
    def named(self) -> bool:
        return self.kind not in (PLAIN, EQUAL)

    @property
    def tied(self) -> bool:
        """True if the size follows the size of a split dim."""
        return self.full != self.block


Axis = tuple[Factor, ...]


class Value(NamedTuple):
    """The axes of a value, the dims over which it is a partial sum, and whether it is zero everywhere."""

    axes: tuple[Axis, ...]
    partial: frozenset[str] = frozenset()
    zero: bool = False


def plain(full: int, block: int) -> Axis:
    """An axis that every device has whole; raises `MixesError` if its size follows the size of a split dim."""
    if full != block:
        raise MixesError(f"makes an axis of {full} elements, and of {block} on a block,")
    return (Factor(PLAIN, full, block),)


def uniform(full: int, block: int) -> Axis:
    """An axis along which all values are equal."""
    return (Factor(EQUAL, full, block),)


def sizes(axis: Axis) -> tuple[int, int]:
    return math.prod(f.full for f in axis), math.prod(f.block for f in axis)


def dims_of(axes: Iterable[Axis]) -> list[str]:
    """The split dims in these axes, once for every occurrence."""
    return [f.kind for axis in axes for f in axis if f.named]


def tied(axis: Axis) -> bool:
    """True if a block differs from the whole array along this axis, in size or in positions."""
    return any(f.named or f.tied for f in axis)


def free(axis: Axis) -> Axis:
    """An axis that a primitive mixes; raises `MixesError` if a block does not have all of it."""
    if dims_of([axis]):
        raise MixesError(f"mixes places along {' '.join(dims_of([axis]))}")
    if tied(axis):
        raise MixesError("reads the size of a block")
    return axis


def join(*axes: Axis) -> Axis:
    """The axis of an elementwise result."""
    known = [axis for axis in axes if any(f.named or (f.kind != EQUAL and (f.full, f.block) != (1, 1)) for f in axis)]
    if not known:
        return axes[0]
    first = tidy(known[0])
    for other in map(tidy, known[1:]):
        if other != first:
            pairs = dict.fromkeys([*dims_of([first]), *dims_of([other])])
            raise MixesError(f"combines different places along {' '.join(pairs)}")
    return first


def tidy(axis: Axis) -> Axis:
    """The same axis with as few factors as possible; factors of one element disappear."""
    result: list[Factor] = []
    several = any(f.kind != EQUAL for f in axis)
    for f in axis:
        kind = PLAIN if f.kind == EQUAL and several and not f.tied else f.kind
        if not f.named and f.full == f.block == 1:
            continue
        if result and kind == result[-1].kind and not f.named:
            last = result.pop()
            result.append(Factor(kind, last.full * f.full, last.block * f.block))
        else:
            result.append(Factor(kind, f.full, f.block))
    return tuple(result) or ((Factor(PLAIN if several else EQUAL, 1, 1)),)


def regroup(axes: Sequence[Axis], shapes: Sequence[tuple[int, int]]) -> list[Axis]:
    """The axes after a reshape to these sizes, row-major; raises `MixesError` where it cuts through a split dim."""
    rest = [f for axis in axes for f in axis if f.named or (f.full, f.block) != (1, 1)]
    result: list[Axis] = []
    for full, block in shapes:
        taken: list[Factor] = []
        while math.prod(f.full for f in taken) < full:
            if not rest:
                raise MixesError("changes the number of elements")
            f, need = rest.pop(0), full // math.prod(f.full for f in taken)
            if f.full > need:
                if f.named or f.tied or not need or f.full % need:
                    raise MixesError(f"cuts through {f.kind}" if f.named else "splits an axis by the size of a block")
                rest.insert(0, Factor(f.kind, f.full // need, f.block // need))
                f = Factor(f.kind, need, need)
            taken.append(f)
        if full == 1 and rest and rest[0].named and rest[0].full == 1:
            taken.append(rest.pop(0))  # a block of one element
        axis = tidy(tuple(taken) or (Factor(EQUAL, 1, 1),))
        if sizes(axis) != (full, block):
            raise MixesError(f"reshapes to {full} elements, and to {block} on a block,")
        result.append(axis)
    return result
