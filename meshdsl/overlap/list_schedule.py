"""List scheduling of the whole step: a free device runs the ready task with the longest chain of tasks after it.

Collectives start as soon as their operands are ready; on each set of mesh axes, the one with the longest tail first.
At a memory limit, tasks that free memory run first, and collectives that need more memory wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from ..errors.deadline import check_deadline
from .footprint import Footprint
from .tasks import Task, Tasks

__all__ = ["list_schedule"]

Ready = tuple[float, int, Task]  # minus its priority, and a number that breaks ties


def list_schedule(
    tasks: Tasks, priority: Callable[[Task], float] = lambda task: task.tail, limit: float = math.inf
) -> list[Task]:
    """The tasks in the order in which one device should issue them: those with the highest priority first.

    Computation is slower by `machine.overlap_slowdown` while a collective runs. `limit` is in bytes of values between
    tasks; the schedule exceeds it where no ready task frees memory. O(n log n) in tasks without a limit.
    """
    among = set(tasks.all)
    waits_for = {task: sum(source in among for source in task.needs) for task in tasks.all}
    tie = count()
    computes: list[Ready] = []  # ready computation, highest priority first
    sends: list[Ready] = []  # ready collectives, not issued yet
    running: list[tuple[float, int, Task]] = []  # collectives in flight, by completion time
    free: dict[str, float] = {}  # lane -> end of its last collective
    used = Footprint(tasks, limit) if limit < math.inf else None
    order: list[Task] = []
    now = 0.0

    def release(task: Task) -> None:
        heapq.heappush(sends if task.sends else computes, (-priority(task), next(tie), task))

    def issue(task: Task) -> None:
        order.append(task)
        if used is not None:
            used.issue(task)

    def finish(task: Task) -> None:
        if used is not None:
            used.end(task)
        for reader in (reader for reader in task.readers if reader in among):  # not a set: its order changes by run
            waits_for[reader] -= 1
            if not waits_for[reader]:
                release(reader)

    for task in tasks.all:
        if not waits_for[task]:
            release(task)
    while computes or sends or running:
        check_deadline()
        while running and running[0][0] <= now:
            finish(heapq.heappop(running)[2])
        waiting: list[Ready] = []  # for memory, unless nothing else could free it
        while sends:
            ready = heapq.heappop(sends)
            task = ready[2]
            if used is not None and (computes or running) and used.exceeded_by(task):
                waiting.append(ready)
                continue
            issue(task)
            end = max(now, free.get(task.lane, 0.0)) + task.seconds
            free[task.lane] = end
            heapq.heappush(running, (end, next(tie), task))
        sends = waiting  # sorted, so it is a heap
        if computes:
            task = _next(computes, used)
            issue(task)
            now = _end(now, task.seconds, max(free.values(), default=0.0), tasks.machine.overlap_slowdown)
            finish(task)
        elif running:
            now = max(now, running[0][0])
    return order


def _next(computes: list[Ready], used: Footprint | None) -> Task:
    """Remove the task to compute next: that of the highest priority, of those that free memory if it is needed."""
    if used is not None and used.exceeded_by(computes[0][2]):
        freeing = set(used.freeing([task for _, _, task in computes]))
        best = min((ready for ready in computes if ready[2] in freeing), default=computes[0])
        computes.remove(best)
        heapq.heapify(computes)
        return best[2]
    return heapq.heappop(computes)[2]


def _end(start: float, seconds: float, sending_until: float, slowdown: float) -> float:
    """The end of a computation that runs slower until `sending_until`, the end of the collectives."""
    beside = max(0.0, sending_until - start)
    if seconds * slowdown <= beside:
        return start + seconds * slowdown
    return start + beside + seconds - beside / slowdown
