"""The plans that a search has costed, and which of them are best."""

from __future__ import annotations

from collections.abc import Callable

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.no_effect import NoEffectError
from ..errors.units import seconds, show_bytes
from .evaluate import Entry, evaluate
from .variants import Variants

SAME = 1.01  # plans whose cost differs by less are equal; the cost model is not more exact
RUNNERS_UP = 4  # plans of a result besides the best one


def complexity(entry: Entry) -> int:
    """The number of choices of a plan that are not defaults: knobs, and axes in rules and in the mesh."""
    return len(entry.plan.to_dict()) + sum(map(len, entry.layout.rules.values())) + len(entry.mesh.axes)


class Costed:
    """The cost of plans, each computed once. `tell` is called after each."""

    def __init__(self, variants: Variants, tell: Callable[[], object]):
        self.variants, self.tell = variants, tell
        self.entries: dict[Plan, Entry] = {}
        self.refused: dict[Plan, str] = {}
        self.illegal = 0  # of the refused plans, those with an illegal layout

    def look(self, plan: Plan) -> Entry | None:
        """The cost of a plan, cached; None if it is illegal."""
        known = self.variants.canonical(plan)
        if known is None:
            return None
        if known not in self.entries and known not in self.refused:
            try:
                self.entries[known] = evaluate(self.variants.problem(known), known.mesh, known.layout)
            except LayoutError as error:
                self.refused[known] = str(error)
                self.illegal += not isinstance(error, NoEffectError)
            self.tell()
        return self.entries.get(known)

    def score(self, entry: Entry) -> tuple[bool, float, int]:
        """Sort key, smallest best: plans that fit by their time; plans that don't fit by their memory."""
        return not entry.fits, entry.seconds if entry.fits else entry.peak_bytes, complexity(entry)

    def best(self) -> Entry | None:
        """The fastest plan that fits, or the smallest if none fits; None before any is costed."""
        return min(self.entries.values(), key=self.score, default=None)

    def ranked(self) -> list[Entry]:
        """The best plans that fit, one per time and memory: first the simplest of those near the fastest."""
        each: dict[tuple[float, ...], Entry] = {}
        for entry in sorted((e for e in self.entries.values() if e.fits), key=complexity):
            each.setdefault(entry.outcome, entry)
        ranked = [each[outcome] for outcome in sorted(each)]
        near = [entry for entry in ranked if entry.seconds <= SAME * ranked[0].seconds]
        near.sort(key=complexity)
        listed: dict[tuple[str, str], Entry] = {}
        for entry in [*near[:1], *ranked]:
            listed.setdefault((seconds(entry.seconds), show_bytes(entry.peak_bytes)), entry)
        return list(listed.values())[: 1 + RUNNERS_UP]
