"""All plans of a search: their number, every combination of knobs, and the least work of any of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from ..compile.plan import Plan
from ..dims import Dim
from ..ir import walk
from ..layouts import Mesh
from ..pipelines import bubble
from .evaluate import watts
from .floor import floor, kernels
from .knobs import Turn
from .request import ROUNDING
from .variants import Variants


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
        """True if a plan keeps the requested rules, and uses only the requested axes, one a dim if so requested."""
        r, rules = self.request, plan.layout.rules
        free = [cut for dim, cut in rules.items() if dim not in r.fixed.rules]
        return (
            all(rules.get(dim) == cut for dim, cut in r.fixed.rules.items())
            and plan.layout.overrides == r.fixed.overrides
            and all(r.axes is None or axis in r.axes for cut in free for axis in cut)
            and (r.several is not False or all(len(cut) <= 1 for cut in free))
        )

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
        """The least of the objective of any plan: the work of the step that recomputes nothing, over all devices."""
        free = {"remat": "none", "microbatches": 1}
        turned = {turn.knob for turn in self.turns}
        least = self._base().replace(**{name: value for name, value in free.items() if name in turned})
        graph = self.variants.problem(self.variants.canonical(least) or self._base()).graph
        machine, works = self.request.machine, kernels(graph)
        stored = sum(math.prod(d.size for d in v.dims) * v.dtype.itemsize for v in graph.ins)
        of_mesh: dict[str, Callable[[Mesh], float]] = {
            "seconds": lambda mesh: floor(works, machine, mesh.size),
            "energy": lambda mesh: floor(works, machine, mesh.size) * watts(machine, mesh),
            "peak_bytes": lambda mesh: stored / mesh.size,
            "wire_bytes": lambda mesh: 0.0,
        }
        return min(map(of_mesh[self.request.objective], self.meshes)) * (1 - ROUNDING)
