"""XLA for CPUs. Products are calls of a library; an all_reduce writes its result beside its operand."""

from __future__ import annotations

from ..lowering.emit import Emission
from .target import MemoryRules, Target

NO_RAGGED = Emission(ragged=False)  # JAX has no ragged exchange there
CPU = Target("cpu", devices=("CPU device",), emission=NO_RAGGED, memory=MemoryRules(in_place=False))
