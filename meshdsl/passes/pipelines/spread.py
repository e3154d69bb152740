"""Work of the first stage, spread over all stages: once in S ticks, each of the S stages does it for one micro-batch.

It consists of the products before the layers, such as layers of another kind or an encoder, and of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...control import cond
from ...dims import Dim
from ...ops.elementwise import where
from ...ops.indexing import iota
from ...ops.slicing import roll
from ...trace import Tensor


@dataclass(frozen=True)
class Spread:
    """The stages of a pipeline and the number of its micro-batches, of which the first stage begins one a tick."""

    stage: Dim
    microbatches: int

    def entering(
        self, tick: Tensor, every: range, ahead: Sequence[Tensor], compute: Callable[[Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """The values for the first stage in this tick, on stage 0; stage s holds those for s ticks later.

        In one of S ticks, every stage computes them for one micro-batch; in the others, they move one stage down.
        """

        def first(number: Any) -> Any:
            return (number % self.stage.size == 0) & (number < self.microbatches)

        return cond(
            first(tick),
            lambda: compute(tick + iota(self.stage)),
            lambda: [roll(x, self.stage, -1) for x in ahead],
            frequency=frequency(every, first),
        )

    def left(self, new: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        """The first stage's values of this tick and of the ones before: stage s holds those of s ticks ago."""
        first = iota(self.stage) == 0
        return [where(first, x, roll(old, self.stage, 1)) for x, old in zip(new, before, strict=True)]

    def complete(self, number: Any) -> Any:
        """True if the stages have a micro-batch each, or the last ones, after the first stage's of this number."""
        return (number % self.stage.size == self.stage.size - 1) | (number == self.microbatches - 1)

    def numbers(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each stage's micro-batch after the first stage's `last` one, and False if it had it before."""
        number = last - iota(self.stage)
        return number, number >= last // self.stage.size * self.stage.size


def frequency(every: range, needed: Callable[[int], Any]) -> float:
    """The fraction of the ticks of a loop that need something."""
    return len([number for number in every if needed(number)]) / len(every)
