"""Prints keep their order: each reads a boolean that the print before it returns.

A loop carries the boolean, and the branches of a condition return it. A fence would not do: compilers drop an operand
of a barrier whose result nobody reads.
"""

from __future__ import annotations

import numpy as np

from ..ir import Cond, Eqn, Graph, Scan, Var, While, acts
from ..trace import FULL
from .program import Program

BOOL = np.dtype(bool)


def order_prints(program: Program) -> Program:
    """The program whose prints are tied to each other; itself if it has none."""
    if not any(acts(eqn) for eqn in program.eqns):
        return program
    return _ordered(program, None)[0]


def _ordered(program: Graph, told: Var | None) -> tuple[Program, Var]:
    """The program whose first print comes after `told`, and what its last one tells."""
    assert isinstance(program, Program)
    eqns: list[Eqn] = []
    if told is None:
        told = Var((), BOOL)
        eqns.append(Eqn(FULL, (), (told,), {"value": np.False_, "shape": ()}))
    for eqn in program.eqns:
        if acts(eqn):
            eqn = _after(eqn, told)
            told = _told(eqn)
        eqns.append(eqn)
    return program.replace(eqns=tuple(eqns)), told


def _told(eqn: Eqn) -> Var:
    return eqn.outs[eqn.scan.carries - 1] if eqn.scan is not None else eqn.outs[-1]


def _after(eqn: Eqn, told: Var) -> Eqn:
    """The equation, which reads `told`, the boolean of the print before it, and returns that of its last print."""
    match eqn.control:
        case Scan() as loop:
            i, o = loop.consts + loop.carries, loop.carries
            eqn = eqn.replace(ins=_with(eqn.ins, i, told), outs=_with(eqn.outs, o, Var((), BOOL)))
            return eqn.with_control(body=_inner(loop.body, i, o), carries=loop.carries + 1)
        case While() as loop:
            i, o = len(eqn.ins), len(eqn.outs)
            eqn = eqn.replace(ins=(*eqn.ins, told), outs=(*eqn.outs, Var((), BOOL)))
            return eqn.with_control(test=_unread(loop.test), body=_inner(loop.body, i, o))
        case Cond() as branch:
            i, o = len(eqn.ins) - 1, len(eqn.outs)  # the predicate is no operand of the branches
            eqn = eqn.replace(ins=(*eqn.ins, told), outs=(*eqn.outs, Var((), BOOL)))
            return eqn.with_control(yes=_inner(branch.yes, i, o), no=_inner(branch.no, i, o))
        case _:
            return eqn.replace(ins=(*eqn.ins, told))


def _with(values: tuple[Var, ...], place: int, one: Var) -> tuple[Var, ...]:
    return (*values[:place], one, *values[place:])


def _inner(graph: Graph, i: int, o: int) -> Graph:
    held = Var((), BOOL)
    ordered, told = _ordered(graph.replace(ins=_with(graph.ins, i, held)), held)
    return ordered.replace(outs=_with(ordered.outs, o, told))


def _unread(graph: Graph) -> Graph:
    return graph.replace(ins=(*graph.ins, Var((), BOOL)))
