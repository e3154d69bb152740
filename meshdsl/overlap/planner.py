"""A planner has one program to plan, on one machine, and what all modes use: orders, parts, and their times.

A mode is a function of a planner that returns candidate plans, programs with their names, which the timeline judges. It
raises `NoEffectError` if it has none. `modes.PLANS` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import cast

from ..cost.machine import Machine
from ..cost.network import Placement
from ..errors.no_effect import NoEffectError
from ..ir import Eqn
from ..lowering.program import Program
from ..lowering.unroll import unroll
from .combine import combine
from .fences import fence, kernels_with_products
from .list_schedule import fastest_schedule, list_schedule, timed_schedule
from .memory_target import MemoryTarget
from .one_in_flight import one_in_flight
from .ranges import delays
from .tasks import Task, Tasks, ordered, tasks_of
from .values import Overlap

STAGGER = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # delays of later parts to try, in units of a collective's time
Candidates = Iterator[tuple[str, Program]]


def bodies(program: Program) -> Iterator[Program]:
    """The program, and the programs of its loops and branches."""
    yield program
    for eqn in program.eqns:
        for sub in eqn.graphs().values():
            yield from bodies(cast(Program, sub))


def fenced(program: Program, machine: Machine, placement: Placement) -> Program:
    """A planned program with fences; where the machine's compiler runs one collective at a time, so does it."""
    if machine.target.one_in_flight:
        program = one_in_flight(program, machine, placement)
    return fence(program, kernels_with_products(program))


class Planner:
    """The program, machine and request of one plan. The program is unrolled once, for the modes that keep no loops.

    `target` has the peak memory that orders should stay below; `paired` returns the program of a pipeline whose ticks
    have one loop over layers.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        placement: Placement,
        request: Overlap,
        target: MemoryTarget,
        paired: Callable[[], Program] | None = None,
    ):
        self.machine, self.placement, self.request, self.target = machine, placement, request, target
        self.program, self.paired = program, paired

    @property
    def alone(self) -> bool:
        """True if one mode is planned: without candidates, or without an effect of its options, it is an error."""
        return self.request.mode != "auto"

    @cached_property
    def too_large(self) -> bool:
        """True if the unplanned program needs more memory than the limit."""
        return self.target.measure(self.program).peak > self.target.limit

    @property
    def default_parts(self) -> bool:
        """True if no option is about parts."""
        return self.request.dim is None and self.request.parts == 2

    def no_effect(self, reason: str) -> NoEffectError:
        """The error of a mode that has no candidates, for this reason."""
        return NoEffectError(f"overlap={self.request.mode!r} has no effect: {reason}")

    @cached_property
    def unrolled(self) -> Program:
        """The program without loops, with a reduction for each row of a stack, for the stack, or for several gradients
        together, whichever is faster.

        One reduction of a stack cannot start before its last row; many have the latency of one each.
        """
        by_row, stacked = unroll(self.program), self.combined(unroll(self.program, math.inf))
        candidates = [by_row, self.combined(by_row), stacked]
        counts = {len(one.collectives): one for one in reversed(candidates)}
        if len(counts) == 1:
            return by_row
        return min(counts.values(), key=lambda one: self.seconds(self.in_order(one)))

    def combined(self, program: Program) -> Program:
        """The program with the collectives of gradients combined as far as the machine's compiler combines them."""
        limits = self.placement.network.combine
        return combine(program, limits) if limits else program

    def seconds(self, program: Program) -> float:
        return self.target.seconds(program)

    def tasks(self, program: Program) -> Tasks:
        return tasks_of(program, self.machine, self.placement)

    def in_order(self, program: Program, schedule: Callable[[Tasks], Sequence[Task]] = list_schedule) -> Program:
        tasks = self.tasks(program)
        return ordered(tasks, schedule(tasks))

    def listed(self, program: Program) -> Program:
        """The program in the order of the fastest list schedule, near the memory target."""
        return self.target.order(lambda limit: self.in_order(program, lambda tasks: fastest_schedule(tasks, limit)))

    def delayed(self, program: Program, part: Mapping[Eqn, int]) -> tuple[float, Callable[[float], Program]]:
        """The best of a few delays between the parts, in seconds; the order with it, given a limit of memory."""
        tasks = self.tasks(program)

        def order(hold: float, limit: float = math.inf) -> tuple[list[Task], float]:
            return timed_schedule(tasks, lambda t: t.tail - hold * part.get(t.eqn, 0), limit)

        best = min(delays(tasks, part, STAGGER), key=lambda hold: order(hold)[1])
        return best, lambda limit: ordered(tasks, order(best, limit)[0])

    def fenced(self, program: Program) -> Program:
        return fenced(program, self.machine, self.placement)

    def need_exchanges(self) -> None:
        """Raise `NoEffectError` unless the program has all_to_alls that run beside computation on this machine."""
        exchanges = any(record.op.timed_as == "all_to_all" for record in self.program.collectives)
        if not exchanges or "all_to_all" not in self.machine.asynchronous:
            raise self.no_effect(
                f"the program has no all_to_all that runs beside computation on {self.machine.name}, "
                "which it is about\n"
                "  use overlap='list' or 'halves', which move every kind of collective"
            )

    def cut_dims(self) -> list[str]:
        """The dims along which to try splitting the program: the requested one, or those of its data and of slots."""
        if self.request.dim is not None:
            return [self.request.dim]
        data = [v for v in self.program.ins if v.name.partition("/")[0] not in ("params", "state")]
        return list(dict.fromkeys([*(d.name for v in data for d in v.dims), *self.slot_dims()]))

    def slot_dims(self) -> Iterator[str]:
        """The dims of exchanged values that no input has and that the exchange neither splits nor joins."""
        of_inputs = {d.name for v in self.program.ins for d in v.dims}
        for eqn in (eqn for one in bodies(self.program) for eqn in one.eqns):
            if eqn.effect.exchanges:
                moved = {eqn.effect.joins, eqn.effect.cuts}
                yield from (d.name for d in eqn.ins[0].dims if d.name not in of_inputs | moved)
