"""A program in parts while it is made: its new equations, and the parts of each value.

`split` and `slots` add equations to it. A value has parts, or is complete, or both; a complete value is cut into parts
where a part is read, and parts are joined where the complete value is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from ..dims import Dim, Shape
from ..ir import Eqn, Var
from ..lowering.program import Program
from .parts import JOIN_PARTS, PART, SUM_PARTS, Cut, resized


class Pieces:
    """The equations so far of `program` in `parts` parts, and the parts and cuts of its values.

    `among` are the equations that may run in parts (default: all). Results in `stored` are read by the backward pass
    alone. `of_slots` returns the complete value of one in the slots of experts; None for another.
    """

    of_slots: Callable[[Var, Eqn | None], Var | None]

    def __init__(self, program: Program, parts: int, among: set[Eqn] | None, dim: str, stored: Collection[Var]):
        self.program, self.parts, self.among, self.stored = program, parts, among, stored
        self.new_dim = "" if any(d.name == dim for v in program.ins for d in v.dims) else dim
        self.eqns: list[Eqn] = []
        self.part: dict[Eqn, int] = {}
        self.of: dict[Eqn, Eqn] = {}
        self.ends: list[Eqn] = []
        self.computes = dict(program.producers)
        self.cut: dict[Var, Cut] = {}
        self.pieces: dict[Var, tuple[Var, ...]] = {}
        self.joined: dict[Var, Var] = {}
        self.taken: dict[tuple[Var, Cut], tuple[Var, ...]] = {}

    def divides(self, v: Var, cut: Cut) -> bool:
        """True if every device's block divides into equal parts, without padding."""
        d = next(d for d in v.dims if d.name == cut.dim)
        extents, ways = self.program.extents, self.program.mesh.count(v.sharding.axes(d))
        small = Dim(d.name, d.size // self.parts)
        return (
            d.size > 0
            and not extents.is_padded(d, ways)
            and d.size % (self.parts * ways * cut.chunks) == 0
            and not extents.is_padded(small, ways)
        )

    def append(self, eqn: Eqn, part: int) -> None:
        """Add an equation of one part."""
        self.eqns.append(eqn)
        self.part[eqn] = part

    def whole(self, v: Var, reader: Eqn | None = None) -> Var:
        """The complete value, joined from its parts if only these were computed."""
        of_slots = self.of_slots(v, reader)
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

    def in_full(self, eqn: Eqn) -> None:
        """Add one equation that is not in parts; its operands are put together first.

        Later equations may cut its results along `new_dim`, a dim that no input of the program has.
        """
        self.ends += [eqn] * any(v in self.pieces for v in eqn.ins)
        one = dataclasses.replace(eqn, ins=tuple(self.whole(v, eqn) for v in eqn.ins))
        self.eqns.append(one)
        fresh = Cut(self.new_dim, 1)
        self.cut.update((v, fresh) for v in eqn.outs if has_dim(v, self.new_dim) and self.divides(v, fresh))

    def small(self, v: Var, cut: object) -> Shape:
        """The dims of a part."""
        return resized(v.dims, cut.dim, 1 / self.parts) if isinstance(cut, Cut) else v.dims

    def trace(self, eqn: Eqn | None) -> None:
        """Remember the equation of the program behind the last new ones; a join's is that of its pieces."""
        for one in self.eqns[len(self.of) :]:
            joined = self.computes.get(one.ins[-1]) if one.op in (JOIN_PARTS, SUM_PARTS) else None
            self.of[one] = origin = joined or self.computes.get(one.outs[0]) or eqn or one
            self.computes.update((v, origin) for v in one.outs)


def has_dim(v: Var, dim: str) -> bool:
    return any(d.name == dim for d in v.dims)
