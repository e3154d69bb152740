"""Operator partition: split a range of a program into parts along one dim, so that the parts can overlap one another.

Parts of a value are cut from each device's own block, so nothing is sent. An equation runs on each part if its
operation's sharding rule passes the dim: parts of its result are then parts of the complete result. At the end of the
range, parts are joined. A backward sum over the dim (a weight gradient) runs on each part, and the partial results are
added before they are reduced. A gather or an all_to_all of the dim interleaves the devices' parts: the value then
consists of `chunks`, each with its own parts. A dim that no input has (the slots of experts) is cut wherever a value
with that dim was computed in full. (Jiang et al., 2024, section 5.2, infers axes by constraints; dim names
make this a lookup.)
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..dims import Dim, Shape
from ..errors import MeshdslError
from ..ir import Collective, Eqn, Op, Type, Var, dce, params_with
from ..lowering.labels import labels_of
from ..lowering.program import Program
from ..lowering.ragged import RaggedAllToAll
from ..ops.indexing import SCATTER_ADD, TAKE
from ..ops.inverse import INVERSE
from ..ops.ordering import CUMSUM
from ..ops.reshape import RENAME, RESHAPE
from .parts import CARRIED, FILLED_PART, JOIN_PARTS, PART, SUM_PARTS, Cut, inner_cut, resized
from .slot_spaces import RefusedError, StoredSlots, sums_parts
from .slots import SlotParts

# operations with their own rule that treats every block of a dim the same way
WITH_RULES = (RENAME, RESHAPE, TAKE, SCATTER_ADD, INVERSE)


@dataclass(frozen=True)
class Parts:
    """A program with a range in parts: the part that each equation computes, and the size of the range."""

    program: Program
    part: Mapping[Eqn, int]  # equation -> number of its part, for equations that compute one part
    equations: int  # number of equations of the original program that run in parts
    of: Mapping[Eqn, Eqn]  # equation -> equation of the original program whose result, or a part of it, it computes
    ends: tuple[Eqn, ...] = ()  # equations that read a value in parts and need it in full
    slots: tuple[StoredSlots, ...] = ()  # stored values in slots, which another loop reads

    @property
    def bytes_sent(self) -> float:
        """The expected bytes of the collectives that run in parts."""
        sent = [self.program.record(eqn, 1) for eqn in self.part if eqn.sends]
        return sum(record.bytes * record.op.share for record in sent)


def cuts_along(program: Program, dim: str, parts: int) -> dict[Var, Cut]:
    """The cut of every value that is connected to `dim` of the program's inputs."""
    return _finished(lambda refused: Splitter(program, _of_inputs(program, dim), parts, None, dim, refused)).cut


def _finished(make: Callable[[Sequence[Eqn]], Splitter]) -> Splitter:
    """The splitter after all equations; it is made again without each space of slots that cannot be in parts."""
    refused: list[Eqn] = []
    while True:
        splitter = make(refused)
        try:
            splitter.run()
        except RefusedError as refusal:
            refused.append(refusal.inverse)
        else:
            return splitter


def _of_inputs(program: Program, dim: str) -> dict[Var, Cut]:
    return {v: Cut(dim, 1) for v in program.ins if _has(v, dim)}


def split(
    program: Program,
    dim: str,
    parts: int,
    cuts: Mapping[Var, Cut] | None = None,
    among: Collection[Eqn] | None = None,
    stored: Collection[Var] = (),
    read: Sequence[StoredSlots] = (),
) -> Parts:
    """Split the equations that the inputs' `dim` passes through into `parts` parts.

    The range is the equations `among` (default: the whole program); `cuts` says how values from outside are cut in it.
    The results `stored` are read by the backward pass alone, indices of slots as names of slots; `read` are inputs that
    such a program stored. Equations inside loops and branches stay complete. Weight gradients are equal up to the order
    of float additions; all other values are computed by the same operations on the same elements.
    """
    cuts = _of_inputs(program, dim) if cuts is None else cuts
    range_ = None if among is None else set(among)
    splitter = _finished(lambda refused: Splitter(program, cuts, parts, range_, dim, refused, stored, read))
    after = dce(program.replace(eqns=tuple(splitter.eqns), outs=splitter.outs))
    part = {eqn: splitter.part[eqn] for eqn in after.eqns if eqn in splitter.part}
    return Parts(after, part, splitter.count, splitter.of, tuple(splitter.ends), splitter.to_store)


@dataclass(frozen=True)
class Filled:
    """The cut of counts of filled slots: every part has `size` slots of a device's block."""

    size: int


def _has(v: Var, dim: str) -> bool:
    return any(d.name == dim for d in v.dims)


class Splitter:
    def __init__(
        self,
        program: Program,
        cuts: Mapping[Var, Cut],
        parts: int,
        among: set[Eqn] | None,
        dim: str,
        refused: Sequence[Eqn],
        stored: Collection[Var] = (),
        read: Sequence[StoredSlots] = (),
    ):
        self.program, self.parts, self.among = program, parts, among
        self.stored, self.read = stored, read
        self.to_store: tuple[StoredSlots, ...] = ()
        self.new_dim = "" if any(d.name == dim for v in program.ins for d in v.dims) else dim
        self.ends: list[Eqn] = []
        self.eqns: list[Eqn] = []
        self.part: dict[Eqn, int] = {}
        self.of: dict[Eqn, Eqn] = {}
        self.computes = {v: eqn for eqn in program.eqns for v in eqn.outs}
        self.count = 0
        self.cut: dict[Var, Cut] = {}
        self.pieces: dict[Var, tuple[Var, ...]] = {}
        self.joined: dict[Var, Var] = {}
        self.taken: dict[tuple[Var, Cut], tuple[Var, ...]] = {}
        self.outs: tuple[Var, ...] = ()
        self.slots = SlotParts(self, refused)
        computed = {v for eqn in among or () for v in eqn.outs}
        self.cut.update((v, cut) for v, cut in cuts.items() if v not in computed and self.divides(v, cut))

    def divides(self, v: Var, cut: Cut) -> bool:
        """True if every device's block divides into equal parts, without padding."""
        d = next(d for d in v.dims if d.name == cut.dim)
        extents, ways = self.program.extents, self.program.mesh.count(v.sharding.axes(d))
        stored = extents.padded(d)
        small = Dim(d.name, d.size // self.parts)
        return (
            d.size > 0
            and stored == d.size
            and d.size % (self.parts * ways * cut.chunks) == 0
            and extents.padded(small) == small.size
        )

    def run(self) -> None:
        for one in self.read:
            self.slots.resume(one)
        self.trace(None)
        for eqn in self.program.eqns:
            self.add(eqn)
            self.trace(eqn)
        self.to_store = tuple(self.slots.to_store())
        self.outs = tuple(map(self.whole, self.program.outs))
        self.trace(None)

    def trace(self, eqn: Eqn | None) -> None:
        """Remember the equation of the program behind the last new ones; a join's is that of its pieces."""
        for one in self.eqns[len(self.of) :]:
            joined = self.computes.get(one.ins[-1]) if one.op in (JOIN_PARTS, SUM_PARTS) else None
            self.of[one] = origin = joined or self.computes.get(one.outs[0]) or eqn or one
            self.computes.update((v, origin) for v in one.outs)

    def append(self, eqn: Eqn, part: int) -> None:
        """Add an equation of one part."""
        self.eqns.append(eqn)
        self.part[eqn] = part

    def whole(self, v: Var, reader: Eqn | None = None) -> Var:
        """The complete value, joined from its parts if only these were computed."""
        of_slots = self.slots.whole(v, reader)
        if of_slots is not None or v not in self.pieces:
            return of_slots or v
        if v not in self.joined:
            self.joined[v] = self.join(self.pieces[v], v, self.cut[v])  # itself: later ranges name it in their cuts
        return self.joined[v]

    def join(self, pieces: Sequence[Var], out: Var, cut: Cut) -> Var:
        maker = next((e for e in reversed(self.eqns) if pieces[-1] in e.outs), None)
        where = {} if maker is None else {"where": maker.where, "backward": maker.backward}
        self.eqns.append(Eqn(JOIN_PARTS, tuple(pieces), (out,), {"dim": cut.dim, "chunks": cut.chunks}, **where))
        return out

    def in_parts(self, v: Var, cut: Cut, eqn: Eqn) -> tuple[Var, ...]:
        """The parts of a value, cut from the complete value if it was not computed in parts."""
        if v in self.pieces and self.cut[v] == cut:
            return self.pieces[v]
        if (v, cut) not in self.taken:
            whole = self.whole(v, eqn)
            parts: list[Var] = []
            for i in range(self.parts):
                out = Var(self.small(v, cut), v.dtype, v.name, v.sharding)
                params = {"dim": cut.dim, "index": i, "parts": self.parts, "chunks": cut.chunks}
                self.append(Eqn(PART, (whole,), (out,), params, eqn.where, eqn.backward), i)
                parts.append(out)
            self.taken[v, cut] = tuple(parts)
        return self.taken[v, cut]

    def add(self, eqn: Eqn) -> None:
        """Add one equation of the program: on parts if its rule allows, else on complete values."""
        inside = self.among is None or eqn in self.among
        if self.slots.add(eqn, inside):
            return
        if inside and self.carried(eqn):
            return
        plan = self.plan(eqn) if inside and any(v in self.cut for v in eqn.ins) else None
        if plan is None:
            self.in_full(eqn)
        else:
            self.each_part(eqn, plan)

    def each_part(self, eqn: Eqn, plan: _Plan) -> None:
        """Add an equation once for each part."""
        self.count += 1
        ins = [self.operands(v, cut, eqn) for v, cut in plan.ins]
        results: list[list[Var]] = [[] for _ in eqn.outs]
        for i in range(self.parts):
            outs = tuple(
                dataclasses.replace(v, dims=self.small(v, cut)) for v, cut in zip(eqn.outs, plan.outs, strict=True)
            )
            xs = tuple(operands[i] for operands in ins)
            self.append(dataclasses.replace(eqn, ins=xs, outs=outs, params=plan.params), i)
            for pieces, v in zip(results, outs, strict=True):
                pieces.append(v)
        for v, cut, pieces in zip(eqn.outs, plan.outs, results, strict=True):
            if cut is not None:
                self.cut[v], self.pieces[v] = cut, tuple(pieces)
            else:
                self.eqns.append(Eqn(SUM_PARTS, tuple(pieces), (v,), {}, eqn.where, eqn.backward))

    def carried(self, eqn: Eqn) -> bool:
        """Add a running count along the cut dim: each part counts on from the part before. False for another
        equation; sums of floats would have other bits.
        """
        cut = Cut(eqn.params["dim"].name, 1) if eqn.op is CUMSUM else None
        if cut is None or self.cut.get(eqn.ins[0]) != cut or eqn.params["reverse"] or not self.divides(eqn.ins[0], cut):
            return False
        if eqn.outs[0].dtype.kind not in "iu" or eqn.ins[0].sharding.axes(cut.dim):
            return False
        (out,), before = eqn.outs, tuple[Var, ...]()
        for i, x in enumerate(self.in_parts(eqn.ins[0], cut, eqn)):
            params = {"dim": Dim(cut.dim, eqn.params["dim"].size // self.parts)}
            piece = dataclasses.replace(out, dims=self.small(out, cut))
            one = eqn.replace(ins=(x,), outs=(piece,), params={**eqn.params, **params})
            self.append(one if i == 0 else one.replace(op=CARRIED, ins=(x, before[-1]), params=params), i)
            before = (*before, piece)
        self.count += 1
        self.cut[out], self.pieces[out] = cut, before
        return True

    def in_full(self, eqn: Eqn) -> None:
        """Add one equation that is not in parts; its operands are put together first.

        Later equations may cut its results along `new_dim`, a dim that no input of the program has.
        """
        self.ends += [eqn] * any(v in self.pieces for v in eqn.ins)
        one = dataclasses.replace(eqn, ins=tuple(self.whole(v, eqn) for v in eqn.ins))
        self.eqns.append(one)
        fresh = Cut(self.new_dim, 1)
        self.cut.update((v, fresh) for v in eqn.outs if _has(v, self.new_dim) and self.divides(v, fresh))

    def operands(self, v: Var, cut: Cut | Filled | None, eqn: Eqn) -> tuple[Var, ...]:
        """The operand of each part."""
        if cut is None:
            return (self.whole(v, eqn),) * self.parts
        return self.counts(v, cut, eqn) if isinstance(cut, Filled) else self.in_parts(v, cut, eqn)

    def counts(self, v: Var, filled: Filled, eqn: Eqn) -> tuple[Var, ...]:
        """The filled slots of each part, from the filled slots of the block."""
        outs = [dataclasses.replace(v) for _ in range(self.parts)]
        for i, out in enumerate(outs):
            params = {"start": i * filled.size, "size": filled.size}
            self.append(Eqn(FILLED_PART, (self.whole(v, eqn),), (out,), params, eqn.where, eqn.backward), i)
        return tuple(outs)

    def small(self, v: Var, cut: Cut | Filled | None) -> Shape:
        """The dims of a part."""
        return resized(v.dims, cut.dim, 1 / self.parts) if isinstance(cut, Cut) else v.dims

    def plan(self, eqn: Eqn) -> _Plan | None:
        """The equation in parts; None if it cannot run in parts."""
        op = eqn.collective
        if op is None:
            return self.of_operation(eqn)
        x, (out,) = eqn.ins[0], eqn.outs
        if x not in self.cut:
            return None
        cut = self.cut[x]
        result_cut = self.of_collective(op.padded if isinstance(op, RaggedAllToAll) else op, cut)
        if result_cut is None or not self.divides(out, result_cut):
            return None
        counts = self.of_counts(eqn, op, cut, result_cut) if isinstance(op, RaggedAllToAll) else ()
        return None if counts is None else _Plan(((x, cut), *counts), (result_cut,), eqn.params)

    def of_counts(
        self, eqn: Eqn, op: RaggedAllToAll, before: Cut, after: Cut
    ) -> tuple[tuple[Var, Cut | Filled], ...] | None:
        """The cuts of the counts of a ragged exchange, before and after it; None if it cannot run in parts."""
        x, sent, came = eqn.ins
        if before.dim == op.slots:
            slots = next(i for i, d in enumerate(x.dims) if d.name == op.slots)
            size = self.program.local_shape(x)[slots] // self.parts
            return None if before.chunks != 1 else ((sent, Filled(size)), (came, Filled(size)))
        if before.dim not in op.cells or not self.divides(sent, before) or not self.divides(came, after):
            return None
        return (sent, before), (came, after)

    def of_collective(self, op: Collective, cut: Cut) -> Cut | None:
        """The cut of a collective's result, given its operand's cut; None if it cannot run in parts."""
        n, effect = self.program.mesh.count(op.axes), op.effect
        if cut.dim == effect.joins:
            return Cut(cut.dim, cut.chunks * n)
        if cut.dim == effect.cuts:
            return None if cut.chunks % n else Cut(cut.dim, cut.chunks // n)
        return None if cut.dim in effect.moves else cut

    def of_operation(self, eqn: Eqn) -> _Plan | None:
        op = cast(Op, eqn.op)
        if eqn.control is not None or op.acts or op.inside_blocks or (op.rule is not None and op not in WITH_RULES):
            return None
        inner = self.inner(eqn)
        along = self.along(eqn) if inner is None else None
        if along is None:
            return inner
        labels = labels_of(eqn)
        ins, outs = _cuts(eqn.ins, labels.ins, *along), _cuts(eqn.outs, labels.outs, *along)
        if ins is None or outs is None or (None in outs and not sums_parts(eqn, op)):
            return None
        if any(self.cut.get(v) not in (None, cut) for v, cut in zip(eqn.ins, ins, strict=True)):
            return None
        both = zip((*eqn.ins, *eqn.outs), (*ins, *outs), strict=True)
        if not all(cut is None or self.divides(v, cut) for v, cut in both):
            return None
        return self.checked(eqn, tuple(zip(eqn.ins, ins, strict=True)), outs)

    def along(self, eqn: Eqn) -> tuple[str, int] | None:
        """The label and chunks that all cut operands have; None if they differ, or if the rows of the label move."""
        labels, op = labels_of(eqn), cast(Op, eqn.op)
        known = [(self.cut[v], names) for v, names in zip(eqn.ins, labels.ins, strict=True) if v in self.cut]
        found = {(names[cut.dim], cut.chunks) for cut, names in known}
        (label, chunks), *others = found or {(None, 0)}
        if label is None or others:
            return None
        moves = op.moves(*(v.type for v in eqn.ins), **eqn.params) if op.moves is not None else None
        stays = op.moves is None or (moves is not None and labels.outs[0].get(moves.out.name) != label)
        return (label, chunks) if stays else None

    def inner(self, eqn: Eqn) -> _Plan | None:
        """The plan of a reshape whose outer dim has one element per device; None for another equation."""
        cut = self.cut.get(eqn.ins[0])
        inner_dim = None if cut is None or cut.chunks != 1 else inner_cut(eqn, cut.dim, self.program.mesh)
        if cut is None or inner_dim is None:
            return None
        after = Cut(inner_dim, 1)
        if not self.divides(eqn.ins[0], cut) or not self.divides(eqn.outs[0], after):
            return None
        return self.checked(eqn, ((eqn.ins[0], cut),), (after,))

    def checked(self, eqn: Eqn, ins: Sequence[tuple[Var, Cut | None]], outs: tuple[Cut | None, ...]) -> _Plan | None:
        """The plan, if the operation's type rule accepts operands and results of a part's sizes; else None."""
        pairs = [*ins, *zip(eqn.outs, outs, strict=True)]
        new = {
            d: Dim(d.name, d.size // self.parts)
            for v, cut in pairs
            if cut is not None
            for d in v.dims
            if d.name == cut.dim
        }
        params = params_with(eqn, new)
        types = [Type(self.small(v, cut), v.dtype) for v, cut in pairs]
        try:
            fits = cast(Op, eqn.op).infer(types[: len(ins)], params) == tuple(types[len(ins) :])
        except (MeshdslError, KeyError, ValueError):
            return None
        return _Plan(tuple(ins), outs, params) if fits else None


@dataclass(frozen=True)
class _Plan:
    """One equation in parts: the cut of each operand and result; None if every part reads the complete
    value.
    """

    ins: tuple[tuple[Var, Cut | Filled | None], ...]
    outs: tuple[Cut | None, ...]
    params: Mapping[str, Any]


def _cuts(
    values: Sequence[Var], labels: Sequence[Mapping[str, str | None]], label: str, chunks: int
) -> tuple[Cut | None, ...] | None:
    """The cut of each value along its dim with this label; None if a value has two of them."""
    dims = [[d.name for d in v.dims if names.get(d.name) == label] for v, names in zip(values, labels, strict=True)]
    if any(len(found) > 1 for found in dims):
        return None
    return tuple(Cut(found[0], chunks) if found else None for found in dims)
