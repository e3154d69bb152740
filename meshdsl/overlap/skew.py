"""Skewed loops: one stage of a loop's body runs a trip before the rest, so that a trip overlaps with its neighbours.

The body is cut into an early and a late stage; nothing in the early one depends on the late one. A trip of the skewed
loop runs the late stage of one trip and the early stage of the next (software pipelining; Lam, 1988). The first early
and the last late stage are outside the loop, so every equation runs as often as before, and bytes are equal. A model of
64 layers keeps one body per direction.

- `gathers_ahead`: the gathers of the next trip's rows (weights of the next layer) run during this trip.
- `gradients_behind`: results that no later trip reads (weight gradients) are computed one trip late.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Local
from ..control import SCAN
from ..control.host import host_values
from ..dims import Dim
from ..ir import Eqn, Fuses, Linear, Op, Product, Scan, Type, Var, dce, no_flops, read_by, sources_of
from ..lowering.collectives import AllGather
from ..lowering.program import Program
from ..ops.indexing import IOTA
from ..ops.joining import INDEX
from ..ops.reshape import RENAME
from .loops import in_parts, no_loop_in_parts
from .planner import Candidates, Planner
from .reasons import no_skew


def _with_row(c: Local, x: Any, row: Any, *, dim: Dim, first: bool) -> Any:
    return c.xp.concatenate([row[None], x] if first else [x, row[None]], 0)


ROW = Op(  # the row at index `at` + `skip` of a stack
    "row",
    type=lambda x, at, *, dim, skip: Type(tuple(d for d in x.dims if d != dim), x.dtype),
    kernel=lambda c, x, at, *, dim, skip: c.xp.dynamic_slice(x, at + skip, 1, c.ins[0].position(dim)).reshape(
        c.outs[0].sizes
    ),
    blocked=lambda x, at, *, dim, skip: (dim.name,),
    linear=Linear.FIRST,
    flops=no_flops,
    fuses=Fuses.PICK,
)
WITH_ROW = Op(  # a stack with one more row, first or last
    "with_row",
    type=lambda x, row, *, dim, first: Type((dim, *row.dims), row.dtype),
    kernel=_with_row,
    blocked=lambda x, row, *, dim, first: (dim.name,),
    linear=Linear.JOINT,
    flops=no_flops,
    fuses=Fuses.MAP,
)


@dataclass(frozen=True, eq=False)
class EarlyStage:
    """How the body of a skewed loop divides.

    Trip i of the new loop runs the `early` equations of trip i + 1 of the old one, and the others, the late ones, of
    trip i. All carries are computed by the early equations, or all by the late ones.
    """

    early: frozenset[Eqn]
    carry_early: bool


def gathers_ahead(scan: Scan) -> EarlyStage | None:
    """The gathers of rows and constants, with all that they read; None if the body has none."""
    body = scan.body
    free = set(body.ins) - set(scan.inputs(body.ins)[1])
    fixed: set[Eqn] = set()
    for eqn in body.eqns:
        if free.issuperset(eqn.ins) and eqn.control is None:
            fixed.add(eqn)
            free.update(eqn.outs)
    early = sources_of(body.eqns, [v for eqn in fixed if isinstance(eqn.op, AllGather) for v in eqn.outs])
    return EarlyStage(frozenset(early), False) if early else None


def gradients_behind(scan: Scan) -> EarlyStage | None:
    """All but the products, and what reads them, that no carry depends on; None if there is nothing to hide behind
    them, or no such product.
    """
    body = scan.body
    early = sources_of(body.eqns, scan.results(body.outs)[0])
    late = [eqn for eqn in body.eqns if eqn not in early]
    products = any(isinstance(eqn.op, Op) and eqn.op.product is not Product.NONE for eqn in late)
    sends = any(eqn.sends for eqn in early)
    return EarlyStage(frozenset(early), True) if products and sends else None


def skewed(planner: Planner) -> Candidates:
    """Loops in parts, and skewed loops: gathers ahead, gradients behind, both where different loops allow them."""
    cut = False
    for name, program in in_parts(planner, planner.program):
        yield f"loops in {name}", planner.in_order(planner.combined(program))
        cut = True
    if planner.alone and not planner.default_parts:
        if not cut:
            raise planner.no_effect(
                f"no collective in a loop runs in {planner.request.parts} parts\n"
                f"{no_loop_in_parts(planner)}  leave dim and parts out, or use overlap='list', which cuts nothing"
            )
        return

    def body(one: Program) -> Program:
        return planner.fenced(planner.in_order(one))

    choices = {"gathers ahead": gathers_ahead, "gradients behind": gradients_behind}
    programs = {name: skew(planner.program, choose, body) for name, choose in choices.items()}
    programs = {name: one for name, one in programs.items() if one is not planner.program}
    if len(programs) == 2:
        programs["gradients behind, or gathers ahead"] = skew(
            planner.program, lambda scan: gradients_behind(scan) or gathers_ahead(scan), body
        )
    if not programs and not cut:
        raise planner.no_effect(no_skew(planner.program))
    for name, one in programs.items():
        yield name, planner.in_order(planner.combined(one))


def skew(program: Program, choose: Callable[[Scan], EarlyStage | None], order: Callable[[Program], Program]) -> Program:
    """The program with the loops for which `choose` returns stages skewed, and their bodies ordered by `order`; the
    same program if there are none.

    >>> import meshdsl as md
    >>> def loss(w, x):
    ...     def layer(h, row):
    ...         return md.tanh(md.einsum(md.relu(md.einsum(h, row, out="b o")), row, out="b i")), None
    ...     return md.sum(md.scan(layer, x, w, over="layer")[0])
    >>> types = md.spec("layer:4 i:8 o:8"), md.spec("b:8 i:8")
    >>> program = md.compile(md.grad(loss), "cols:2", "o:cols").program(*types)
    >>> [eqn.control.trips for eqn in program.eqns if eqn.control]
    [4, 4]
    >>> skewed = skew(program, gradients_behind, lambda body: body)  # the loop of the backward pass
    >>> [eqn.control.trips for eqn in skewed.eqns if eqn.control]
    [4, 3]
    """
    skewed: dict[Eqn, list[Eqn]] = {}
    on_host = host_values(program)  # whose rows the device can neither take apart nor join
    for eqn in program.eqns:
        scan = eqn.scan if on_host.isdisjoint((*eqn.ins, *eqn.outs)) else None
        stages = choose(scan) if scan is not None and scan.trips > 2 else None
        if scan is not None and stages is not None:
            skewed[eqn] = _Skewed(eqn, scan, stages).eqns(order)
    eqns = tuple(late_values for eqn in program.eqns for late_values in skewed.get(eqn, [eqn]))
    return dce(program.replace(eqns=eqns)) if skewed else program


class _Skewed:
    """One loop under rewriting."""

    def __init__(self, loop: Eqn, scan: Scan, stages: EarlyStage):
        assert isinstance(scan.body, Program)
        self.loop, self.scan, self.stages, self.body = loop, scan, stages, scan.body
        literal = {eqn for eqn in self.body.eqns if not eqn.ins}
        self.early = [eqn for eqn in self.body.eqns if eqn in stages.early or eqn in literal]
        self.late = [eqn for eqn in self.body.eqns if eqn not in stages.early or eqn in literal]
        self.carry = scan.inputs(self.body.ins)[1]
        late_values = {v for eqn in self.late for v in eqn.outs}
        self.late_rows = [v in late_values or not self.of_early(v) for v in scan.results(self.body.outs)[1]]
        self.crossing = self._crossing(late_values)

    def of_early(self, v: Var) -> bool:
        """True if the early stage has a value: it computes it, or it is a carry of its own."""
        return any(v in eqn.outs for eqn in self.early) or (self.stages.carry_early and v in self.carry)

    def _crossing(self, defined: set[Var]) -> list[Var]:
        rows = [v for v, late in zip(self.scan.results(self.body.outs)[1], self.late_rows, strict=True) if late]
        carries = [] if self.stages.carry_early else self.scan.results(self.body.outs)[0]
        read = dict.fromkeys([*(v for eqn in self.late for v in eqn.ins), *rows, *carries])
        return [v for v in read if v not in defined and self.of_early(v)]

    def add(self, eqns: list[Eqn], op: Op, ins: Sequence[Var], out: Var, **params: Any) -> Var:
        eqns.append(Eqn(op, tuple(ins), (out,), params, self.loop.where, self.loop.backward))
        return out

    def copies(self, eqns: list[Eqn], stage: Sequence[Eqn], values: Mapping[Var, Var]) -> dict[Var, Var]:
        """Add the equations of a stage on these values; returns these and its own."""
        values = dict(values)
        for eqn in stage:
            outs = tuple(dataclasses.replace(v) for v in eqn.outs)
            eqns.append(dataclasses.replace(eqn, ins=tuple(values[v] for v in eqn.ins), outs=outs))
            values.update(zip(eqn.outs, outs, strict=True))
        return values

    def rows(self, eqns: list[Eqn], read: Callable[[list[Eqn], Var, Var], Var], stage: Sequence[Eqn]) -> dict[Var, Var]:
        """The rows of one trip that a stage reads."""
        inner = self.scan.inputs(self.body.ins)[2]
        carries, rows = self.scan.results(self.body.outs)
        needed = read_by(stage, rows if stage is self.late else ())
        needed.update(carries if (stage is self.early) == self.stages.carry_early else ())
        stacks = self.scan.inputs(self.loop.ins)[2]
        return {v: read(eqns, x, v) for v, x in zip(inner, stacks, strict=True) if v in needed}

    def eqns(self, order: Callable[[Program], Program]) -> list[Eqn]:
        """The equations that replace the loop."""
        scan, eqns = self.scan, list[Eqn]()
        held, carry, _ = scan.inputs(self.loop.ins)
        consts = dict(zip(scan.inputs(self.body.ins)[0], held, strict=True))
        start = dict(zip(self.carry, carry, strict=True))
        first, last = (scan.trips - 1, 0) if scan.reverse else (0, scan.trips - 1)

        before = {**consts, **(start if self.stages.carry_early else {})}
        before = self.copies(eqns, self.early, {**before, **self.rows(eqns, self.at(first), self.early)})
        carried = self.carries(before) if self.stages.carry_early else list(carry)
        looped, crossed, rows = self.looped(eqns, order, carried, [before[v] for v in self.crossing])

        after = {**consts, **dict(zip(self.crossing, crossed, strict=True))}
        after |= {} if self.stages.carry_early else dict(zip(self.carry, looped, strict=True))
        after = self.copies(eqns, self.late, {**after, **self.rows(eqns, self.at(last), self.late)})
        ends = looped if self.stages.carry_early else self.carries(after)
        self.finish(eqns, ends, rows, before, after)
        return eqns

    def at(self, index: int) -> Callable[[list[Eqn], Var, Var], Var]:
        def read(eqns: list[Eqn], stack: Var, inner: Var) -> Var:
            return self.add(eqns, INDEX, [stack], dataclasses.replace(inner), dim=self.scan.dim, at=index)

        return read

    def carries(self, values: Mapping[Var, Var]) -> list[Var]:
        return [values[v] for v in self.scan.results(self.body.outs)[0]]

    def looped(
        self, eqns: list[Eqn], order: Callable[[Program], Program], carry: Sequence[Var], crossing: Sequence[Var]
    ) -> tuple[list[Var], list[Var], list[Var]]:
        """Add the loop of all trips but one; returns its last carries, crossing values, and stacks."""
        scan, dim = self.scan, Dim(self.scan.dim.name, self.scan.trips - 1)
        held, _, stacks = scan.inputs(self.loop.ins)
        trips = self.add(eqns, IOTA, [], Var((dim,), np.dtype(np.int32)), dim=dim, dtype=np.dtype(np.int32))
        body = self.paired(held, stacks)
        n = len(held) + len(stacks)
        control = Scan(order(body), n, len(carry) + len(crossing), dim, scan.reverse)
        ins = (*held, *stacks, *carry, *crossing, trips)
        ends, inner = control.results(body.outs)
        outs = [dataclasses.replace(v) for v in ends]
        outs += [dataclasses.replace(v, dims=(dim, *v.dims)) for v in inner]
        eqns.append(dataclasses.replace(self.loop, op=SCAN, ins=ins, outs=tuple(outs), params={"control": control}))
        k = len(carry)
        return outs[:k], outs[k : len(ends)], outs[len(ends) :]

    def paired(self, held: Sequence[Var], stacks: Sequence[Var]) -> Program:
        """The body: the late stage of one trip, and the early stage of the next."""
        scan, body = self.scan, self.body

        def new(v: Var) -> Var:
            return dataclasses.replace(v)

        consts, whole = [new(v) for v in scan.inputs(body.ins)[0]], [new(v) for v in stacks]
        carry, crossing, at = [new(v) for v in self.carry], [new(v) for v in self.crossing], Var((), np.dtype(np.int32))
        of = dict(zip(stacks, whole, strict=True))
        eqns: list[Eqn] = []

        def row(skip: int) -> Callable[[list[Eqn], Var, Var], Var]:
            def read(eqns: list[Eqn], stack: Var, inner: Var) -> Var:
                return self.add(eqns, ROW, [of[stack], at], new(inner), dim=scan.dim, skip=skip)

            return read

        known = dict(zip(scan.inputs(body.ins)[0], consts, strict=True))
        own = dict(zip(self.carry, carry, strict=True))
        late = {**known, **dict(zip(self.crossing, crossing, strict=True))} | ({} if self.stages.carry_early else own)
        early = {**known, **(own if self.stages.carry_early else {})}
        late = self.copies(eqns, self.late, {**late, **self.rows(eqns, row(int(scan.reverse)), self.late)})
        early = self.copies(eqns, self.early, {**early, **self.rows(eqns, row(int(not scan.reverse)), self.early)})
        ends = self.carries(early if self.stages.carry_early else late)
        rows = [
            (late if is_late else early)[v]
            for v, is_late in zip(scan.results(body.outs)[1], self.late_rows, strict=True)
        ]
        outs = (*ends, *(early[v] for v in self.crossing), *rows)
        return body.replace(ins=(*consts, *whole, *carry, *crossing, at), eqns=tuple(eqns), outs=outs)

    def finish(
        self,
        eqns: list[Eqn],
        ends: Sequence[Var],
        rows: Sequence[Var],
        before: Mapping[Var, Var],
        after: Mapping[Var, Var],
    ) -> None:
        """Define the loop's results: rename the carries, and add the row that the loop lacks to each stack."""
        carries, stacks = self.scan.results(self.loop.outs)
        _, inner = self.scan.results(self.body.outs)
        for v, end in zip(carries, ends, strict=True):
            self.add(eqns, RENAME, [end], v, shape=v.dims)
        for v, x, row, late in zip(stacks, rows, inner, self.late_rows, strict=True):
            one = (after if late else before)[row]
            self.add(eqns, WITH_ROW, [x, one], v, dim=self.scan.dim, first=late == self.scan.reverse)
