"""Exact minimum of a sum of tables by variable elimination: minimise variables one by one, then read all choices back.

A table covers one variable or two. To eliminate a variable, add up the tables that contain it and keep its best choice
for every combination of the other variables in them. The cost grows with the most variables in one such table (the
width), not with their number. With a cap on a second amount, a Lagrangian gives a lower bound for every choice within
the cap, and the best choice that it visited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import LayoutError

__all__ = ["Capped", "Tables"]

MOST = 20_000_000  # maximum entries of one table during elimination
STEPS = 100  # of the Lagrangian; each visits another corner of a hull with few corners


@dataclass(frozen=True, eq=False)
class Capped:
    """The best choice found within a cap, and a lower bound for every choice within it."""

    picks: tuple[int, ...]
    bound: float


@dataclass(frozen=True, eq=False)
class Tables:
    """Two amounts, a cost and a load, as sums over variables and pairs of variables; infinite if a choice is illegal.

    `alone[i]` is [2, choices of i]; `together[i, j]`, for some i < j, is [2, choices of i, choices of j].

    >>> first, second = np.array([[0, -3.0], [0, 8.0]]), np.array([[0, -2.0], [0, 1.0]])
    >>> tables = Tables([first, second], {(0, 1): np.array([[[0, 0], [0, 4.0]], [[0, 0], [0, 0]]])})
    >>> tables.least(), tables.amounts((1, 0))
    ((1, 0), (-3.0, 8.0))
    >>> tables.within(5).picks, round(tables.within(5).bound, 3)
    ((0, 1), -2.571)
    """

    alone: Sequence[np.ndarray]
    together: Mapping[tuple[int, int], np.ndarray]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Elimination order: always a variable that shares tables with the fewest others."""
        return tuple(i for i, _ in self._eliminated)

    @property
    def width(self) -> int:
        """The most variables in one table, without the eliminated one."""
        return max((len(met) for _, met in self._eliminated), default=0)

    @cached_property
    def _eliminated(self) -> list[tuple[int, frozenset[int]]]:
        meets = {i: {a + b - i for a, b in self.together if i in (a, b)} for i in range(len(self.alone))}
        steps: list[tuple[int, frozenset[int]]] = []
        while meets:
            i = min(meets, key=lambda i: (len(meets[i]), i))
            met = meets.pop(i)
            for other in met:
                meets[other] = (meets[other] | met) - {i, other}
            steps.append((i, frozenset(met)))
        return steps

    def amounts(self, picks: Sequence[int]) -> tuple[float, float]:
        """The cost and the load if every variable takes the given choice."""
        total = sum((table[:, n] for table, n in zip(self.alone, picks, strict=True)), np.zeros(2))
        total = sum((table[:, picks[i], picks[j]] for (i, j), table in self.together.items()), total)
        return float(total[0]), float(total[1])

    def least(self, cost: float = 1.0, load: float = 0.0) -> tuple[int, ...]:
        """The choice that minimises `cost * cost + load * load`; ties take a variable's first choice.

        Raises `LayoutError` if an intermediate table would be too large.
        """
        waiting: list[tuple[tuple[int, ...], np.ndarray]] = [
            ((i,), _weighed(table, cost, load)) for i, table in enumerate(self.alone)
        ]
        waiting += [(pair, _weighed(table, cost, load)) for pair, table in self.together.items()]
        best: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        for i in self.order:
            mine = [factor for factor in waiting if i in factor[0]]
            waiting = [factor for factor in waiting if i not in factor[0]]
            others = tuple(sorted({v for scope, _ in mine for v in scope} - {i}))
            total = self._sum(mine, (*others, i))
            best.append((i, others, total.argmin(axis=-1)))
            waiting.append((others, total.min(axis=-1)))
        picks = [0] * len(self.alone)
        for i, others, choice in reversed(best):
            picks[i] = int(choice[tuple(picks[v] for v in others)])
        return tuple(picks)

    def _sum(self, factors: Sequence[tuple[tuple[int, ...], np.ndarray]], scope: tuple[int, ...]) -> np.ndarray:
        shape = [self.alone[v].shape[1] for v in scope]
        if math.prod(shape) > MOST:
            raise LayoutError(
                f"the exact choice needs a table of {math.prod(shape):,} entries, and {MOST:,} are allowed\n"
                f"  {len(scope)} tensors meet in it; search fewer of them (tensors=), "
                "or fewer choices of each (choices=)"
            )
        total = np.zeros(shape)
        for own, table in factors:
            axes = sorted(range(len(own)), key=lambda k: scope.index(own[k]))
            placed = table.transpose(axes)
            total += placed.reshape([n if v in own else 1 for v, n in zip(scope, shape, strict=True)])
        return total

    def within(self, cap: float) -> Capped:
        """A choice whose load is within the cap, and the largest Lagrangian bound on its cost.

        The choice is the best one visited, improved by changing single variables. If no choice is within the cap, the
        smallest load of all choices replaces the cap.
        """
        cheap = self.least()
        if self.amounts(cheap)[1] <= cap:
            return Capped(cheap, self.amounts(cheap)[0])
        light = self.least(0.0, 1.0)
        cap = max(cap, self.amounts(light)[1])
        bound = self.amounts(cheap)[0]
        best = light
        for price, picks in self._corners(cheap, light, cap):
            cost, load = self.amounts(picks)
            bound = max(bound, cost + price * (load - cap))
            if load <= cap and cost < self.amounts(best)[0]:
                best = picks
        best = self._improved(best, cap)
        return Capped(best, min(bound, self.amounts(best)[0]))  # only rounding can make the bound larger

    def _improved(self, picks: tuple[int, ...], cap: float) -> tuple[int, ...]:
        """Change one variable at a time while that lowers the cost within the cap."""
        best = self.amounts(picks)[0]
        while True:
            near = [
                (*picks[:i], n, *picks[i + 1 :]) for i, table in enumerate(self.alone) for n in range(table.shape[1])
            ]
            cost, other = min((self.amounts(other)[0], other) for other in near if self.amounts(other)[1] <= cap)
            if cost >= best:
                return picks
            best, picks = cost, other

    def _corners(
        self, over: tuple[int, ...], under: tuple[int, ...], cap: float
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Prices of the load, each with the best choice at that price, until the line between both sides is reached."""
        for _ in range(STEPS):
            (a, m), (b, n) = self.amounts(over), self.amounts(under)
            if m <= n:
                return
            price = max((b - a) / (m - n), 0.0)
            picks = self.least(1.0, price)
            yield price, picks
            cost, load = self.amounts(picks)
            if cost + price * load >= (a + price * m) - 1e-12 * (abs(a) + abs(price * m)):
                return
            over, under = (over, picks) if load <= cap else (picks, under)


def _weighed(table: np.ndarray, cost: float, load: float) -> np.ndarray:
    possible = np.isfinite(table[0])
    return np.where(possible, cost * np.where(possible, table[0], 0) + load * np.where(possible, table[1], 0), np.inf)
