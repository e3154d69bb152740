"""Spaces of slots that may be in parts, and the slots of an operation's result.

`md.inverse_index` names slots by indices. Its space may be in parts if the indices are complete on a device and only
name slots from there on: they are read at, written at, or inverted, whatever the order of the slots is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import numpy as np

from ..backend import Block, Local, NumPy
from ..control.remat import BARRIER
from ..dims import Dim, Shape
from ..ir import Eqn, Fuses, Linear, Op, Reduce, Var
from ..lowering.labels import labels_of
from ..lowering.program import Program
from ..ops.indexing import SCATTER_ADD, TAKE
from ..ops.inverse import INVERSE
from ..ops.reshape import RENAME, RESHAPE, groups


@dataclass(eq=False)
class SlotSpace:
    """The slots that one `inverse_index` names, and what is known of their parts."""

    inverse: Eqn
    active: bool = False
    placed: dict[Var, tuple[Var, ...]] = field(default_factory=dict[Var, "tuple[Var, ...]"])  # index -> its parts
    joined: dict[Var, Var] = field(default_factory=dict[Var, Var])  # index -> its parts, joined
    used: list[Var] = field(default_factory=list[Var])  # slots used after each part
    runs: dict[int, list[Var]] = field(default_factory=dict[int, "list[Var]"])  # part -> versions of its run

    @property
    def over(self) -> Dim:
        """The dim of the tokens."""
        return self.inverse.params["over"]

    @property
    def into(self) -> Shape:
        """The dims of the slots; the last one counts the slots of an expert."""
        return self.inverse.params["into"]

    @property
    def cells(self) -> Shape:
        """The dims whose places have slots of their own: groups and experts."""
        return self.inverse.outs[0].dims[:-1]


@dataclass(frozen=True, eq=False)
class InSlots:
    """A value in slots: its dims that tell slots apart, and its names of the space's dims where it has them."""

    space: SlotSpace
    dims: frozenset[str]
    names: Mapping[str, str]
    zero: bool = True  # it is zero in slots of other parts
    holder: bool = False  # it holds positions of tokens


def positions(held: InSlots) -> frozenset[str]:
    """The dims that count slots of an expert; those of its cells do not."""
    return held.dims - {held.names[d.name] for d in held.space.cells if d.name in held.names}


@dataclass(frozen=True, eq=False)
class StoredSlots:
    """Values in slots that a loop stores for a loop of the backward pass, beside the indices that name their slots."""

    inverse: Eqn
    held: Mapping[Var, InSlots]

    def read_as(self, rows: Mapping[Var, Var]) -> StoredSlots | None:
        """The same by the names that the reading loop has for them; None if it does not read the indices."""
        if not rows.keys() >= set(self.inverse.ins):
            return None
        ins, out = tuple(rows[v] for v in self.inverse.ins), self.inverse.outs[0]
        inverse = self.inverse.replace(ins=ins, outs=(rows.get(out, replace(out)),), backward=True)
        return StoredSlots(inverse, {rows[v]: held for v, held in self.held.items() if v in rows})


class RefusedError(Exception):
    """Raised where the slots of a space cannot be in parts; the program is split again without them."""

    def __init__(self, space: SlotSpace):
        self.inverse = space.inverse


def sums_parts(eqn: Eqn, op: Op) -> bool:
    """True if the results of the parts may be added: in the backward pass only, because a forward result stays bitwise
    the same.
    """
    return op.reduce is Reduce.SUM and op.mask == 0 and eqn.backward and len(eqn.outs) == 1


def names_slots(eqn: Eqn, index: Var) -> bool:
    """True if an equation uses an index only as the name of a slot, whatever the order of the slots is."""
    match eqn.op:
        case op if op is TAKE:
            return index is eqn.ins[1] and index is not eqn.ins[0]
        case op if op is SCATTER_ADD:
            return index is eqn.ins[0] and index is not eqn.ins[1]
        case op:
            return op in (INVERSE, BARRIER)


def slot_spaces(program: Program) -> Iterator[SlotSpace]:
    """The spaces of slots of a program that may be in parts; no index is of two of them."""
    readers, place = program.readers, program.places
    taken: set[Var] = set()
    for eqn in program.eqns:
        if eqn.op is INVERSE and taken.isdisjoint(eqn.ins) and _complete(eqn):
            names = _names_of(eqn.ins, readers)
            only_names = all(_used_as_name(eqn, v, reader, place) for v in names for reader in readers.get(v, ()))
            if only_names and not any(v in program.outs for v in names if v not in eqn.ins):
                taken.update(names)
                yield SlotSpace(eqn, placed=dict.fromkeys(names, ()))


def _complete(inverse: Eqn) -> bool:
    """True if a device has all tokens and all slots of its groups, and there are some."""
    over, into = inverse.params["over"], inverse.params["into"]
    split = any(v.sharding.axes(over.name) for v in inverse.ins) or any(
        inverse.outs[0].sharding.axes(d.name) for d in into
    )
    return not split and prod(d.size for d in into) > 0 and len(set(inverse.ins)) == len(inverse.ins)


def _names_of(indices: Sequence[Var], readers: Mapping[Var, Sequence[Eqn]]) -> list[Var]:
    """The indices, also as they are after barriers."""
    found = list(indices)
    for v in found:  # grows meanwhile
        found += [reader.outs[0] for reader in readers.get(v, ()) if reader.op is BARRIER]
    return found


def _used_as_name(inverse: Eqn, index: Var, reader: Eqn, place: Mapping[Eqn, int]) -> bool:
    """True if a reader reads a slot's name after the slots have names; the indices may also be read as numbers."""
    total = prod(d.size for d in inverse.params["into"])
    if names_slots(reader, index) and (reader.op is BARRIER or _same_slots(reader, inverse, total)):
        return place[reader] >= place[inverse]
    return index in inverse.ins


def _same_slots(reader: Eqn, inverse: Eqn, total: int) -> bool:
    """True if a reader of an index has the slots that it names."""
    return reader is inverse if reader.op is INVERSE else reader.params["over"].size == total


def slots_after(eqn: Eqn, inside: Mapping[Var, InSlots], zeros: Collection[Var]) -> tuple[InSlots, bool] | None:
    """The slots of an operation's result, and whether it sums over slots; None if it mixes them.

    `inside` are its operands in slots, `zeros` the values of zeros alone.
    """
    op, held = cast(Op, eqn.op), next(iter(inside.values()))
    if eqn.control is not None or op.acts or op.inside_blocks or len(eqn.outs) != 1:
        return None
    kept = _after_reshape(eqn, held) if op is RESHAPE else _after_labels(eqn, inside)
    if kept is None:
        return None
    dims, names, summed = kept
    holder = held.holder and op in (BARRIER, RENAME, RESHAPE)
    return InSlots(held.space, dims, names, _zero_after(eqn, inside, zeros), holder), summed


Kept = tuple[frozenset[str], Mapping[str, str], bool]  # dims, names, and whether slots are summed over


def _after_reshape(eqn: Eqn, held: InSlots) -> Kept:
    pairs = list(groups(eqn.ins[0].dims, eqn.outs[0].dims))
    dims = {d.name for old, new in pairs if any(o.name in held.dims for o in old) for d in new}
    same = {old[0].name for old, new in pairs if list(old) == list(new) and len(old) == 1}
    return frozenset(dims), {k: name for k, name in held.names.items() if name in same}, False


def _after_labels(eqn: Eqn, inside: Mapping[Var, InSlots]) -> Kept | None:
    """By the labels of the operation's sharding rule; operations with other rules, except reads, mix slots."""
    op = cast(Op, eqn.op)
    if op is not RENAME and (op.moves is not None or (op.rule is not None and op is not TAKE and not op.product)):
        return None
    labels = labels_of(eqn)
    after = {label: d for d, label in labels.outs[0].items() if label is not None}
    dims, names, summed = set[str](), dict[str, str](), False
    for v, of_dims in zip(eqn.ins, labels.ins, strict=True):
        if v in inside:
            found = {of_dims.get(d) for d in inside[v].dims}
            if None in found:
                return None
            summed |= not found <= after.keys()
            dims |= {d for label, d in after.items() if label in found}
            of_names = {k: of_dims.get(d) for k, d in inside[v].names.items()}
            names |= {k: after[label] for k, label in of_names.items() if label in after}
    return frozenset(dims), names, summed


def _zero_after(eqn: Eqn, inside: Mapping[Var, InSlots], zeros: Collection[Var]) -> bool:
    """True if the result is zero in slots in which the operands in slots are."""
    op = cast(Op, eqn.op)
    zero = [v in zeros or (v in inside and inside[v].zero) for v in eqn.ins]
    match op.linear:
        case Linear.EACH:
            return any(zero)
        case Linear.JOINT:
            return all(zero)
        case Linear.FIRST | Linear.RATIO:
            return zero[0]
        case Linear.BRANCHES:
            return all(zero[1:])
        case _:
            return len(zero) == 1 and zero[0] and _zero_at_zero(op, eqn)


def _zero_at_zero(op: Op, eqn: Eqn) -> bool:
    """True if an elementwise operation of one operand gives zero for zero."""
    if op.fuses is not Fuses.MAP or op.rule is not None or eqn.ins[0].dims != eqn.outs[0].dims:
        return False
    block = Block((), (), ())
    local = Local(NumPy, (block,), (block,))
    return not np.any(op.kernel(local, np.zeros((), eqn.ins[0].dtype), **eqn.params))
