"""Search over plans: mesh and layout, and of a training step its weight update, rematerialisation and other knobs.

If there are few plans, every one is costed. Otherwise all candidates are estimated, under every combination of knobs
(`screen`), and the most promising are costed exactly; each exact cost corrects the estimates of plans that are alike.
Plans that differ from the best one in one choice are estimated and costed too. At the end, knobs that are not
estimated (overlap, collective steps, groups of updates, chunks of stages) are tried on the two best plans. No clock
stops a search: the same question has the same answer.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..compile.plan import Plan
from ..errors import LayoutError
from ..errors.units import show_bytes
from ..ir import walk
from ..layouts import Layout, Mesh
from ..layouts.layout import PARAMS
from ..lowering.partition import partition
from .costed import SAME, Costed
from .digest import Digest, digest
from .evaluate import Entry
from .floor import floor, kernels
from .guesses import Guess, Guesses, Knobs, plan_of
from .knobs import Turn, title
from .result import Counts, SearchProgress, SearchResult
from .roles import ROLES, best_roles, candidates, named_roles
from .screen import Candidate
from .space import Role, Space
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


class PlanSearch:
    """The state of a search over plans. `generated`: the meshes are all those of a number of devices."""

    def __init__(
        self,
        variants: Variants,
        meshes: Sequence[Mesh],
        turns: Sequence[Turn],
        hints: Mapping[str, tuple[str, str]],
        start: Plan | None = None,
        generated: bool = False,
    ):
        self.variants, self.request, self.turns = variants, variants.request, turns
        self.costed = Costed(variants, self.tell)
        self.meshes, self.hints, self.start, self.generated = list(meshes), hints, start, generated
        self.complete = False  # every plan is costed
        self.stopped = ""

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
        if self.request.progress is not None:
            self.request.progress(SearchProgress(self.counts(), self.costed.best(), self.lower_bound()))

    @cached_property
    def base(self) -> Plan:
        """The plan whose knobs are not turned."""
        return self.variants.canonical(self.variants.base) or self.variants.base

    @cached_property
    def plans(self) -> int:
        """The number of plans to cost; by default, fewer of long programs, each of which takes longer."""
        if self.request.plans is not None:
            return self.request.plans
        equations = sum(1 for _ in walk(self.variants.problem(self.base.replace(mesh="", layout="")).graph))
        return max(LEAST, min(USUAL, EQUATIONS // equations))

    @cached_property
    def early(self) -> int:
        """The number of plans to cost before the knobs that are not estimated."""
        return self.plans - (round(self.plans * LATE) if self.late_turns else 0)

    @cached_property
    def space(self) -> Space:
        """The layouts of the step."""
        return self.request.space(self.variants.problem(self.base.replace(mesh="", layout="")).graph)

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
        own, by_layout = getattr(self.base, knob), PARAMS in self.request.fixed.rules
        turn = next((turn for turn in self.turns if turn.knob == knob), None)
        if turn is None or (knob == "weight_update" and by_layout):
            return [own]
        return [v for v in self.tried(turn, self.base) if v == own or not turn.late(v)]

    @cached_property
    def digests(self) -> dict[str, Digest]:
        """The digest of each step, by its first value of remat."""
        found: dict[str, Digest] = {}
        for remat in self.values("remat"):
            whole = self.variants.canonical(self.base.replace(remat=remat, microbatches=1))
            known = whole or self.variants.canonical(self.base.replace(remat=remat))
            if known is not None and known.remat not in found:
                problem = self.variants.problem(known.replace(mesh="", layout=""))
                found[known.remat] = digest(problem.graph, problem.results)
        return found

    @cached_property
    def guesses(self) -> Guesses:
        """The estimates."""
        updates, counts = self.values("weight_update"), self.values("microbatches")
        return Guesses(self.digests, self.request.machine, self.request.limit, updates, counts)

    def estimated(self) -> None:
        """Cost the most promising of all candidates, and what is near the best."""
        guesses, loops = self.guesses, next(iter(self.digests.values())).loops
        dims = [d for d in self.space.sizes if d not in loops]
        roles = [*named_roles(self.hints, self.space), *best_roles(guesses.score, self.space, dims, self.meshes)]
        staged = [(d,) for d in self.space.sizes if d in loops and max(guesses.microbatches) > 1]
        roles = list(dict.fromkeys((*roles[:5], *staged, *roles[5:])))[:ROLES]
        guesses.add(candidates(self.space, self.meshes, roles, self.generated))
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
        plan = plan_of(self.base, guess, self.space.layout)
        illegal, entry = self.costed.illegal, self.costed.look(plan)
        if entry is not None:
            self.guesses.costed(guess, entry)
        elif self.variants.canonical(plan) is None:
            self.guesses.refused.add((guess.knobs.remat, guess.knobs.microbatches))
        elif self.costed.illegal > illegal:
            roles = guess.candidate.roles
            self.guesses.refused.update(role for role in roles if not self.may_share(role))
            self.guesses.refused.add(tuple(sorted(roles)))
        return entry

    def may_share(self, role: Role) -> bool:
        """True if these dims may have one axis of two devices."""
        try:
            partition(next(iter(self.digests.values())).graph, Mesh("x:2"), Layout(dict.fromkeys(role, ("x",))))
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
        if not self.request.fixed.rules:
            for grid in (grid for grid in self.meshes if len(grid.axes) == len(mesh.axes)):
                orders = itertools.permutations(roles) if self.generated else [roles]
                yield from (Candidate(grid, each) for each in orders if self.space.allows(grid, each))

    @cached_property
    def late_turns(self) -> list[tuple[str, Turn]]:
        """The knobs with values that are not estimated; groups of updates, which seldom help, last."""
        plan = self.base.replace(mesh=self.meshes[0], microbatches=max(self.guesses.microbatches))
        late = [(turn.knob, turn) for turn in self.turns if any(map(turn.late, turn.candidates(plan)))]
        return sorted(late, key=lambda each: each[0] == "weight_update")

    def late(self) -> None:
        """Try the knobs that are not estimated on the best plans."""
        for entry in self.costed.ranked()[:FINAL]:
            best = entry
            for knob, turn in self.late_turns:
                for value in filter(turn.late, turn.candidates(best.plan)):
                    if not self.more(self.plans) or not self.may_help(knob, value, best):
                        break
                    found = self.costed.look(best.plan.replace(**{knob: value}))
                    if found is not None and self.costed.score(found) < self.costed.score(best):
                        best = found

    def may_help(self, knob: str, value: Any, entry: Entry) -> bool:
        """False for a value that the plan has no use for: it has no stages, or hardly any communication to hide."""
        plan, loops = entry.plan, next(iter(self.digests.values())).loops
        in_stages = any(plan.mesh.count(plan.layout.axes(loop)) > 1 for loop in loops)
        match knob:
            case "chunks":
                return in_stages
            case "overlap":
                return entry.exposed > HIDDEN and (value.mode == "ticks") == in_stages
            case "steps":
                return entry.exposed > HIDDEN
            case _:
                return plan.weight_update.mode != "replicated"

    def simplify(self) -> None:
        """Cost the best plan without one of its rules, where the estimate does not say that this is slower."""
        ranked = self.costed.ranked()
        while ranked and self.more(self.early):
            best = ranked[0]
            rules, fixed = best.layout.rules, self.request.fixed.rules
            for gone in [d for d in rules if d not in fixed]:
                fewer = Layout({d: cut for d, cut in rules.items() if d != gone}, overrides=best.layout.overrides)
                guess = self.guesses.simpler(best.plan, fewer)
                if guess <= SAME:
                    self.costed.look(best.plan.replace(layout=fewer))
            ranked = self.costed.ranked()
            if ranked[0] is best:
                return

    @cached_property
    def floor(self) -> float:
        """The least seconds of any plan: the work of the step that recomputes nothing, over all devices.

        0 on a machine with a profile, whose measured times may be below the machine's figures.
        """
        if self.request.machine.profile is not None:
            return 0.0
        free = {"remat": "none", "microbatches": 1}
        turned = {turn.knob for turn in self.turns}
        least = self.base.replace(**{name: value for name, value in free.items() if name in turned})
        graph = self.variants.problem(self.variants.canonical(least) or self.base).graph
        works = kernels(graph)
        return min(floor(works, self.request.machine, mesh.size) for mesh in self.meshes) * (1 - ROUNDING)

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
            machine=self.request.machine,
            limit=self.request.limit,
            best=ranked[0],
            runners_up=tuple(ranked[1:]),
            counts=self.counts(),
            bound=self.lower_bound(),
            complete=self.complete,
            stopped=self.stopped,
            knobs=tuple(turn.knob for turn in self.turns),
            fixed=self.fixed(),
        )

    def fixed(self) -> tuple[str, ...]:
        """The knobs of the step of which no candidate but the first could be made, with the first reason."""
        costed = [entry.plan for entry in self.costed.entries.values()]
        reasons: list[str] = []
        for name in ("remat", "microbatches"):
            other = "microbatches" if name == "remat" else "remat"
            tried = {
                self.variants.base.replace(remat=r, microbatches=m): why
                for (r, m), why in self.variants.refused.items()
            }
            alone = [why for plan, why in tried.items() if getattr(plan, other) == getattr(self.variants.base, other)]
            if alone and len({getattr(plan, name) for plan in costed}) == 1:
                reasons.append(f"{title(name)}: {alone[0].splitlines()[0]}")
        return tuple(reasons)

    def nothing_fits(self) -> LayoutError:
        """The error if there is no result."""
        if not self.costed.entries:
            reasons = list(dict.fromkeys(self.costed.refused.values())) or ["no plan was costed"]
            return LayoutError("every plan is illegal\n\n" + "\n\n".join(reasons[:5]))
        entry = min(self.costed.entries.values(), key=lambda e: e.peak_bytes)
        return LayoutError(
            f"no plan costed fits {show_bytes(self.request.limit)} on each device\n"
            f"  the smallest needs {show_bytes(entry.peak_bytes)}:\n  " + str(entry.plan).replace("\n", "\n  ")
        )
