"""The candidate plans of each mode: programs in an order of their own, to be judged by the timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from ..cost.machine import Machine
from ..cost.network import Placement
from ..errors.deadline import check_deadline
from ..errors.no_effect import NoEffectError
from ..errors.units import seconds
from ..ir import Eqn
from ..lowering.program import Program
from ..lowering.unroll import unroll
from .combine import combine
from .fences import fence, kernels_with_products
from .insertion import improved_schedule
from .lancet import lancet
from .late_sends import late_sends
from .list_schedule import list_schedule
from .loops import LoopsInParts
from .memory_target import MemoryTarget
from .one_in_flight import one_in_flight
from .ranges import delays, expert_ranges, pipelined, reductions_early, staggered
from .reasons import no_parts, no_rings, no_skew
from .ring_products import faster_rings, ring_products, rings
from .skew import gathers_ahead, gradients_behind, skew
from .split import Parts, cuts_along, split
from .tasks import Task, Tasks, ordered, tasks_of
from .values import Overlap
from .weight_gradients import dw_schedule

DEGREES = (2, 4, 8)  # numbers of parts to try for experts, as Tutel does
STAGGER = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # delays of later parts to try, in units of a collective's time
NEARLY = 0.9  # cuts whose communication in parts is at least this fraction of the largest are compared by their time


def fenced(program: Program, machine: Machine, placement: Placement) -> Program:
    """A planned program with fences; where the machine's compiler runs one collective at a time, so does it."""
    if machine.target.one_in_flight:
        program = one_in_flight(program, machine, placement)
    return fence(program, kernels_with_products(program))


def bodies(program: Program) -> Iterator[Program]:
    """The program, and the programs of its loops and branches."""
    yield program
    for eqn in program.eqns:
        for sub in eqn.graphs().values():
            yield from bodies(cast(Program, sub))


class Planner:
    """The plans of one program on one machine, by mode. The program is unrolled once, for the modes that keep no loops.

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

    @cached_property
    def unrolled(self) -> Program:
        """The program without loops."""
        return self.unroll(self.program)

    def unroll(self, program: Program) -> Program:
        """The program without loops, with a reduction for each row of a stack, for the stack, or for several gradients
        together, whichever is faster.

        One reduction of a stack cannot start before its last row; many have the latency of one each.
        """
        by_row, stacked = unroll(program), self.combined(unroll(program, math.inf))
        candidates = [by_row, self.combined(by_row), stacked]
        counts = {len(one.collectives): one for one in reversed(candidates)}
        if len(counts) == 1:
            return by_row
        return min(counts.values(), key=lambda one: self.seconds(self.in_order(one, list_schedule)))

    def combined(self, program: Program) -> Program:
        """The program with the collectives of gradients combined as far as the machine's compiler combines them."""
        limits = self.placement.network.combine
        return combine(program, limits) if limits else program

    def plans(self, mode: str) -> Iterator[tuple[str, Program]]:
        """The plans of a mode, with their names."""
        if mode in ("ticks", "auto"):
            yield from self.ticks(mode)
        if mode == "ticks" or (mode == "auto" and self.paired is not None and self.default_parts):
            return  # unrolled ticks keep what every micro-batch saves, and the program grows with their number
        exchanges = self.exchanges_beside()
        if mode in ("dw", "auto") and (exchanges or mode == "dw"):
            self.need_exchanges(mode, exchanges)
            yield from self.gradients(mode)
        if mode in ("partition", "lancet", "auto") and (exchanges or mode != "auto"):
            self.need_exchanges(mode, exchanges)
            yield from self.lancet(mode)
        if mode == "experts":
            self.need_exchanges(mode, exchanges)
            yield from self.experts()
        if mode in ("list", "auto"):
            yield "list", self.listed(self.unrolled)
        if mode in ("ring", "auto"):
            yield from self.rings(mode)
        if mode in ("skew", "auto"):
            yield from self.skewed(mode)
        if mode in ("halves", "auto"):
            yield from self.halves(mode)

    def exchanges_beside(self) -> bool:
        """True if the program has all_to_alls that run beside computation on this machine."""
        exchanges = any(record.op.timed_as == "all_to_all" for record in self.program.collectives)
        return exchanges and "all_to_all" in self.machine.asynchronous

    def need_exchanges(self, mode: str, exists: bool) -> None:
        if not exists:
            raise NoEffectError(
                f"overlap={mode!r} has no effect: the program has no all_to_all that runs beside computation on "
                f"{self.machine.name}, which it is about\n"
                "  use overlap='list' or 'halves', which move every kind of collective"
            )

    def in_order(self, program: Program, schedule: Callable[..., Sequence[Task]]) -> Program:
        check_deadline()
        tasks = tasks_of(program, self.machine, self.placement)
        return ordered(tasks, schedule(tasks))

    def gradients(self, mode: str) -> Iterator[tuple[str, Program]]:
        """Lancet's first pass, unless it moves nothing."""
        tasks = tasks_of(self.unrolled, self.machine, self.placement)
        order = dw_schedule(tasks)
        if order != list(tasks.all):
            yield "dw", ordered(tasks, reductions_early(order))
        elif mode != "auto":
            raise NoEffectError(
                f"overlap={mode!r} has no effect: no weight gradient can move behind an all_to_all\n"
                "  use overlap='list', which moves every kind of computation"
            )

    def listed(self, program: Program) -> Program:
        def plan(limit: float, late: bool) -> Program:
            return self.in_order(program, lambda tasks: _late(tasks, improved_schedule(tasks, limit), late))

        return self.target.order(plan)

    def seconds(self, program: Program) -> float:
        return self.target.seconds(program)

    def rings(self, mode: str) -> Iterator[tuple[str, Program]]:
        """The gathers that only products read as rings: those that make the step faster, or all under "ring"."""
        all_rings = rings(self.unrolled) if "permute" in self.machine.asynchronous else ()
        if all_rings:
            count, ordered = faster_rings(self.unrolled, lambda one: self.in_order(one, list_schedule), self.seconds)
            if count:
                yield f"{count} of {len(all_rings)} rings", ordered
            elif mode == "ring":
                yield f"{len(all_rings)} rings", self.listed(ring_products(self.unrolled, all_rings))
        elif mode == "ring":
            raise NoEffectError(f"overlap='ring' has no effect: {no_rings(self.unrolled, self.machine)}")

    def skewed(self, mode: str) -> Iterator[tuple[str, Program]]:
        """Loops in parts, and skewed loops: gathers ahead, gradients behind, both where different loops allow them."""
        in_parts = dict(self.loops_in_parts())
        if mode == "skew" and not in_parts and not self.default_parts:
            raise NoEffectError(
                f"overlap={mode!r} has no effect: no collective in a loop runs in {self.request.parts} parts\n"
                f"{self.no_loop_in_parts()}  leave dim and parts out, or use overlap='list', which cuts nothing"
            )
        yield from in_parts.items()
        if mode == "skew" and not self.default_parts:
            return

        def body(one: Program) -> Program:
            return fenced(self.in_order(one, list_schedule), self.machine, self.placement)

        programs = {
            "gathers ahead": skew(self.program, gathers_ahead, body),
            "gradients behind": skew(self.program, gradients_behind, body),
        }
        programs = {name: one for name, one in programs.items() if one is not self.program}
        if len(programs) == 2:
            programs["gradients behind, or gathers ahead"] = skew(
                self.program, lambda scan: gradients_behind(scan) or gathers_ahead(scan), body
            )
        if not programs and not in_parts and mode != "auto":
            raise NoEffectError(f"overlap={mode!r} has no effect: {no_skew(self.program)}")
        for name, one in programs.items():
            yield name, self.in_order(self.combined(one), list_schedule)

    def loops_in_parts(self) -> Iterator[tuple[str, Program]]:
        """The bodies of loops in parts along one dim, where collectives are in parts then, for each such dim."""
        for name, program in self.in_parts(self.program):
            yield f"loops in {name}", self.in_order(self.combined(program), list_schedule)

    def in_parts(
        self, program: Program, wanted: Callable[[Program], bool] = lambda body: True
    ) -> Iterator[tuple[str, Program]]:
        """A program with its wanted bodies of loops in parts, and all bodies in an order of their own, for each dim."""
        for dim in self.cut_dims():
            loops = LoopsInParts(dim, self.request.parts, wanted)
            split = loops.split(program)

            def order(one: Program, part: Mapping[Eqn, int] = loops.part) -> Program:
                in_parts = any(eqn.sends for eqn in one.eqns if eqn in part)
                return self.delayed(one, part)[1](math.inf, False) if in_parts else self.body_in_order(one)

            if any(eqn.sends for eqn in loops.part):
                yield f"{loops.n} parts of {dim}", self.bodies_in_order(split, order)

    def no_loop_in_parts(self) -> str:
        """The reason for each loop and dim, a line each."""
        n, loops = self.request.parts, [eqn for eqn in self.program.eqns if eqn.scan is not None]
        cuts = [(eqn, cast(Program, eqn.scan.body), dim) for eqn in loops if eqn.scan for dim in self.cut_dims()]
        lines = [f"loop at {eqn.where}: {no_parts(one, dim, n, split(one, dim, n))}" for eqn, one, dim in cuts]
        return "".join(f"  {line}\n" for line in dict.fromkeys(lines) or ["the program has no loop over a tensor"])

    def bodies_in_order(self, program: Program, order: Callable[[Program], Program]) -> Program:
        """The program with the bodies of its loops and branches in an order of their own, the innermost first."""

        def body(one: Any) -> Program:
            return fenced(order(self.bodies_in_order(one, order)), self.machine, self.placement)

        return program.replace(eqns=tuple(eqn.map_graphs(body) for eqn in program.eqns))

    def body_in_order(self, body: Program) -> Program:
        return self.in_order(body, improved_schedule)

    def ticks(self, mode: str) -> Iterator[tuple[str, Program]]:
        """The program of a pipeline with every loop body in an order of its own; and that with paired ticks.

        The ticks before and after the paired ones have one pass, whose parts hide the communication of each other.
        Outside of loops, collectives that start early would need more memory than they save time.
        """
        if self.paired is not None:
            yield "a loop for each pass", self.bodies_in_order(self.program, self.body_in_order)
            paired, in_parts = self.paired(), False
            yield "one loop for both passes", self.bodies_in_order(paired, self.body_in_order)
            for name, program in self.in_parts(paired, _is_of_one_pass):
                yield f"one loop for both passes, the others in {name}", program
                in_parts = True
            if mode == "ticks" and not in_parts and not self.default_parts:
                raise NoEffectError(
                    "dim and parts have no effect with overlap='ticks': in ticks of one pass, no collective has parts\n"
                    f"{self.no_loop_in_parts()}  leave dim and parts out"
                )
        elif mode != "auto":
            raise NoEffectError(
                f"overlap={mode!r} has no effect: no loop over 2 micro-batches or more runs in pipeline stages\n"
                "  map the dim of the layers to an axis and divide the batch with microbatches=, without unroll=True; "
                "or use overlap='list'"
            )

    def lancet(self, mode: str) -> Iterator[tuple[str, Program]]:
        dim = self.request.dim
        if dim is not None and not cuts_along(self.unrolled, dim, 2):
            reason = no_parts(self.unrolled, dim, 2, split(self.unrolled, dim, 2))
            raise NoEffectError(
                f"overlap={mode!r}, dim={dim!r} has no effect: nothing runs in parts\n  {reason}\n  leave dim out"
            )
        gradients = mode != "partition"
        plan = lancet(self.unrolled, self.machine, self.placement, self.cut_dims(), gradients)
        if plan is not None:
            yield plan
        elif mode != "auto":
            raise NoEffectError(
                f"overlap={mode!r} has no effect: no range around an all_to_all is faster in parts"
                f"{', and no weight gradient can move' * gradients}\n  use overlap='auto', which may choose none"
            )

    def experts(self) -> Iterator[tuple[str, Program]]:
        """Dispatch, experts and combine of each layer in parts of their slots; in 2, 4 and 8 parts if slots divide."""
        ranges = list(expert_ranges(self.unrolled.eqns))
        among = {eqn for eqns in ranges for eqn in eqns}
        dims = [self.request.dim] if self.request.dim is not None else list(dict.fromkeys(self.slot_dims()))
        cuts = {(n, dim): split(self.unrolled, dim, n, among=among) for n in DEGREES for dim in dims}
        sending = {key: parts for key, parts in cuts.items() if _bytes_in_parts(parts)}
        for (n, dim), parts in sending.items():
            program = pipelined(parts, ranges, self.machine, self.placement)
            yield f"experts in {n} parts of {dim}", self.in_order(program, lambda tasks: reductions_early(tasks.all))
        if not sending:
            reasons = [no_parts(self.unrolled, dim, n, parts) for (n, dim), parts in cuts.items() if n == 2]
            raise NoEffectError(
                "overlap='experts' has no effect: no all_to_all runs in parts\n"
                + "".join(f"  {reason}\n" for reason in reasons or ["no dim counts the slots of experts"])
                + "  use overlap='list', which cuts nothing"
            )

    def cut_dims(self) -> list[str]:
        """The dims along which to try splitting the program: the requested one, or those of its data and of slots."""
        if self.request.dim is not None:
            return [self.request.dim]
        data = [v for v in self.program.ins if v.name.partition("/")[0] not in ("params", "state")]
        return list(dict.fromkeys([*(d.name for v in data for d in v.dims), *self.slot_dims()]))

    @property
    def default_parts(self) -> bool:
        """True if no option is about parts."""
        return self.request.dim is None and self.request.parts == 2

    def slot_dims(self) -> Iterator[str]:
        """The dims of exchanged values that no input has and that the exchange neither splits nor joins."""
        of_inputs = {d.name for v in self.program.ins for d in v.dims}
        for eqn in (eqn for one in bodies(self.program) for eqn in one.eqns):
            if eqn.effect.exchanges:
                moved = {eqn.effect.joins, eqn.effect.cuts}
                yield from (d.name for d in eqn.ins[0].dims if d.name not in of_inputs | moved)

    def halves(self, mode: str) -> Iterator[tuple[str, Program]]:
        n = self.request.parts
        cuts = [(dim, split(self.unrolled, dim, n)) for dim in self.cut_dims()]
        sending = [(dim, parts) for dim, parts in cuts if _bytes_in_parts(parts)]
        if not sending and self.request.mode == "auto" and self.default_parts:
            return
        if not sending:
            slots = next(self.slot_dims(), None)
            other = "another dim" if slots is None or slots in dict(cuts) else f"dim={slots!r}"
            reasons = [no_parts(self.unrolled, dim, n, parts) for dim, parts in cuts] or ["the program reads no data"]
            raise NoEffectError(
                f"overlap={mode!r} has no effect: no collective runs in {n} parts\n"
                + "".join(f"  {reason}\n" for reason in reasons)
                + f"  use {other}, or overlap='list', which cuts nothing"
            )
        dim, parts = self.fastest(sending)
        hold, program = self.staggered(parts)
        yield f"{n} parts of {dim}, {seconds(hold)} apart", program

    def fastest(self, cuts: Sequence[tuple[str, Parts]]) -> tuple[str, Parts]:
        """The cut with the most communication in parts; of several with nearly as much, the fastest with a delay."""
        most = max(_bytes_in_parts(parts) for _, parts in cuts)
        cuts = [one for one in cuts if _bytes_in_parts(one[1]) >= NEARLY * most]
        if len(cuts) == 1:
            return cuts[0]
        tasks = {dim: tasks_of(parts.program, self.machine, self.placement) for dim, parts in cuts}
        return min(cuts, key=lambda one: staggered(tasks[one[0]], one[1].part)[1])

    def staggered(self, parts: Parts) -> tuple[float, Program]:
        """The best of a few delays between the parts, in seconds, and the program with it."""
        hold, plan = self.delayed(parts.program, parts.part)
        return hold, self.target.order(plan)

    def delayed(self, program: Program, part: Mapping[Eqn, int]) -> tuple[float, Callable[[float, bool], Program]]:
        """The best of a few delays between the parts, in seconds; the order with it, given a limit of memory."""
        tasks = tasks_of(program, self.machine, self.placement)

        def plan(hold: float, limit: float = math.inf, late: bool = False) -> Program:
            check_deadline()
            order = list_schedule(tasks, lambda t: t.tail - hold * part.get(t.eqn, 0), limit)
            return ordered(tasks, _late(tasks, order, late))

        seconds_of = {hold: self.seconds(plan(hold)) for hold in delays(tasks, part, STAGGER)}
        best = min(seconds_of, key=lambda hold: seconds_of[hold])
        return best, lambda limit, late: plan(best, limit, late)


def _late(tasks: Tasks, order: Sequence[Task], late: bool) -> Sequence[Task]:
    return late_sends(tasks, order) if late else order


def _bytes_in_parts(parts: Parts) -> float:
    """The expected bytes of the collectives that run in parts."""
    sent = [parts.program.record(eqn, 1) for eqn in parts.part if eqn.sends]
    return sum(record.bytes * record.op.share for record in sent)


def _is_of_one_pass(body: Program) -> bool:
    """True unless a loop's body sends in both passes."""
    return len({eqn.backward for eqn in body.eqns if eqn.sends}) < 2
