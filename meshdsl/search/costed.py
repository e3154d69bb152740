"""The plans that a search has costed, and which of them are best."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.deadline import OutOfTimeError, deadline
from .evaluate import Entry, evaluate
from .variants import Variants

SAME = 1.01  # plans whose cost differs by less are equal; the cost model is not more exact
RUNNERS_UP = 4  # plans of a result besides the best one
EVERY = 0.5  # seconds between two progress reports
LOOKS = 6  # plans costed without anything better before patience ends, ...
LONGER = 3  # ... unless that takes so many times as long


class ImpatientError(Exception):
    """The patience of a phase is over."""


def complexity(entry: Entry) -> int:
    """The number of choices of a plan that are not defaults: knobs, and axes in rules and in the mesh."""
    return len(entry.plan.to_dict()) + sum(map(len, entry.layout.rules.values())) + len(entry.mesh.axes)


class Costed:
    """The cost of plans, each computed once. A plan that is not costed when the time is over is given up.

    Patience is processor time, so that other programs on the machine do not change the result. `tell` is called about
    twice a second.
    """

    def __init__(self, variants: Variants, tell: Callable[[], object]):
        self.variants, self.request, self.tell = variants, variants.request, tell
        self.started = time.perf_counter() if self.request.started is None else self.request.started
        self.begun = time.process_time()
        self.entries: dict[Plan, Entry] = {}
        self.refused: dict[Plan, str] = {}
        self.improved = 0.0  # processor seconds from the start to the last better plan
        self.looked = 0  # plans costed since then
        self.told = 0.0  # seconds from the start to the last report
        self.patient = False  # patience ends the phase

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def touch(self) -> None:
        """Note that something better was found."""
        self.improved, self.looked = time.process_time() - self.begun, 0

    def time_left(self) -> float:
        """Seconds to the time limit; infinite without one, and until a first plan is costed."""
        limit = self.request.time_limit
        return math.inf if limit is None or not self.entries else limit - self.elapsed

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """The evaluation of one plan or layout.

        Raises `OutOfTimeError` once the time is over, also in the middle of it, and `ImpatientError` after it if the
        phase is `patient` and nothing better was found for the seconds of the request's patience.
        """
        with deadline(self.time_left()):
            yield
        if self.elapsed >= self.told + EVERY:
            self.told = self.elapsed
            self.tell()
        if self.time_left() < 0:
            raise OutOfTimeError
        patience = self.request.patience if self.patient else None
        if patience is not None and self.least() < math.inf:
            waited = time.process_time() - self.begun - self.improved
            if waited > (patience if self.looked >= LOOKS else LONGER * patience):
                raise ImpatientError

    def look(self, plan: Plan) -> Entry | None:
        """The cost of a plan, cached; None if it is illegal."""
        known = plan
        try:
            with self.evaluation():
                known = self.variants.canonical(plan)
                return None if known is None else self._costed(known)
        except LayoutError as error:
            self.refused[known or plan] = str(error)
        return None

    def _costed(self, known: Plan) -> Entry | None:
        if known in self.refused:
            return None
        if known not in self.entries:
            entry = evaluate(self.variants.problem(known), known.mesh, known.layout)
            self.looked += 1
            if self.score(entry) < min(map(self.score, self.entries.values()), default=(True, math.inf, 0)):
                self.touch()
            self.entries[known] = entry
        return self.entries[known]

    def score(self, entry: Entry) -> tuple[bool, float, int]:
        """Sort key, smallest best: plans that fit by their time; plans that don't fit by their memory."""
        amount = entry.seconds if entry.fits else entry.peak_bytes
        return not entry.fits, amount, len(entry.plan.to_dict()) + len(entry.layout.rules)

    def ranked(self) -> list[Entry]:
        """The best plans that fit, one per outcome: first the simplest of those within `SAME` of the fastest."""
        each: dict[tuple[float, ...], Entry] = {}
        for entry in sorted((e for e in self.entries.values() if e.fits), key=complexity):
            each.setdefault(entry.outcome, entry)
        ranked = [each[outcome] for outcome in sorted(each)]
        near = [entry for entry in ranked if entry.seconds <= SAME * ranked[0].seconds]
        near.sort(key=complexity)
        return [*near[:1], *(entry for entry in ranked if entry is not near[0])][: 1 + RUNNERS_UP]

    def least(self) -> float:
        """Seconds of the fastest plan that fits; infinite while none fits."""
        return min((e.seconds for e in self.entries.values() if e.fits), default=math.inf)
