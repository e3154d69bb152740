"""All plans of a search: their number, every combination of knobs, and the least work of any of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from ..compile.plan import Plan
from ..dims import Dim
from ..ir import walk
from ..layouts import Mesh
from ..pipelines import bubble
from .floor import floor, kernels
from .knobs import Turn
from .variants import Variants

ROUNDING = 1e-9  # relative tolerance: the floor sums the same numbers in another order


class PlanSpace:
    """The plans over some meshes and knobs."""

    def __init__(self, variants: Variants, meshes: Sequence[Mesh], turns: Sequence[Turn]):
        self.variants, self.meshes, self.request, self.turns = variants, list(meshes), variants.request, turns

    def combinations(self) -> Iterator[Plan]:
        """Every combination of mesh and knobs."""
        plans = [self.variants.base.replace(mesh=mesh) for mesh in self.meshes]
        for turn in self.turns:
            plans = [
                plan.replace(**{turn.knob: value})
                for plan in plans
                for value in dict.fromkeys([getattr(plan, turn.knob), *turn.candidates(plan)])
            ]
        yield from plans

    def keeps_request(self, plan: Plan) -> bool:
        """True if a plan keeps the requested rules."""
        fixed, layout = self.request.fixed, plan.layout
        kept = all(layout.rules.get(dim) == cut for dim, cut in fixed.rules.items())
        return kept and layout.overrides == fixed.overrides

    @cached_property
    def loops(self) -> tuple[Dim, ...]:
        """The dims of the step's loops that may be in stages, such as that of the layers."""
        plain = self.variants.canonical(self.variants.base.replace(microbatches=1))
        if plain is None:
            return ()
        graph = self.variants.problem(plain).graph
        return tuple(dict.fromkeys(eqn.scan.dim for eqn, _ in walk(graph) if eqn.scan is not None))

    def stages(self, plan: Plan) -> dict[Dim, int]:
        """The dims of loops whose layers run in pipeline stages, with the number of stages."""
        counts = {dim: plan.mesh.count(plan.layout.axes(dim.name)) for dim in self.loops}
        return {dim: n for dim, n in counts.items() if n > 1 and plan.microbatches > 1}

    def shorter(self, plan: Plan, chunks: int) -> float:
        """The time of a pipeline with so many chunks over that of the plan, by their bubbles; infinite without one."""
        for dim, stages in self.stages(plan).items():
            if 1 < chunks <= min(stages, -(-dim.size // stages)) and not plan.microbatches % stages:
                now, then = (bubble(stages, plan.microbatches, v) for v in (plan.chunks, chunks))
                return (1 - now) / (1 - then)
        return math.inf

    @cached_property
    def size(self) -> int:
        """Number of plans: combinations of mesh and knobs, times the combinations of axes for the dims."""
        graph = self.variants.problem(self._base()).graph
        knobs = Counter(plan.mesh for plan in self.combinations())
        return sum(self.request.space(graph, mesh).size * knobs[mesh] for mesh in self.meshes)

    def _base(self) -> Plan:
        return self.variants.canonical(self.variants.base) or self.variants.base

    @cached_property
    def floor(self) -> float:
        """The least seconds of any plan: the work of the step that recomputes nothing, over all devices.

        0 on a machine with a profile, whose measured times may be below the machine's figures.
        """
        if self.request.machine.profile is not None:
            return 0.0
        free = {"remat": "none", "microbatches": 1}
        turned = {turn.knob for turn in self.turns}
        least = self._base().replace(**{name: value for name, value in free.items() if name in turned})
        graph = self.variants.problem(self.variants.canonical(least) or self._base()).graph
        works = kernels(graph)
        return min(floor(works, self.request.machine, mesh.size) for mesh in self.meshes) * (1 - ROUNDING)
