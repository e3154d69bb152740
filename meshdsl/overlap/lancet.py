"""Lancet's second pass: split ranges of the forward pass into parts, by dynamic programming (Jiang et al., 2024, 5.1).

    T(n) = min over i of T(i) + min over k of P(i, n, k)

where P(i, n, k) is the time of the groups i to n in k parts that overlap one another. A group is a run of consecutive
tasks that takes about a fifth of the time between two mixture-of-experts layers. The all_to_alls of one layer are in
one group. A range contains an all_to_all and takes at most the time between two layers. The number of parts is
increased until one more part is slower. Afterwards weight gradients move behind the all_to_alls of the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cost.ledger import ledger
from ..cost.machine import Machine
from ..cost.network import Placement
from ..cost.timeline import timeline
from ..ir import Eqn, Var
from ..lowering.collectives import AllToAll
from ..lowering.program import Program
from ..lowering.ragged import RaggedAllToAll
from .list_schedule import list_schedule
from .split import Cut, cuts_along, split
from .tasks import Task, Tasks, ordered, reorder, tasks_of
from .weight_gradients import dw_schedule

__all__ = ["lancet"]

GROUPS = 5  # groups between two mixture-of-experts layers
MOST_PARTS = 8


@dataclass(frozen=True)
class _Range:
    """Equations of the forward pass that run in parts, identified by their first results."""

    values: frozenset[Var]
    parts: int


def lancet(program: Program, machine: Machine, placement: Placement, dims: Sequence[str]) -> tuple[str, Program] | None:
    """The name and the program of Lancet's plan along the best of these dims; None if the plan changes nothing.

    Requires a program whose all_to_alls are outside loops.
    """
    cuts = max((cuts_along(program, dim, 2) for dim in dims), key=len, default={})
    ranges = _Search(program, machine, placement, cuts).best()
    piped = program
    for one in ranges:
        among = [eqn for eqn in piped.eqns if eqn.outs[0] in one.values]
        piped = _pipelined(piped, split(piped, "", one.parts, cuts, among).program, machine, placement, among)
    tasks = tasks_of(piped, machine, placement)
    order = dw_schedule(tasks)
    if not ranges and order == list(tasks.all):
        return None
    counts = sorted({one.parts for one in ranges})
    shown = f"{len(ranges)} ranges in {' or '.join(map(str, counts))} parts" if ranges else "no range"
    return f"dw, {shown}", ordered(tasks, order)


def _pipelined(
    before: Program, after: Program, machine: Machine, placement: Placement, among: Collection[Eqn]
) -> Program:
    """The program with the new equations of one range in list-scheduled order."""
    outside = {eqn.outs[0] for eqn in before.eqns} - {eqn.outs[0] for eqn in among}
    tasks = tasks_of(after, machine, placement)
    inner = [task for task in tasks.all if task.eqn.outs[0] not in outside]
    if not inner:
        return after
    order = list_schedule(_alone(tasks, inner))
    mine = set(inner)
    first, last = inner[0].number, inner[-1].number
    head = [task for task in tasks.all[:last] if task not in mine and (task.number < first or _needed(task, mine))]
    tail = [task for task in tasks.all if task not in mine and task not in set(head)]
    return reorder(after, [task.eqn for task in (*head, *order, *tail)])


def _needed(task: Task, mine: set[Task]) -> bool:
    """True if a task between those of the range depends on none of them."""
    stack, seen = [task], {task}
    while stack:
        for source in stack.pop().needs:
            if source in mine:
                return False
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return True


def _alone(tasks: Tasks, among: Sequence[Task]) -> Tasks:
    return Tasks(tasks.program, tasks.machine, tuple(among))


class _Search:
    """The dynamic program over the groups of the forward pass."""

    def __init__(self, program: Program, machine: Machine, placement: Placement, cuts: Mapping[Var, Cut]):
        self.program, self.machine, self.placement, self.cuts = program, machine, placement, cuts
        self.known: dict[object, float] = {}
        first = next((i for i, eqn in enumerate(program.eqns) if eqn.backward), len(program.eqns))
        self.forward = program.eqns[:first]
        self.place = {eqn: i for i, eqn in enumerate(self.forward)}
        self.tasks = [t for t in tasks_of(program, machine, placement).all if t.eqn in self.place]
        self.bounds, self.seconds = self.groups()

    def groups(self) -> tuple[list[int], list[float]]:
        """The equation number at which each group begins, then the end of the last one; and the seconds of each
        group.
        """
        exchanges = [t for t in self.tasks if t.sends and isinstance(t.eqn.op, AllToAll | RaggedAllToAll)]
        pairs = [self.place[t.eqn] for t in exchanges]
        inside = {i for a, b in pairwise(pairs[: len(pairs) // 2 * 2]) if pairs.index(a) % 2 == 0 for i in range(a, b)}
        whole = sum(t.seconds for t in self.tasks)
        self.longest = whole / max(1, len(exchanges) // 2)
        bounds, seconds, now = [0], list[float](), 0.0
        for task in sorted(self.tasks, key=lambda t: self.place[t.eqn]):
            now += task.seconds
            end = self.place[task.eqn] + 1
            if now >= self.longest / GROUPS and end - 1 not in inside:
                bounds.append(end)
                seconds.append(now)
                now = 0.0
        if bounds[-1] < len(self.forward):
            bounds.append(len(self.forward))
            seconds.append(now)
        return bounds, seconds

    def best(self) -> list[_Range]:
        """The ranges of the fastest partition of the forward pass, first to last."""
        total: list[tuple[float, list[_Range]]] = [(0.0, [])]
        for n in range(1, len(self.bounds)):
            options: list[tuple[float, list[_Range]]] = []
            for i in range(n - 1, -1, -1):
                if i < n - 1 and sum(self.seconds[i:n]) > 1.001 * self.longest:
                    break
                before, ranges = total[i]
                for parts, seconds in self.times(i, n):
                    chosen = [] if parts == 1 else [_Range(self.values(i, n), parts)]
                    options.append((before + seconds, ranges + chosen))
            total.append(min(options, key=lambda one: one[0]))
        return total[-1][1]

    def values(self, i: int, n: int) -> frozenset[Var]:
        return frozenset(eqn.outs[0] for eqn in self.forward[self.bounds[i] : self.bounds[n]])

    def times(self, i: int, n: int) -> Iterator[tuple[int, float]]:
        """P(i, n, k) for k = 1, 2, ..., while more parts are faster."""
        eqns = self.forward[self.bounds[i] : self.bounds[n]]
        body = self.body(eqns)
        last = self.time(body, 1)
        yield 1, last
        if not any("all_to_all" in getattr(eqn.op, "name", "") for eqn in eqns):
            return
        for parts in range(2, MOST_PARTS + 1):
            now = self.time(body, parts)
            yield parts, now
            if now >= last and parts > 2:
                return
            last = min(last, now)

    def body(self, eqns: Sequence[Eqn]) -> Program:
        """A range as a program: its inputs are values read from outside, its results are values read outside."""
        produced = {v for eqn in eqns for v in eqn.outs}
        ins = dict.fromkeys(v for eqn in eqns for v in eqn.ins if v not in produced)
        mine = set(eqns)
        read = {v for eqn in self.program.eqns if eqn not in mine for v in eqn.ins} | set(self.program.outs)
        outs = [v for eqn in eqns for v in eqn.outs if v in read]
        return self.program.replace(ins=tuple(ins), eqns=tuple(eqns), outs=tuple(outs))

    def time(self, body: Program, parts: int) -> float:
        """Seconds of a range in parts, overlapped by a list schedule; infinite if it cannot be split that way."""
        key = parts, tuple((str(eqn.op), tuple(v.type for v in eqn.outs)) for eqn in body.eqns)
        if key not in self.known:
            self.known[key] = self.timed(body, parts)
        return self.known[key]

    def timed(self, body: Program, parts: int) -> float:
        if parts > 1:
            cuts = {v: self.cuts[v] for v in body.ins if v in self.cuts}
            parts_of_body = split(body, "", parts, cuts, body.eqns)
            sends = sum("all_to_all" in getattr(eqn.op, "name", "") for eqn in parts_of_body.part)
            if not sends:
                return float("inf")
            body = parts_of_body.program
        tasks = tasks_of(body, self.machine, self.placement)
        order = tasks.all if parts == 1 else list_schedule(tasks)
        return timeline(ledger(ordered(tasks, order)), self.machine, self.placement).seconds
