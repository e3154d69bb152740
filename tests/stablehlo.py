"""The law of costs: a program states the collectives of its StableHLO text, one by one."""

from __future__ import annotations

from meshdsl.compilers.verify import verify
from meshdsl.lowering import Program

__all__ = ["cost_law"]


def cost_law(program: Program, text: str) -> int:
    """The number of collectives, loops counted; fails when the program and its StableHLO differ in one."""
    found = verify(text, program)
    assert found.equal, str(found)
    return found.count
