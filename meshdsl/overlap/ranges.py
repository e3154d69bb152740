"""Ranges of a program in parts: the parts of one range overlap one another, and ranges run one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..cost.machine import Machine
from ..cost.network import Placement
from ..ir import Eqn, Var, sources_of
from ..lowering.program import Program
from .list_schedule import timed_schedule
from .split import Parts
from .tasks import Task, Tasks, reorder, tasks_of

STAGGER = (0.0, 0.5, 1.0, 2.0)  # delays of later parts to try, in units of a collective's time


def is_exchange(eqn: Eqn) -> bool:
    """True for an all_to_all of values; those of counts of filled slots are none."""
    return eqn.effect.exchanges and eqn.outs[0].dtype.kind not in "iu"


def expert_ranges(eqns: Sequence[Eqn]) -> Iterator[list[Eqn]]:
    """For each layer of experts, and each direction: the equations on paths from dispatch to combine, both included.

    They are an all_to_all and the next one that reads its result.
    """
    start: Eqn | None = None
    below, between = set[Var](), list[Eqn]()  # values that depend on the dispatch, and their equations
    for eqn in eqns:
        if start is not None and not below.isdisjoint(eqn.ins):
            below.update(eqn.outs)
            between.append(eqn)
            if is_exchange(eqn):
                sources = sources_of(between, eqn.outs)
                yield [each for each in between if each in sources]
                start = None
        elif start is None and is_exchange(eqn):
            start, below, between = eqn, set(eqn.outs), [eqn]


def pipelined(made: Parts, ranges: Sequence[Collection[Eqn]], machine: Machine, placement: Placement) -> Program:
    """The program with the equations of each range in list-scheduled order; ranges hold equations before the split."""
    tasks = tasks_of(made.program, machine, placement)
    order = list(tasks.all)
    for among in map(set, ranges):
        order = _range_in_order(tasks, order, {task for task in order if made.of[task.eqn] in among}, made.part)
    return reorder(made.program, [task.eqn for task in order])


def _range_in_order(tasks: Tasks, order: list[Task], mine: set[Task], part: Mapping[Eqn, int]) -> list[Task]:
    """The order, with the tasks in `mine` list-scheduled where the first of them is, after all that they need."""
    if not mine:
        return order
    first = next(k for k, task in enumerate(order) if task in mine)
    needed, stack = set(order[:first]), list(mine)
    while stack:
        sources = [source for source in stack.pop().needs if source not in needed and source not in mine]
        needed.update(sources)
        stack += sources
    inner, _ = staggered(Tasks(tasks.program, tasks.machine, tuple(task for task in order if task in mine)), part)
    before = [task for task in order if task in needed]
    return [*before, *inner, *(task for task in order if task not in needed and task not in mine)]


def staggered(tasks: Tasks, part: Mapping[Eqn, int]) -> tuple[list[Task], float]:
    """The fastest list schedule of a few delays between the parts, and its seconds; of equal ones, the least delayed.

    Without a delay, the chains of the parts advance together, and wait for the network together.
    """
    holds = delays(tasks, part, STAGGER)
    schedules = (timed_schedule(tasks, lambda t, hold=hold: t.tail - hold * part.get(t.eqn, 0)) for hold in holds)
    return min(schedules, key=lambda one: one[1])


def delays(tasks: Tasks, part: Mapping[Eqn, int], factors: Sequence[float]) -> list[float]:
    """Delays between the parts, in seconds: these factors of the median time of a collective in parts."""
    sends = sorted((task.seconds for task in tasks.all if task.sends and task.eqn in part), reverse=True)
    unit = sends[len(sends) // 2] if sends else 0.0
    return list(dict.fromkeys(factor * unit for factor in factors))


def reductions_early(order: Sequence[Task]) -> list[Task]:
    """The order with every collective that is no all_to_all directly behind the last task that it reads."""
    moved = {t for t in order if t.sends and not t.eqn.effect.exchanges}
    place = {task: (k, k) for k, task in enumerate(order)}
    for k, task in enumerate(order):
        if task in moved:
            place[task] = max((place[source][0] for source in task.needs), default=k), k
    return sorted(order, key=lambda task: (place[task][0], task in moved, place[task][1]))
