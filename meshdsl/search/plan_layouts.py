"""The layouts of plans: the fastest ones of a few meshes, and those near a plan's, by the memo of the layout search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..compile.plan import Plan
from ..cost.machine import Machine
from ..errors import LayoutError
from ..errors.deadline import deadline
from ..layouts import Mesh
from ..lowering import Program
from .candidates import Candidates
from .costed import Costed
from .evaluate import Assignment, Entry
from .layout_costs import LayoutCosts
from .moves import meshes_near, named_rows, rows_near
from .request import SearchRequest
from .space import Row
from .variants import Variants

__all__ = ["PlanLayouts"]

FIRST_MESHES = 5
LAYOUTS_SHARE = 0.3  # of the time limit, for the first phase
LAYOUT_MOVES = 6  # layouts that are costed in a round


class PlanLayouts:
    """The layouts of each mesh for a plan's knobs; `costed` has the cost of all plans."""

    def __init__(
        self,
        variants: Variants,
        machine: Machine,
        request: SearchRequest,
        hints: Mapping[str, tuple[str, str]],
        assignment: Assignment | None,
    ):
        self.variants, self.machine, self.request = variants, machine, request
        self.hints, self.assignment = hints, assignment
        self.costed = Costed(variants, machine, request, assignment, self.partitioned)
        self._groups: dict[tuple[Plan, Mesh], Candidates] = {}

    def descended(self, meshes: Sequence[Mesh], starts: list[Plan]) -> Iterator[None]:
        """The fastest layout of a few meshes by the memo, ignoring memory, with the first plan's knobs."""
        base = self.variants.canonical(self.variants.base)
        if base is None:
            raise LayoutError(next(iter(self.variants.refused.values())))
        chosen = sorted(meshes, key=lambda mesh: (len(mesh.axes), *_skew(mesh)))[:FIRST_MESHES]
        best: list[tuple[float, Plan]] = []
        for mesh in chosen:
            if best and self.costed.elapsed > LAYOUTS_SHARE * (self.request.time_limit or math.inf):
                break
            group = self.group(base, mesh)
            row, seconds = (0,) * len(group.space.dims), math.inf
            named = list(named_rows(group.space, self.hints))
            for each in named:  # people's layouts fit where the fastest one does not
                self.costed.look(base.replace(mesh=mesh, layout=group.space.layout(each)))
                yield
            before = [near for _, plan in best for near in meshes_near(plan, [mesh])]
            known = [group.space.row(near.layout) for near in before if group.space.contains(near.layout)]
            rows = [*known, row, *named, *rows_near(group.space, row)]
            while rows:
                nearest = row
                for each in dict.fromkeys(rows):
                    amount = self.screened(group, each, seconds)
                    if amount < seconds:
                        nearest, seconds = each, amount
                    if (
                        self.costed.elapsed > LAYOUTS_SHARE * (self.request.time_limit or math.inf)
                        and seconds < math.inf
                    ):
                        break
                    yield
                rows, row = (rows_near(group.space, nearest) if nearest != row else []), nearest
            plan = base.replace(mesh=mesh, layout=group.space.layout(row))
            self.costed.look(plan)
            best.append((seconds, plan))
            yield
        starts += [plan for _, plan in sorted(best, key=lambda each: each[0])]

    def screened(self, group: Candidates, row: Row, enough: float) -> float:
        """The objective of a layout without sharded updates and overlap; stops early once it reaches `enough`."""
        if group.screen.usable and group.objective != "peak_bytes":
            with deadline(self.costed.time_left()):
                if enough < math.inf:
                    return group.screened(row, enough)
                return group.exact(row, enough)
        if group.by_rules(row)[group.objective] >= enough:
            return enough
        entry = self.costed.look(group.problem.plan.replace(mesh=group.space.mesh, layout=group.space.layout(row)))
        return math.inf if entry is None else getattr(entry, group.objective)

    def near(self, best: Entry) -> Iterator[Plan | None]:
        """Layouts that change one dim: those of least time without sharded updates, or of least memory if it lacks.

        Yields None after each bound.
        """
        plan = self.variants.canonical(best.plan.replace(weight_update="replicated", overlap="none"))
        if plan is None:
            return
        group = self.group(plan, best.mesh)
        try:
            row = group.space.row(best.layout)
        except ValueError:
            return
        exact = group.screen.usable and best.fits and group.objective != "peak_bytes"
        now = group.exact(row, math.inf) if exact else math.inf
        amounts: list[tuple[float, Row]] = []
        times = {now}  # layouts that take equal time have equal programs
        for near in rows_near(group.space, row):
            with deadline(self.costed.time_left()):
                amount = group.screened(near, 1.1 * now) if exact else group.by_rules(near)["peak_bytes"]
            if amount < 1.1 * now and not (exact and amount in times):
                amounts.append((amount, near))
                times.add(amount)
            yield None
        for _, near in sorted(amounts)[:LAYOUT_MOVES]:
            yield best.plan.replace(layout=group.space.layout(near))

    def group(self, knobs: Plan, mesh: Mesh) -> Candidates:
        """The candidates of a mesh for a plan's knobs, cached; only single layouts of it are looked at."""
        key = (knobs.replace(mesh="", layout=""), mesh)
        if key not in self._groups:
            costs = LayoutCosts([(self.variants.problem(key[0]), mesh)], self.machine, self.request, self.assignment)
            self._groups[key] = costs.meshes[0]
        return self._groups[key]

    def partitioned(self, plan: Plan) -> Program | None:
        """The program of a plan on a mesh whose layouts are lowered with a memo; None on others, and if illegal."""
        group = self._groups.get((plan.replace(mesh="", layout=""), plan.mesh))
        if group is None or not group.screen.usable or not group.space.contains(plan.layout):
            return None
        return group.screen.program(plan.layout)


def _skew(mesh: Mesh) -> tuple[int, ...]:
    """Two axes: small inner axes first, as in a node."""
    return tuple(reversed(mesh.axes.values()))
