"""List scheduling of the whole step: a free device runs the ready task with the longest chain of tasks after it.

Collectives start as soon as their operands are ready; on each set of mesh axes, the one with the longest tail first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from .tasks import Task, Tasks

__all__ = ["list_schedule"]


def list_schedule(tasks: Tasks, priority: Callable[[Task], float] = lambda task: task.tail) -> list[Task]:
    """The tasks in the order in which one device should issue them: those with the highest priority first.

    Computation is slower by `machine.overlap_slowdown` while a collective runs. O(n log n) in tasks.
    """
    among = set(tasks.all)
    waits_for = {task: sum(source in among for source in task.needs) for task in tasks.all}
    tie = count()
    computes: list[tuple[float, int, Task]] = []  # ready computation, highest priority first
    sends: list[tuple[float, int, Task]] = []  # ready collectives, not issued yet
    running: list[tuple[float, int, Task]] = []  # collectives in flight, by completion time
    free: dict[str, float] = {}  # lane -> end of its last collective
    order: list[Task] = []
    now = 0.0

    def release(task: Task) -> None:
        heapq.heappush(sends if task.sends else computes, (-priority(task), next(tie), task))

    def finish(task: Task) -> None:
        for reader in (reader for reader in task.readers if reader in among):  # not a set: its order changes by run
            waits_for[reader] -= 1
            if not waits_for[reader]:
                release(reader)

    for task in tasks.all:
        if not waits_for[task]:
            release(task)
    while computes or sends or running:
        while running and running[0][0] <= now:
            finish(heapq.heappop(running)[2])
        while sends:
            _, _, task = heapq.heappop(sends)
            order.append(task)
            end = max(now, free.get(task.lane, 0.0)) + task.seconds
            free[task.lane] = end
            heapq.heappush(running, (end, next(tie), task))
        if computes:
            _, _, task = heapq.heappop(computes)
            order.append(task)
            now = _end(now, task.seconds, max(free.values(), default=0.0), tasks.machine.overlap_slowdown)
            finish(task)
        elif running:
            now = max(now, running[0][0])
    return order


def _end(start: float, seconds: float, sending_until: float, slowdown: float) -> float:
    """The end of a computation that runs slower until `sending_until`, the end of the collectives."""
    beside = max(0.0, sending_until - start)
    if seconds * slowdown <= beside:
        return start + seconds * slowdown
    return start + beside + seconds - beside / slowdown
