"""The ledger: the cost of every instruction of a program, on one device, for one trip.

Nothing here is estimated. FLOPs come from the operations' own rules, collectives from `Program.record`, bytes from
the stored sizes of the values that are read and written (see `fusion`). `timeline` computes time from the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..control.host import moves_to_or_from_host
from ..errors import Where
from ..ir import Cause, Eqn, Fuses, Op, Product, Var, operations, walk
from ..lowering import Program
from ..lowering.program import CollectiveRecord
from ..ops.contraction import EINSUM
from ..ops.creation import EMPTY
from .attention import AttentionWork, is_scores, work_of_attention
from .fusion import Branch, Kernel, LoopStep, Send, Step, Wait, steps


@dataclass(frozen=True)
class Matmul:
    """Sizes of a matrix product on one device: `batch` products of [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, eq=False)
class Line:
    """One instruction. FLOPs and bytes are per device and per trip; multiply by `trips`."""

    index: int  # position in the program, loop bodies included, from 0
    eqn: Eqn
    kind: str  # "matmul", "conv", "vector", "move", "host" (a copy to or from the host's memory) or "collective"
    trips: float  # how often it runs, by the loops and the branches of known frequency around it; see `walk`
    unbounded: bool  # inside a while loop, whose trip count is unknown
    flops: float
    hbm_bytes: int  # bytes read and written; values that stay inside a kernel do not count
    dtype: np.dtype[Any]  # of the operands of a product, otherwise of the result; for a collective, of the data sent
    matmul: Matmul | None  # None for a "matmul" that is a whole attention
    collective: CollectiveRecord | None
    step: Step  # the kernel that contains it; several lines may share one
    score_bytes: int = 0  # of `hbm_bytes`: attention scores, which a fused attention kernel does not store
    attention: AttentionWork | None = None  # of a whole attention; its kernel depends on the machine

    @property
    def op(self) -> str:
        """The operation's name, or the collective's kind."""
        return str(self.eqn.op) if self.collective is None else self.collective.kind

    @property
    def name(self) -> str:
        """The named tensor that it reads or makes; "" if none."""
        if self.collective is not None:
            return self.collective.name
        return next((v.name for v in (*self.eqn.outs, *self.eqn.ins) if v.name), "")

    @property
    def record(self) -> CollectiveRecord:
        """The record of a collective; the line must be one."""
        assert self.collective is not None
        return self.collective

    @property
    def where(self) -> Where:
        """The user's source line."""
        return self.eqn.where

    @property
    def backward(self) -> bool:
        """True if differentiation made it."""
        return self.eqn.backward

    @property
    def cause(self) -> Cause:
        """The reason for a collective."""
        return self.eqn.cause

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        record = self.collective
        return {
            "index": self.index,
            "op": self.op,
            "kind": self.kind,
            "name": self.name,
            "where": str(self.where),
            "backward": self.backward,
            "trips": self.trips,
            "unbounded": self.unbounded,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "dtype": self.dtype.name,
            "matmul": None if self.matmul is None else vars(self.matmul),
            "axes": [] if record is None else list(record.axes),
            "bytes": 0 if record is None else record.bytes,
            "wire_bytes": 0 if record is None else record.wire_bytes,
            "cause": str(self.cause),
        }


@dataclass(frozen=True, eq=False)
class Ledger:
    """Every line of a program in program order, and the steps that the device launches."""

    program: Program
    lines: tuple[Line, ...]
    steps: tuple[Step, ...]

    @property
    def flops(self) -> float:
        """FLOPs of one device in one run."""
        return sum(line.flops * line.trips for line in self.lines)

    @property
    def hbm_bytes(self) -> int:
        """Bytes one device reads and writes in one run."""
        return round(sum(line.hbm_bytes * line.trips for line in self.lines))

    @property
    def wire_bytes(self) -> int:
        """Bytes one device sends in one run."""
        return round(sum(x.collective.wire_bytes * x.trips for x in self.lines if x.collective is not None))

    def of(self, step: Step) -> tuple[Line, ...]:
        """The lines of one kernel or collective, for one run; trips of an unrolled loop share a branch's steps."""
        return self._by_step.get(step, ())

    @cached_property
    def _by_step(self) -> dict[Step, tuple[Line, ...]]:
        groups: dict[Step, dict[int, Line]] = {}
        for line in self.lines:
            groups.setdefault(line.step, {})[line.index] = line
        return {step: tuple(lines.values()) for step, lines in groups.items()}


def ledger(program: Program) -> Ledger:
    """The cost of every instruction of a program, per device.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> costs = ledger(step.program(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")))
    >>> [(line.op, line.flops, line.trips) for line in costs.lines]
    [('einsum', 2048.0, 1), ('all_reduce', 0.0, 1)]
    >>> costs.wire_bytes
    1536
    """
    top = steps(program)
    lines = sorted(_lines(program, top, 1, False, _order(program)), key=lambda line: line.index)
    return Ledger(program, tuple(lines), top)


def _order(program: Program) -> dict[Eqn, int]:
    """The number of each equation, loop bodies included."""
    return {eqn: i for i, (eqn, _) in enumerate(walk(program))}


def _lines(
    program: Program, body_steps: Sequence[Step], trips: float, unbounded: bool, order: dict[Eqn, int]
) -> Iterator[Line]:
    for step in body_steps:
        if isinstance(step, LoopStep):
            yield from _lines(program, step.body, trips * step.trips, unbounded or step.unbounded, order)
        elif isinstance(step, Branch):
            for key, arm in zip(step.eqn.graphs(), step.arms, strict=True):
                yield from _lines(program, arm, trips * step.eqn.runs(key), unbounded, order)
        elif isinstance(step, Wait):
            continue
        elif isinstance(step, Send):
            record = program.record(step.eqn, trips, unbounded)
            moved = sum(map(program.local_bytes, (*step.reads, *step.writes))) + 2 * sum(program.padded_bytes(step.eqn))
            index = order[step.eqn]
            yield Line(index, step.eqn, "collective", trips, unbounded, 0.0, moved, record.dtype, None, record, step)
        else:
            yield from _kernel(program, step, trips, unbounded, order)


def _kernel(program: Program, step: Kernel, trips: float, unbounded: bool, order: dict[Eqn, int]) -> Iterator[Line]:
    unread = dict(zip(step.reads, step.read_bytes, strict=True))
    *_, last = step.eqns
    if _in_place(program, last):
        unread.pop(last.ins[0], None)
    for eqn in step.eqns:
        moved = [(v, written_bytes(program, eqn, v)) for v in eqn.outs if v in step.writes]
        # the last equation also pays for reads through views and for recomputed operands
        own = [v for v in dict.fromkeys(eqn.ins) if v in unread]
        reads = [*own, *(v for v in unread if v not in own)] if eqn is last else own
        moved += [(v, unread.pop(v)) for v in reads]
        matmul = matmul_of(program, eqn)
        flops = operations(eqn, program.local_shape) if eqn.collective is None else 0.0
        attention = work_of_attention(program, eqn)
        products = matmul is not None or attention is not None
        dtype = eqn.ins[0].dtype if products else eqn.outs[0].dtype
        kind = _kind(eqn, products, flops)
        if kind == "host":
            moved = moved[:1]  # the other side of the copy is not in the device's memory
        total, scores = sum(n for _, n in moved), sum(n for v, n in moved if is_scores(program, v))
        yield Line(order[eqn], eqn, kind, trips, unbounded, flops, total, dtype, matmul, None, step, scores, attention)


def _kind(eqn: Eqn, products: bool, flops: float) -> str:
    """The kind of a kernel's line."""
    if moves_to_or_from_host(eqn):
        return "host"
    if isinstance(eqn.op, Op) and eqn.op.product is Product.CONV:
        return "conv"
    return "matmul" if products else "vector" if flops else "move"


def _in_place(program: Program, eqn: Eqn) -> bool:
    """True if an equation writes over a part of its first operand; an argument of the program is copied instead."""
    return isinstance(eqn.op, Op) and eqn.op.fuses is Fuses.UPDATE and eqn.ins[0] not in program.ins


def written_bytes(program: Program, eqn: Eqn, v: Var) -> int:
    """Bytes that an equation writes of a stored result: all of it; in place, those of its second operand.

    Memory that nothing has written yet is only allocated.
    """
    if eqn.op is EMPTY:
        return 0
    return program.local_bytes(eqn.ins[1] if _in_place(program, eqn) else v)


def matmul_of(program: Program, eqn: Eqn) -> Matmul | None:
    """Sizes of a product of two tensors that sums over some dim; None for any other equation."""
    if not isinstance(eqn.op, Op) or eqn.op.product is not Product.MATMUL or (eqn.op is EINSUM and len(eqn.ins) != 2):
        return None
    x, y = eqn.ins[:2]
    sizes = {d.name: n for v in (x, y) for d, n in zip(v.dims, program.local_shape(v), strict=True)}
    left, right, out = ({d.name for d in v.dims} for v in (x, y, eqn.outs[0]))

    def count(names: set[str]) -> int:
        return math.prod(sizes[name] for name in names)

    summed = count((left | right) - out)
    if summed == 1:
        return None
    return Matmul(count(left & right & out), count((left & out) - right), count((right & out) - left), summed)
