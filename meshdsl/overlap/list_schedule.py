"""List scheduling of the whole step: a free device runs the ready task with the longest chain of tasks after it.

Collectives start as soon as their operands are ready; on each set of mesh axes, the one with the longest tail first.
At a memory limit, tasks that free memory run first, and collectives that need more memory wait. Times are those of the
clock of `cost`, `Lanes`.

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
from ..cost.lanes import COMPUTE, LaneItem, Lanes
from .tasks import Task, Tasks

EARLY = 8.0  # at a limit, collectives that need memory start at most this early, in units of their own time
Ready = tuple[float, int, Task]  # minus its priority, and a number that breaks ties
Priority = Callable[[Task], float]


def list_schedule(tasks: Tasks, priority: Priority = lambda task: task.tail, limit: float = math.inf) -> list[Task]:
    """The tasks in the order in which one device should issue them: those with the highest priority first.

    `limit` is in bytes of values between tasks; the schedule exceeds it where no ready task frees memory. O(n log n) in
    tasks without a limit.
    """
    return timed_schedule(tasks, priority, limit)[0]


def fastest_schedule(tasks: Tasks, limit: float = math.inf) -> list[Task]:
    """The fastest of three list schedules: by the longest chain, with the task and after it, and in program order.

    What comes after a task decides where one device has all of the work (Jackson's rule): a short product before a long
    collective precedes a long product. The program's order computes each gradient as soon as it can, so where the
    network takes longer than the device, its reductions start earlier.
    """
    priorities: tuple[Priority, ...] = (
        lambda task: task.tail,
        lambda task: task.tail - task.seconds,
        lambda task: -task.number,
    )
    return min((timed_schedule(tasks, priority, limit) for priority in priorities), key=lambda one: one[1])[0]


def timed_schedule(tasks: Tasks, priority: Priority, limit: float = math.inf) -> tuple[list[Task], float]:
    """The order of `list_schedule`, and its seconds."""
    device = _Device(tasks, priority, Footprint(tasks, limit) if limit < math.inf else None)
    device.run()
    return device.order, device.lanes.now


class _Device:
    """One device while it runs the tasks: what is ready, and its lanes."""

    def __init__(self, tasks: Tasks, priority: Priority, used: Footprint | None) -> None:
        among = set(tasks.all)
        self.priority, self.used = priority, used
        # lists, not sets: the order of a set changes by run
        self.readers = {task: [reader for reader in task.readers if reader in among] for task in tasks.all}
        self.waits_for = {task: sum(source in among for source in task.needs) for task in tasks.all}
        self.tie = count()
        self.computes: list[Ready] = []  # ready computation, highest priority first
        self.sends: list[Ready] = []  # ready collectives, not issued yet
        self.lanes = Lanes(tasks.machine.overlap_slowdown)
        self.issued: dict[LaneItem, Task] = {}  # those that have not ended
        self.order: list[Task] = []
        self.left = sorted((task for task in tasks.all if not task.sends), key=priority)  # computation, maybe begun
        self.begun: set[Task] = set()
        for task in tasks.all:
            self.release(task)

    def run(self) -> None:
        """Issue all tasks. A device issues between its computations, and waits for a lane if nothing is ready."""
        while self.computes or self.sends or self.issued:
            while COMPUTE not in self.lanes.queues:
                self.send()
                if not self.computes:
                    break
                self.issue(_next(self.computes, self.used))
            self.finish(self.issued.pop(self.lanes.advance()))

    def release(self, task: Task) -> None:
        if not self.waits_for[task]:
            ready = -self.priority(task), next(self.tie), task
            heapq.heappush(self.sends if task.sends else self.computes, ready)

    def issue(self, task: Task) -> None:
        self.order.append(task)
        self.begun.add(task)
        if self.used is not None:
            self.used.issue(task)
        item = LaneItem(task.step, task.lanes, task.seconds, task.share, {})
        self.issued[item] = task
        self.lanes.put(item)

    def finish(self, task: Task) -> None:
        if self.used is not None:
            self.used.end(task)
        for reader in self.readers[task]:
            self.waits_for[reader] -= 1
            self.release(reader)

    def send(self) -> None:
        """Issue the ready collectives, less those that wait for memory while something else could free it."""
        waiting: list[Ready] = []
        while self.sends:
            ready = heapq.heappop(self.sends)
            if self.used is not None and self.waits(self.used, ready[2]):
                waiting.append(ready)
            else:
                self.issue(ready[2])
        self.sends = waiting  # sorted, so it is a heap

    def waits(self, used: Footprint, task: Task) -> bool:
        """True for a collective that exceeds the limit; and for one that needs memory, such as a gather of weights,
        before its lane is free, or long before its turn. Not if nothing else could run."""
        if not (self.computes or self.issued):
            return False
        if used.exceeded_by(task) or not used.grows(task):
            return used.exceeded_by(task)
        while self.left and self.left[-1] in self.begun:
            self.left.pop()
        longest = self.priority(self.left[-1]) if self.left else 0.0
        queued = sum(self.lanes.remaining.get(item, item.work) for item in self.lanes.queues.get(task.lanes[0], ()))
        next_one = self.computes[0][2].seconds if self.computes else 0.0
        return queued > next_one or longest > self.priority(task) + EARLY * task.seconds


def _next(computes: list[Ready], used: Footprint | None) -> Task:
    """Remove the task to compute next: that of the highest priority, of those that free memory if it is needed."""
    if used is not None and used.exceeded_by(computes[0][2]):
        freeing = set(used.freeing([task for _, _, task in computes]))
        best = min((ready for ready in computes if ready[2] in freeing), default=computes[0])
        computes.remove(best)
        heapq.heapify(computes)
        return best[2]
    return heapq.heappop(computes)[2]


class Footprint:
    """The bytes of the values between tasks, and their limit. Every task is issued once, and then ends."""

    def __init__(self, tasks: Tasks, limit: float):
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
        return self.bytes + self._allocated(task) > self.limit and self.grows(task)

    def grows(self, task: Task) -> bool:
        """True if more bytes are in use after the task than before it."""
        return self._allocated(task) > self._freed(task)

    def freeing(self, tasks: Sequence[Task]) -> list[Task]:
        """Those of the tasks that free more bytes than they allocate."""
        return [task for task in tasks if self._freed(task) > self._allocated(task)]

    def _allocated(self, task: Task) -> int:
        return sum(self.sizes.get(v, 0) for v in task.step.writes)

    def _freed(self, task: Task) -> int:
        """The bytes of the values that nothing else reads after this task."""
        return sum(self.sizes[v] for v in dict.fromkeys(task.step.reads) if self.readers[v] == 1)
