"""The plans worth costing: estimates of all candidates under all knobs, corrected by the exact costs so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..layouts import Layout, Mesh
from ..updates.weight_update import WeightUpdate
from .digest import Digest
from .estimate import Estimate
from .evaluate import Entry
from .roles import Role
from .screen import Axes, Candidate, Numbers, Screen

KEPT = 60  # candidates of each combination of knobs
OVER = 1.5  # times the memory limit, above which an estimate is left out
AGAIN = 0.03, 0.02, 0.02  # by which a plan seems slower for each that is alike in this
NEAR = 1.04  # times the memory limit, up to which a corrected estimate may fit
SIZE = 0.005, 0.0005  # the same for each axis, and each dim of a role: of equal plans, the simplest is first


@dataclass(frozen=True)
class Knobs:
    """The knobs that are estimated."""

    remat: str
    update: WeightUpdate
    microbatches: int


@dataclass(frozen=True)
class Guess:
    """A plan to cost: the estimate of its seconds and bytes."""

    candidate: Candidate
    knobs: Knobs
    seconds: float
    peak: float
    scale: float | None = None  # exact over estimated seconds of a plan that differs in one choice

    @cached_property
    def alike(self) -> tuple[Any, ...]:
        """What other plans may share with it: mesh and roles, roles alone, knobs."""
        return self.candidate, tuple(sorted(self.candidate.roles)), self.knobs

    @property
    def cost(self) -> tuple[Any, ...]:
        """Equal for plans whose programs are equal, but for names of dims."""
        return f"{self.seconds:.6g} {self.peak:.6g}", self.candidate.mesh, self.knobs


@dataclass(eq=False)
class Guesses:
    """All guesses, and the exact costs that correct them: `ratios` are exact over estimated."""

    digests: Mapping[str, Digest]  # by value of remat
    machine: Machine
    limit: float
    updates: Sequence[WeightUpdate]
    microbatches: Sequence[int]
    estimated: int = 0  # plans
    pool: list[Guess] = field(default_factory=list[Guess])
    ratios: list[float] = field(default_factory=list[float])  # of seconds, of the plans costed
    _near: float = 1.0  # exact seconds of plans near the best, over their estimates, of late
    _seconds: dict[Any, float] = field(default_factory=dict[Any, float])
    _peak: dict[Any, float] = field(default_factory=dict[Any, float])
    _seen: Counter[Any] = field(default_factory=Counter[Any])
    _known: set[tuple[Candidate, Knobs]] = field(default_factory=set[tuple[Candidate, Knobs]])
    refused: set[Any] = field(default_factory=set[Any])  # illegal roles, costs known, steps that cannot be made

    def estimates(
        self, candidates: Sequence[Candidate], knobs: Sequence[Knobs]
    ) -> Iterator[tuple[Knobs, Numbers, Numbers]]:
        """Seconds and bytes of these candidates under each of some knobs."""
        axes = Axes(candidates, self.machine)
        for remat in dict.fromkeys(each.remat for each in knobs):
            estimate = Estimate(Screen(self.digests[remat], axes, self.machine), self.machine, remat == "offload")
            for each in knobs:
                if each.remat == remat:
                    yield each, *estimate.of(each.update, each.microbatches)

    @cached_property
    def combinations(self) -> list[Knobs]:
        """Every combination of knobs."""
        return [Knobs(r, u, m) for r in self.digests for u in self.updates for m in self.microbatches]

    def score(self, candidates: Sequence[Candidate]) -> tuple[Numbers, Numbers]:
        """The least seconds, and the least bytes, of candidates under any update, with the first other knobs."""
        first = self.combinations[0]
        each = [
            (s, b)
            for _, s, b in self.estimates(candidates, [Knobs(first.remat, u, first.microbatches) for u in self.updates])
        ]
        return np.min([s for s, _ in each], axis=0), np.min([b for _, b in each], axis=0)

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Add the best of these candidates under every combination of knobs."""
        for knobs, seconds, peak in self.estimates(candidates, self.combinations):
            self.estimated += len(candidates)
            order = np.argsort(np.where(peak < OVER * self.limit, seconds, math.inf), kind="stable")[:KEPT]
            small = np.argsort(np.where(np.isfinite(seconds), peak, math.inf), kind="stable")[:3]
            for i in dict.fromkeys(map(int, (*order, *small))):
                self._put(candidates[i], knobs, seconds[i], peak[i])

    def add_near(self, best: Guess, exact: Entry, candidates: Sequence[Candidate], knobs: Sequence[Knobs]) -> None:
        """Add plans that differ from one costed in one choice: these candidates with its knobs, or it with these."""
        mine, scale = [best.candidate, *candidates], 1.0
        for each, seconds, peak in self.estimates(mine, list(dict.fromkeys((best.knobs, *knobs)))):
            own = each == best.knobs
            self.estimated += len(candidates) if own else 1
            if own:
                scale = exact.seconds / float(seconds[0])
            for i in range(1, len(mine)) if own else (0,):
                self._put(mine[i], each, seconds[i], peak[i], scale if own else None)

    def _put(self, candidate: Candidate, knobs: Knobs, seconds: float, peak: float, scale: float | None = None) -> None:
        if (candidate, knobs) not in self._known and math.isfinite(seconds):
            self._known.add((candidate, knobs))
            self.pool.append(Guess(candidate, knobs, float(seconds), float(peak), scale))

    def next(self, fits: bool) -> Guess | None:
        """The most promising guess, removed from the pool; the smallest one as long as no plan `fits`."""
        pool = [guess for guess in self.pool if not self._refused(guess)]
        small = [guess for guess in pool if self.corrected_peak(guess) <= NEAR * self.limit]
        if not small and fits:
            return None
        chosen = min(small, key=self._rank) if small else min(pool, key=self.corrected_peak, default=None)
        self.pool = [guess for guess in pool if guess is not chosen]
        return chosen

    def _refused(self, guess: Guess) -> bool:
        roles, step = guess.candidate.roles, (guess.knobs.remat, guess.knobs.microbatches)
        return not self.refused.isdisjoint((tuple(sorted(roles)), step, guess.cost, *roles))

    def _rank(self, guess: Guess) -> float:
        again = sum(more * self._seen[each] for each, more in zip(guess.alike, AGAIN, strict=True))
        axis, dim = SIZE
        size = axis * len(guess.candidate.roles) + dim * sum(map(len, guess.candidate.roles))
        over = max(0.0, self.corrected_peak(guess) / self.limit - 1)
        return self.corrected(guess) * (1 + again * (0.5 if guess.scale else 1.0) + size + over)

    def corrected(self, guess: Guess) -> float:
        """Seconds, corrected by the exact cost of the plan most alike."""
        if guess.scale:
            return guess.seconds * guess.scale * self._near
        return guess.seconds * self._ratio(self._seconds, guess)

    def corrected_peak(self, guess: Guess) -> float:
        """Bytes, corrected by the exact cost of the plan most alike."""
        return guess.peak * self._ratio(self._peak, guess)

    def _ratio(self, ratios: Mapping[Any, float], guess: Guess) -> float:
        return next((ratios[key] for key in self._families(guess) if key in ratios), 1.0)

    def _families(self, guess: Guess) -> list[Any]:
        knobs = guess.knobs
        several = knobs.microbatches > 1
        return [
            (guess.alike[1], knobs),
            (guess.alike[1], knobs.remat, several),
            (knobs.remat, knobs.update, several),
            (knobs.remat, several),
            knobs.remat,
            "all",
        ]

    def simpler(self, plan: Plan, layout: Layout) -> float:
        """The estimated seconds of a plan with another layout, over those with its own."""
        knobs = Knobs(plan.remat, plan.weight_update, plan.microbatches)
        each = [Candidate(plan.mesh, roles_of(plan.mesh, rules)) for rules in (plan.layout, layout)]
        _, seconds, _ = next(self.estimates(each, [knobs]))
        return float(seconds[1] / seconds[0])

    def costed(self, guess: Guess, entry: Entry) -> None:
        """Correct the estimates by the exact cost of one of them."""
        if guess.scale:
            self._near = (self._near + entry.seconds / (guess.seconds * guess.scale)) / 2
        self.ratios.append(entry.seconds / guess.seconds)
        self._seen.update(guess.alike)
        self.refused.add(guess.cost)
        for known, ratio in ((self._seconds, self.ratios[-1]), (self._peak, entry.peak_bytes / guess.peak)):
            for key in self._families(guess):
                known[key] = ratio if key not in known else (known[key] + ratio) / 2


def roles_of(mesh: Mesh, layout: Layout) -> tuple[Role, ...]:
    """The dims that have each axis of a mesh."""
    return tuple(tuple(sorted(d for d, axes in layout.rules.items() if axis in axes)) for axis in mesh.axes)


def plan_of(base: Plan, guess: Guess, layout: Callable[[Any, Sequence[Role]], Any]) -> Plan:
    """The plan of a guess."""
    knobs, (mesh, roles) = guess.knobs, (guess.candidate.mesh, guess.candidate.roles)
    return base.replace(
        mesh=mesh, layout=layout(mesh, roles), weight_update=knobs.update, remat=knobs.remat,
        microbatches=knobs.microbatches,
    )  # fmt: skip
