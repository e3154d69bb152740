"""Fences keep a compiler from changing the planned order: equations between a start and its wait are tied to both.

A compiler moves equations freely between their operands and their readers, so an order survives only as a dependency.
At a start, the collective's operand is tied to operands of the kernels in its window, so they cannot run before it. At
the wait, the result is tied to the results of these kernels, so its readers run after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dims import size_of
from ..ir import Eqn, Linear, Op, Product, Reduce, Var
from ..lowering.asynchrony import FENCE, WAIT, Start, pairs
from ..lowering.program import Program

__all__ = ["Held", "fence", "is_product", "windows"]


def is_product(eqn: Eqn) -> bool:
    """True if an equation multiplies and sums (a matmul, for example), so that a window should hold its kernel."""
    if not isinstance(eqn.op, Op):
        return False
    return eqn.op.product is not Product.NONE or (eqn.op.reduce is Reduce.SUM and eqn.op.linear is Linear.EACH)


@dataclass(frozen=True, eq=False)
class Held:
    """A kernel that a fence keeps in its window: its (equation, stored value) reads, and the stored values it
    writes.
    """

    reads: tuple[tuple[Eqn, Var], ...]
    writes: tuple[Var, ...]


def windows(program: Program) -> dict[Eqn, tuple[Eqn, ...]]:
    """For every start in the program's body, the equations between it and its wait."""
    place = {eqn: i for i, eqn in enumerate(program.eqns)}
    return {start: program.eqns[place[start] + 1 : place[wait]] for start, wait in pairs(program).items()}


def fence(program: Program, kernels: Mapping[Eqn, Held]) -> Program:
    """Add a fence at every start and wait whose window contains one of these kernels.

    `kernels` maps the equation that identifies a kernel to its reads and writes. Values, shardings and order do not
    change.
    """
    inside = {start: [kernels[e] for e in eqns if e in kernels] for start, eqns in windows(program).items()}
    start_of = {wait: start for start, wait in pairs(program).items()}
    fenced = _Fenced(program)
    before: Eqn | None = None
    for eqn in program.eqns:
        if isinstance(eqn.op, Start) and inside[eqn]:
            fenced.start(eqn, inside[eqn], before.outs if before is not None and before.op is WAIT else ())
        elif eqn.op is WAIT and inside[start_of[eqn]]:
            fenced.wait(eqn, inside[start_of[eqn]])
        else:
            fenced.add(eqn)
        before = eqn
    return program.replace(eqns=tuple(fenced.eqns), outs=tuple(fenced.now(v) for v in program.outs))


class _Fenced:
    """A program under rewriting: its new equations, and the fenced versions of its values."""

    def __init__(self, program: Program):
        self.eqns: list[Eqn] = []
        self.new: dict[Var, Var] = {}  # fenced version for all later readers
        self.operands: dict[tuple[Eqn, Var], Var] = {}  # fenced version for one reader
        self.defined = set(program.ins)

    def now(self, v: Var) -> Var:
        return self.new.get(v, v)

    def add(self, eqn: Eqn) -> None:
        ins = tuple(self.operands.get((eqn, v)) or self.now(v) for v in eqn.ins)
        self.eqns.append(dataclasses.replace(eqn, ins=ins))
        self.defined.update(eqn.outs)

    def tie(self, values: Sequence[Var], eqn: Eqn) -> list[Var]:
        """The fenced versions of these values, behind one new fence."""
        outs = [dataclasses.replace(v) for v in values]
        ins = tuple(self.now(v) for v in values)
        self.eqns.append(Eqn(FENCE, ins, tuple(outs), {}, eqn.where, eqn.backward))
        return outs

    def start(self, eqn: Eqn, kernels: Sequence[Held], arrived: Sequence[Var]) -> None:
        """Tie the collective's operand to the largest operand of each kernel whose operands are all defined here, and
        to the result of a wait directly before it.
        """
        chosen: list[tuple[Eqn, Var]] = []
        for kernel in kernels:
            free = [edge for edge in kernel.reads if edge not in self.operands]
            if free and all(v in self.defined for _, v in kernel.reads):  # else it depends on kernels of the window
                chosen.append(max(free, key=lambda edge: size_of(edge[1].shape)))
        others = [v for v in dict.fromkeys(v for _, v in chosen) if v is not eqn.ins[0]]
        arrived = [v for v in arrived if v is not eqn.ins[0]]
        values = list(dict.fromkeys([*others, *arrived]))
        if values:
            operand, *tied = self.tie([eqn.ins[0], *values], eqn)
            of = dict(zip(values, tied, strict=True))
            self.new.update((v, of[v]) for v in arrived)
            self.operands.update((edge, of[edge[1]]) for edge in chosen if edge[1] in of)
            self.operands[eqn, eqn.ins[0]] = operand
        self.add(eqn)

    def wait(self, eqn: Eqn, kernels: Sequence[Held]) -> None:
        """Tie the collective's result to the results of the kernels before it."""
        self.add(eqn)
        values = [*eqn.outs, *dict.fromkeys(v for kernel in kernels for v in kernel.writes if v in self.defined)]
        self.new.update(zip(values, self.tie(values, eqn), strict=True))
