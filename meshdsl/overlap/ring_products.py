"""Ring products (collective matmul): products read a sharded operand block by block, instead of gathering it first.

A gather whose result is read only by products becomes n - 1 permutes, each of one block. Every device multiplies the
block that it has while it receives the next one (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023). A permute sends what the gather's ring sends per step, so the bytes are equal. Blocks along a dim
of the result are computed as by the whole product; blocks along a summed dim are added, in another order on each
device. A ring of more than `UNROLLED` devices is a loop of permutes (GShard, Lepikhin et al., 2020, figure 4c).

`TURN`: a device multiplies the block of a sharded operand that it has in this turn of a ring.

Choose the gathers that become ring products: those with which the step is faster by the timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Local, letters
from ..control import SCAN
from ..dims import Dim, Shape, fresh_dim
from ..ir import NO_CAUSE, Because, Cause, Collective, Eqn, Labels, Op, Product, Scan, Type, Var, dce
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..lowering.blocks import RELABEL
from ..lowering.collectives import AllGather
from ..lowering.partition.index_map import Exchange
from ..lowering.program import Program
from ..ops.contraction import EINSUM
from ..ops.index_map import replaced
from ..ops.indexing import IOTA
from ..ops.masking import MASK
from ..ops.reshape import RENAME
from ..ops.slicing import PAD, SLICE
from ..trace import FULL, number
from .loops import bodies_in_order
from .planner import Candidates, Planner
from .reasons import no_rings


@dataclass(frozen=True, eq=False)
class Ring:
    """A gather, its rename if it has one, and the complete value that only products read."""

    gather: Eqn
    rename: Eqn | None
    value: Var

    @property
    def axes(self) -> Axes:
        assert isinstance(self.gather.op, AllGather)
        return self.gather.op.axes

    @property
    def stored(self) -> Dim:
        """The gathered dim, as the gather calls it."""
        assert isinstance(self.gather.op, AllGather)
        return next(d for d in self.gather.outs[0].dims if d.name == self.gather.op.dim)

    @property
    def dim(self) -> Dim:
        """The gathered dim, as the products call it."""
        return self.value.dims[self.gather.outs[0].dims.index(self.stored)]


def rings(program: Program) -> tuple[Ring, ...]:
    """The gathers of the program's body that can become rings.

    All readers are products of two operands whose results are sharded over the gather's axes, and the dim is gathered
    completely.
    """
    readers = program.readers
    gathers = (_named(eqn, readers.get(eqn.outs[0], ())) for eqn in program.eqns if isinstance(eqn.op, AllGather))
    outs = set(program.outs)
    return tuple(
        ring
        for ring in gathers
        if outs.isdisjoint((ring.gather.outs[0], ring.value)) and _fits(ring, readers.get(ring.value, ()))
    )


def _named(gather: Eqn, readers: Sequence[Eqn]) -> Ring:
    if len(readers) == 1 and readers[0].op is RENAME:
        return Ring(gather, readers[0], readers[0].outs[0])
    return Ring(gather, None, gather.outs[0])


def _fits(ring: Ring, readers: Sequence[Eqn]) -> bool:
    (x,) = ring.gather.ins
    complete = x.sharding.axes(ring.stored) == ring.axes and not x.sharding.partial
    return bool(readers) and ring.dim.size > 0 and complete and all(_turns_fit(r, ring) for r in readers)


def _turns_fit(product: Eqn, ring: Ring) -> bool:
    two = product.op is EINSUM and len(product.ins) == 2 and list(product.ins).count(ring.value) == 1
    complete = not any(v.sharding.partial for v in product.ins)
    return two and complete and set(ring.axes) <= product.outs[0].sharding.varying


def ring_products(program: Program, chosen: Collection[Ring]) -> Program:
    """The program with these gathers as rings.

    >>> import meshdsl as md
    >>> def dot(x, w):
    ...     return md.einsum(x, md.rename(w, part="io"), out="batch hidden")
    >>> types = md.spec("batch:8 io:16"), md.spec("part:16 hidden:32")
    >>> program = md.compile(dot, "rows:4", "batch:rows; part:rows").program(*types)
    >>> [str(eqn.op) for eqn in program.eqns]
    ['all_gather part over rows', 'rename', 'einsum']
    >>> ring = ring_products(program, rings(program))
    >>> [eqn.op.name for eqn in ring.eqns if eqn.op.name in ("permute", "turn")]
    ['permute', 'permute', 'permute', 'turn', 'turn', 'turn', 'turn']
    """
    starts = {ring.gather: ring for ring in chosen}
    renames = {ring.rename for ring in chosen}
    readers, place = program.readers, program.places
    made = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outs}
    of: dict[Eqn, _Blocks] = {}
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        if eqn in starts:
            products = sorted(readers[starts[eqn].value], key=place.__getitem__)
            ready = all(made.get(v, -1) < place[products[0]] for product in products for v in product.ins)
            blocks = _Blocks(program, starts[eqn], products, ready)
            of |= dict.fromkeys(products, blocks)
        if eqn in of:
            eqns += of[eqn].product(eqn)
        elif eqn not in renames and eqn not in starts:
            eqns.append(eqn)
    return dce(program.replace(eqns=tuple(eqns)))


class _Blocks:
    """The blocks of a gathered value, one after another, and the equations of the products that read them.

    Equations are added in the order of the products; if all operands are `ready` at the first one, a large ring is one
    loop for all of them.
    """

    def __init__(self, program: Program, ring: Ring, products: Sequence[Eqn], ready: bool):
        self.program, self.ring, self.gather, self.products = program, ring, ring.gather, products
        self.n = program.mesh.count(ring.axes)
        self.loops = self.n > UNROLLED and ready
        self.eqns: list[Eqn] = []
        size = self.n * program.extents.local(ring.stored, self.n)
        self.whole = Dim(ring.dim.name, size)  # with the padding of the last blocks
        taken = program.extents.multiple, program.known_dim_names
        self.block = fresh_dim(Dim(f"{ring.dim.name}__block", size), *taken)
        self.turn_dim = fresh_dim(Dim(f"{ring.dim.name}__turn", self.n - 1), *taken)
        self.held = [self._own_block()]

    def add(self, op: Op | Collective, ins: Sequence[Var], out: Var, cause: Cause = NO_CAUSE, **params: Any) -> Var:
        """Add an equation; returns its result."""
        self.eqns.append(Eqn(op, tuple(ins), (out,), params, self.gather.where, self.gather.backward, cause))
        return out

    def full(self, v: Var, value: int) -> Var:
        """A value that is this number everywhere."""
        return self.add(FULL, (), v, value=number(value, v.dtype), shape=v.dims)

    def _own_block(self) -> Var:
        ring, (x,) = self.ring, self.gather.ins
        if self.whole != ring.dim and any(ring.dim not in eqn.outs[0].dims for eqn in self.products):
            x = self.add(MASK, (x,), _like(x), over=(ring.stored,), fill=0)  # what is summed must not be padding
        dims = replaced(ring.value.dims, ring.dim, self.block)
        split = ring.value.sharding.with_split(self.block.name, ring.axes)
        return self.add(RELABEL, (x,), Var(dims, x.dtype, x.name, split), shape=dims)

    def sent(self, x: Var) -> Var:
        """The block of the next device."""
        send = Exchange(self.block.name, self.ring.axes, tuple(((i + 1) % self.n, i) for i in range(self.n)))
        return self.add(send, (x,), _like(x), Cause(Because.TURNS, parts=(self.gather.cause,)))

    def product(self, eqn: Eqn) -> list[Eqn]:
        """The equations of the next product, with those that it needs first."""
        if self.loops and eqn is self.products[0]:
            self._loop()
        elif not self.loops:
            while len(self.held) < self.n:
                self.held.append(self.sent(self.held[-1]))
            turns = [self.full(Var((), np.dtype(np.int32)), t) for t in range(self.n)]
            factors, total = self.factors(eqn), self.zeros(eqn)
            for held, turn in zip(self.held, turns, strict=True):
                total = self.turn(eqn, factors, held, total, turn)
            self.result(eqn, total)
        eqns, self.eqns = self.eqns, []
        return eqns

    def factors(self, eqn: Eqn) -> list[Var]:
        """The other operand of a product, with the padding that the blocks have."""
        (x,) = (v for v in eqn.ins if v is not self.ring.value)
        if self.whole != self.ring.dim and self.ring.dim in x.dims:
            padded = Var(replaced(x.dims, self.ring.dim, self.whole), x.dtype, x.name, x.sharding)
            high = self.whole.size - self.ring.dim.size
            x = self.add(PAD, (x,), padded, dim=self.ring.dim, low=0, high=high, inner=0, value=number(0, x.dtype))
        return [x]

    def zeros(self, eqn: Eqn) -> Var:
        """The sum before the first turn."""
        (out,) = eqn.outs
        dims = replaced(out.dims, self.ring.dim, self.whole)
        return self.full(Var(dims, out.dtype, out.name, out.sharding), 0)

    def turn(self, eqn: Eqn, factors: Sequence[Var], held: Var, total: Var, turn: Var) -> Var:
        """The sum after the product with one block."""
        operand = eqn.ins.index(self.ring.value)
        both = [held, *factors] if operand == 0 else [*factors, held]
        params = {"operand": operand, "ring": self.whole, "block": self.block, "axes": self.ring.axes}
        return self.add(TURN, (*both, total, turn), _like(total), dtype=total.dtype, **params)

    def result(self, eqn: Eqn, total: Var) -> None:
        """Define the product's result, without padding."""
        (out,) = eqn.outs
        if total.dims != out.dims:
            self.add(SLICE, (total,), out, dim=self.whole, start=0, size=self.ring.dim.size, stride=1)
        else:
            self.eqns[-1] = self.eqns[-1].replace(outs=(out,))

    def _loop(self) -> None:
        """One loop of all turns but the last, in which each device sends its block on, and the last turns."""
        factors, zeros = [self.factors(eqn) for eqn in self.products], [self.zeros(eqn) for eqn in self.products]
        consts = list(dict.fromkeys(v for each in factors for v in each))
        turns = self.add(
            IOTA, (), Var((self.turn_dim,), np.dtype(np.int32)), dim=self.turn_dim, dtype=np.dtype(np.int32)
        )
        inner, before, t = {v: _like(v) for v in consts}, [_like(v) for v in (self.held[0], *zeros)], _like(turns, ())
        outside, self.eqns = self.eqns, []
        after = [self.sent(before[0])]
        for eqn, each, total in zip(self.products, factors, before[1:], strict=True):
            after.append(self.turn(eqn, [inner[v] for v in each], before[0], total, t))
        program = self.program.replace(ins=(*inner.values(), *before, t), eqns=tuple(self.eqns), outs=tuple(after))
        outs, self.eqns = [_like(v) for v in (self.held[0], *zeros)], outside
        params = {"control": Scan(program, len(consts), len(outs), self.turn_dim)}
        ins = *consts, self.held[0], *zeros, turns
        self.eqns.append(Eqn(SCAN, ins, tuple(outs), params, self.gather.where, self.gather.backward))
        last = self.full(Var((), np.dtype(np.int32)), self.n - 1)
        for eqn, each, total in zip(self.products, factors, outs[1:], strict=True):
            self.result(eqn, self.turn(eqn, each, outs[0], total, last))


def _like(v: Var, dims: Shape | None = None) -> Var:
    return Var(v.dims if dims is None else dims, v.dtype, v.name, v.sharding)


def _turn_kernel(c: Local, *xs: Any, operand: int, ring: Dim, block: Dim, axes: Axes, dtype: Any) -> Any:
    """The device's product with its current block, which is the block `turn` places after its own."""
    *factors, acc, turn = xs
    n, size = c.count(axes), c.ins[operand].size(block)
    start = (c.xp.asarray(c.index(axes), np.int32) + turn) % n * size
    shapes: list[Shape] = [replaced(b.dims, block, ring) for b in c.ins[: len(factors)]]
    for k, shape in enumerate(shapes):
        if k != operand and ring in shape:
            factors[k] = c.xp.dynamic_slice(factors[k], start, size, shape.index(ring))
    out = c.outs[0].dims
    part = c.xp.einsum(letters(shapes, out), *factors, dtype=dtype).astype(dtype)
    return c.xp.dynamic_update(acc, part, start, out.index(ring)) if ring in out else acc + part


def _turn_rule(*types: Type, operand: int, ring: Dim, block: Dim, **_: Any) -> Labels:
    names = [{d.name: None if d in (ring, block) else d.name for d in t.dims} for t in types]
    return Labels(tuple(names), ({d.name: None if d == ring else d.name for d in types[-2].dims},))


def _turn_flops(ins: Any, outs: Any, *, shapes: Any, ring: Dim, block: Dim, **_: Any) -> float:
    sizes: dict[str, int] = {}
    for shape, local in zip(shapes[:-2], ins[:-2], strict=True):
        sizes.update({d.name: n for d, n in zip(shape, local, strict=True) if d != ring})
    return 2.0 * math.prod(sizes.values())


def _turn_shardings(eqn: Eqn) -> list[Sharding]:
    return [eqn.ins[-2].sharding]  # each device reads another block in each turn; no label can say so


TURN = Op(
    "turn",
    type=lambda *types, **_: types[-2],
    kernel=_turn_kernel,
    flops=_turn_flops,
    rule=_turn_rule,
    shardings=_turn_shardings,
    product=Product.MATMUL,
)


UNROLLED = 8  # devices: a larger ring is a loop
TRIED = 6  # kinds of gathers, those with the most bytes first


def ring(planner: Planner) -> Candidates:
    """The gathers that only products read as rings: those that make the step faster; all of them, without other plans,
    or where the program does not fit in memory, because a ring never stores what it gathers.
    """
    beside = "permute" in planner.machine.asynchronous
    found = rings(planner.unrolled) if beside or planner.alone or planner.too_large else ()
    if not found:
        raise planner.no_effect(no_rings(planner.unrolled))

    def with_bodies(one: Program) -> Program:
        return bodies_in_order(planner, one, planner.in_order)

    count, program = faster_rings(planner.unrolled, lambda one: planner.in_order(with_bodies(one)), planner.seconds)
    if count:
        yield f"{count} of {len(found)} rings", program
    if planner.too_large or (planner.alone and not count):
        yield f"{len(found)} rings", planner.listed(with_bodies(ring_products(planner.unrolled, found)))


def faster_rings(
    program: Program, order: Callable[[Program], Program], seconds: Callable[[Program], float]
) -> tuple[int, Program]:
    """The number of rings and the program in the order that `order` gives, with each kind of ring that is faster.

    Gathers of equal axes, shapes and dtypes are one kind (the layers of a model), which is taken or left together.
    """
    kinds: dict[object, list[Ring]] = {}
    for ring in rings(program):
        v = ring.value
        kinds.setdefault((ring.axes, ring.dim.name, v.type, ring.gather.backward), []).append(ring)
    chosen: list[Ring] = []
    best = order(program)
    least = seconds(best)
    largest = sorted(kinds.values(), key=lambda alike: -len(alike) * program.local_bytes(alike[0].value))
    for alike in largest[:TRIED]:
        candidate = order(ring_products(program, [*chosen, *alike]))
        now = seconds(candidate)
        if now < least:
            chosen, best, least = [*chosen, *alike], candidate, now
    return len(chosen), best
