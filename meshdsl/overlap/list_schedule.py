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
    device = _Device(tasks, priority, Footprint(tasks, limit) if limit < math.inf else None)
    while device.computes or device.sends or device.running:
        check_deadline()
        device.complete()
        device.send()
        device.compute()
    return device.order


class _Device:
    """One device while it runs the tasks: what is ready, what is in flight, and the time."""

    def __init__(self, tasks: Tasks, priority: Callable[[Task], float], used: Footprint | None) -> None:
        among = set(tasks.all)
        self.priority, self.used, self.slowdown = priority, used, tasks.machine.overlap_slowdown
        # lists, not sets: the order of a set changes by run
        self.readers = {task: [reader for reader in task.readers if reader in among] for task in tasks.all}
        self.waits_for = {task: sum(source in among for source in task.needs) for task in tasks.all}
        self.tie = count()
        self.computes: list[Ready] = []  # ready computation, highest priority first
        self.sends: list[Ready] = []  # ready collectives, not issued yet
        self.running: list[tuple[float, int, Task]] = []  # collectives in flight, by completion time
        self.free: dict[str, float] = {}  # lane -> end of its last collective
        self.order: list[Task] = []
        self.now = 0.0
        for task in tasks.all:
            self.release(task)

    def release(self, task: Task) -> None:
        if not self.waits_for[task]:
            ready = -self.priority(task), next(self.tie), task
            heapq.heappush(self.sends if task.sends else self.computes, ready)

    def issue(self, task: Task) -> None:
        self.order.append(task)
        if self.used is not None:
            self.used.issue(task)

    def finish(self, task: Task) -> None:
        if self.used is not None:
            self.used.end(task)
        for reader in self.readers[task]:
            self.waits_for[reader] -= 1
            self.release(reader)

    def complete(self) -> None:
        """Finish the collectives that have ended by now."""
        while self.running and self.running[0][0] <= self.now:
            self.finish(heapq.heappop(self.running)[2])

    def send(self) -> None:
        """Issue the ready collectives, less those that wait for memory while something else could free it."""
        waiting: list[Ready] = []
        while self.sends:
            ready = heapq.heappop(self.sends)
            task = ready[2]
            if self.used is not None and (self.computes or self.running) and self.used.exceeded_by(task):
                waiting.append(ready)
                continue
            self.issue(task)
            end = max(self.now, self.free.get(task.lane, 0.0)) + task.seconds
            self.free[task.lane] = end
            heapq.heappush(self.running, (end, next(self.tie), task))
        self.sends = waiting  # sorted, so it is a heap

    def compute(self) -> None:
        """Run the next computation; without one, wait for the first collective in flight."""
        if self.computes:
            task = _next(self.computes, self.used)
            self.issue(task)
            self.now = _end(self.now, task.seconds, max(self.free.values(), default=0.0), self.slowdown)
            self.finish(task)
        elif self.running:
            self.now = max(self.now, self.running[0][0])


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
