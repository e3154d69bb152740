"""Loops that stay loops: their bodies in an order of their own, or split into parts along one dim.

A loop of the forward pass stores values for one of the backward pass. If they are in the slots of experts, they have
the numbers of slots in parts, and so have the indices that it stores; the other loop cuts them by these indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..ir import Eqn, Scan, Var
from ..lowering.program import Program
from ..ops.inverse import INVERSE
from .list_schedule import fastest_schedule
from .planner import Candidates, Planner
from .reasons import no_parts
from .slot_spaces import StoredSlots, names_slots
from .split import split


@dataclass
class LoopsInParts:
    """Splits the bodies of a program's loops and branches, the innermost first, into `n` parts along `dim`.

    Only bodies of which `wanted` is true are split.
    """

    dim: str
    n: int
    wanted: Callable[[Program], bool] = lambda body: True
    part: dict[Eqn, int] = field(default_factory=dict[Eqn, int])  # equation -> number of its part

    def split(self, program: Program) -> Program:
        """The program with its bodies in parts."""
        readers = program.readers
        read: dict[Eqn, list[StoredSlots]] = {}  # by loop of the backward pass
        eqns: list[Eqn] = []
        for eqn in program.eqns:
            passed = {} if eqn.scan is None else _passed(program, eqn, readers)
            stored = [v for v, rows in passed.items() if all(_names_only(eqn, v, *at) for at in rows.items())]
            after, slots = self.in_parts(eqn, stored, read.get(eqn, ()))
            eqns.append(after)
            for reader in dict.fromkeys(at for rows in passed.values() for at in rows):
                rows = {v: at[reader] for v, at in passed.items() if reader in at}
                read[reader] = [known for one in slots if (known := one.read_as(rows)) is not None]
        return program.replace(eqns=tuple(eqns))

    def in_parts(self, eqn: Eqn, stored: Collection[Var], read: Sequence[StoredSlots]) -> tuple[Eqn, list[StoredSlots]]:
        """The equation with its bodies in parts, and what they store in slots."""
        slots: list[StoredSlots] = []

        def body(one: Any) -> Program:
            if not self.wanted(one):
                return self.split(one)
            parts = split(self.split(one), self.dim, self.n, stored=stored, read=read)
            self.part.update(parts.part)
            slots.extend(parts.slots)
            return parts.program

        return eqn.map_graphs(body), slots


def in_parts(planner: Planner, program: Program, wanted: Callable[[Program], bool] = lambda body: True) -> Candidates:
    """A program with its wanted bodies of loops in parts, and all bodies in an order of their own, for each dim."""
    for dim in planner.cut_dims():
        loops = LoopsInParts(dim, planner.request.parts, wanted)
        split = loops.split(program)

        def order(one: Program, part: Mapping[Eqn, int] = loops.part) -> Program:
            in_parts = any(eqn.sends for eqn in one.eqns if eqn in part)
            return planner.delayed(one, part)[1](math.inf) if in_parts else planner.in_order(one, fastest_schedule)

        if any(eqn.sends for eqn in loops.part):
            yield f"{loops.n} parts of {dim}", bodies_in_order(planner, split, order)


def bodies_in_order(planner: Planner, program: Program, order: Callable[[Program], Program]) -> Program:
    """The program with the bodies of its loops and branches in an order of their own, the innermost first."""

    def body(one: Any) -> Program:
        return planner.fenced(order(bodies_in_order(planner, one, order)))

    return program.replace(eqns=tuple(eqn.map_graphs(body) for eqn in program.eqns))


def no_loop_in_parts(planner: Planner) -> str:
    """The reason for each loop and dim, a line each."""
    n, loops = planner.request.parts, [eqn for eqn in planner.program.eqns if eqn.scan is not None]
    cuts = [(eqn, cast(Program, eqn.scan.body), dim) for eqn in loops if eqn.scan for dim in planner.cut_dims()]
    lines = [f"loop at {eqn.where}: {no_parts(one, dim, n, split(one, dim, n))}" for eqn, one, dim in cuts]
    return "".join(f"  {line}\n" for line in dict.fromkeys(lines) or ["the program has no loop over a tensor"])


def _passed(program: Program, loop: Eqn, readers: Mapping[Var, Sequence[Eqn]]) -> dict[Var, dict[Eqn, Var]]:
    """The rows of a loop's results that only loops of the backward pass read, with the rows of these loops.

    No loop that routes tokens itself is one of them: it would have numbers of slots of its own.
    """
    scan = cast(Scan, loop.scan)
    passed: dict[Var, dict[Eqn, Var]] = {}
    for stack, row in zip(scan.results(loop.outs)[1], scan.results(scan.body.outs)[1], strict=True):
        at = {reader: _row_of(reader, stack) for reader in readers.get(stack, ()) if _routes_nothing(reader)}
        if stack not in program.outs and len(at) == len(readers.get(stack, ())) and None not in at.values():
            passed[row] = cast("dict[Eqn, Var]", at)
    return passed


def _row_of(loop: Eqn, stack: Var) -> Var | None:
    """The row of a stack in a loop's body; None if the loop reads the stack in another way, or twice."""
    scan = cast(Scan, loop.scan)
    rows = dict(zip(scan.inputs(loop.ins)[2], scan.inputs(scan.body.ins)[2], strict=True))
    return rows.get(stack) if loop.ins.count(stack) == 1 else None


def _routes_nothing(eqn: Eqn) -> bool:
    """True for a loop of the backward pass that gives no slots to tokens."""
    return eqn.scan is not None and eqn.backward and all(one.op is not INVERSE for one in eqn.scan.body.eqns)


def _names_only(loop: Eqn, v: Var, reader: Eqn, row: Var) -> bool:
    """True unless a row names slots in one loop, and is read as a number in the other."""
    scan, other = cast(Scan, loop.scan), cast(Scan, reader.scan)
    if not any(eqn.op is INVERSE and v in eqn.ins for eqn in scan.body.eqns):
        return True
    return row not in other.body.outs and all(names_slots(eqn, row) for eqn in other.body.eqns if row in eqn.ins)
