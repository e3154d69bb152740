"""Classes of axes that have the same places, and so are one dim; unification finds them.

A class has `parts` if a reshape splits it somewhere: an axis of 4 heads of 16 is two parts, major first. The smallest
parts are its atoms, and each atom is a dim of the DSL; an axis of one element has none. Classes of other sizes with
the same name are a family: slicing an axis changes its size and not its name.

Two axes of one value are never of one family, and two names of the user are never one family. What would break this is
refused, and the dim gets another name there: as keys and values of attention get `memory` beside `length`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import meshdsl as md


class _Node:
    """A node of a union-find forest."""

    def __init__(self) -> None:
        self.parent: Self = self

    def find(self) -> Self:
        node = self
        while node.parent is not node:
            node.parent = node.parent.parent
            node = node.parent
        return node


class Family(_Node):
    """Classes with one name. `values`: everything that has an axis of the family."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__()
        self.values, self.name = set(values), ""
        self.by_user = False


class Axis(_Node):
    """A class of axes. `values` have an axis of the class. `rigid`: an operation on the axis as a whole needs it as
    one dim. `words`: the names that the user gave to its parts."""

    def __init__(self, size: int, values: Iterable[Any] = ()) -> None:
        super().__init__()
        self.size, self.values, self.rigid = size, set(values), False
        self.parts: list[Axis] = []
        self.words: tuple[str, ...] = ()
        self.beside: Axis | None = None  # the class that it cannot be united with: the length beside the memory
        self.family = Family(self.values)

    @property
    def root(self) -> Axis:
        return self.find()

    @property
    def named(self) -> Family:
        """The family of the class."""
        return self.find().family.find()

    def atoms(self) -> list[Axis]:
        """The dims that this axis merges, major first."""
        root = self.find()
        if root.size == 1:
            return []
        return [a for part in root.parts for a in part.atoms()] if root.parts else [root]


def link(a: Axis, b: Axis) -> bool:
    """Give both the same name; False if one value would have it twice, or both have names of the user's."""
    f, g = a.named, b.named
    if f is g or 1 in (a.size, b.size):
        return True
    if (f.by_user and g.by_user and f.name != g.name) or not f.values.isdisjoint(g.values):
        return False
    small, large = sorted((f, g), key=lambda each: len(each.values))
    if small.by_user or not large.name:
        large.name, large.by_user = small.name, small.by_user
    small.parent = large
    large.values |= small.values
    return True


def unite(a: Axis, b: Axis) -> bool:
    """Make both one class, with the same parts; False if that cannot be."""
    a, b = a.find(), b.find()
    if a is b or a.size == 1:
        return True
    if a.size != b.size:
        return False
    if not (a.parts or b.parts):
        if not link(a, b):
            return False
    else:
        for x, y in ((a, b), (b, a)):
            if not x.parts and not expand(x, [p.size for p in y.atoms()]):
                return False
        if not align(a.atoms(), b.atoms()):
            return False
    a.rigid, a.words, a.beside = a.rigid or b.rigid, a.words or b.words, a.beside or b.beside
    a.values |= b.values
    b.parent = a
    return True


def expand(a: Axis, sizes: Sequence[int]) -> bool:
    """Split a class into parts of these sizes; False if it must stay one dim.

    The name that the user gave to the whole is that of the outer part: of `heads`, in heads of 64.
    """
    a = a.find()
    if a.rigid or a.parts or math.prod(sizes) != a.size:
        return False
    a.parts = [Axis(n, a.values) for n in sizes]  # not the values of its family: a slice has other parts
    if a.named.by_user:
        a.parts[0].family = a.family
    return True


def align(left: Sequence[Axis], right: Sequence[Axis]) -> bool:
    """Unite two runs of axes with equal numbers of elements, row-major, and split what must be split."""
    sides = [[x for a in side for x in a.atoms()] for side in (left, right)]
    while sides[0] and sides[1]:
        a, b = sides[0][0], sides[1][0]
        if a.size == b.size:
            if not unite(a, b):
                return False
            del sides[0][0], sides[1][0]
            continue
        side, large, small = (sides[0], a, b) if a.size > b.size else (sides[1], b, a)
        if large.size % small.size or not expand(large, [small.size, large.size // small.size]):
            return False
        side[:1] = large.atoms()
    return not (sides[0] or sides[1])


def groups(left: Sequence[Axis], right: Sequence[Axis]) -> list[tuple[list[Axis], list[Axis]]]:
    """The shortest runs of axes, on both sides of a reshape, with equal numbers of elements."""
    left, right = ([a for a in side if a.size != 1] for side in (left, right))
    found: list[tuple[list[Axis], list[Axis]]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (n := math.prod(x.size for x in a)) != (m := math.prod(x.size for x in b)):
            (a if n < m else b).append((left if n < m else right).pop(0))
        found.append((a, b))
    return found


def dims(axes: Iterable[Any]) -> tuple[md.Dim, ...]:
    """The dims of axes; a `Dim` stands for itself."""
    found: list[md.Dim] = []
    for axis in axes:
        found += [axis] if isinstance(axis, md.Dim) else [md.Dim(a.named.name, a.size) for a in axis.atoms()]
    return tuple(found)
