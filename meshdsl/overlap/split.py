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

from ..control.host import moves_to_or_from_host
from ..dims import Dim
from ..errors import MeshdslError
from ..ir import Collective, Eqn, Op, Type, Var, dce, params_with
from ..lowering.labels import index_map_of, labels_of
from ..lowering.program import Program
from ..lowering.ragged import RaggedAllToAll
from ..ops.indexing import SCATTER_ADD, TAKE
from ..ops.inverse import INVERSE
from ..ops.ordering import CUMSUM
from ..ops.reshape import RENAME, RESHAPE
from .parts import CARRIED, FILLED_PART, SUM_PARTS, Cut, inner_cut
from .pieces import Pieces, has_dim
from .slot_spaces import RefusedError, StoredSlots, sums_parts
from .slots import SlotParts

# operations with their own rule that treats every block of a dim the same way
WITH_RULES = (RENAME, RESHAPE, TAKE, SCATTER_ADD, INVERSE)


@dataclass(frozen=True)
class Parts:
    """A program with a range in parts, and the part that each equation computes."""

    program: Program
    part: Mapping[Eqn, int]  # equation -> number of its part, for equations that compute one part
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
    cuts = _of_inputs(program, dim)
    return _finished(lambda refused: Splitter(Pieces(program, parts, None, dim, ()), cuts, refused)).state.cut


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
    return {v: Cut(dim, 1) for v in program.ins if has_dim(v, dim)}


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
    splitter = _finished(lambda refused: Splitter(Pieces(program, parts, range_, dim, stored), cuts, refused, read))
    made = splitter.state
    after = dce(program.replace(eqns=tuple(made.eqns), outs=splitter.outs))
    part = {eqn: made.part[eqn] for eqn in after.eqns if eqn in made.part}
    return Parts(after, part, made.of, tuple(made.ends), splitter.to_store)


@dataclass(frozen=True)
class Filled:
    """The cut of counts of filled slots: every part has `size` slots of a device's block."""

    size: int


class Splitter:
    def __init__(
        self, state: Pieces, cuts: Mapping[Var, Cut], refused: Sequence[Eqn], read: Sequence[StoredSlots] = ()
    ):
        self.state, self.read = state, read
        self.to_store: tuple[StoredSlots, ...] = ()
        self.outs: tuple[Var, ...] = ()
        self.slots = SlotParts(state, refused)
        state.of_slots = self.slots.whole
        computed = {v for eqn in state.among or () for v in eqn.outs}
        state.cut.update((v, cut) for v, cut in cuts.items() if v not in computed and state.divides(v, cut))

    def run(self) -> None:
        for one in self.read:
            self.slots.resume(one)
        self.state.trace(None)
        for eqn in self.state.program.eqns:
            self.add(eqn)
            self.state.trace(eqn)
        self.to_store = tuple(self.slots.to_store())
        self.outs = tuple(map(self.state.whole, self.state.program.outs))
        self.state.trace(None)

    def add(self, eqn: Eqn) -> None:
        """Add one equation of the program: on parts if its rule allows, else on complete values."""
        inside = self.state.among is None or eqn in self.state.among
        if self.slots.add(eqn, inside):
            return
        if inside and self.carried(eqn):
            return
        # parts of a value in the host's memory could not be joined there
        in_parts = inside and any(v in self.state.cut for v in eqn.ins) and not moves_to_or_from_host(eqn)
        plan = self.plan(eqn) if in_parts else None
        if plan is None:
            self.state.in_full(eqn)
        else:
            self.each_part(eqn, plan)

    def each_part(self, eqn: Eqn, plan: _Plan) -> None:
        """Add an equation once for each part."""
        ins = [self.operands(v, cut, eqn) for v, cut in plan.ins]
        results: list[list[Var]] = [[] for _ in eqn.outs]
        for i in range(self.state.parts):
            outs = tuple(
                dataclasses.replace(v, dims=self.state.small(v, cut))
                for v, cut in zip(eqn.outs, plan.outs, strict=True)
            )
            xs = tuple(operands[i] for operands in ins)
            self.state.append(dataclasses.replace(eqn, ins=xs, outs=outs, params=plan.params), i)
            for pieces, v in zip(results, outs, strict=True):
                pieces.append(v)
        for v, cut, pieces in zip(eqn.outs, plan.outs, results, strict=True):
            if cut is not None:
                self.state.cut[v], self.state.pieces[v] = cut, tuple(pieces)
            else:
                self.state.eqns.append(Eqn(SUM_PARTS, tuple(pieces), (v,), {}, eqn.where, eqn.backward))

    def carried(self, eqn: Eqn) -> bool:
        """Add a running count along the cut dim: each part counts on from the part before. False for another
        equation; sums of floats would have other bits.
        """
        if eqn.op is not CUMSUM or eqn.params["reverse"]:
            return False
        (whole,), (out,), cut = eqn.ins, eqn.outs, Cut(eqn.params["dim"].name, 1)
        if self.state.cut.get(whole) != cut or not self.state.divides(whole, cut):
            return False
        if out.dtype.kind not in "iu" or whole.sharding.axes(cut.dim):
            return False
        before = tuple[Var, ...]()
        for i, x in enumerate(self.state.in_parts(whole, cut, eqn)):
            params = {"dim": Dim(cut.dim, eqn.params["dim"].size // self.state.parts)}
            piece = dataclasses.replace(out, dims=self.state.small(out, cut))
            one = eqn.replace(ins=(x,), outs=(piece,), params={**eqn.params, **params})
            self.state.append(one if i == 0 else one.replace(op=CARRIED, ins=(x, before[-1]), params=params), i)
            before = (*before, piece)
        self.state.cut[out], self.state.pieces[out] = cut, before
        return True

    def operands(self, v: Var, cut: Cut | Filled | None, eqn: Eqn) -> tuple[Var, ...]:
        """The operand of each part."""
        if cut is None:
            return (self.state.whole(v, eqn),) * self.state.parts
        return self.counts(v, cut, eqn) if isinstance(cut, Filled) else self.state.in_parts(v, cut, eqn)

    def counts(self, v: Var, filled: Filled, eqn: Eqn) -> tuple[Var, ...]:
        """The filled slots of each part, from the filled slots of the block."""
        outs = [dataclasses.replace(v) for _ in range(self.state.parts)]
        for i, out in enumerate(outs):
            params = {"start": i * filled.size, "size": filled.size}
            self.state.append(Eqn(FILLED_PART, (self.state.whole(v, eqn),), (out,), params, eqn.where, eqn.backward), i)
        return tuple(outs)

    def plan(self, eqn: Eqn) -> _Plan | None:
        """The equation in parts; None if it cannot run in parts."""
        op = eqn.collective
        if op is None:
            return self.of_operation(eqn)
        x, (out,) = eqn.ins[0], eqn.outs
        if x not in self.state.cut:
            return None
        cut = self.state.cut[x]
        result_cut = self.of_collective(op.padded if isinstance(op, RaggedAllToAll) else op, cut)
        if result_cut is None or not self.state.divides(out, result_cut):
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
            size = self.state.program.local_shape(x)[slots] // self.state.parts
            return None if before.chunks != 1 else ((sent, Filled(size)), (came, Filled(size)))
        if before.dim not in op.cells or not self.state.divides(sent, before) or not self.state.divides(came, after):
            return None
        return (sent, before), (came, after)

    def of_collective(self, op: Collective, cut: Cut) -> Cut | None:
        """The cut of a collective's result, given its operand's cut; None if it cannot run in parts."""
        n, effect = self.state.program.mesh.count(op.axes), op.effect
        if cut.dim == effect.joins:
            return Cut(cut.dim, cut.chunks * n)
        if cut.dim == effect.cuts:
            return None if cut.chunks % n else Cut(cut.dim, cut.chunks // n)
        return None if cut.dim in effect.moves else cut

    def of_operation(self, eqn: Eqn) -> _Plan | None:
        op = cast(Op, eqn.op)
        own = op.rule is not None or op.shardings is not None
        if eqn.control is not None or op.acts or op.inside_blocks or (own and op not in WITH_RULES):
            return None
        inner = self.inner(eqn)
        along = self.along(eqn) if inner is None else None
        if along is None:
            return inner
        labels = labels_of(eqn)
        ins, outs = _cuts(eqn.ins, labels.ins, *along), _cuts(eqn.outs, labels.outs, *along)
        if ins is None or outs is None or (None in outs and not sums_parts(eqn, op)):
            return None
        if not all(map(self.fits, (*eqn.ins, *eqn.outs), (*ins, *outs))):
            return None
        return self.checked(eqn, tuple(zip(eqn.ins, ins, strict=True)), outs)

    def fits(self, v: Var, cut: Cut | None) -> bool:
        """True if a value can be cut like this: it is not cut otherwise, and its blocks divide."""
        return self.state.cut.get(v) in (None, cut) and (cut is None or self.state.divides(v, cut))

    def along(self, eqn: Eqn) -> tuple[str, int] | None:
        """The label and chunks that all cut operands have; None if they differ, or if the rows of the label move."""
        labels, op = labels_of(eqn), cast(Op, eqn.op)
        known = [
            (self.state.cut[v], names) for v, names in zip(eqn.ins, labels.ins, strict=True) if v in self.state.cut
        ]
        found = {(names[cut.dim], cut.chunks) for cut, names in known}
        (label, chunks), *others = found or {(None, 0)}
        if label is None or others:
            return None
        moves = index_map_of(eqn)
        stays = op.moves is None or (moves is not None and labels.outs[0].get(moves.out.name) != label)
        return (label, chunks) if stays else None

    def inner(self, eqn: Eqn) -> _Plan | None:
        """The plan of a reshape whose outer dim has one element per device; None for another equation."""
        cut = self.state.cut.get(eqn.ins[0])
        inner_dim = None if cut is None or cut.chunks != 1 else inner_cut(eqn, cut.dim, self.state.program.mesh)
        if cut is None or inner_dim is None:
            return None
        after = Cut(inner_dim, 1)
        if not self.state.divides(eqn.ins[0], cut) or not self.state.divides(eqn.outs[0], after):
            return None
        return self.checked(eqn, ((eqn.ins[0], cut),), (after,))

    def checked(self, eqn: Eqn, ins: Sequence[tuple[Var, Cut | None]], outs: tuple[Cut | None, ...]) -> _Plan | None:
        """The plan, if the operation's type rule accepts operands and results of a part's sizes; else None."""
        pairs = [*ins, *zip(eqn.outs, outs, strict=True)]
        new = {
            d: Dim(d.name, d.size // self.state.parts)
            for v, cut in pairs
            if cut is not None
            for d in v.dims
            if d.name == cut.dim
        }
        params = params_with(eqn, new)
        types = [Type(self.state.small(v, cut), v.dtype) for v, cut in pairs]
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
