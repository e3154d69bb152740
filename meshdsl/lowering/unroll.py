"""Unroll loops: a scan becomes a sequence of its trips, so that later passes can move equations across trips.

Results are bitwise the same as the loop's. A row that one loop stacks and another reads is passed on directly. If the
other one runs backward, a barrier may make the compiler store this row, as it does for the loop, and not larger values
from which it could compute the row again. A reduction of a stack of large rows becomes one reduction per row, as soon
as the row is computed: same bytes, more collectives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..control import BARRIER
from ..control.host import host_values
from ..dims import Dim
from ..ir import Eqn, Scan, Var, dce
from ..ops.joining import INDEX, STACK
from .program import Program

LARGE = 2**18  # bytes of a row; smaller rows are reduced together, to pay the latency of one collective only


def unroll(program: Program, large: float = LARGE, most: float = math.inf, stores: bool = True) -> Program:
    """The program with every scan of at most `most` trips as a sequence of trips.

    Loops without trips stay loops. Stacks of rows with at least `large` bytes are reduced row by row. Unless it
    `stores` rows for loops that run backward, a compiler decides what it stores.

    >>> import meshdsl as md
    >>> def f(x, w):
    ...     return md.scan(lambda h, row: (md.tanh(h * row), None), x, w, over="layer")[0]
    >>> program = md.compile(f, "rows:2", "batch:rows").program(md.spec("batch:4"), md.spec("layer:3 batch:4"))
    >>> [str(eqn.op) for eqn in unroll(program).eqns]
    ['index', 'multiply', 'tanh', 'index', 'multiply', 'tanh', 'index', 'multiply', 'tanh']
    """
    if not any(_unrollable(eqn, most) for eqn in program.eqns):
        return program
    unrolled = _Unrolled(program, large, most, stores)
    for eqn in program.eqns:
        unrolled.add(eqn)
    return dce(program.replace(eqns=tuple(unrolled.eqns), outs=tuple(unrolled.now(v) for v in program.outs)))


def _unrollable(eqn: Eqn, most: float) -> bool:
    loop = eqn.scan
    return loop is not None and 0 < loop.trips <= most


class _Unrolled:
    """A program under rewriting: its new equations, and the replacement of each old value."""

    def __init__(self, program: Program, large: float, most: float, stores: bool):
        self.program, self.large, self.most, self.stores = program, large, most, stores
        self.offloaded = host_values(program)  # stored already
        self.eqns: list[Eqn] = []
        self.new: dict[Var, Var] = {}
        self.rows: dict[Var, tuple[Dim, tuple[Var, ...]]] = {}  # stacked value -> its dim and rows

    def now(self, v: Var) -> Var:
        return self.new.get(v, v)

    def add(self, eqn: Eqn) -> None:
        eqn = dataclasses.replace(eqn, ins=tuple(self.now(v) for v in eqn.ins))
        if eqn.scan is not None and _unrollable(eqn, self.most):
            self.loop(eqn, eqn.scan)
        elif len(eqn.ins) == 1 and eqn.ins[0] in self.rows and self.reduces_rows(eqn):
            self.by_row(eqn)
        else:
            self.eqns.append(eqn)

    def reduces_rows(self, eqn: Eqn) -> bool:
        """True if to replace a collective on a stack by the same collective on each of its rows."""
        dim, rows = self.rows[eqn.ins[0]]
        return eqn.sends and dim.name not in eqn.effect.dims and self.program.local_bytes(rows[0]) >= self.large

    def by_row(self, eqn: Eqn) -> None:
        dim, rows = self.rows[eqn.ins[0]]
        op: Any = eqn.op
        outs: list[Var] = []
        for row in rows:
            at = next((j + 1 for j, e in enumerate(self.eqns) if row in e.outs), len(self.eqns))
            out = Var(row.dims, row.dtype, eqn.outs[0].name, op.step(row.sharding, self.program.mesh))
            self.eqns.insert(at, dataclasses.replace(eqn, ins=(row,), outs=(out,)))
            outs.append(out)
        self.stack(eqn.outs[0], dim, outs, eqn)

    def stack(self, v: Var, dim: Dim, rows: Sequence[Var], eqn: Eqn) -> None:
        """Define a stacked value from its rows."""
        stacked = dataclasses.replace(v)
        self.eqns.append(Eqn(STACK, tuple(rows), (stacked,), {"dim": dim}, eqn.where, eqn.backward))
        self.new[v], self.rows[stacked] = stacked, (dim, tuple(rows))

    def row(self, stacked: Var, inner: Var, dim: Dim, at: int, eqn: Eqn) -> Var:
        """One row of a stacked value, without an index if the row is known."""
        if stacked in self.rows and (inner in self.offloaded or not (eqn.backward and self.stores)):
            return self.rows[stacked][1][at]
        if stacked in self.rows:
            row = self.rows[stacked][1][at]
            stored = dataclasses.replace(row)
            self.eqns.append(Eqn(BARRIER, (row,), (stored,), {}, eqn.where, eqn.backward))
            return stored
        result = Var(inner.dims, inner.dtype, inner.name, inner.sharding)
        self.eqns.append(Eqn(INDEX, (stacked,), (result,), {"dim": dim, "at": at}, eqn.where, eqn.backward))
        return result

    def loop(self, eqn: Eqn, scan: Scan) -> None:
        assert isinstance(scan.body, Program)
        body, dim = unroll(scan.body, self.large, self.most, self.stores), scan.dim
        held, carry, stacks = scan.inputs(eqn.ins)
        _, _, inner_rows = scan.inputs(body.ins)
        last, out_stacks = scan.results(eqn.outs)
        stacked: list[dict[int, Var]] = [{} for _ in out_stacks]
        for t in reversed(range(scan.trips)) if scan.reverse else range(scan.trips):
            rows = [self.row(v, inner, dim, t, eqn) for v, inner in zip(stacks, inner_rows, strict=True)]
            carry, outs = scan.results(self.trip(body, [*held, *carry, *rows]))
            for of, v in zip(stacked, outs, strict=True):
                of[t] = v
        self.new.update(zip(last, carry, strict=True))
        for v, of in zip(out_stacks, stacked, strict=True):
            self.stack(v, dim, [of[t] for t in range(scan.trips)], eqn)

    def trip(self, body: Program, ins: Sequence[Var]) -> list[Var]:
        """Add one run of a body on these values."""
        of = dict(zip(body.ins, ins, strict=True))
        for eqn in body.eqns:
            outs = tuple(dataclasses.replace(v) for v in eqn.outs)
            self.eqns.append(dataclasses.replace(eqn, ins=tuple(of[v] for v in eqn.ins), outs=outs))
            of.update(zip(eqn.outs, outs, strict=True))
        return [of[v] for v in body.outs]
