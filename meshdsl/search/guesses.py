"""The plans worth costing: estimates of all candidates under all knobs, corrected by the exact costs so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    scale: float = 0.0  # exact over estimated seconds of a plan that differs in one choice; 0 if none is costed

    @property
    def alike(self) -> tuple[Any, ...]:
        """What other plans may share with it: mesh and roles, roles alone, knobs."""
        return self.candidate, tuple(sorted(self.candidate.roles)), self.knobs

    @property
    def families(self) -> tuple[Any, ...]:
        """The keys of plans whose exact costs correct its estimate, the most alike first."""
        (_, roles, knobs), several = self.alike, self.knobs.microbatches > 1
        known = knobs.remat, several
        return (roles, knobs), (roles, *known), (*known, knobs.update), known, knobs.remat, "all"

    @property
    def refusable(self) -> tuple[Any, ...]:
        """The key of a refusal: roles, a step, and a cost, which plans that differ only in names of dims share."""
        cost = f"{self.seconds:.6g} {self.peak:.6g}", self.candidate.mesh, self.knobs
        return cost, (self.knobs.remat, self.knobs.microbatches), self.alike[1], *self.candidate.roles

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Seconds, bytes, scale, and what is added for its size."""
        axis, dim = SIZE
        roles = self.candidate.roles
        return self.seconds, self.peak, self.scale, axis * len(roles) + dim * sum(map(len, roles))


class _Table:
    """Guesses as arrays, one row each, and a number for everything that several may share."""

    def __init__(self, guesses: Sequence[Guess]):
        self.seconds, self.peak, self.scale, self.size = np.array([guess.figures for guess in guesses]).T
        self._numbers: dict[Any, int] = {}
        self._families = self._rows([guess.families for guess in guesses])
        self._alike = self._rows([guess.alike for guess in guesses])
        self._refusable = self._rows([guess.refusable for guess in guesses])

    def _rows(self, keys: Sequence[Sequence[Any]]) -> Numbers:
        """The numbers of the keys; rows that are shorter than others have their first number again."""
        longest = max(map(len, keys))
        numbers = [[self._numbers.setdefault(key, len(self._numbers)) for key in row] for row in keys]
        return np.array([row + row[:1] * (longest - len(row)) for row in numbers])

    def _values(self, known: Mapping[Any, float]) -> Numbers:
        """The value of each number; NaN for those without."""
        values = np.full(len(self._numbers), math.nan)
        for key in known.keys() & self._numbers.keys():
            values[self._numbers[key]] = known[key]
        return values

    def ratio(self, known: Mapping[Any, float]) -> Numbers:
        """The value of the first family that has one; 1 if none has."""
        values = self._values(known)[self._families]
        first = np.argmax(~np.isnan(values), axis=1)
        return np.nan_to_num(values[np.arange(len(values)), first], nan=1.0)

    def again(self, seen: Mapping[Any, float]) -> Numbers:
        """The sum of `AGAIN` over plans that are alike."""
        return np.nan_to_num(self._values(seen)[self._alike]) @ np.array(AGAIN)

    def refused(self, keys: Collection[Any]) -> Numbers:
        """True for guesses that have one of the keys."""
        return (self._values(dict.fromkeys(keys, 1.0))[self._refusable] == 1.0).any(axis=1)


@dataclass(eq=False)
class Guesses:
    """All guesses, and the exact costs that correct them: `ratios` are exact over estimated."""

    digests: Mapping[str, Digest]  # by value of remat
    machine: Machine
    limit: float
    updates: Sequence[WeightUpdate]
    microbatches: Sequence[int]
    estimated: int = 0  # plans
    ratios: list[float] = field(default_factory=list[float])  # of seconds, of the plans costed
    refused: set[Any] = field(default_factory=set[Any])  # of what `Guess.refusable` has
    _pool: list[Guess] = field(default_factory=list[Guess])
    _tables: list[_Table] = field(default_factory=list[_Table])  # of the pool
    _taken: list[int] = field(default_factory=list[int])  # their numbers
    _near: float = 1.0  # exact seconds of plans near the best, over their estimates, of late
    _seconds: dict[Any, float] = field(default_factory=dict[Any, float])
    _peak: dict[Any, float] = field(default_factory=dict[Any, float])
    _seen: Counter[Any] = field(default_factory=Counter[Any])
    _known: set[tuple[Candidate, Knobs]] = field(default_factory=set[tuple[Candidate, Knobs]])

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
        found: list[Guess] = []
        for knobs, seconds, peak in self.estimates(candidates, self.combinations):
            self.estimated += len(candidates)
            order = np.argsort(np.where(peak < OVER * self.limit, seconds, math.inf), kind="stable")[:KEPT]
            small = np.argsort(np.where(np.isfinite(seconds), peak, math.inf), kind="stable")[:3]
            each = dict.fromkeys(map(int, (*order, *small)))
            found += [Guess(candidates[i], knobs, float(seconds[i]), float(peak[i])) for i in each]
        self._put(found)

    def add_near(self, best: Guess, exact: Entry, candidates: Sequence[Candidate], knobs: Sequence[Knobs]) -> None:
        """Add plans that differ from one costed in one choice: these candidates with its knobs, or it with these."""
        mine, found = [best.candidate, *candidates], list[Guess]()
        for each, seconds, peak in self.estimates(mine, list(dict.fromkeys((best.knobs, *knobs)))):
            own = each == best.knobs
            self.estimated += len(candidates) if own else 1
            scale = exact.seconds / float(seconds[0]) if own else 0.0
            numbers = range(1, len(mine)) if own else (0,)
            found += [Guess(mine[i], each, float(seconds[i]), float(peak[i]), scale) for i in numbers]
        self._put(found)

    def _put(self, guesses: Sequence[Guess]) -> None:
        """Add guesses that are legal and not known."""
        added: list[Guess] = []
        for guess in guesses:
            key = guess.candidate, guess.knobs
            if key not in self._known and math.isfinite(guess.seconds):
                self._known.add(key)
                added.append(guess)
        if added:
            self._pool += added
            self._tables.append(_Table(added))

    def next(self, fits: bool) -> Guess | None:
        """The most promising guess, each once; the smallest one as long as no plan `fits`."""
        ranks, peaks = (np.concatenate(each) for each in zip(*map(self._ranked, self._tables), strict=True))
        ranks[self._taken] = peaks[self._taken] = math.inf
        small = np.isfinite(ranks).any()
        if not small and (fits or not np.isfinite(peaks).any()):
            return None
        self._taken.append(int(np.argmin(ranks if small else peaks)))
        return self._pool[self._taken[-1]]

    def _ranked(self, table: _Table) -> tuple[Numbers, Numbers]:
        """The rank of each guess, infinite if it does not fit, and its corrected bytes; both infinite if refused."""
        refused = table.refused(self.refused)
        peak = table.peak * table.ratio(self._peak)
        near = table.scale > 0
        seconds = table.seconds * np.where(near, table.scale * self._near, table.ratio(self._seconds))
        again = table.again(self._seen) * np.where(near, 0.5, 1.0)
        rank = seconds * (1 + again + table.size + np.maximum(0.0, peak / self.limit - 1))
        return np.where(refused | (peak > NEAR * self.limit), math.inf, rank), np.where(refused, math.inf, peak)

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
        self.refused.add(guess.refusable[0])
        for known, ratio in ((self._seconds, self.ratios[-1]), (self._peak, entry.peak_bytes / guess.peak)):
            for key in guess.families:
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
