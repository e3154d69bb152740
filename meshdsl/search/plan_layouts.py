"""The layouts of plans: the fastest ones of a few meshes, and those near a plan's, by the time of their programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..compile.plan import Plan
from ..control import KEEP
from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.timeline import timeline
from ..errors import LayoutError
from ..ir import walk
from ..layouts import Layout, Mesh
from ..layouts.sharding import Axes
from ..lowering.partition import partition
from ..updates.bucket_collectives import bucket_collectives
from .costed import Costed
from .evaluate import Entry, SearchProblem
from .moves import divided, meshes_near, named_rows, rows_near
from .plan_space import PlanSpace
from .space import Row, Space

LAYOUTS_SHARE = 0.3  # of the time limit, for the first phase
LAYOUT_MOVES = 6  # layouts that are costed in a round
SLOWER = 1.1  # layouts that may be faster under a sharded update, by time over that of the best plan's layout


@dataclass(frozen=True)
class Candidates:
    """The layouts of one mesh for the knobs of one problem."""

    problem: SearchProblem
    space: Space
    machine: Machine
    times: dict[Row, float] = field(default_factory=dict[Row, float])

    @cached_property
    def timed(self) -> bool:
        """True if the result of `partition` has the time of the compiled program: no later pass changes it."""
        return self.problem.plain and not any(eqn.op is KEEP for eqn, _ in walk(self.problem.graph))

    def seconds(self, row: Row) -> float:
        """The seconds of a layout's program; infinite for an illegal one. Requires `timed`."""
        if row not in self.times:
            self.times[row] = self._seconds(self.space.layout(row))
        return self.times[row]

    def _seconds(self, layout: Layout) -> float:
        try:
            program = partition(self.problem.graph, self.space.mesh, layout, self.problem.results)
        except LayoutError:
            return math.inf
        program = self.machine.target.prepare(bucket_collectives(program))
        return timeline(ledger(program), self.machine).seconds

    def stored(self, row: Row) -> float:
        """The bytes of the inputs on one device, as sharded by their rules."""
        layout, count = self.space.layout(row).on(self.space.mesh), self.space.mesh.count
        total = 0
        for v in self.problem.graph.ins:
            rules = layout.for_path(v.name)
            total += math.prod(-(-d.size // count(rules.get(d.name, ()))) for d in v.dims) * v.dtype.itemsize
        return float(total)


class PlanLayouts:
    """The layouts of each mesh for a plan's knobs; `costed` has the cost of all plans."""

    def __init__(self, space: PlanSpace, hints: Mapping[str, tuple[str, str]], costed: Costed):
        self.space, self.hints, self.costed = space, hints, costed
        self.variants, self.request = space.variants, space.request
        self.fastest: list[Plan] = []  # the fastest layout of each mesh so far
        self._groups: dict[tuple[Plan, Mesh], Candidates] = {}

    def ordered(self, meshes: Sequence[Mesh]) -> list[Mesh]:
        """Meshes with few axes first; of these, those with a small inner axis, as in a node."""
        return sorted(meshes, key=lambda mesh: (len(mesh.axes), *reversed(mesh.axes.values())))

    def descended(self, mesh: Mesh) -> Plan:
        """The fastest layout of a mesh, ignoring memory, with the first plan's knobs; costs the named layouts too."""
        base = self.variants.canonical(self.variants.base)
        if base is None:
            raise LayoutError(next(iter(self.variants.refused.values())))
        group = self.group(base, mesh)
        row, seconds = (0,) * len(group.space.dims), math.inf
        named = list(named_rows(group.space, self.hints))
        for each in named:  # people's layouts fit where the fastest one does not
            least = self.costed.least()
            if least == math.inf or self.screened(group, each) < least:
                self.costed.look(base.replace(mesh=mesh, layout=group.space.layout(each)))
        rows = [*self.rows_of_fastest(group, mesh), row, *named, *rows_near(group.space, row)]
        while rows:
            nearest = row
            for each in dict.fromkeys(rows):
                time = self.screened(group, each)
                if time < seconds:
                    nearest, seconds = each, time
                if self.late() and seconds < math.inf:
                    break
            rows, row = (rows_near(group.space, nearest) if nearest != row else []), nearest
        plan = base.replace(mesh=mesh, layout=group.space.layout(row))
        self.fastest.append(plan)
        return plan

    def late(self) -> bool:
        """True if the time of the first phase is over."""
        return self.costed.elapsed > LAYOUTS_SHARE * (self.request.time_limit or math.inf)

    def screened(self, group: Candidates, row: Row) -> float:
        """The seconds of a layout, without sharded updates and overlap."""
        if group.timed:
            with self.costed.evaluation():
                return group.seconds(row)
        entry = self.costed.look(group.problem.plan.replace(mesh=group.space.mesh, layout=group.space.layout(row)))
        return math.inf if entry is None else entry.seconds

    def seconds(self, plan: Plan) -> float:
        """The seconds of a plan without pipelines, recomputation, sharded updates and overlap; 0 if unknown."""
        base = self.variants.base.replace(microbatches=plan.microbatches)
        known = self.variants.canonical(base.replace(weight_update="replicated", overlap="none", steps="flat"))
        group = None if known is None else self.group(known, plan.mesh)
        if group is None or not group.space.contains(plan.layout):
            return math.inf
        with self.costed.evaluation():
            return group.seconds(group.space.row(plan.layout)) if group.timed else 0.0

    def near(self, best: Entry) -> Iterator[Plan]:
        """Layouts that give one dim other axes: those of least time without sharded updates, or of least memory if it
        lacks.
        """
        yield from self._best_of(best, [(best.plan, ())])

    def divided(self, best: Entry) -> Iterator[Plan]:
        """The same on meshes that divide an axis, for layouts that use one of its parts alone."""
        meshes = self.space.meshes
        plans = [(plan, parts) for plan, parts in divided(best.plan, meshes) if self.space.keeps_request(plan)]
        yield from self._best_of(best, plans)

    def rows_of_fastest(self, group: Candidates, mesh: Mesh) -> Iterator[Row]:
        """The rows, on this mesh, of the fastest layouts of the meshes before."""
        for plan in self.fastest:
            for near in (*meshes_near(plan, [mesh]), *(each for each, _ in divided(plan, [mesh]))):
                if group.space.contains(near.layout):
                    yield group.space.row(near.layout)

    def _best_of(self, best: Entry, plans: Sequence[tuple[Plan, Axes]]) -> Iterator[Plan]:
        """The best layouts near some plans; where two axes are given, those that give one of them alone to a dim."""
        found: list[tuple[float, Plan]] = []
        for plan, parts in plans:
            known = self.variants.canonical(plan.replace(weight_update="replicated", overlap="none"))
            if known is None:
                return
            group = self.group(known, plan.mesh)
            if not group.space.contains(plan.layout):
                continue
            exact = group.timed and best.fits
            near = self._near(group, group.space.row(plan.layout), parts, exact)
            found += [(amount, plan.replace(layout=layout)) for layout, amount in near]
        found.sort(key=lambda pair: pair[0])
        yield from (near for _, near in found[:LAYOUT_MOVES])

    def _near(self, group: Candidates, row: Row, parts: Axes, exact: bool) -> Iterator[tuple[Layout, float]]:
        """The layouts near a row that may help, with their seconds, or stored bytes unless `exact`."""
        now = group.seconds(row) if exact else math.inf
        times = {now}  # layouts that take equal time have equal programs
        for near in rows_near(group.space, row):
            layout = group.space.layout(near)
            if parts and all((parts[0] in cut) == (parts[1] in cut) for cut in layout.rules.values()):
                continue
            with self.costed.evaluation():
                amount = group.seconds(near) if exact else group.stored(near)
            if amount < SLOWER * now and not (exact and amount in times):
                yield layout, amount
            times.add(amount)

    def group(self, knobs: Plan, mesh: Mesh) -> Candidates:
        """The candidates of a mesh for a plan's knobs, cached; only single layouts of it are looked at."""
        key = (knobs.replace(mesh="", layout=""), mesh)
        if key not in self._groups:
            problem, r = self.variants.problem(key[0]), self.request
            candidates = r.space(problem.graph, mesh)
            self._groups[key] = Candidates(problem, candidates, r.machine)
        return self._groups[key]
