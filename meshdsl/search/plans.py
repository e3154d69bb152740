"""Search over plans: mesh and layout, and of a training step its weight update, rematerialisation and other knobs.

If there are few plans, every one is costed. Otherwise all candidates are estimated, under every combination of knobs
(`screen`), and the most promising are costed exactly; each exact cost corrects the estimates of plans that are alike.
Plans that differ from the best one in one choice are estimated and costed too. At the end, the best plan is costed with
every weight update, and knobs that are not estimated (overlap, collective steps, chunks of stages) are tried on the two
best plans. No clock stops a search: the same question has the same answer.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.units import show_bytes
from ..ir import walk
from ..layouts import Layout, Mesh
from ..layouts.layout import PARAMS
from ..lowering.partition import partition
from .costed import SAME, Costed, Entry
from .digest import digest
from .floor import floor, kernels
from .guesses import Guess, Guesses, Knobs
from .knobs import Turn, title
from .result import Counts, SearchProgress, SearchResult
from .roles import ROLES, best_roles, candidates, named_roles
from .screen import Candidate
from .space import Role, Space, space
from .variants import Variants

USUAL, LEAST, EQUATIONS = 30, 4, 30_000  # plans costed by default; the equations in all of them
LISTED = 20_000  # combinations of dims and knobs, most of them illegal, that are counted to cost every plan
REFUSED = 4  # refused plans count as one that is costed
LATE = 0.2  # of the plans, for knobs that are not estimated
FEW, IDLE = 2, 1 / 4  # plans, or part of all, costed in a row without a better one, after which the others are not
LITTLE = 0.999  # of the seconds of the best plan: a better one than this counts
FINAL = 2  # plans on which these are tried
HIDDEN = 0.01  # of the step: less exposed communication is not worth an overlap plan
COLLECT = 200_000, 20, 20  # objects until the garbage collector runs, which takes a third of the time otherwise
ROUNDING = 1e-9  # relative tolerance: the floor sums the same numbers in another order


@dataclass(eq=False)
class PlanSearch:
    """The state of a search over plans."""

    variants: Variants
    meshes: Sequence[Mesh]
    turns: Sequence[Turn]
    fixed: Layout = field(default_factory=Layout)  # rules and overrides of every plan
    dims: Collection[str] | None = None
    most: int | None = None  # plans that are costed exactly
    progress: Callable[[SearchProgress], None] | None = None
    hints: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])  # named layouts
    start: Plan | None = None
    generated: bool = False  # the meshes are all those of a number of devices
    complete: bool = False  # every plan is costed
    stopped: str = ""

    @cached_property
    def costed(self) -> Costed:
        """The plans costed so far."""
        return Costed(self.variants, self.tell)

    def run(self) -> None:
        """Search to the end or an interrupt; re-raise an interrupt if no plan is costed yet."""
        thresholds = gc.get_threshold()
        gc.freeze()  # the collector need not look at all objects of the process again and again
        gc.set_threshold(*COLLECT)
        try:
            if self.start is not None:
                self.costed.look(self.start)
            if not self.every():
                self.estimated()
                self.simplify()
                self.other_updates()
                self.late()
        except KeyboardInterrupt:
            if not self.costed.entries:
                raise
            self.stopped = "an interrupt"
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)

    def tell(self) -> None:
        """Report the progress."""
        if self.progress is not None:
            self.progress(SearchProgress(self.counts(), self.costed.best(), self.lower_bound()))

    @cached_property
    def base(self) -> Plan:
        """The plan whose knobs are not turned."""
        return self.variants.canonical(self.variants.base) or self.variants.base

    @cached_property
    def plans(self) -> int:
        """The number of plans to cost; by default, fewer of long programs, each of which takes longer."""
        if self.most is not None:
            return self.most
        equations = sum(1 for _ in walk(self.variants.problem(self.base).graph))
        return max(LEAST, min(USUAL, EQUATIONS // equations))

    @cached_property
    def early(self) -> int:
        """The number of plans to cost before the knobs that are not estimated."""
        return self.plans - (round(self.plans * LATE) if self.late_turns else 0)

    @cached_property
    def space(self) -> Space:
        """The layouts of the step."""
        return space(self.variants.problem(self.base).graph, fixed=self.fixed, dims=self.dims)

    def every(self) -> bool:
        """Cost every plan, if there are no more than the search may cost; returns whether it did."""
        if self.size > LISTED:
            return False
        plans = [self.variants.base.replace(mesh=mesh) for mesh in self.meshes]
        for turn in self.turns:
            plans = [plan.replace(**{turn.knob: value}) for plan in plans for value in self.tried(turn, plan)]
        known = dict.fromkeys(filter(None, map(self.variants.canonical, plans)))
        plans = [plan.replace(layout=layout) for plan in known for layout in self.space.every(plan.mesh)]
        if len(plans) > self.plans:
            return False
        for plan in plans:
            self.costed.look(plan)
        self.complete = True
        return True

    @cached_property
    def size(self) -> int:
        """The number of plans: combinations of mesh and knobs, times the combinations of axes for the dims."""
        plan = self.variants.base.replace(mesh=self.meshes[0])
        knobs = math.prod(len(self.tried(turn, plan)) for turn in self.turns)
        return knobs * sum(map(self.space.size, self.meshes))

    def tried(self, turn: Turn, plan: Plan) -> list[Any]:
        """The plan's own value of a knob, and its candidates."""
        return list(dict.fromkeys([getattr(plan, turn.knob), *turn.candidates(plan)]))

    def values(self, knob: str) -> list[Any]:
        """The values of a knob that are estimated."""
        own, by_layout = getattr(self.base, knob), PARAMS in self.fixed.rules
        turn = next((turn for turn in self.turns if turn.knob == knob), None)
        if turn is None or (knob == "weight_update" and by_layout):
            return [own]
        return [v for v in self.tried(turn, self.base) if v == own or not turn.late(v)]

    def read(self, remats: Sequence[str]) -> None:
        """Add the digests of the steps with these values of remat, by the first value that means the same step."""
        digests = self.guesses.digests
        for remat in remats:
            whole = self.variants.canonical(self.base.replace(remat=remat, microbatches=1))
            known = whole or self.variants.canonical(self.base.replace(remat=remat))
            if known is not None and known.remat not in digests:
                problem = self.variants.problem(known)
                digests[known.remat] = digest(problem.graph, problem.results)

    @cached_property
    def guesses(self) -> Guesses:
        """The estimates."""
        updates, counts = self.values("weight_update"), self.values("microbatches")
        return Guesses({}, self.variants.machine, self.variants.limit, updates, counts)

    @cached_property
    def loops(self) -> frozenset[str]:
        """The dims of the step's loops."""
        return next(iter(self.guesses.digests.values())).loops

    def roles(self, dims: Sequence[str]) -> list[tuple[str, ...]]:
        """The dims that layouts may split together, the most promising first; loops become stages of a pipeline."""
        hinted = named_roles(self.hints, self.space)
        roles = [*hinted, *best_roles(self.guesses.score, self.space, dims, self.meshes)]
        staged = [(d,) for d in self.space.sizes if d in self.loops and max(self.guesses.microbatches) > 1]
        return list(dict.fromkeys((*roles[:5], *staged, *roles[5:])))[:ROLES]

    def estimated(self) -> None:
        """Cost the most promising of all candidates, and what is near the best."""
        guesses, remats = self.guesses, self.values("remat")
        self.read([self.base.remat, *{"none"}.intersection(remats)])
        dims = [d for d in self.space.sizes if d not in self.loops]
        every = candidates(self.space, self.meshes, self.roles(dims), self.generated)
        if guesses.add(every, list(guesses.digests)):
            known = set(guesses.digests)
            self.read(remats)
            guesses.add(every, [remat for remat in guesses.digests if remat not in known])
        best: Entry | None = None
        improved = 0
        idle = max(FEW, IDLE * self.plans)
        while self.more(self.early) and len(self.costed.entries) - improved <= idle:
            guess = guesses.next(best is not None and best.fits)
            if guess is None:
                return
            entry = self.look(guess)
            if entry is not None and (best is None or self.costed.score(entry) < self.costed.score(best)):
                if best is None or not best.fits or entry.seconds < LITTLE * best.seconds:
                    improved = len(self.costed.entries)
                best = entry
                guesses.add_near(guess, entry, list(self.near(guess.candidate, dims)), self.turned(guess.knobs))

    def look(self, guess: Guess) -> Entry | None:
        """The exact cost of a guess, which corrects the others; None if its plan is refused."""
        knobs, (mesh, roles) = guess.knobs, (guess.candidate.mesh, guess.candidate.roles)
        plan = self.base.replace(
            mesh=mesh, layout=self.space.layout(mesh, roles), weight_update=knobs.update, remat=knobs.remat,
            microbatches=knobs.microbatches,
        )  # fmt: skip
        illegal, entry = self.costed.illegal, self.costed.look(plan)
        if entry is not None:
            self.guesses.costed(guess, entry)
        elif self.variants.canonical(plan) is None:
            self.guesses.refuse((guess.knobs.remat, guess.knobs.microbatches))
        elif self.costed.illegal > illegal:
            for role in guess.candidate.roles:
                if not self.may_share(role):
                    self.guesses.refuse(role)
            self.guesses.refuse(guess.roles)
        return entry

    def may_share(self, role: Role) -> bool:
        """True if these dims may have one axis of two devices."""
        try:
            partition(next(iter(self.guesses.digests.values())).graph, Mesh("x:2"), Layout(dict.fromkeys(role, ("x",))))
        except LayoutError:
            return False
        return True

    def more(self, most: int) -> bool:
        """True as long as fewer plans than this are costed; a refused one counts for a part."""
        return len(self.costed.entries) + len(self.costed.refused) / REFUSED < most

    def turned(self, knobs: Knobs) -> list[Knobs]:
        """The knobs with another value of one, or twice the micro-batches and another remat."""
        guesses = self.guesses
        counts = [
            m
            for m in guesses.microbatches
            if m in (knobs.microbatches, 2 * knobs.microbatches, knobs.microbatches // 2)
        ]
        found = [Knobs(r, knobs.update, m) for r in guesses.digests for m in counts]
        return [*found, *(replace(knobs, update=update) for update in guesses.updates)]

    def near(self, candidate: Candidate, dims: Sequence[str]) -> Iterator[Candidate]:
        """Candidates with one dim more or less in a role, or with the roles on another mesh of as many axes."""
        mesh, roles = candidate.mesh, candidate.roles
        fixed = [self.space.role(mesh, axis) for axis in mesh.axes]
        for (k, role), d in itertools.product(enumerate(roles), dims):
            if d in fixed[k]:
                continue
            other = tuple(sorted({*role} ^ {d}))
            moved = tuple(
                each if d in kept else tuple(x for x in each if x != d) for each, kept in zip(roles, fixed, strict=True)
            )
            for rest in dict.fromkeys((roles, moved)):
                every = (*rest[:k], other, *rest[k + 1 :])
                if self.space.allows(mesh, every):
                    yield Candidate(mesh, every)
        if not self.fixed.rules:
            for grid in (grid for grid in self.meshes if len(grid.axes) == len(mesh.axes)):
                orders = itertools.permutations(roles) if self.generated else [roles]
                yield from (Candidate(grid, each) for each in orders if self.space.allows(grid, each))

    @cached_property
    def late_turns(self) -> list[Turn]:
        """The knobs with values that are not estimated."""
        plan = self.base.replace(mesh=self.meshes[0], microbatches=max(self.guesses.microbatches))
        return [turn for turn in self.turns if any(map(turn.late, turn.candidates(plan)))]

    def late(self) -> None:
        """Try the knobs that are not estimated on the best plans."""
        for entry in self.costed.ranked()[:FINAL]:
            best = entry
            for turn in self.late_turns:
                for value in filter(turn.late, turn.candidates(best.plan)):
                    if not self.more(self.plans) or not self.may_help(turn.knob, value, best):
                        break
                    found = self.costed.look(best.plan.replace(**{turn.knob: value}))
                    if found is not None and self.costed.score(found) < self.costed.score(best):
                        best = found

    def may_help(self, knob: str, value: Any, entry: Entry) -> bool:
        """False for a value that the plan has no use for: it has no stages, or hardly any communication to hide."""
        in_stages = any(entry.mesh.count(entry.layout.axes(loop)) > 1 for loop in self.loops)
        if knob == "chunks":
            return in_stages
        return entry.exposed > HIDDEN and (knob != "overlap" or (value.mode == "ticks") == in_stages)

    def simplify(self) -> None:
        """Cost the best plan without one of its rules, where the estimate does not say that this is slower."""
        ranked = self.costed.ranked()
        while ranked and self.more(self.early):
            best = ranked[0]
            rules, fixed = best.layout.rules, self.fixed.rules
            for gone in [d for d in rules if d not in fixed]:
                fewer = Layout({d: cut for d, cut in rules.items() if d != gone}, overrides=best.layout.overrides)
                guess = self.guesses.simpler(best.plan, fewer)
                if guess <= SAME:
                    self.costed.look(best.plan.replace(layout=fewer))
            ranked = self.costed.ranked()
            if ranked[0] is best:
                return

    def other_updates(self) -> None:
        """Cost the best plan with each other weight update: what each exposes, the estimates hardly tell apart."""
        for best in self.costed.ranked()[:1]:
            for update in self.guesses.updates:
                if self.more(self.early):
                    self.costed.look(best.plan.replace(weight_update=update))

    @cached_property
    def floor(self) -> float:
        """The least seconds of any plan: the work of the step that recomputes nothing, over all devices.

        0 on a machine with a profile, whose measured times may be below the machine's figures.
        """
        if self.variants.machine.profile is not None:
            return 0.0
        free = {"remat": "none", "microbatches": 1}
        turned = {turn.knob for turn in self.turns}
        least = self.base.replace(**{name: value for name, value in free.items() if name in turned})
        graph = self.variants.problem(self.variants.canonical(least) or self.base).graph
        works = kernels(graph)
        return min(floor(works, self.variants.machine, mesh.size) for mesh in self.meshes) * (1 - ROUNDING)

    def lower_bound(self) -> float:
        """A lower bound of the seconds of every plan."""
        least = min((e.seconds for e in self.costed.entries.values() if e.fits), default=float("inf"))
        return least if self.complete else min(least, self.floor)

    def counts(self) -> Counts:
        """Number of plans by outcome."""
        costed = len(self.costed.entries)
        if self.complete:
            return Counts(len(self.meshes), self.size, self.size - costed, costed)
        ratios = self.guesses.ratios
        return Counts(
            len(self.meshes), self.guesses.estimated, len(self.costed.refused), costed,
            (min(ratios), max(ratios)) if ratios else None,
        )  # fmt: skip

    def result(self) -> SearchResult:
        """The result, after `run`; raises `LayoutError` if no plan fits."""
        ranked = self.costed.ranked()
        if not ranked:
            raise self.nothing_fits()
        return SearchResult(
            title=self.variants.title,
            machine=self.variants.machine,
            limit=self.variants.limit,
            best=ranked[0],
            runners_up=tuple(ranked[1:]),
            counts=self.counts(),
            bound=self.lower_bound(),
            complete=self.complete,
            stopped=self.stopped,
            knobs=tuple(turn.knob for turn in self.turns),
            fixed=self.not_turned(),
        )

    def not_turned(self) -> tuple[str, ...]:
        """The knobs of the step of which no candidate but the first could be made, with the first reason."""
        base, reasons = (self.variants.base.remat, self.variants.base.microbatches), list[str]()
        for k, name in enumerate(("remat", "microbatches")):
            alone = [why for step, why in self.variants.refused.items() if step[1 - k] == base[1 - k]]
            if alone and len({getattr(entry.plan, name) for entry in self.costed.entries.values()}) == 1:
                reasons.append(f"{title(name)}: {alone[0].splitlines()[0]}")
        return tuple(reasons)

    def nothing_fits(self) -> LayoutError:
        """The error if there is no result."""
        if not self.costed.entries:
            reasons = list(dict.fromkeys(self.costed.refused.values())) or ["no plan was costed"]
            return LayoutError("every plan is illegal\n\n" + "\n\n".join(reasons[:5]))
        entry = min(self.costed.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no plan costed fits {show_bytes(self.variants.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}:\n  " + str(entry.plan).replace("\n", "\n  ")
        )
