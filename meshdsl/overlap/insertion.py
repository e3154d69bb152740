"""Improve an order of tasks by insertion moves: remove one task and insert it where the step gets shorter.

On small graphs this closes most of the gap between a list schedule and the optimum; there the moves also start from
other orders, because single moves stop at a local optimum. On large ones a fixed number of
random moves is tried. All seeds are fixed, so that the plan is deterministic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ..errors.deadline import check_deadline
from .list_schedule import list_schedule
from .tasks import Task, Tasks

SMALL = 40  # tasks; up to this number every move is tried
STARTS = 32  # other orders, for small graphs: list schedules with random priorities, and random orders
NOISE = 2.0  # of a priority, relative


def length(order: Sequence[Task], slowdown: float = 1.0) -> float:
    """Seconds of an order: computation runs in order; collectives start at their place and are waited for when read."""
    return _Orders(order, slowdown).length(order)


def starts(order: Sequence[Task], slowdown: float) -> tuple[dict[Task, float], float]:
    """The start of each task, and the seconds of the order."""
    orders = _Orders(order, slowdown)
    orders.keep(order)
    return {task: orders.starts[task] for task in order}, orders.seconds


class _Orders:
    """Times the orders of some tasks. Orders that begin like the order kept last are timed from where they differ."""

    def __init__(self, tasks: Sequence[Task], slowdown: float):
        self.slowdown = slowdown
        # seconds, the lane if it sends, and the tasks that it waits for
        sends = {task for task in tasks if task.sends}
        self.steps = {
            task: (task.seconds, task.lane if task.sends else "", tuple(each for each in task.needs if each in sends))
            for task in tasks
        }
        self.ends: dict[Task, float] = {}  # of the collectives
        self.starts: dict[Task, float] = {}
        self.before: list[tuple[float, dict[str, float]]] = []  # when each task of the order kept last is issued
        self.seconds = 0.0

    def keep(self, order: Sequence[Task]) -> None:
        """Time an order, and keep its times."""
        self.starts, self.before = {}, []
        self.seconds = self._run(order, 0.0, {}, self.ends, self.starts, self.before)

    def length(self, order: Sequence[Task], first: int = 0) -> float:
        """The seconds of an order that begins with the first tasks of the order kept last."""
        now, free = self.before[first] if first else (0.0, {})
        return self._run(order[first:] if first else order, now, dict(free), dict(self.ends), None, None)

    def _run(
        self,
        order: Sequence[Task],
        now: float,
        free: dict[str, float],
        ends: dict[Task, float],
        starts: dict[Task, float] | None,
        before: list[tuple[float, dict[str, float]]] | None,
    ) -> float:
        """Run these tasks from `now`, when the lanes of collectives are free again at `free`."""
        steps, slowdown = self.steps, self.slowdown
        for task in order:
            if before is not None:
                before.append((now, dict(free)))
            seconds, lane, waits = steps[task]
            for source in waits:
                if ends[source] > now:
                    now = ends[source]
            if lane:
                begin = max(now, free.get(lane, 0.0))
                ends[task] = free[lane] = begin + seconds
            else:
                begin = now
                beside = max(0.0, max(free.values(), default=0.0) - now) if free else 0.0
                slowed = seconds * slowdown
                now += slowed if slowed <= beside else seconds + beside - beside / slowdown
            if starts is not None:
                starts[task] = begin
        return max((now, *free.values()))


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
    best, orders = list(order), _Orders(order, tasks.machine.overlap_slowdown)
    orders.keep(best)
    rng = random.Random(0)
    tried, turn, since = 0, 0, 0  # moves, tasks, and tasks since the last better order
    while tried < moves and since < (len(best) if len(best) <= SMALL else moves):
        task = tasks.all[turn % len(best)] if len(best) <= SMALL else rng.choice(best)
        turn += 1
        check_deadline()
        current, places = _places(best, task)
        if len(best) > SMALL:
            places = rng.sample(places, min(len(places), 3))
        since += 1
        for place in places:
            tried += 1
            moved = [*best[:current], *best[current + 1 :]]
            moved.insert(place, task)
            if orders.length(moved, min(current, place)) < orders.seconds * (1 - 1e-9):
                best, since = moved, 0
                orders.keep(best)
                break
        else:
            tried += not places
    return best


def _places(order: Sequence[Task], task: Task) -> tuple[int, list[int]]:
    """The position of a task, and others where it may be inserted: after its operands and before its readers."""
    place = {other: i for i, other in enumerate(order)}
    current = place[task]
    first = max((place[source] + 1 for source in task.needs if source in place), default=0)
    last = min((place[reader] - 1 for reader in task.readers if reader in place), default=len(order) - 1)
    return current, [i for i in range(first, last + 1) if i != current]
