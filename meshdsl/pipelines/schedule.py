"""The schedule of a pipeline: which stage computes which micro-batch in which tick.

Stage s computes the forward pass of micro-batch i in tick i + s and its backward pass in tick i + 2(S-1) - s, as in
1F1B (Narayanan et al., 2019, PipeDream-Flush), in lock-step. So the last stage does both in one tick. A step has S-1
ticks of forward passes, M ticks of both, and S-1 ticks of backward passes, which takes the time of M+S-1 ticks of both.
A stage keeps what its backward pass reads in a ring of 2(S-1)+1 slots, whatever M is.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule", "bubble"]


@dataclass(frozen=True)
class Schedule:
    """The ticks of `stages` stages and `microbatches` micro-batches; `print` shows a table of them.

    >>> print(Schedule(stages=2, microbatches=3))
    tick     0   1      2      3      4
    stage 0  F0  F1     F2 B0  B1     B2
    stage 1  -   F0 B0  F1 B1  F2 B2  -
    """

    stages: int
    microbatches: int
    loops: tuple[str, ...] = ()  # names of the dims of its loops in a program: forward passes, both, backward passes

    @property
    def delay(self) -> int:
        """Ticks between the forward and the backward pass of a micro-batch on the first stage."""
        return 2 * (self.stages - 1)

    @property
    def slots(self) -> int:
        """Slots of the ring of saved values: a tick writes its number modulo this."""
        return self.delay + 1

    @property
    def warm(self) -> int:
        """Ticks before the first backward pass; as many follow after the last forward pass."""
        return self.stages - 1

    @property
    def ticks(self) -> int:
        """All ticks of a step."""
        return self.microbatches + self.delay

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a stage computes nothing of use."""
        return bubble(self.stages, self.microbatches)

    def ticks_of(self, loop: str) -> str:
        """The ticks that a loop of the program runs, by the name of its dim; "" for another loop.

        >>> Schedule(4, 16, loops=("fill", "steady", "drain")).ticks_of("steady")
        'ticks 3 to 18: forward and backward'
        """
        lengths = (self.warm, self.microbatches, self.warm)
        passes = ("forward", "forward and backward", "backward")
        first = 0
        for name, length, what in zip(self.loops, lengths, passes, strict=False):
            if name == loop:
                return f"ticks {first} to {first + length - 1}: {what}" if length > 1 else f"tick {first}: {what}"
            first += length
        return ""

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {"stages": self.stages, "microbatches": self.microbatches, "ticks": self.ticks, "bubble": self.bubble}

    def forward(self, stage: int, tick: int) -> int | None:
        """The micro-batch whose forward pass a stage computes in a tick; None in a bubble."""
        return self._real(tick - stage)

    def backward(self, stage: int, tick: int) -> int | None:
        """The micro-batch whose backward pass a stage computes in a tick; None in a bubble."""
        return self._real(tick - self.delay + stage)

    def _real(self, microbatch: int) -> int | None:
        return microbatch if 0 <= microbatch < self.microbatches else None

    def __str__(self) -> str:
        def cell(stage: int, tick: int) -> str:
            forward, backward = self.forward(stage, tick), self.backward(stage, tick)
            return " ".join(f"{kind}{i}" for kind, i in (("F", forward), ("B", backward)) if i is not None) or "-"

        rows = [["tick", *map(str, range(self.ticks))]]
        rows += [[f"stage {s}", *(cell(s, t) for t in range(self.ticks))] for s in range(self.stages)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def bubble(stages: int, microbatches: int) -> float:
    """The fraction of a step in which a stage of a pipeline computes nothing of use: (S-1) / (M+S-1).

    >>> bubble(stages=4, microbatches=9)
    0.25
    """
    return (stages - 1) / (microbatches + stages - 1)
