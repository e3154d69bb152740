"""The candidates of one mesh: the bound and the status of each listed layout."""

from __future__ import annotations

import enum
import math
from collections import Counter
from functools import cached_property

import numpy as np

from ..cost.machine import Machine
from ..cost.network import Placement
from .bound import UNDECIDED, rule_bound
from .evaluate import Problem, watts
from .result import Counts
from .screen import ILLEGAL, Screen
from .space import Row, Space

__all__ = ["Candidates", "Status"]


class Status(enum.IntEnum):
    """Status of one layout."""

    UNSEEN = 0
    COSTED = 1
    ILLEGAL = 2
    OVER = 3  # its memory bound exceeds the limit


class Candidates:
    """The layouts of one mesh. If there are too many to list, or `listed` is False, one bound covers all of them."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        machine: Machine,
        placement: Placement,
        objective: str,
        listed: bool = True,
    ):
        self.problem, self.space, self.placement, self.objective = problem, space, placement, objective
        self.rules = rule_bound(problem.graph, space, machine, problem.donated, problem.results, problem.plain)
        self.screen = Screen(problem.graph, space.mesh, machine, placement, problem.results, problem.plain)
        rows = space.rows if listed else None
        self.listed = rows is not None
        self.rows = np.zeros((0, len(space.dims)), np.int8) if rows is None else rows
        self.amounts = self.rules.of(self.rows)  # from rules alone
        self.peaks = self.amounts.peak_bytes
        self.bounds = getattr(self.amounts, objective).copy()
        self.status = np.zeros(len(self.rows), np.int8)
        self.bounded: dict[Row, float] = {}  # from the screen

    def row(self, i: int) -> Row:
        """One listed layout."""
        return tuple(self.rows[i].tolist())

    def index(self, row: Row) -> int | None:
        """The index of a layout in the list; None if layouts are not listed."""
        if not self.listed:
            return None
        return int(np.searchsorted(self._numbers, int(np.dot(row, self._weights))))

    @cached_property
    def _weights(self) -> np.ndarray:
        sizes = [len(cuts) for cuts in self.space.options]
        return np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))], np.int64)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self.rows.astype(np.int64) @ self._weights  # ascending, because rows are listed in this order

    def screened(self, row: Row, enough: float) -> float:
        """The bound of a layout with its loops lowered; stops early once it reaches `enough`."""
        i = self.index(row)
        bound = self.bounded.get(row)
        if bound is None:
            alone = self.by_rules(row)[self.objective] if i is None else self.bounds[i]
            name, unit = self._timed
            bound = unit * self.screen.bound(self.space.layout(row), self.rules.least(row), name, enough / unit)
            if bound < enough < math.inf and self.screen.usable and self.objective != "peak_bytes":
                bound = max(bound, self.exact(row, enough))
            bound = self.bounded[row] = max(float(alone), bound)
        if i is not None:
            self.bounds[i] = bound
            if bound == ILLEGAL:
                self.status[i] = Status.ILLEGAL
        return bound

    def exact(self, row: Row, enough: float) -> float:
        """The objective of a layout's program, or a lower bound if that already reaches `enough`."""
        name, unit = self._timed
        return unit * self.screen.exact(self.space.layout(row), name, enough / unit)

    @property
    def _timed(self) -> tuple[str, float]:
        """The objective as the screen computes it, and its unit: energy is seconds times the power of the mesh."""
        if self.objective != "energy":
            return self.objective, 1.0
        return "seconds", watts(self.rules.machine, self.space.mesh)

    def by_rules(self, row: Row) -> dict[str, float]:
        """The bounds of one layout from rules alone, by objective."""
        i = self.index(row)
        amounts, at = (self.rules.of(np.array([row])), 0) if i is None else (self.amounts, i)
        return {name: float(values[at]) for name, values in vars(amounts).items()}

    def claims(self, row: Row) -> dict[str, float]:
        """The best known bounds of a layout, by objective."""
        bounds = self.by_rules(row)
        return {**bounds, self.objective: max(bounds[self.objective], self.bounded.get(row, 0.0))}

    def mark(self, row: Row, status: Status) -> None:
        """Set the status of a layout."""
        i = self.index(row)
        if i is not None:
            self.status[i] = status

    def open_bound(self, limit: float, least: float) -> float:
        """The lowest bound of layouts that may fit and are not costed; infinite if there are none."""
        if not self.listed:
            return float(getattr(self.rules.of(np.full((1, len(self.space.dims)), UNDECIDED)), self.objective)[0])
        unseen = (self.status == Status.UNSEEN) & (self.peaks <= limit)
        return float(self.bounds[unseen].min(initial=math.inf))

    def counts(self, limit: float, worst: float) -> Counts:
        """Number of candidates by status."""
        by_status = Counter(self.status.tolist())
        unseen = self.status == Status.UNSEEN
        over = unseen & (self.peaks > limit)
        excluded = unseen & ~over & (self.bounds * (1 - 1e-9) >= worst)
        listed = len(self.rows) if self.listed else self.space.size
        return Counts(
            candidates=self.space.size,
            illegal=self.space.size - listed + by_status[Status.ILLEGAL],
            over_memory=int(over.sum()) + by_status[Status.OVER],
            excluded=int(excluded.sum()),
            costed=by_status[Status.COSTED],
            unseen=int((unseen & ~over & ~excluded).sum()) if self.listed else self.space.size,
        )
