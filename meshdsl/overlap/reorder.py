"""Reorder a program's steps, and split chosen collectives into a start and a wait.

Only the order changes: all equations keep their operands, so results are bitwise the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InternalError
from ..ir import Eqn, Var
from ..lowering.asynchrony import WAIT, Start
from ..lowering.program import Program

__all__ = ["Begin", "End", "Instruction", "reorder"]


@dataclass(frozen=True)
class Begin:
    """Start this collective here."""

    eqn: Eqn


@dataclass(frozen=True)
class End:
    """Wait for this collective here."""

    eqn: Eqn


Instruction = Eqn | Begin | End


def reorder(program: Program, order: Sequence[Instruction]) -> Program:
    """The program with its equations in this order.

    An equation that the order leaves out (a view, a constant, a value computed inside its readers) is placed before its
    first reader. Raises `InternalError` if the order places an equation before its operands, or leaves one unfinished.
    """
    producers = {v: eqn for eqn in program.eqns for v in eqn.outs}
    listed = {one if isinstance(one, Eqn) else one.eqn for one in order}
    done: set[Eqn] = set()
    eqns: list[Eqn] = []
    flight: dict[Eqn, Var] = {}

    def before(ins: Sequence[Var]) -> Iterator[Eqn]:
        """Equations to place before a reader of these values, operands first. Iterative, because chains may be long."""
        stack = [(producers[v], False) for v in reversed(ins) if v in producers]
        while stack:
            eqn, ready = stack.pop()
            if eqn in done:
                continue
            if eqn in listed:
                raise InternalError(f"reorder: {eqn.op} at {eqn.where} is read before its place in the order")
            if ready:
                done.add(eqn)
                yield eqn
                continue
            stack.append((eqn, True))
            stack += [(producers[v], False) for v in reversed(eqn.ins) if v in producers and producers[v] not in done]

    for one in order:
        eqn = one if isinstance(one, Eqn) else one.eqn
        if isinstance(one, End):
            done.add(eqn)
            eqns.append(Eqn(WAIT, (flight[eqn],), eqn.outs, {}, eqn.where, eqn.backward))
            continue
        eqns += before(eqn.ins)
        if isinstance(one, Begin):
            flight[eqn] = dataclasses.replace(eqn.outs[0])
            if eqn.collective is None:
                raise InternalError(f"reorder: {eqn.op} at {eqn.where} is no collective and cannot be started")
            eqns.append(eqn.replace(op=Start(eqn.collective), outs=(flight[eqn],)))
        else:
            done.add(eqn)
            eqns.append(eqn)
    eqns += before(program.outs)
    left = [eqn for eqn in listed if eqn not in done]
    if left:
        raise InternalError(f"reorder: {left[0].op} at {left[0].where} has no place in the order")
    return program.replace(eqns=tuple(eqns))
