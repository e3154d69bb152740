"""Find the windows of an overlap plan in the text of a compiled program, and which planned products run in them.

`emit` numbers the equations of a planned program in their names (`eqn12`), and the compiler keeps these names on
instructions and inside fusions. The text is in execution order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...lowering.asynchrony import Start
from ...lowering.program import Program
from ...overlap.fences import kernels_with_products, products
from .hlo import KINDS, Instruction, bodies_of, called

NUMBER = re.compile(r"\beqn(\d+)\b")


@dataclass(frozen=True)
class CompiledWindow:
    """One planned collective in the compiled program."""

    collective: str
    where: str
    asynchronous: bool  # has a start and a done, or runs inside kernels
    planned: int  # products that the plan places between start and wait
    inside: int  # how many of them the compiler kept there

    def __str__(self) -> str:
        how = f"{self.inside} of {self.planned} products inside" if self.asynchronous else "synchronous"
        return f"{self.collective}: {how}  # {self.where}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))


def compiled_windows(text: str, program: Program) -> tuple[CompiledWindow, ...]:
    """Every window of a planned program, as found in the compiled text."""
    bodies, entry = bodies_of(text)
    order = bodies.get(entry, [])
    numbers = [_numbers(bodies, instruction) for instruction in order]
    number = program.places
    compiled: list[CompiledWindow] = []
    for start, eqns in products(program, kernels_with_products(program)).items():
        planned = {number[eqn] for eqn in eqns}
        begin, end = _span(bodies, order, number[start])
        inside = set[int]().union(*numbers[begin:end]) if begin < end else set[int]()
        assert isinstance(start.op, Start)
        compiled.append(
            CompiledWindow(str(start.op.collective), str(start.where), begin < end, len(planned), len(planned & inside))
        )
    return tuple(compiled)


def _numbers(bodies: dict[str, list[Instruction]], instruction: Instruction) -> set[int]:
    """The equations that an instruction computes, including those inside its fusion."""
    numbers = {int(n) for n in NUMBER.findall(instruction.attributes)}
    for name in called(instruction):
        for inner in bodies.get(name, []):
            numbers |= _numbers(bodies, inner)
    return numbers


def _span(bodies: dict[str, list[Instruction]], order: list[Instruction], number: int) -> tuple[int, int]:
    """Instructions from a collective's start up to and including its done; an empty span if it has none.

    The TPU compiler writes a start and a done, or starts the collective inside one kernel and ends it inside another.
    """
    starts = (i for i, instruction in enumerate(order) if _is(bodies, instruction, "start", number))
    begin = next(starts, 0)
    for i in range(begin + 1, len(order)):
        if order[i].opcode.endswith("-done") and order[begin].name in order[i].operands:
            return begin, i + 1
        if _is(bodies, order[i], "done", number):
            return begin, i + 1
    return 0, 0


def _is(bodies: dict[str, list[Instruction]], instruction: Instruction, phase: str, number: int) -> bool:
    """True if an instruction starts (or ends, by `phase`) the numbered collective, itself or inside its kernel."""
    if instruction.opcode.endswith(f"-{phase}") and str(number) in NUMBER.findall(instruction.attributes):
        return True
    for name in called(instruction):
        inside = bodies.get(name, [])
        if any(f"AsyncCollective{phase.title()}" in inner.attributes for inner in inside):
            if any(inner.opcode in KINDS and str(number) in NUMBER.findall(inner.attributes) for inner in inside):
                return True
        elif any(_is(bodies, inner, phase, number) for inner in inside):
            return True
    return False
