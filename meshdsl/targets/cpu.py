"""XLA for CPUs. Products are calls of a library; an all_reduce writes its result beside its operand."""

from __future__ import annotations

from ..lowering.emit import Emission
from .target import MemoryRules, Target

CPU = Target("cpu", emission=Emission(ragged=False), memory=MemoryRules(in_place=False))  # no ragged exchange in JAX
