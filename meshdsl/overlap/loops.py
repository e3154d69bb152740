"""Loops in parts: the bodies of all loops of a program, split along one dim.

A loop of the forward pass stores values for one of the backward pass. If they are in the slots of experts, they have
the numbers of slots in parts, and so have the indices that it stores; the other loop cuts them by these indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from ..ir import Eqn, Scan, Var
from ..lowering.program import Program
from ..ops.inverse import INVERSE
from .slot_spaces import StoredSlots, names_slots, readers_of
from .split import split


@dataclass
class LoopsInParts:
    """Splits the bodies of a program's loops and branches, the innermost first, into `n` parts along `dim`."""

    dim: str
    n: int
    part: dict[Eqn, int] = field(default_factory=dict[Eqn, int])  # equation -> number of its part

    def split(self, program: Program) -> Program:
        """The program with all bodies in parts."""
        readers = readers_of(program)
        slots: dict[Eqn, list[StoredSlots]] = {}  # loop of the backward pass -> what it reads
        eqns: list[Eqn] = []
        for eqn in program.eqns:
            after = eqn.map_graphs(self.split)
            passed = {} if eqn.scan is None else _passed(program, eqn, readers)
            stored = [v for v, rows in passed.items() if all(_names_only(eqn, v, at, row) for at, row in rows)]
            found: list[StoredSlots] = []

            def body(
                one: Program, stored: list[Var] = stored, eqn: Eqn = eqn, found: list[StoredSlots] = found
            ) -> Program:
                parts = split(one, self.dim, self.n, stored=stored, read=slots.get(eqn, ()))
                self.part.update(parts.part)
                found += parts.slots
                return parts.program

            eqns.append(after.map_graphs(body))
            for reader in dict.fromkeys(at for rows in passed.values() for at, _ in rows):
                rows = {v: row for v, pairs in passed.items() for at, row in pairs if at is reader}
                slots[reader] = [read for one in found if (read := one.read_as(rows)) is not None]
        return program.replace(eqns=tuple(eqns))


def _passed(program: Program, loop: Eqn, readers: Mapping[Var, list[Eqn]]) -> dict[Var, list[tuple[Eqn, Var]]]:
    """The rows of a loop's results that only loops of the backward pass read, by row: these loops and their rows.

    No loop that routes tokens itself is one of them: it would have numbers of slots of its own.
    """
    scan = cast(Scan, loop.scan)
    stacks, rows = scan.results(loop.outs)[1], scan.results(scan.body.outs)[1]
    passed: dict[Var, list[tuple[Eqn, Var]]] = {}
    for stack, row in zip(stacks, rows, strict=True):
        if stack not in program.outs and all(map(_reads_rows, readers.get(stack, ()))):
            pairs = [(at, cast(Scan, at.scan), x) for at in readers.get(stack, ()) for x in at.ins if x is stack]
            found = [
                (at, dict(zip(control.inputs(at.ins)[2], control.inputs(control.body.ins)[2], strict=True)).get(x))
                for at, control, x in pairs
            ]
            if all(row_of is not None for _, row_of in found):
                passed[row] = [(at, cast(Var, row_of)) for at, row_of in found]
    return passed


def _reads_rows(eqn: Eqn) -> bool:
    return eqn.scan is not None and eqn.backward and all(one.op is not INVERSE for one in eqn.scan.body.eqns)


def _names_only(loop: Eqn, v: Var, reader: Eqn, row: Var) -> bool:
    """True unless a row names slots in one loop, and is read as a number in the other."""
    scan, other = cast(Scan, loop.scan), cast(Scan, reader.scan)
    if not any(eqn.op is INVERSE and v in eqn.ins for eqn in scan.body.eqns):
        return True
    return row not in other.body.outs and all(names_slots(eqn, row) for eqn in other.body.eqns if row in eqn.ins)
