"""The schedule of a pipeline: which stage computes which micro-batch in which tick.

Stage s computes the forward pass of micro-batch i in tick i + s and its backward pass in tick i + 2(S-1) - s, as in
1F1B (Narayanan et al., 2019, PipeDream-Flush), in lock-step. So the last stage does both in one tick. A step has S-1
ticks of forward passes, M ticks of both, and S-1 ticks of backward passes, which takes the time of M+S-1 ticks of both.
A stage keeps what its backward pass reads in a ring of 2(S-1)+1 slots, whatever M is.

With v chunks (Narayanan et al., 2021, section 2.2), stage s has the blocks q = cS + s of layers, for c below v, and a
tick computes one block. Micro-batch gS + p runs forward through block q in tick gSv + p + q and backward in tick
gSv + p + 2(Sv-1) - q, so the bubble is (S-1)/v of the time of a micro-batch, and the ring has (v+1)S smaller slots.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from ...errors.tables import table


@dataclass(frozen=True)
class Schedule:
    """The ticks of `stages` stages and `microbatches` micro-batches; `print` shows a table of them.

    >>> print(Schedule(stages=2, microbatches=3))
    tick     0   1      2      3      4
    stage 0  F0  F1     F2 B0  B1     B2
    stage 1  -   F0 B0  F1 B1  F2 B2  -

    If the loss is `late`, as with `overlap="ticks"`, backward passes begin one tick later:

    >>> print(Schedule(stages=2, microbatches=3, late=True))
    tick     0   1   2      3      4   5
    stage 0  F0  F1  F2     B0     B1  B2
    stage 1  -   F0  F1 B0  F2 B1  B2  -
    """

    stages: int
    microbatches: int
    chunks: int = 1  # blocks of layers of each stage
    late: bool = False  # backward passes begin a tick after the last forward pass
    loops: tuple[str, ...] = field(default=(), repr=False)  # dims of its loops: forward passes, both, backward passes
    layer: str = field(default="", repr=False)  # the dim of the layers
    stage: str = field(default="", repr=False)  # the dim of the stages, which the pipeline made

    @property
    def delay(self) -> int:
        """Ticks between the forward and the backward pass of a micro-batch on the first stage."""
        return 2 * (self.blocks - 1) + self.late

    @property
    def blocks(self) -> int:
        """Blocks of layers, of all stages."""
        return self.stages * self.chunks

    @property
    def slots(self) -> int:
        """Slots of the ring of saved values."""
        return self.delay + 1 if self.chunks == 1 else (self.chunks + 1) * self.stages

    def slot(self, number: Any) -> Any:
        """The slot in which a unit of work saves values until its backward pass, by its number (`unit`).

        With chunks, the S units of a group and a chunk have a page of S slots. Units of chunk c of v live for about
        2(v-c)S ticks, so chunk c has two pages in turn; chunk v-c uses each of them while it is free.

        >>> schedule = Schedule(stages=2, microbatches=4, chunks=3)
        >>> [schedule.slot(number) for number in range(12)]
        [0, 1, 4, 5, 6, 7, 2, 3, 6, 7, 4, 5]
        """
        if self.chunks == 1:
            return number % self.slots
        s, v = self.stages, self.chunks
        group, chunk = number // (s * v), number // s % v
        second = 2 * chunk // (v + 1)  # 1 for chunks above v/2, which use the pages of chunk v - c
        page = 2 * chunk - second * (4 * chunk - 2 * v) + (group + second) % 2
        return (page - page // (v + 1)) * s + number % s  # chunk v/2 has one page

    @property
    def warm(self) -> int:
        """Ticks before the first backward pass; as many follow after the last forward pass."""
        return self.blocks - 1 + self.late

    @property
    def both(self) -> int:
        """Ticks of a forward and a backward pass."""
        return self.units + self.stages - 1 - self.warm

    @property
    def turn(self) -> int:
        """Ticks by which the first backward pass of a stage's first chunk is later than that of its last one."""
        return (self.chunks - 1) * self.stages

    @property
    def units(self) -> int:
        """Units of work of a stage: micro-batches times chunks."""
        return self.microbatches * self.chunks

    @property
    def ticks(self) -> int:
        """All ticks of a step."""
        return self.both + 2 * self.warm

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a stage computes nothing of use."""
        return bubble(self.stages, self.microbatches, self.chunks)

    def ticks_of(self, loop: str) -> str:
        """The ticks that a loop of the program runs, by the name of its dim; "" for another loop.

        >>> Schedule(4, 16, loops=("fill", "steady", "drain")).ticks_of("steady")
        'ticks 3 to 18: forward and backward'
        """
        lengths = (self.warm, self.both, self.warm)
        passes = ("forward", "forward and backward", "backward")
        first = 0
        for name, length, what in zip(self.loops, lengths, passes, strict=False):
            if name == loop:
                return f"ticks {first} to {first + length - 1}: {what}" if length > 1 else f"tick {first}: {what}"
            first += length
        return ""

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        sizes = {"stages": self.stages, "microbatches": self.microbatches, "chunks": self.chunks}
        return {**sizes, "ticks": self.ticks, "bubble": self.bubble}

    def forward(self, stage: int, tick: int) -> tuple[int, int] | None:
        """The micro-batch and the chunk whose forward pass a stage computes in a tick; None in a bubble."""
        return self._real(tick - stage)

    def backward(self, stage: int, tick: int) -> tuple[int, int] | None:
        """The micro-batch and the chunk whose backward pass a stage computes in a tick; None in a bubble."""
        unit = self._real(tick - self.delay + stage + self.turn)
        return unit and (unit[0], self.chunks - 1 - unit[1])

    def _real(self, unit: int) -> tuple[int, int] | None:
        return self.unit(unit) if 0 <= unit < self.units else None

    def unit(self, number: Any) -> tuple[Any, Any]:
        """The micro-batch and the chunk of a stage's unit of work, by its number in the order of the forward passes.

        >>> [Schedule(stages=2, microbatches=4, chunks=2).unit(number) for number in range(6)]
        [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0)]
        """
        if self.chunks == 1:
            return number, 0
        s, chunks = self.stages, self.chunks
        return number // (s * chunks) * s + number % s, number // s % chunks

    def name(self, kind: str, unit: tuple[int, int]) -> str:
        """A unit in a table, such as F3; with several chunks F3.1, whose last number is the chunk."""
        return f"{kind}{unit[0]}" + (f".{unit[1]}" if self.chunks > 1 else "")

    def __str__(self) -> str:
        def cell(stage: int, tick: int) -> str:
            forward, backward = self.forward(stage, tick), self.backward(stage, tick)
            return " ".join(self.name(kind, unit) for kind, unit in (("F", forward), ("B", backward)) if unit) or "-"

        rows = [[f"stage {s}", *(cell(s, t) for t in range(self.ticks))] for s in range(self.stages)]
        return table(["tick", *map(str, range(self.ticks))], rows, "<" * (1 + self.ticks), indent=0, width=sys.maxsize)


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The fraction of a step in which a stage of a pipeline computes nothing of use: (S-1) / (Mv+S-1) of v chunks.

    >>> bubble(stages=4, microbatches=9), bubble(stages=5, microbatches=8, chunks=2)
    (0.25, 0.2)
    """
    return (stages - 1) / (microbatches * chunks + stages - 1)
