"""Parts along the tokens of a group: the slots that a part of the tokens fills (Jiang et al., 2024, sections 2.3, 6).

`md.inverse_index` names slots by indices, no slot twice. In parts, the indices of a part are numbered anew, from the
slots that earlier parts use: for routers in token order these are the same slots, and for routers that order all tokens
first, the same tokens keep a slot. A value in slots ("held") then has all slots in every part, and is zero in those of
other parts. Operations that keep the slots apart run on each part; a read at the part's indices gives a part of the
tokens again; a backward sum over slots adds the parts. The complete value is the sum of the parts, and only the
backward pass may read it, because a sum turns -0.0 into 0.0. A space of slots whose values are used in another way is
not cut.

An exchange of held values is ragged: each part sends the run of slots that it fills, and both sides know the run first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np

from ..control.remat import BARRIER
from ..dims import Dim, fresh_dim
from ..ir import Eqn, Op, Var
from ..layouts import Sharding
from ..lowering.collectives import AllToAll
from ..lowering.partition.planner import Reshard
from ..lowering.ragged import RaggedAllToAll
from ..ops.contraction import EINSUM
from ..ops.dtypes import CAST, kind
from ..ops.indexing import SCATTER_ADD, TAKE
from ..ops.inverse import INVERSE
from ..ops.reshape import RENAME
from .filled import FILLED_DOT, FILLED_OUTER, is_dot, is_outer
from .parts import PLACED, RUN, SUM_PARTS, USED, Cut, resized
from .pieces import Pieces
from .slot_spaces import (
    InSlots,
    RefusedError,
    SlotSpace,
    StoredSlots,
    names_slots,
    positions,
    slot_spaces,
    slots_after,
    sums_parts,
)


class SlotParts:
    """The slots of a program in parts."""

    def __init__(self, state: Pieces, refused: Sequence[Eqn]):
        self.state, self.program = state, state.program
        self.refused = refused
        self.held: dict[Var, InSlots] = {}
        self.complete: set[Var] = set()  # values that another loop stored, which have all slots
        self.zeros = {
            v
            for eqn in self.program.eqns
            if isinstance(eqn.op, Op) and eqn.op.literal and not np.any(eqn.params["value"])
            for v in eqn.outs
        }
        self.uniform = {v for eqn in self.program.eqns if isinstance(eqn.op, Op) and eqn.op.literal for v in eqn.outs}
        self.readers = self.program.readers
        self.space_of = {
            v: space for space in slot_spaces(self.program) if space.inverse not in refused for v in space.placed
        }
        for space in set(self.space_of.values()):
            space.placed.clear()

    def resume(self, stored: StoredSlots) -> None:
        """Cut values that another loop stored: the slots of each part have consecutive numbers already."""
        inverse, space = stored.inverse, SlotSpace(stored.inverse)
        cut = Cut(space.over.name, 1)
        if inverse in self.refused or not all(self.state.divides(i, cut) for i in inverse.ins):
            return
        self.state.cut.update(dict.fromkeys(inverse.ins, cut))
        self.space_of.update(dict.fromkeys(inverse.ins, space))
        self.number(space)
        self.complete.update(inverse.ins, inverse.outs)
        for v, held in stored.held.items():
            if not held.holder:
                self.hold_complete(v, dataclasses.replace(held, space=space))

    def hold_complete(self, v: Var, held: InSlots) -> None:
        """Hold a value that every part reads with all slots."""
        self.complete.add(v)
        self.held[v] = dataclasses.replace(held, zero=False)
        self.state.pieces[v] = (v,) * self.state.parts

    def to_store(self) -> Iterator[StoredSlots]:
        """The stored values in slots, by space. Raises `RefusedError` if the indices that name the slots are not stored
        too.
        """
        outs = set(self.program.outs) & set(self.state.stored)
        for space in dict.fromkeys(self.space_of.values()):
            held = {v: self.held[v] for v in self.program.outs if v in self.held and self.held[v].space is space}
            if held and not outs.issuperset(space.inverse.ins):
                raise RefusedError(space)
            if held:
                yield StoredSlots(space.inverse, held)

    def add(self, eqn: Eqn, inside: bool) -> bool:
        """Add an equation that names slots, or reads values in slots. False for another equation."""
        if eqn.op is INVERSE and inside and eqn.ins[0] in self.space_of:
            space = self.space_of[eqn.ins[0]]
            return space.inverse is eqn and self.number(space)
        space = next((s for v in eqn.ins if (s := self.space_of.get(v)) and s.active and names_slots(eqn, v)), None)
        if space is None and not any(v in self.held for v in eqn.ins):
            return False
        if not inside or not (self.by_index(eqn, space) if space is not None else self.kept(eqn)):
            self.state.in_full(eqn)
        return True

    def whole(self, v: Var, reader: Eqn | None) -> Var | None:
        """The complete value for a reader (None: a result of the program); None if it has no parts here."""
        if v in self.complete:
            return v
        space, stored = self.space_of.get(v), reader is None and v in self.state.stored
        as_name = stored if reader is None else names_slots(reader, v)
        if space is not None and v in space.placed and as_name:
            if v not in space.joined:
                space.joined[v] = self.state.join(space.placed[v], dataclasses.replace(v), Cut(space.over.name, 1))
            return space.joined[v]
        if v not in self.held:
            return None
        held = self.held[v]
        backward = stored or (self.state.among is not None if reader is None else reader.backward)
        if not backward:
            raise RefusedError(held.space)
        if v not in self.state.joined:
            self.state.joined[v] = self.sum_of(v, held)
        return self.state.joined[v]

    def sum_of(self, v: Var, held: InSlots) -> Var:
        eqn = held.space.inverse
        if not (v is eqn.outs[0] if held.holder else held.zero):
            raise RefusedError(held.space)
        if held.holder:
            self.state.eqns.append(eqn.replace(ins=tuple(self.whole(i, eqn) or i for i in eqn.ins)))
        else:
            self.state.eqns.append(Eqn(SUM_PARTS, self.state.pieces[v], (v,), {}, eqn.where, eqn.backward))
        return v

    def number(self, space: SlotSpace) -> bool:
        """Number the slots of each part of the tokens, if the indices are in parts."""
        eqn, cut = space.inverse, Cut(space.over.name, 1)
        if any(self.state.cut.get(i) != cut or not self.state.divides(i, cut) for i in eqn.ins):
            return False
        pieces = [self.state.in_parts(i, cut, eqn) for i in eqn.ins]
        small = Dim(space.over.name, space.over.size // self.state.parts)
        params = {"over": small, "into": space.into}
        split = {d.name: eqn.outs[0].sharding.axes(d.name) for d in space.cells}
        placed: list[list[Var]] = [[] for _ in eqn.ins]
        holders: list[Var] = []
        for part in range(self.state.parts):
            own = tuple(piece[part] for piece in pieces)
            before = (*own, *space.used[-1:])
            for which, i in enumerate(own):
                placed[which] += self.emit(eqn, part, PLACED, before, i.sharding, which=which, **params)
            space.used += self.emit(eqn, part, USED, before, Sharding.of(split), **params)
            new = tuple(each[part] for each in placed)
            holders += self.emit(eqn, part, INVERSE, new, eqn.outs[0].sharding, **params)
        space.placed.update({i: tuple(each) for i, each in zip(eqn.ins, placed, strict=True)})
        space.active = True
        names = {d.name: d.name for d in (*space.cells, space.into[-1])}
        self.hold(eqn, holders, InSlots(space, frozenset(d.name for d in space.into), names, False, True))
        return True

    def by_index(self, eqn: Eqn, space: SlotSpace) -> bool:
        """Add an operation at indices of slots: a barrier around them, a read, or a write."""
        index = eqn.ins[0] if eqn.op in (BARRIER, SCATTER_ADD) else eqn.ins[1]
        pieces = self.indices(space, index, eqn)
        if eqn.op is BARRIER:
            space.placed[eqn.outs[0]] = self.each(eqn, [pieces], space)
            return True
        if eqn.op is SCATTER_ADD:
            dims = frozenset([eqn.params["over"].name])
            updates = self.tokens(eqn.ins[1], space, eqn)
            names = {d.name: d.name for d in space.inverse.ins[0].dims if d != space.over}
            return updates is not None and self.hold(
                eqn, self.each(eqn, [pieces, updates]), InSlots(space, dims, names)
            )
        held = self.held.get(eqn.ins[0])
        if held is not None and (held.space is not space or held.dims != {eqn.params["over"].name}):
            return False
        out = eqn.outs[0]
        self.state.pieces[out] = self.each(eqn, [self.parts_of(eqn.ins[0], eqn), pieces], space)
        self.state.cut[out] = Cut(space.over.name, 1)
        return True

    def indices(self, space: SlotSpace, index: Var, eqn: Eqn) -> tuple[Var, ...]:
        return space.placed.get(index) or self.state.in_parts(index, Cut(space.over.name, 1), eqn)

    def tokens(self, v: Var, space: SlotSpace, eqn: Eqn) -> tuple[Var, ...] | None:
        """The parts of a value along the tokens; None if it has no equal parts."""
        cut = Cut(space.over.name, 1)
        if space.over not in v.dims:
            return self.parts_of(v, eqn)
        if v in self.held or v.sharding.axes(space.over.name) or not self.state.divides(v, cut):
            return None
        return self.state.in_parts(v, cut, eqn)

    def parts_of(self, v: Var, eqn: Eqn) -> tuple[Var, ...]:
        """The parts of a value in slots, or the complete value for every part."""
        return self.state.pieces[v] if v in self.held else (self.state.whole(v, eqn),) * self.state.parts

    def kept(self, eqn: Eqn) -> bool:
        """Add an operation that keeps the slots apart, or sums over them in the backward pass."""
        inside = {v: self.held[v] for v in eqn.ins if v in self.held}
        held = next(iter(inside.values()))
        self.check_numbers(eqn, held)
        if len({one.space for one in inside.values()}) > 1:
            return False
        if held.holder and eqn.op is TAKE and eqn.ins[0] not in inside and eqn.params["over"] == held.space.over:
            return self.dispatched(eqn, held)
        if not isinstance(eqn.op, Op):
            return self.sent(eqn, held)
        found = slots_after(eqn, inside, self.zeros)
        if found is None:
            return False
        after, summed = found
        return self.summed(eqn, inside, after) if summed else self.apart(eqn, inside, after)

    def check_numbers(self, eqn: Eqn, held: InSlots) -> None:
        """Raise `RefusedError` if another operand has a value for each slot, in the numbers of the whole group."""
        others = [v for v in eqn.ins if v not in self.held and v not in self.uniform]
        if any(d.name in positions(held) for v in others for d in v.dims):
            raise RefusedError(held.space)

    def summed(self, eqn: Eqn, inside: Mapping[Var, InSlots], after: InSlots) -> bool:
        """Add the parts of a backward sum over slots; False if other slots than their own add to them."""
        if not after.zero or not sums_parts(eqn, cast(Op, eqn.op)):
            return False
        self.state.eqns.append(Eqn(SUM_PARTS, self.computed(eqn, inside), eqn.outs, {}, eqn.where, eqn.backward))
        return True

    def apart(self, eqn: Eqn, inside: Mapping[Var, InSlots], after: InSlots) -> bool:
        """Add an operation for each part; once, for all slots, if no operand has parts."""
        if after.holder or not self.complete.issuperset(inside):
            return self.hold(eqn, self.computed(eqn, inside), after)
        self.state.in_full(eqn)
        self.hold_complete(eqn.outs[0], after)
        return True

    def dispatched(self, eqn: Eqn, held: InSlots) -> bool:
        """Add the read of tokens into slots, of a part of the tokens each."""
        rows = self.tokens(eqn.ins[0], held.space, eqn)
        if rows is None:
            return False
        small = {"over": Dim(held.space.over.name, held.space.over.size // self.state.parts)}
        pieces = self.each(eqn.replace(params=small), [rows, self.parts_of(eqn.ins[1], eqn)])
        return self.hold(eqn, pieces, dataclasses.replace(held, zero=True, holder=False))

    def computed(self, eqn: Eqn, inside: Mapping[Var, InSlots]) -> tuple[Var, ...]:
        """Add an operation for every part; the results."""
        operands = [self.parts_of(v, eqn) for v in eqn.ins]
        if eqn.op is CAST and operands[0][0].dtype == eqn.outs[0].dtype:  # the product is of this dtype already
            return tuple(operands[0])
        product = self.product(eqn, inside)
        if product is None:
            return self.each(eqn, operands)
        x, y = product.ins
        runs = [self.run(inside[x], part, x, eqn) for part in range(self.state.parts)]
        return self.each(product, [operands[eqn.ins.index(x)], operands[eqn.ins.index(y)], runs])

    def product(self, eqn: Eqn, inside: Mapping[Var, InSlots]) -> Eqn | None:
        """The product of filled slots in place of an einsum, with operands in slots first; None if it is no such."""
        if eqn.op is not EINSUM or len(eqn.ins) != 2 or kind(eqn.outs[0].dtype) != "f":
            return None
        x, y = sorted(eqn.ins, key=lambda v: v not in inside)
        names = self.cells_and_slots(inside[x], x)
        if names is None or any(x.sharding.axes(d.name) != y.sharding.axes(d.name) for d in y.dims if d.name in names):
            return None
        if y not in inside:
            op = FILLED_DOT if is_dot(eqn, x, y, names) else None
        else:
            op = FILLED_OUTER if inside[y].names == inside[x].names and is_outer(eqn, x, y, names) else None
        if op is None:
            return None
        params = {
            "out": eqn.params["out"],
            "slots": next(d for d in x.dims if d.name == names[-1]),
            "dtype": self.result_dtype(eqn) if op is FILLED_DOT else eqn.params["dtype"],
            "share": self.filled(inside[x].space),
        }
        return eqn.replace(op=op, ins=(x, y), params=params)

    def cells_and_slots(self, held: InSlots, *values: Var) -> tuple[str, ...] | None:
        """The names of the cells, then of their slots; None if a device's block is not made of whole runs of slots."""
        dims = (*held.space.cells, held.space.into[-1])
        if any(d.name not in held.names for d in dims):
            return None
        names = tuple(held.names[d.name] for d in dims)
        return None if any(self.program.is_padded(v, d) for v in values for d in v.dims if d.name in names) else names

    def result_dtype(self, eqn: Eqn) -> np.dtype[Any]:
        """The dtype of a product: that of the cast which alone reads it, so that no wider result is stored."""
        (reader, *others) = self.readers.get(eqn.outs[0], [eqn])
        narrow = reader.outs[0].dtype
        inside = self.state.among is None or reader in self.state.among
        cast_alone = reader.op is CAST and not others and inside and eqn.outs[0] not in self.program.outs
        narrower = kind(narrow) == "f" and narrow.itemsize < eqn.outs[0].dtype.itemsize
        return narrow if cast_alone and narrower else eqn.params["dtype"]

    def filled(self, space: SlotSpace) -> float:
        """The expected fraction of the experts' slots that one part of the tokens fills."""
        slots = prod(d.size for d in space.into)
        return min(1.0, len(space.inverse.ins) * space.over.size / slots) / self.state.parts

    def sent(self, eqn: Eqn, held: InSlots) -> bool:
        """Add a collective of a value in slots; an all_to_all between groups and experts sends the run of each part."""
        op = eqn.collective
        op = op.padded if isinstance(op, RaggedAllToAll) else op
        if held.holder or op is None or op.effect.moves:
            return False
        x, out = eqn.ins[0], eqn.outs[0]
        ragged = self.ragged(op, x, out, held) if isinstance(op, AllToAll) else None
        if ragged is None:
            return self.hold(eqn, self.each(eqn.replace(op=op, ins=(x,)), [self.parts_of(x, eqn)]), held)
        ways = [[self.run(held, part, v, eqn) for part in range(self.state.parts)] for v in (x, out)]
        return self.hold(eqn, self.each(eqn.replace(op=ragged), [self.parts_of(x, eqn), *ways]), held)

    def ragged(self, op: AllToAll, x: Var, out: Var, held: InSlots) -> RaggedAllToAll | None:
        """The exchange of a part's slots; None if a device's block is not made of whole runs of slots."""
        names = self.cells_and_slots(held, x, out)
        if names is None or not {op.dim, op.to} <= set(names[:-1]) or x.sharding.axes(names[-1]):
            return None
        return RaggedAllToAll(op.dim, op.to, op.axes, names[:-1], names[-1], self.filled(held.space))

    def run(self, held: InSlots, part: int, v: Var, eqn: Eqn) -> Var:
        """The run of slots that a part fills, in the sharding and with the names of a value in slots."""
        space, program = held.space, self.program
        if part not in space.runs:
            used = tuple(space.used[max(part - 1, 0) : part + 1])
            run = fresh_dim(Dim(f"{space.into[-1].name}__run", 2), program.extents.multiple, program.known_dim_names)
            space.runs[part] = list(self.emit(space.inverse, part, RUN, used, used[-1].sharding, run=run))
        versions, mesh, extents = space.runs[part], program.mesh, program.extents
        shape = (*(Dim(held.names[d.name], d.size) for d in space.cells), versions[0].dims[-1])
        target = v.sharding.along(shape[:-1])

        def renamed(one: Var) -> Sharding:
            return Sharding.of({new.name: one.sharding.axes(d) for d, new in zip(one.dims, shape, strict=True)})

        def move(one: Var) -> Reshard:
            return Reshard(renamed(one), target, shape, mesh, extents, one.dtype.itemsize)

        best = min(versions, key=lambda one: move(one).cost)
        steps = move(best).steps
        if best.dims != shape:
            versions += self.emit(space.inverse, part, RENAME, (best,), renamed(best), shape=shape)
            best = versions[-1]
        for step in steps:
            moved = Var(shape, best.dtype, "", step.step(best.sharding, mesh))
            self.state.append(Eqn(step, (best,), (moved,), {}, eqn.where, eqn.backward, eqn.cause), part)
            versions.append(moved)
            best = moved
        return best

    def hold(self, eqn: Eqn, pieces: Sequence[Var], held: InSlots) -> bool:
        self.held[eqn.outs[0]], self.state.pieces[eqn.outs[0]] = held, tuple(pieces)
        return True

    def each(self, eqn: Eqn, operands: Sequence[Sequence[Var]], tokens: SlotSpace | None = None) -> tuple[Var, ...]:
        """Add the equation for every part; the results, which have a part of the tokens if `tokens` is given."""
        outs: list[Var] = []
        for part in range(self.state.parts):
            dims = eqn.outs[0].dims
            if tokens is not None:
                dims = resized(dims, tokens.over.name, 1 / self.state.parts)
            outs.append(dataclasses.replace(eqn.outs[0], dims=dims, dtype=eqn.params.get("dtype", eqn.outs[0].dtype)))
            self.state.append(eqn.replace(ins=tuple(xs[part] for xs in operands), outs=(outs[-1],)), part)
        return tuple(outs)

    def emit(
        self, eqn: Eqn, part: int, op: Op, ins: Sequence[Var], sharding: Sharding, **params: Any
    ) -> tuple[Var, ...]:
        (kind,) = op.infer([v.type for v in ins], params)
        out = Var(kind.dims, kind.dtype, "", sharding)
        self.state.append(Eqn(op, tuple(ins), (out,), params, eqn.where, eqn.backward), part)
        return (out,)
