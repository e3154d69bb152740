"""Pipelines: each pass of a tick runs beside the messages of the other, or both in one loop, layer by layer."""

from __future__ import annotations

from ..errors.no_effect import NoEffectError
from ..lowering.program import Program
from .list_schedule import fastest_schedule
from .loops import bodies_in_order, in_parts, no_loop_in_parts
from .planner import Candidates, Planner


def ticks(planner: Planner) -> Candidates:
    """The program of a pipeline with every loop body in an order of its own; and that with paired ticks.

    The ticks before and after the paired ones have one pass, whose parts hide the communication of each other. Outside
    of loops, collectives that start early would need more memory than they save time.
    """
    if planner.paired is None:
        raise planner.no_effect(
            "no loop over 2 micro-batches or more runs in pipeline stages\n"
            "  map the dim of the layers to an axis and divide the batch with microbatches=, without unroll=True; "
            "or use overlap='list'"
        )

    def order(body: Program) -> Program:
        return planner.in_order(body, fastest_schedule)

    yield "a loop for each pass", bodies_in_order(planner, planner.program, order)
    paired = planner.paired()
    yield "one loop for both passes", bodies_in_order(planner, paired, order)
    cut = list(in_parts(planner, paired, _is_of_one_pass))
    for name, program in cut:
        yield f"one loop for both passes, the others in {name}", program
    if not cut and planner.alone and not planner.default_parts:
        raise NoEffectError(
            "dim and parts have no effect with overlap='ticks': in ticks of one pass, no collective has parts\n"
            f"{no_loop_in_parts(planner)}  leave dim and parts out"
        )


def _is_of_one_pass(body: Program) -> bool:
    """True unless a loop's body sends in both passes."""
    return len({eqn.backward for eqn in body.eqns if eqn.sends}) < 2
