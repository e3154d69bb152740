"""What Lancet compares itself with, as plans that `benchmarks.overlap` judges beside those of `overlap=`.

- `experts`: only dispatch, experts and combine in parts of their slots, as in Tutel (Hwang et al., 2023) and FasterMoE
  (He et al., 2022);
- `partition`: the ranges of Lancet's forward pass in parts, without its schedule of weight gradients (section 5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import meshdsl as md
from meshdsl.cost.network import place
from meshdsl.overlap.lancet import lancet
from meshdsl.overlap.plan import plan_overlap
from meshdsl.overlap.planner import Planner
from meshdsl.overlap.ranges import expert_ranges, pipelined, reductions_early
from meshdsl.overlap.reasons import no_parts
from meshdsl.overlap.split import split
from meshdsl.overlap.values import OverlapPlan

DEGREES = (2, 4, 8)  # numbers of parts to try, as Tutel does


def experts(planner: Planner) -> Iterator[tuple[str, md.Program]]:
    """Dispatch, experts and combine of each layer in parts of their slots; in 2, 4 and 8 parts if slots divide."""
    planner.need_exchanges()
    program = planner.unrolled
    ranges = list(expert_ranges(program.eqns))
    among = {eqn for eqns in ranges for eqn in eqns}
    dims = [planner.request.dim] if planner.request.dim is not None else list(dict.fromkeys(planner.slot_dims()))
    cuts = {(n, dim): split(program, dim, n, among=among) for n in DEGREES for dim in dims}
    for (n, dim), parts in cuts.items():
        if parts.bytes_sent:
            one = pipelined(parts, ranges, planner.machine, planner.placement)
            yield f"experts in {n} parts of {dim}", planner.in_order(one, lambda tasks: reductions_early(tasks.all))
    if not any(parts.bytes_sent for parts in cuts.values()):
        reasons = [no_parts(program, dim, n, parts) for (n, dim), parts in cuts.items() if n == 2]
        raise planner.no_effect("\n  ".join(["no all_to_all runs in parts", *reasons]))


def planned(
    mode: str, program: md.Program, machine: md.Machine, dim: str | None = None, donated: Collection[int] = ()
) -> tuple[md.Program, OverlapPlan]:
    """The program under one of the baselines, and its plan."""
    placement = place(machine.network, program.mesh)
    return plan_overlap(program, md.Overlap("lancet", dim=dim), machine, placement, donated, plans=BASELINES[mode])


BASELINES = {"experts": experts, "partition": partial(lancet, gradients=False)}
