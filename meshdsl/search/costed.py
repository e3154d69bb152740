"""The plans that a search has costed, and which of them are best."""

from __future__ import annotations

import math
import time

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..errors import LayoutError
from .anytime import SearchRequest
from .evaluate import Assignment, Entry, evaluate
from .variants import Variants

__all__ = ["Costed"]


class Costed:
    """The cost of plans, each computed once.

    An overlap plan of a deep model takes seconds to make. Until `finished`, none is begun that may exceed the limit.
    """

    def __init__(self, variants: Variants, machine: Machine, request: SearchRequest, assignment: Assignment | None):
        self.started = time.perf_counter()
        self.variants, self.machine, self.request, self.assignment = variants, machine, request, assignment
        self.limit = request.limit
        self.entries: dict[Plan, Entry] = {}
        self.refused: dict[Plan, str] = {}
        self.improved = 0.0  # seconds from the start to the last better plan
        self.slow = 0.0  # seconds of the longest evaluation of an overlap plan
        self.finished = False

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def touch(self) -> None:
        """Note that something better was found."""
        self.improved = self.elapsed

    def time_left(self) -> float:
        """Seconds to the time limit; infinite without one, and once the search is finished."""
        limit = self.request.time_limit
        return math.inf if limit is None or self.finished else limit - self.elapsed

    def look(self, plan: Plan) -> Entry | None:
        """The cost of a plan, cached; None if it is illegal."""
        known = self.variants.canonical(plan)
        if known is None or known in self.refused:
            return None
        if known not in self.entries:
            began, overlapped = self.elapsed, known.overlap.mode != "none"
            if overlapped and self.time_left() < 2 * self.slow:
                return None
            try:
                problem = self.variants.problem(known)
                entry = evaluate(problem, known.mesh, known.layout, self.machine, self.limit, self.assignment)
            except LayoutError as error:
                self.refused[known] = str(error)
                return None
            finally:
                self.slow = max(self.slow, self.elapsed - began) if overlapped else self.slow
            if self.score(entry) < min(map(self.score, self.entries.values()), default=(True, math.inf, 0)):
                self.touch()
            self.entries[known] = entry
        return self.entries[known]

    def score(self, entry: Entry) -> tuple[bool, float, int]:
        """Sort key, smallest best: plans that fit by the objective; plans that don't fit by their memory."""
        amount = getattr(entry, self.request.objective) if entry.fits else entry.peak_bytes
        return not entry.fits, amount, len(entry.plan.to_dict()) + len(entry.layout.rules)

    def ranked(self) -> list[Entry]:
        """The best plans that fit, one per outcome; of plans with equal costs, the one with the fewest changes."""
        each: dict[tuple[float, ...], Entry] = {}
        for entry in sorted(self.entries.values(), key=lambda e: (len(e.plan.to_dict()), len(e.layout.rules))):
            if entry.fits:
                each.setdefault((getattr(entry, self.request.objective), *entry.outcome), entry)
        return [each[outcome] for outcome in sorted(each)[: 1 + self.request.runners_up]]

    def least(self) -> float:
        """The objective of the best plan; infinite while none fits."""
        return min((getattr(e, self.request.objective) for e in self.entries.values() if e.fits), default=math.inf)
