"""Plan the overlap of one program: the plans that were tried, the one that runs, and the contents of its windows.

Each plan is a program, so timeline, memory and simulator judge it like any other. "auto" takes the fastest plan by the
timeline that fits the memory limit; the unchanged program is always a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.memory import Memory, memory
from ..cost.network import Placement
from ..cost.timeline import Timeline, timeline
from ..errors import LayoutError
from ..errors.no_effect import NoEffectError
from ..errors.units import show_bytes
from ..ir import Fuses, Op
from ..lowering.asynchrony import Start
from ..lowering.program import Program
from .fences import kernels_with_products, windows
from .memory_target import GROWTH, MemoryTarget
from .modes import PLANS
from .planner import Candidates, Planner, bodies, fenced
from .reasons import nothing_beside
from .values import Attempt, Overlap, OverlapPlan, OverlapWindow

Judged = tuple[Attempt, Program, Timeline]


def plan_overlap(
    program: Program,
    request: Overlap,
    machine: Machine,
    placement: Placement,
    donated: Collection[int] = (),
    paired: Callable[[], Program] | None = None,
    plans: Callable[[Planner], Candidates] | None = None,
) -> tuple[Program, OverlapPlan]:
    """The program in the planned order, with fences, and the plan.

    `donated` are the numbers of the inputs whose memory results may reuse. `paired` returns the program of a pipeline
    in whose ticks one loop computes the layers of two micro-batches, one forward and one backward. `plans` are those to
    judge instead of the request's mode.

    Raises `NoEffectError` if the mode has no effect in this program, and `LayoutError` if its plan exceeds the memory
    limit.
    """
    limit = machine.hbm if request.memory_limit is None else request.memory_limit

    def used(one: Program) -> Memory:
        return memory(one, donated=[one.ins[i] for i in donated], machine=machine)

    def timed(one: Program) -> Timeline:
        return timeline(ledger(one), machine, placement)

    def judged(name: str, one: Program) -> Judged:
        time, peak = timed(one), used(one).peak
        over = f"{show_bytes(peak)} of memory, over the limit of {show_bytes(limit)}" if peak > limit else ""
        return Attempt(name, time.seconds, time.exposed, peak, over), one, time

    plain = judged("none", program)
    if not any(record.op.timed_as in machine.asynchronous for record in program.collectives):
        if request == Overlap("auto", memory_limit=request.memory_limit):
            return program, OverlapPlan(request.mode, machine.name, "none", (plain[0],))
        kinds = ", ".join(machine.asynchronous) or "none"
        raise NoEffectError(
            f"overlap={request.mode!r} has no effect: the program sends nothing that {machine.name} can overlap\n"
            f"  kinds that run beside computation there: {kinds}; use overlap='none'"
        )

    near = min(limit, GROWTH * plain[0].peak_bytes) if request.memory_limit is None else limit
    target = MemoryTarget(
        lambda one: used(fenced(one, machine, placement)), lambda one: timed(one).seconds, near, limit
    )
    planner = Planner(program, machine, placement, request, target, paired)
    plans = plans or PLANS[request.mode]
    candidates = [plain, *(judged(name, planner.fenced(one)) for name, one in plans(planner))]
    chosen = _best(request, candidates)
    if request.mode != "auto" and not _has_effect(*chosen[:2], plain[0]):
        raise NoEffectError(
            f"overlap={request.mode!r} has no effect: {nothing_beside(program)}\n"
            "  use overlap='auto', which may choose none"
        )
    attempt, best, time = chosen
    attempts = tuple(one for one, _, _ in candidates)
    return best, OverlapPlan(request.mode, machine.name, attempt.name, attempts, tuple(_windows(best, time)))


def _best(request: Overlap, candidates: Sequence[Judged]) -> Judged:
    """The fastest plan that fits in memory; under "auto", the unchanged program is one of them.

    Raises `LayoutError` if no plan fits. Under "auto" and without a limit by the user, the program is unchanged then.
    """
    own = candidates if request.mode == "auto" else candidates[1:]
    fitting = [one for one in own if not one[0].rejected]
    if fitting:
        return min(fitting, key=lambda one: one[0].seconds)
    if request.mode == "auto" and request.memory_limit is None:
        return candidates[0]
    least = min(own, key=lambda one: one[0].peak_bytes)[0]
    other = "set a higher memory_limit" if request.mode == "auto" else "use overlap='auto', which keeps to the limit"
    raise LayoutError(f"overlap={request.mode!r} needs {least.rejected}\n  {other}")


def _has_effect(attempt: Attempt, program: Program, plain: Attempt) -> bool:
    """True if a plan saves memory, or computes or starts something between the start and the wait of a collective."""
    if plain.rejected or attempt.peak_bytes < plain.peak_bytes:
        return True
    inside = (eqn for body in bodies(program) for eqns in windows(body).values() for eqn in eqns if eqn.ins)
    return any(not isinstance(eqn.op, Op) or eqn.op.fuses is not Fuses.VIEW for eqn in inside)


def _windows(program: Program, time: Timeline) -> Iterator[OverlapWindow]:
    costs = {cost.line.eqn: cost for cost in time.costs}
    for body in bodies(program):
        kernels = kernels_with_products(body).products
        for start, eqns in windows(body).items():
            inside = tuple((str(one.op), str(one.where)) for eqn in eqns for one in kernels.get(eqn, ()))
            cost = costs.get(start)
            if cost is None:  # in an arm of a branch that the time does not count, as the other one is longer
                continue
            assert isinstance(start.op, Start)
            yield OverlapWindow(
                str(start.op.collective), str(start.where), str(start.cause), cost.seconds, cost.exposed, inside
            )
