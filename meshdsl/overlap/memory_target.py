"""Orders whose peak memory is near that of the unplanned program, or below the limit that the user set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..cost.memory import Memory
from ..lowering.program import Program

GROWTH = 1.05  # peak memory of a plan over that of the unplanned program, unless the user sets a limit
SLOWER = 1.01  # time of the step that may be paid for it
TRIES = 5
STEP = 0.02  # the limit of a schedule is lowered by at least this part of the target


@dataclass(frozen=True)
class MemoryTarget:
    """Bytes of peak memory to stay below if the step is at most `SLOWER` times as long, and a `limit` in any case."""

    measure: Callable[[Program], Memory]
    seconds: Callable[[Program], float]
    bytes: float
    limit: float

    def order(self, schedule: Callable[[float], Program]) -> Program:
        """The program with the least peak of those that `schedule` returns, up to the first one below the target.

        It is called without a limit, then with lower and lower ones, in bytes of values between tasks.
        """
        best = schedule(math.inf)
        usage = self.measure(best)
        least = peak = usage.peak
        if peak <= self.bytes:
            return best
        longest = math.inf if peak > self.limit else SLOWER * self.seconds(best)
        limit = math.inf
        spare = self.bytes - usage.profile[0].bytes  # beside arguments and results
        for _ in range(TRIES):
            limit = min(spare, limit - max(peak - self.bytes, STEP * self.bytes))
            program = schedule(limit)
            peak = self.measure(program).peak
            if peak < least and self.seconds(program) <= longest:
                least, best = peak, program
            if peak <= self.bytes:
                break
        return best
