"""Plan the overlap of one program: the plans that were tried, the one that runs, and the contents of its windows.

Each plan is a program, so timeline, memory and simulator judge it like any other. "auto" takes the fastest plan by the
timeline that fits the memory limit; the unchanged program is always a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

from ...cost.fusion import Kernel, holders, steps
from ...cost.ledger import ledger
from ...cost.machine import Machine
from ...cost.memory import memory
from ...cost.network import Placement
from ...cost.timeline import Timeline, timeline
from ...errors import LayoutError
from ...ir import Eqn, Var
from ...lowering.asynchrony import Start
from ...lowering.collectives import AllToAll
from ...lowering.program import Program
from ...lowering.ragged import RaggedAllToAll
from ...schedule.fences import Held, fence, is_product, windows
from ...schedule.ring_products import ring_products, rings
from ...schedule.skew import gathers_ahead, gradients_behind, skew
from ...schedule.split import Parts, split
from ...schedule.unroll import unroll
from ...units import seconds, show_bytes
from .insertion import insertion_moves
from .lancet import lancet
from .list_schedule import list_schedule
from .reasons import no_parts, no_rings, no_skew
from .ring_choice import faster_rings
from .tasks import Task, ordered, tasks_of
from .values import Attempt, Overlap, OverlapPlan, Window
from .weight_gradients import dw_schedule

__all__ = ["kernels_with_products", "plan_overlap"]

STAGGER = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # delays of later parts to try, in units of a collective's time


def plan_overlap(
    program: Program, request: Overlap, machine: Machine, placement: Placement, donated: Collection[Var] = ()
) -> tuple[Program, OverlapPlan]:
    """The program in the planned order, with fences, and the plan.

    Raises `LayoutError` if the mode has no effect in this program, and if its plan exceeds the memory limit.
    """
    limit = machine.hbm if request.memory_limit is None else request.memory_limit

    def judged(name: str, one: Program, time: Timeline | None = None) -> tuple[Attempt, Program, Timeline]:
        time = timeline(ledger(one), machine, placement) if time is None else time
        peak = memory(one, donated=donated).peak
        over = f"{show_bytes(peak)} of memory, over the limit of {show_bytes(limit)}" if peak > limit else ""
        return Attempt(name, time.seconds, time.exposed, peak, over), one, time

    plain = judged("none", program)
    if not any(machine.asynchronous and record.kind in machine.asynchronous for record in program.collectives):
        if request.mode == "auto":
            return program, OverlapPlan(request.mode, machine.name, "none", (plain[0],))
        kinds = ", ".join(machine.asynchronous) or "none"
        raise LayoutError(
            f"overlap={request.mode!r} has no effect: the program sends nothing that {machine.name} can overlap\n"
            f"  kinds that run beside computation there: {kinds}; use overlap='none'"
        )
    planner = _Planner(program, machine, placement, request)
    found = [
        plain,
        *(judged(name, fence(one, kernels_with_products(one))) for name, one in planner.plans(request.mode)),
    ]
    if request.mode == "auto":
        fitting = [one for one in found if not one[0].rejected]
        chosen = min(fitting or found, key=lambda one: one[0].seconds)
    else:
        chosen = min(found[1:], key=lambda one: (bool(one[0].rejected), one[0].seconds))
        if chosen[0].rejected:
            raise LayoutError(
                f"overlap={request.mode!r} needs {chosen[0].rejected}\n  use overlap='auto', which keeps to the limit"
            )
    attempt, best, time = chosen
    attempts = tuple(one for one, _, _ in found)
    return best, OverlapPlan(request.mode, machine.name, attempt.name, attempts, tuple(_windows(best, time)))


class _Planner:
    """The plans of one program on one machine, by mode. The program is unrolled once."""

    def __init__(self, program: Program, machine: Machine, placement: Placement, request: Overlap):
        self.machine, self.placement, self.request = machine, placement, request
        self.program, self.unrolled = program, unroll(program)

    def plans(self, mode: str) -> Iterator[tuple[str, Program]]:
        """The plans of a mode, with their names."""
        exchanges = any("all_to_all" in record.kind for record in self.unrolled.collectives)
        if mode in ("dw", "auto") and (exchanges or mode == "dw"):
            self.need_exchanges(mode, exchanges)
            yield "dw", self.in_order(self.unrolled, dw_schedule)
        if mode in ("lancet", "auto") and (exchanges or mode == "lancet"):
            self.need_exchanges(mode, exchanges)
            yield from self.lancet(mode)
        if mode in ("list", "auto"):
            yield "list", self.listed(self.unrolled)
        if mode in ("ring", "auto"):
            yield from self.rings(mode)
        if mode in ("skew", "auto"):
            yield from self.skewed(mode)
        if mode in ("halves", "auto"):
            yield from self.halves(mode)

    def need_exchanges(self, mode: str, there: bool) -> None:
        if not there:
            raise LayoutError(
                f"overlap={mode!r} has no effect: the program has no all_to_all, which it is about\n"
                "  use overlap='list' or 'halves', which move every kind of collective"
            )

    def in_order(self, program: Program, schedule: Callable[..., Sequence[Task]]) -> Program:
        tasks = tasks_of(program, self.machine, self.placement)
        return ordered(tasks, schedule(tasks))

    def listed(self, program: Program) -> Program:
        return self.in_order(program, lambda tasks: insertion_moves(tasks, list_schedule(tasks)))

    def seconds(self, program: Program) -> float:
        return timeline(ledger(program), self.machine, self.placement).seconds

    def rings(self, mode: str) -> Iterator[tuple[str, Program]]:
        """The gathers that only products read as rings: those that make the step faster, or all under "ring"."""
        found = rings(self.unrolled) if "permute" in self.machine.asynchronous else ()
        if found:
            count, made = faster_rings(self.unrolled, lambda one: self.in_order(one, list_schedule), self.seconds)
            if count:
                yield f"{count} of {len(found)} rings", made
            elif mode == "ring":
                yield f"{len(found)} rings", self.listed(ring_products(self.unrolled, found))
        elif mode == "ring":
            raise LayoutError(f"overlap='ring' has no effect: {no_rings(self.unrolled, self.machine)}")

    def skewed(self, mode: str) -> Iterator[tuple[str, Program]]:
        """Skewed loops: gathers ahead, gradients behind, and both where different loops allow them."""

        def body(one: Program) -> Program:
            order = self.in_order(one, list_schedule)
            return fence(order, kernels_with_products(order))

        made = {
            "gathers ahead": skew(self.program, gathers_ahead, body),
            "gradients behind": skew(self.program, gradients_behind, body),
        }
        made = {name: one for name, one in made.items() if one is not self.program}
        if len(made) == 2:
            made["gradients behind, or gathers ahead"] = skew(
                self.program, lambda scan: gradients_behind(scan) or gathers_ahead(scan), body
            )
        if not made and mode != "auto":
            raise LayoutError(f"overlap={mode!r} has no effect: {no_skew(self.program)}")
        for name, one in made.items():
            yield name, self.in_order(one, list_schedule)

    def lancet(self, mode: str) -> Iterator[tuple[str, Program]]:
        found = lancet(self.unrolled, self.machine, self.placement, self.cut_dims())
        if found is not None:
            yield found
        elif mode != "auto":
            raise LayoutError(
                "overlap='lancet' has no effect: no range around an all_to_all is faster in parts, and no weight "
                "gradient can move\n  use overlap='auto', which may choose none"
            )

    def cut_dims(self) -> list[str]:
        """The dims along which to try splitting the program: the requested one, or those of its data and of slots."""
        if self.request.dim is not None:
            return [self.request.dim]
        data = [v for v in self.unrolled.ins if v.name.partition("/")[0] not in ("params", "state")]
        return list(dict.fromkeys([*(d.name for v in data for d in v.shape), *self.slot_dims()]))

    def slot_dims(self) -> Iterator[str]:
        """The dims of exchanged values that no input has and that the exchange neither splits nor joins."""
        of_inputs = {d.name for v in self.unrolled.ins for d in v.shape}
        for eqn in self.unrolled.eqns:
            if isinstance(eqn.op, AllToAll | RaggedAllToAll):
                moved = {eqn.op.dim, eqn.op.to}
                yield from (d.name for d in eqn.ins[0].shape if d.name not in of_inputs | moved)

    def halves(self, mode: str) -> Iterator[tuple[str, Program]]:
        n = self.request.parts
        cuts = [(dim, split(self.unrolled, dim, n)) for dim in self.cut_dims()]
        sending = [(dim, parts) for dim, parts in cuts if _bytes_in_parts(parts)]
        if not sending and mode == "auto":
            return
        if not sending:
            slots = next(self.slot_dims(), None)
            other = "another dim" if slots is None or slots in dict(cuts) else f"dim={slots!r}"
            reasons = [no_parts(self.unrolled, dim, n, parts) for dim, parts in cuts] or ["the program reads no data"]
            raise LayoutError(
                f"overlap={mode!r} has no effect: no collective runs in {n} parts\n"
                + "".join(f"  {reason}\n" for reason in reasons)
                + f"  use {other}, or overlap='list', which cuts nothing"
            )
        dim, parts = max(sending, key=lambda one: (_bytes_in_parts(one[1]), one[1].equations))
        hold, program = self.staggered(parts)
        yield f"{n} parts of {dim}, {seconds(hold)} apart", program

    def staggered(self, parts: Parts) -> tuple[float, Program]:
        """The best of a few delays between the parts, in seconds, and the program with it."""
        tasks = tasks_of(parts.program, self.machine, self.placement)
        sends = sorted((task.seconds for task in tasks.all if task.sends and task.eqn in parts.part), reverse=True)
        unit = sends[len(sends) // 2] if sends else 0.0

        def plan(hold: float) -> Program:
            return ordered(tasks, list_schedule(tasks, lambda t: t.tail - hold * parts.part.get(t.eqn, 0)))

        tried = {factor * unit: plan(factor * unit) for factor in STAGGER}
        best = min(tried, key=lambda hold: self.seconds(tried[hold]))
        return best, tried[best]


def _bytes_in_parts(parts: Parts) -> int:
    """The bytes of the collectives that run in parts."""
    return sum(parts.program.record(eqn, 1).bytes for eqn in parts.part if eqn.sends)


def kernels_with_products(program: Program) -> dict[Eqn, Held]:
    """The kernels with products, by their last equation, with the values they read from and write to memory."""
    found: dict[Eqn, Held] = {}
    source = holders(program)
    for step in steps(program):
        if isinstance(step, Kernel) and any(map(is_product, step.eqns)):
            stored = set(step.reads)
            reads = tuple((eqn, v) for eqn in step.eqns for v in eqn.ins if source.get(v, v) in stored)
            found[step.eqns[-1]] = Held(reads, step.writes)
    return found


def _bodies(program: Program) -> Iterator[Program]:
    """The program, and the programs of its loops and branches."""
    yield program
    for eqn in program.eqns:
        for sub in eqn.graphs().values():
            yield from _bodies(cast(Program, sub))


def _windows(program: Program, time: Timeline) -> Iterator[Window]:
    costs = {cost.line.eqn: cost for cost in time.costs}
    for start, eqns in ((start, eqns) for body in _bodies(program) for start, eqns in windows(body).items()):
        inside = tuple((str(eqn.op), str(eqn.where)) for eqn in eqns if is_product(eqn))
        cost = costs[start]
        assert isinstance(start.op, Start)
        yield Window(str(start.op.collective), str(start.where), str(start.cause), cost.seconds, cost.exposed, inside)
