"""The law of costs: a program states exactly the collectives of its StableHLO text."""

from __future__ import annotations

from meshdsl.lowering import Program
from meshdsl.tools.compilers.verify import verify

__all__ = ["cost_law"]


def cost_law(program: Program, text: str) -> int:
    """Assert that the program's collectives equal those of its StableHLO; returns their number, loop trips counted."""
    found = verify(text, program)
    assert found.equal, str(found)
    return found.count
