"""Choose the mesh axes of each label of one operation, from its operands' shardings and the layout.

Each axis is assigned to at most one label. If two labels claim an axis, `md.prefer` in the model decides. Without it,
the assignment that sends fewer bytes wins if the result has the layout of one of the operands, a dim vanishes, or the
operation belongs to a gradient. Any other conflict is reported as a problem, and the user must resolve it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ...layouts.sharding import Axes


@dataclass(frozen=True)
class Conflict:
    """Two labels of one tensor that claim the same axis."""

    axis: str
    first: str
    second: str


class Claims:
    """The axes requested for each label: tuples of axes, in the order of the requests."""

    def __init__(self) -> None:
        self.options: dict[str, list[Axes]] = {}
        self.annotations: dict[str, Any] = {}  # the `md.shard` that asks, by label, if nothing else does

    def add(self, label: str, axes: Axes) -> None:
        """Request axes for a label."""
        options = self.options.setdefault(label, [])
        if axes and axes not in options:
            options.append(axes)

    def without(self, taken: frozenset[str]) -> Claims:
        """The same claims without the axes in `taken`."""
        if not taken:
            return self
        left = Claims()
        left.annotations = self.annotations
        for label, options in self.options.items():
            left.options[label] = []
            for axes in options:
                left.add(label, tuple(axis for axis in axes if axis not in taken))
        return left

    def without_taken(self, new: Collection[str], kept: Collection[str | None]) -> Claims:
        """The same claims without those of `new` labels to an axis that a label in `kept` claims."""
        taken = {axis for label, options in self.options.items() if label in kept for axes in options for axis in axes}
        left = Claims()
        left.annotations = self.annotations
        left.options = {
            label: [axes for axes in options if label not in new or taken.isdisjoint(axes)]
            for label, options in self.options.items()
        }
        return left

    def beside(self, wanted: Mapping[str, Axes]) -> Claims:
        """The same claims; then the wanted axes, and those that are left of each claim beside the wanted ones."""
        if not wanted:
            return self
        more = Claims()
        more.annotations = self.annotations
        more.options = {label: list(options) for label, options in self.options.items()}
        for label, axes in wanted.items():
            more.add(label, axes)
        for label, options in self.options.items():
            taken = {axis for other, axes in wanted.items() if other != label for axis in axes}
            for axes in options:
                more.add(label, tuple(axis for axis in axes if axis not in taken))
        return more

    @cached_property
    def contested(self) -> list[Conflict]:
        """Every pair of labels that claim the same axis, of complete claims."""
        owners: dict[str, list[str]] = {}
        if sum(map(bool, self.options.values())) < 2:
            return []
        for label, options in self.options.items():
            for axis in dict.fromkeys(axis for axes in options for axis in axes):
                owners.setdefault(axis, []).append(label)
        return [Conflict(axis, who[0], other) for axis, who in owners.items() for other in who[1:]]


def choose(claims: Claims, preferred: Sequence[str], price: Callable[[Mapping[str, Axes]], float]) -> dict[str, Axes]:
    """Give each label one of its claims: preferred labels first, then the others at the least total `price`.

    A label gets no axes only if other labels took an axis of each of its claims.
    """
    fixed: dict[str, Axes] = {}
    for label in preferred:
        options = claims.without(_axes_of(fixed)).options.get(label, [])
        if options:
            fixed[label] = options[0]
    left = claims.without(_axes_of(fixed))
    labels = [label for label in left.options if label not in fixed]
    if all(len(left.options[label]) <= 1 for label in labels) and not left.contested:
        return {**{label: axes for label in labels for axes in left.options[label]}, **fixed}
    assignments = ({**assigned, **fixed} for assigned in _assignments(left, labels))
    nothing: dict[str, Axes] = {}
    return min(assignments, key=price, default=nothing)


def _axes_of(assigned: Mapping[str, Axes]) -> frozenset[str]:
    return frozenset(axis for axes in assigned.values() for axis in axes)


def _assignments(claims: Claims, labels: Sequence[str]) -> Iterator[dict[str, Axes]]:
    """Every assignment that uses an axis once and to which no claim can be added."""
    for picks in product(*([*claims.options[label], ()] for label in labels)):
        used = [axis for axes in picks for axis in axes]
        if len(used) == len(set(used)) and not _could_add(claims, labels, picks, frozenset(used)):
            yield {label: axes for label, axes in zip(labels, picks, strict=True) if axes}


def _could_add(claims: Claims, labels: Sequence[str], picks: Sequence[Axes], used: frozenset[str]) -> bool:
    return any(
        not axes and any(used.isdisjoint(option) for option in claims.options[label])
        for label, axes in zip(labels, picks, strict=True)
    )
