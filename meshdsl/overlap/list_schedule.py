"""List scheduling of the whole step: a free device runs the ready task with the longest chain of tasks after it.

Collectives start as soon as their operands are ready; on each set of mesh axes, the one with the longest tail first.
At a memory limit, tasks that free memory run first, and collectives that need more memory wait.

Memory in use while tasks are scheduled, so that a schedule can stay below a limit.

A task allocates the values that it writes when it is issued, and frees those that it is the last to read when it ends.
Arguments and results are not counted, because they occupy memory during the whole step. A kernel that overwrites an
operand is counted as if it did not: `cost.memory` measures the finished order.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from ..cost.fusion import holders
from ..errors.deadline import check_deadline
from .tasks import Task, Tasks

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
    """End time of a computation that runs `slowdown` times slower until the collectives end, at `sending_until`."""
    beside = max(0.0, sending_until - start)
    if seconds * slowdown <= beside:
        return start + seconds * slowdown
    return start + beside + seconds - beside / slowdown


class Footprint:
    """The bytes of the values between tasks, and their limit. Every task is issued once, and then ends."""

    def __init__(self, tasks: Tasks, limit: float = math.inf):
        program, self.limit, self.bytes = tasks.program, limit, 0
        source = holders(program)
        whole_step = {*program.ins, *(source.get(v, v) for v in program.outs)}
        written = (v for task in tasks.all for v in task.step.writes if v not in whole_step)
        self.sizes = {v: program.local_bytes(v) for v in written}
        self.readers = Counter(v for task in tasks.all for v in dict.fromkeys(task.step.reads) if v in self.sizes)

    def issue(self, task: Task) -> None:
        self.bytes += self._allocated(task)

    def end(self, task: Task) -> None:
        self.bytes -= self._freed(task)
        self.readers.subtract(v for v in dict.fromkeys(task.step.reads) if v in self.sizes)

    def exceeded_by(self, task: Task) -> bool:
        """True if the task needs more memory than the limit while it runs, and more than before when it ends."""
        return self.bytes + self._allocated(task) > self.limit and self._allocated(task) > self._freed(task)

    def freeing(self, tasks: Sequence[Task]) -> list[Task]:
        """Those of the tasks that free more bytes than they allocate."""
        return [task for task in tasks if self._freed(task) > self._allocated(task)]

    def _allocated(self, task: Task) -> int:
        return sum(self.sizes.get(v, 0) for v in task.step.writes)

    def _freed(self, task: Task) -> int:
        """The bytes of the values that nothing else reads after this task."""
        return sum(self.sizes[v] for v in dict.fromkeys(task.step.reads) if self.readers[v] == 1)
