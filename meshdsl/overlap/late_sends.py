"""Start collectives that need memory, such as gathers of weights, as late as they are complete in time.

A list schedule starts a gather as soon as its operand and the network are free, which may be layers before its first
reader; its result is in memory all that time. The order of computation stays. On each set of mesh axes, collectives run
in the order of their deadlines, so the step may be slightly longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from .insertion import starts
from .list_schedule import Footprint
from .tasks import Task, Tasks

EARLY = 1.0  # a collective is complete this early, in units of its own time, because predicted times are not exact


def late_sends(tasks: Tasks, order: Sequence[Task]) -> list[Task]:
    """The order with those collectives later whose results are larger than the operands that they free."""
    start, end = starts(order, tasks.machine.overlap_slowdown)
    used = Footprint(tasks, 0)
    deadline: dict[Task, float] = {}  # by which it is complete
    for task in (task for task in order if task.sends):
        read = min((start[reader] for reader in task.readers if reader in start), default=end)
        earlier = start[task] + task.seconds
        deadline[task] = max(earlier, read - EARLY * task.seconds) if used.exceeded_by(task) else earlier
    following: dict[str, float] = {}  # lane -> start of the next collective on it
    for task in sorted(deadline, key=lambda task: -deadline[task]):
        last = min(deadline[task], following.get(task.lane, math.inf)) - task.seconds
        following[task.lane] = start[task] = max(start[task], last)
    numbers = [number for number, task in enumerate(order) if not task.sends]
    times = [start[order[number]] for number in numbers]
    place: dict[Task, tuple[float, float]] = {}
    for number, task in enumerate(order):
        running = bisect_right(times, start[task]) - 1  # the computation during which it starts
        before = numbers[running] - 0.5 if task.sends and running >= 0 else number
        place[task] = max(float(number), before), start[task]
    return sorted(order, key=lambda task: place[task])
