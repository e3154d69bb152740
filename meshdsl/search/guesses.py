"""The plans worth costing: estimates of all candidates under all knobs, corrected by the exact costs so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..layouts import Layout
from ..updates.weight_update import WeightUpdate
from .costed import Entry
from .digest import Digest
from .estimate import Estimate
from .screen import Axes, Candidate, Numbers, Screen

KEPT = 20  # candidates of each combination of knobs
OVER = 1.5  # times the memory limit, above which an estimate is left out
ROOM = 0.9  # of the memory limit: if the fastest estimate needs less, no memory is to be saved
AGAIN = 0.03, 0.02, 0.02  # by which a plan seems slower for each that is alike in this
NEAR = 1.04  # times the memory limit, up to which a corrected estimate may fit
SIZE = 0.005, 0.0005  # the same for each axis, and each dim of a role: of equal plans, the simplest is first


@dataclass(frozen=True)
class Knobs:
    """The knobs that are estimated."""

    remat: str
    update: WeightUpdate
    microbatches: int

    @cached_property
    def family(self) -> str:
        """Of plans whose estimates one exact cost corrects."""
        return f"{self.remat} {self.update} {self.microbatches > 1}"

    def __str__(self) -> str:
        return f"{self.family} {self.microbatches}"


@dataclass(frozen=True, eq=False)
class Guess:
    """A plan to cost: the estimate of its seconds and bytes."""

    candidate: Candidate
    knobs: Knobs
    seconds: float
    peak: float
    scale: float = 0.0  # exact over estimated seconds of a plan that differs in one choice; 0 if none is costed

    @cached_property
    def roles(self) -> str:
        """The roles in any order."""
        return str(sorted(self.candidate.roles))

    @cached_property
    def alike(self) -> tuple[str, str, str]:
        """What other plans may share with it: mesh and roles, roles alone, knobs."""
        return f"{self.candidate.mesh} {self.candidate.roles}", self.roles, str(self.knobs)

    @cached_property
    def families(self) -> tuple[str, str, str]:
        """The keys of plans whose exact costs correct its seconds, the most alike first."""
        return self.knobs.family, self.knobs.remat, ""

    @cached_property
    def byte_families(self) -> tuple[str, ...]:
        """The same for its bytes, which depend on the roles more than on anything else."""
        return f"{self.knobs.remat} {self.roles}", self.roles, *self.families

    @cached_property
    def refusable(self) -> frozenset[Any]:
        """The keys of a refusal: a step, roles, and a cost, which plans that differ only in names of dims share."""
        return frozenset((self.cost, (self.knobs.remat, self.knobs.microbatches), self.roles, *self.candidate.roles))

    @property
    def cost(self) -> str:
        """Equal for plans that differ only in names of dims."""
        return f"{self.seconds:.6g} {self.peak:.6g} {self.candidate.mesh} {self.knobs}"

    @cached_property
    def size(self) -> float:
        """The part of its time that is added for its axes and rules."""
        axis, dim = SIZE
        return axis * len(self.candidate.roles) + dim * sum(map(len, self.candidate.roles))


@dataclass(eq=False)
class Guesses:
    """All guesses, and the exact costs that correct them: `ratios` are exact over estimated."""

    digests: dict[str, Digest]  # by value of remat
    machine: Machine
    limit: float
    updates: Sequence[WeightUpdate]
    microbatches: Sequence[int]
    estimated: int = 0  # plans
    ratios: list[float] = field(default_factory=list[float])  # of seconds, of the plans costed
    _refused: set[Any] = field(default_factory=set[Any])  # of what `Guess.refusable` has
    _pool: list[Guess] = field(default_factory=list[Guess])
    _near: float = 1.0  # exact seconds of plans near the best, over their estimates, of late
    _seconds: dict[str, float] = field(default_factory=dict[str, float])  # exact over estimated, by family
    _peak: dict[str, float] = field(default_factory=dict[str, float])
    _seen: Counter[str] = field(default_factory=Counter[str])
    _known: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

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

    def score(self, candidates: Sequence[Candidate]) -> tuple[Numbers, Numbers]:
        """The least seconds, and the least bytes, of candidates under any update, with the first other knobs."""
        remat, count = next(iter(self.digests)), self.microbatches[0]
        each = [(s, b) for _, s, b in self.estimates(candidates, [Knobs(remat, u, count) for u in self.updates])]
        return np.min([s for s, _ in each], axis=0), np.min([b for _, b in each], axis=0)

    def add(self, candidates: Sequence[Candidate], remats: Iterable[str]) -> bool:
        """Add the best of these candidates under every combination of knobs; returns whether memory is to be saved."""
        combinations = [Knobs(r, u, m) for r in remats for u in self.updates for m in self.microbatches]
        fastest, in_room = math.inf, math.inf
        for knobs, seconds, peak in self.estimates(candidates, combinations):
            self.estimated += len(candidates)
            order = np.argsort(np.where(peak < OVER * self.limit, seconds, math.inf), kind="stable")[:KEPT]
            small = np.argsort(np.where(np.isfinite(seconds), peak, math.inf), kind="stable")[:3]
            each = dict.fromkeys(map(int, (*order, *small)))
            self._put(Guess(candidates[i], knobs, float(seconds[i]), float(peak[i])) for i in each)
            fastest = min(fastest, float(seconds.min()))
            in_room = min(in_room, float(np.where(peak < ROOM * self.limit, seconds, math.inf).min()))
        return in_room > fastest

    def add_near(self, best: Guess, exact: Entry, candidates: Sequence[Candidate], knobs: Sequence[Knobs]) -> None:
        """Add plans that differ from one costed in one choice: these candidates with its knobs, or it with these."""
        mine, scale = [best.candidate, *candidates], exact.seconds / best.seconds
        for each, seconds, peak in self.estimates(mine, list(dict.fromkeys((best.knobs, *knobs)))):
            numbers = range(1, len(mine)) if each == best.knobs else (0,)
            self.estimated += len(numbers)
            self._put(Guess(mine[i], each, float(seconds[i]), float(peak[i]), scale) for i in numbers)

    def _put(self, guesses: Iterable[Guess]) -> None:
        """Add guesses that are legal and not known."""
        for guess in guesses:
            key = guess.alike[0], guess.alike[2]
            if key not in self._known and math.isfinite(guess.seconds) and self._refused.isdisjoint(guess.refusable):
                self._known.add(key)
                self._pool.append(guess)

    def next(self, fits: bool) -> Guess | None:
        """The most promising guess, each once; the smallest one as long as no plan `fits`."""
        found = min(self._pool, key=self._rank, default=None)
        if found is not None and self._rank(found) == math.inf:
            found = None if fits else min(self._pool, key=self._bytes)
        if found is not None:
            self._pool.remove(found)
        return found

    def _bytes(self, guess: Guess) -> float:
        """The bytes of a guess, corrected."""
        return guess.peak * _ratio(self._peak, guess.byte_families)

    def _rank(self, guess: Guess) -> float:
        """The corrected seconds of a guess, more for what it shares with costed plans; infinite if it does not fit."""
        over = self._bytes(guess) / self.limit
        if over > NEAR:
            return math.inf
        again = sum(part * self._seen[key] for part, key in zip(AGAIN, guess.alike, strict=True))
        near = guess.scale > 0
        seconds = guess.seconds * (guess.scale * self._near if near else _ratio(self._seconds, guess.families))
        return seconds * (1 + (again / 2 if near else again) + guess.size + max(0.0, over - 1))

    def simpler(self, plan: Plan, layout: Layout) -> float:
        """The estimated seconds of a plan with another layout, over those with its own."""
        knobs = Knobs(plan.remat, plan.weight_update, plan.microbatches)
        each = [
            Candidate(plan.mesh, tuple(tuple(sorted(d for d in rules if a in rules[d])) for a in plan.mesh.axes))
            for rules in (plan.layout.rules, layout.rules)
        ]
        _, seconds, _ = next(self.estimates(each, [knobs]))
        return float(seconds[1] / seconds[0])

    def refuse(self, key: Any) -> None:
        """Leave out guesses that have this among their keys of refusals."""
        self._refused.add(key)
        self._pool = [guess for guess in self._pool if key not in guess.refusable]

    def costed(self, guess: Guess, entry: Entry) -> None:
        """Correct the estimates by the exact cost of one of them."""
        if guess.scale:
            self._near = (self._near + entry.seconds / (guess.seconds * guess.scale)) / 2
        self.ratios.append(entry.seconds / guess.seconds)
        self._seen.update(guess.alike)
        self.refuse(guess.cost)
        bytes_ratio = entry.peak_bytes / guess.peak
        for known, keys, ratio in (
            (self._seconds, guess.families, self.ratios[-1]), (self._peak, guess.byte_families, bytes_ratio),
        ):  # fmt: skip
            for key in keys:
                known[key] = (known.get(key, ratio) + ratio) / 2


def _ratio(known: Mapping[str, float], keys: Sequence[str]) -> float:
    """The value of the first of these keys that has one; 1 if none has."""
    return next((known[key] for key in keys if key in known), 1.0)
