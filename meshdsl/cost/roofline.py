"""How long one kernel runs on one device: the roofline, with an efficiency that depends on the size.

    seconds = max(products / (peak x efficiency) + other FLOPs / vector rate, bytes / bandwidth) + launch

The bound below is the same without launch, at full efficiency, with products and other FLOPs side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ledger import Line
from .machine import Machine

__all__ = ["Roofline", "roofline"]


@dataclass(frozen=True)
class Roofline:
    """Seconds of one kernel by what they are spent on; the lines of the kernel share them by `weights`."""

    products: float  # matrix units, at the efficiency of the size
    vector: float
    memory: float
    launch: float
    least: float  # at full efficiency, nothing in the way of anything
    weights: tuple[float, ...]  # of each line, adding up to 1

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self.products + self.vector, self.memory) + self.launch

    @property
    def bound(self) -> str:
        """What the time goes to: "compute", "memory" or "launch"."""
        compute = self.products + self.vector
        if self.launch > max(compute, self.memory):
            return "launch"
        return "compute" if compute >= self.memory else "memory"


def roofline(lines: Sequence[Line], machine: Machine) -> Roofline:
    """The time of one kernel, given the lines of the ledger that run in it."""
    products = vector = memory = full = 0.0
    alone: list[float] = []
    for line in lines:
        moving = line.hbm_bytes / machine.hbm_bandwidth
        if line.kind in ("matmul", "conv"):
            fastest = line.flops / machine.peak_of(line.dtype)
            computing = machine.matmul_seconds(line.flops, line.dtype)
            full += fastest
            products += computing
        else:
            computing = line.flops / machine.vector
            vector += computing
        memory += moving
        alone.append(max(computing, moving))
    total = sum(alone)
    weights = tuple(t / total for t in alone) if total else tuple(1 / len(lines) for _ in lines)
    return Roofline(products, vector, memory, machine.launch, max(full, vector, memory), weights)
