"""`Target`: what is known of the compiler of one platform, and what it therefore gets to compile.

Emission, memory, overlap and the choice of kernels ask a target and know no platform. The defaults are those of a
compiler without known habits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cost.fusion import Step
from ..cost.scores import Scores, no_scores
from ..ir import Eqn, Var
from ..lowering.emit import PLAIN, Emission
from ..lowering.program import Program
from ..ops.attention.kernels import FusedKernel


def _none(program: Program) -> set[Var]:
    return set()


def _unpadded(program: Program) -> Callable[[Var], float]:
    return lambda v: 1.0


def _in_order(eqn: Eqn, steps: Sequence[Step], carried: set[Var]) -> Sequence[Step]:
    return steps


@dataclass(frozen=True)
class MemoryRules:
    """The values that a compiler stores, and for how long."""

    scores: Callable[[Program], Scores] = no_scores  # what the fusion model stores
    inside: Callable[[Program], set[Var]] = _none  # values of a loop's body that it computes inside later kernels
    copied: Callable[[Program], set[Var]] = _none  # arguments of which its kernels read a copy
    padding: Callable[[Program], Callable[[Var], float]] = _unpadded  # stored bytes of a value over its own
    combines: float = 0.0  # bytes of all_reduces that run as one, when the last of their operands is there
    in_place: bool = True  # an all_reduce writes its result over an operand that nothing else reads
    body_order: Callable[[Eqn, Sequence[Step], set[Var]], Sequence[Step]] = _in_order  # of a loop that carries these


@dataclass(frozen=True)
class Target:
    """One platform, by JAX's name of it."""

    name: str
    devices: tuple[str, ...] = ()  # the words of machine files for one device
    emission: Emission = PLAIN
    passes: tuple[tuple[str, Callable[[Program], Program]], ...] = ()  # with their names in `history`
    memory: MemoryRules = MemoryRules()
    one_in_flight: bool = False  # its compiler runs one collective at a time
    capability: float = 0.0  # JAX's `compute_capability` of the devices
    kernels: tuple[FusedKernel, ...] = ()  # of attention; the first one is chosen where it takes the case

    def prepare(self, program: Program) -> Program:
        """The program that this compiler gets; itself if it is prepared already."""
        for _, rewrite in self.passes:
            program = rewrite(program)
        return program
