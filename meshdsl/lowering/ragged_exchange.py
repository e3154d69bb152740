"""Replace all-to-alls of values marked by `md.ragged` by exchanges that send only filled slots.

A mark gives the number of filled slots of a value, under all its names and shardings. An all_to_all of the value
becomes a `RaggedAllToAll`. The counts are exchanged before the value, and once for all values with these counts. The
marks are removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dims import Dim, fresh_dim, show
from ..errors import LayoutError, at
from ..ir import Because, Cause, Eqn, Op, Var, cse, dce
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..ops.ragged import RAGGED
from ..ops.reshape import RENAME
from .blocks import FILLED
from .collectives import AllToAll
from .partition.planner import Reshard
from .program import Program
from .ragged import RaggedAllToAll


@dataclass(frozen=True, eq=False)
class _Mark:
    """The facts known about a marked value: its counts, the dims it shares with them, and the dim they count along."""

    counts: Var
    names: Mapping[str, str]  # dim of the counts -> its name in the value
    slots: str
    share: float

    def renamed(self, new: Mapping[str, str]) -> _Mark:
        names = {d: new[name] for d, name in self.names.items()}
        return dataclasses.replace(self, names=names, slots=new[self.slots])


def ragged_exchange(program: Program) -> Program:
    """The program without marks and with ragged exchanges of marked values; the same program if no value is marked."""
    return dce(cse(_trimmed(program))) if RAGGED in program.kinds else program


def _trimmed(program: Program) -> Program:
    """Rewrite one program, including its loops and branches."""
    trim = _Trim(program)
    marks = _marks(program.eqns)
    for eqn in program.eqns:
        trim.add(eqn.map_graphs(_trimmed), marks.get(eqn))
    return program.replace(eqns=tuple(trim.eqns), outs=tuple(map(trim.now, program.outs)))


def _reshards(eqn: Eqn) -> bool:
    """True for a collective; exchanges of rows are none, because they change the value instead of its sharding."""
    return eqn.collective is not None and eqn.ins[0].sharding != eqn.outs[0].sharding


def _links(eqns: Sequence[Eqn]) -> Iterator[tuple[Var, Var, Mapping[str, str]]]:
    """Pairs of values that are the same data, and the dim names of the first mapped to those of the second."""
    for eqn in eqns:
        if eqn.op in (RAGGED, RENAME) or _reshards(eqn):
            x, y = eqn.ins[0], eqn.outs[0]
            yield x, y, {a.name: b.name for a, b in zip(x.dims, y.dims, strict=True)}


def _marks(eqns: Sequence[Eqn]) -> dict[Eqn, _Mark]:
    """The nearest mark of every all-to-all that is connected to one by collectives and renames only."""
    to: dict[Var, _Mark] = {}  # marks of values that are marked later
    of: dict[Var, _Mark] = {}  # marks of values that are marked earlier
    for eqn in eqns:
        if eqn.op is RAGGED:
            counts, same = eqn.ins[1], {d.name: d.name for d in eqn.ins[1].dims}
            mark = _Mark(counts, same, eqn.params["dim"].name, eqn.params["share"])
            to[eqn.ins[0]] = of[eqn.outs[0]] = mark
    links = list(_links(eqns))
    for x, y, names in links:
        if x in of:
            of.setdefault(y, of[x].renamed(names))
    for x, y, names in reversed(links):
        if y in to:
            to.setdefault(x, to[y].renamed({new: old for old, new in names.items()}))
    marks: dict[Eqn, _Mark] = {}
    for eqn in eqns:
        if isinstance(eqn.op, AllToAll):
            mark = to.get(eqn.outs[0]) or of.get(eqn.ins[0])
            if mark is not None:
                marks[eqn] = mark
    return marks


@dataclass(eq=False)
class _Trim:
    """The program under construction."""

    program: Program
    eqns: list[Eqn] = field(default_factory=list[Eqn])
    same: dict[Var, Var] = field(default_factory=dict[Var, Var])  # result of a mark -> the value it marks
    origin: dict[Var, Var] = field(default_factory=dict[Var, Var])  # result of a collective -> its original
    versions: dict[Var, list[Var]] = field(default_factory=dict[Var, list[Var]])  # origin -> versions so far

    def __post_init__(self) -> None:
        self.versions.update({v: [v] for v in self.program.ins})

    def now(self, v: Var) -> Var:
        """The value that replaces this one."""
        return self.same.get(v, v)

    def add(self, eqn: Eqn, mark: _Mark | None) -> None:
        """Add one equation of the program, or its replacement."""
        eqn = dataclasses.replace(eqn, ins=tuple(map(self.now, eqn.ins)))
        if eqn.op is RAGGED:
            self.same[eqn.outs[0]] = eqn.ins[0]
        elif mark is not None and self.program.local_bytes(eqn.ins[0]):
            self.exchange(eqn, mark)
        else:
            self.append(eqn)

    def append(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        if _reshards(eqn) and not eqn.effect.reduces:
            self.origin[eqn.outs[0]] = self.origin.get(eqn.ins[0], eqn.ins[0])
        for v in eqn.outs:
            self.versions.setdefault(self.origin.get(v, v), []).append(v)

    def exchange(self, eqn: Eqn, mark: _Mark) -> None:
        """Add the counts on both sides, and the exchange that uses them."""
        (x,), (y,), exchange = eqn.ins, eqn.outs, eqn.op
        assert isinstance(exchange, AllToAll)
        self.check(eqn, exchange, mark)
        sent, came = (self.filled(eqn, v, mark) for v in (x, y))
        cells = tuple(mark.names[d.name] for d in mark.counts.dims)
        op = RaggedAllToAll(exchange.dim, exchange.to, exchange.axes, cells, mark.slots, mark.share)
        self.append(dataclasses.replace(eqn, op=op, ins=(x, sent, came)))

    def check(self, eqn: Eqn, op: AllToAll, mark: _Mark) -> None:
        x = eqn.ins[0]
        told = tuple(mark.names.values())
        lacking = [d for d in (op.dim, op.to) if d not in told]
        if lacking:
            raise at(
                LayoutError(
                    f"a ragged exchange cannot send only the filled {mark.slots!r}: '{op}'\n"
                    f"  it cuts or joins {' and '.join(map(repr, lacking))} of {show(x.dims)}, and what it sends is "
                    f"runs of whole {mark.slots!r}, one for each place of {', '.join(map(repr, told))}\n"
                    f"  split {' and '.join(map(repr, told))} instead, or send every slot (exchange='padded' of "
                    f"md.nn.moe_layer, no md.ragged)"
                ),
                eqn.where,
            )
        if self.origin.get(mark.counts, mark.counts) not in self.versions:
            raise at(
                LayoutError(
                    f"a ragged exchange cannot send only the filled {mark.slots!r}: '{op}'\n"
                    "  the counts that md.ragged got are computed after it, and both sides need them before\n"
                    "  compute them from what is known before the exchange"
                ),
                eqn.where,
            )

    def filled(self, eqn: Eqn, v: Var, mark: _Mark) -> Var:
        """The number of filled slots in the value's block, with the value's dim names."""
        extents, mesh = self.program.extents, self.program.mesh
        cuts = {d: v.sharding.axes(mark.names[d.name]) for d in mark.counts.dims}
        blocks = {d: (extents.local(x, mesh.count(cut)) for x in (d, _named(d, mark.names))) for d, cut in cuts.items()}
        alike = {d.name: cuts[d] for d, (one, other) in blocks.items() if one == other}
        counts = self.lying(eqn, mark.counts, alike)
        shape = tuple(_named(d, mark.names) for d in counts.dims)
        if shape != counts.dims:
            split = {mark.names[d]: axes for d, axes in counts.sharding.split}
            counts = self.make(eqn, RENAME, counts, split, shape=shape)
        counts = self.lying(eqn, counts, {d.name: v.sharding.axes(d.name) for d in shape})
        slots = next(d for d in v.dims if d.name == mark.slots)
        axes = v.sharding.axes(slots.name)
        parts = fresh_dim(Dim(f"{slots.name}__parts", mesh.count(axes)), extents.multiple, shape)
        size = extents.local(slots, parts.size)
        split = {**dict(counts.sharding.split), parts.name: axes}
        return self.make(eqn, FILLED, counts, split, dim=slots, parts=parts, size=size, axes=axes)

    def lying(self, eqn: Eqn, counts: Var, split: Mapping[str, Axes]) -> Var:
        """The counts in a sharding, from the version that is cheapest to reshard."""
        mesh, extents, target = self.program.mesh, self.program.extents, Sharding.of(split)
        shape, itemsize = counts.dims, counts.dtype.itemsize
        versions = self.versions[self.origin.get(counts, counts)]
        moves = [(v, Reshard(v.sharding, target, shape, mesh, extents, itemsize)) for v in versions]
        counts, move = min(moves, key=lambda pair: pair[1].cost)
        for step in move.steps:
            moved = Var(shape, counts.dtype, counts.name, step.step(counts.sharding, mesh))
            cause = Cause(Because.COUNTS, parts=(eqn.cause,))
            self.append(Eqn(step, (counts,), (moved,), {}, eqn.where, eqn.backward, cause))
            counts = moved
        return counts

    def make(self, eqn: Eqn, op: Op, x: Var, split: Mapping[str, Axes], **params: Any) -> Var:
        (kind,) = op.infer([x.type], params)
        result = Var(kind.dims, kind.dtype, "", Sharding.of(split))
        self.append(Eqn(op, (x,), (result,), params, eqn.where, eqn.backward))
        return result


def _named(dim: Dim, names: Mapping[str, str]) -> Dim:
    return Dim(names[dim.name], dim.size)
