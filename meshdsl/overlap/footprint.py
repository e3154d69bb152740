"""Memory in use while tasks are scheduled, so that a schedule can stay below a limit.

A task allocates the values that it writes when it is issued, and frees those that it is the last to read when it ends.
Arguments and results are not counted, because they occupy memory during the whole step. A kernel that overwrites an
operand is counted as if it did not: `cost.memory` measures the finished order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..targets.fusion import holders
from .tasks import Task, Tasks

__all__ = ["Footprint"]


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
