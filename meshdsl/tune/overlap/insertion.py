"""Improve an order of tasks by insertion moves: remove one task and insert it where the step gets shorter.

On small graphs this closes most of the gap between a list schedule and the optimum; there the moves also start from
other orders, because single moves stop at a local optimum. On large ones a fixed number of
random moves is tried. All seeds are fixed, so that the plan is deterministic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ...errors.deadline import check_deadline
from .list_schedule import list_schedule
from .tasks import Task, Tasks

__all__ = ["improved_schedule", "insertion_moves", "length", "starts"]

SMALL = 40  # tasks; up to this number every move is tried
STARTS = 32  # other orders, for small graphs: list schedules with random priorities, and random orders
NOISE = 2.0  # of a priority, relative


def length(order: Sequence[Task], slowdown: float = 1.0) -> float:
    """Seconds of an order: computation runs in order; collectives start at their place and are waited for when read."""
    return starts(order, slowdown)[1]


def starts(order: Sequence[Task], slowdown: float) -> tuple[dict[Task, float], float]:
    """The start of each task, and the seconds of the order."""
    now = 0.0
    free: dict[str, float] = {}
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    for task in order:
        for source in task.needs:
            if source.sends and end[source] > now:
                now = end[source]
        if task.sends:
            start[task] = max(now, free.get(task.lane, 0.0))
            end[task] = free[task.lane] = start[task] + task.seconds
            continue
        start[task] = now
        beside = max(0.0, max(free.values(), default=0.0) - now)
        now += (
            task.seconds * slowdown if task.seconds * slowdown <= beside else task.seconds + beside - beside / slowdown
        )
    return start, max([now, *end.values()])


def improved_schedule(tasks: Tasks, limit: float = math.inf) -> list[Task]:
    """The list schedule after insertion moves; on small graphs, the best of several.

    `limit` is that of `list_schedule`, in bytes; the moves may exceed it, and other orders are tried without one only.
    """
    best = insertion_moves(tasks, list_schedule(tasks, limit=limit))
    if len(best) > SMALL or limit < math.inf:
        return best
    rng = random.Random(0)
    for k in range(STARTS):
        noise = {task: 1 + NOISE * rng.uniform(-1, 1) for task in tasks.all}
        start = _any_order(tasks, rng) if k % 2 else list_schedule(tasks, lambda t, noise=noise: t.tail * noise[t])
        other = insertion_moves(tasks, start)
        best = min(best, other, key=lambda order: length(order, tasks.machine.overlap_slowdown))
    return best


def _any_order(tasks: Tasks, rng: random.Random) -> list[Task]:
    """A random order in which every task follows the tasks it reads; unlike a list schedule's, its lanes may idle."""
    left, order = list(tasks.all), list[Task]()
    while left:
        ready = [task for task in left if not any(source in left for source in task.needs)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def insertion_moves(tasks: Tasks, order: Sequence[Task], moves: int = 600) -> list[Task]:
    """The order after the best of `moves` insertion moves; never longer than the given order. O(moves x tasks)."""
    slowdown = tasks.machine.overlap_slowdown
    best, least = list(order), length(order, slowdown)
    rng = random.Random(0)
    tried, turn, since = 0, 0, 0  # moves, tasks, and tasks since the last better order
    while tried < moves and since < (len(best) if len(best) <= SMALL else moves):
        task = tasks.all[turn % len(best)] if len(best) <= SMALL else rng.choice(best)
        turn += 1
        check_deadline()
        places = _places(best, task)
        if len(best) > SMALL:
            places = rng.sample(places, min(len(places), 3))
        since += 1
        for place in places:
            tried += 1
            moved = [other for other in best if other is not task]
            moved.insert(place, task)
            now = length(moved, slowdown)
            if now < least * (1 - 1e-9):
                best, least, since = moved, now, 0
                break
        else:
            tried += not places
    return best


def _places(order: Sequence[Task], task: Task) -> list[int]:
    """The positions where a task may be inserted, after its operands and before its readers, except its current one."""
    place = {other: i for i, other in enumerate(order)}
    current = place[task]
    first = max((place[source] + 1 for source in task.needs if source in place), default=0)
    last = min((place[reader] - 1 for reader in task.readers if reader in place), default=len(order) - 1)
    return [i for i in range(first, last + 1) if i != current]
