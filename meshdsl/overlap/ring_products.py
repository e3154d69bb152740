"""Ring products (collective matmul): products read a sharded operand block by block, instead of gathering it first.

A gather whose result is read only by products becomes n - 1 permutes, each of one block. Every device multiplies the
block that it has while it receives the next one (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023). A permute sends what the gather's ring sends per step, so the bytes are equal. Blocks along a dim
of the result are computed as by the whole product; blocks along a summed dim are added, in another order on each
device.

`TURN`: a device multiplies the block of a sharded operand that it has in this turn of a ring.

Choose the gathers that become ring products: those with which the step is faster by the timeline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Local, letters
from ..dims import Dim, Shape, fresh_dim
from ..ir import NO_CAUSE, Because, Cause, Collective, Eqn, Labels, Op, Product, Type, Var, dce, readers_of
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..lowering.blocks import RELABEL
from ..lowering.collectives import AllGather
from ..lowering.partition.index_map import Exchange
from ..lowering.program import Program
from ..ops.contraction import EINSUM
from ..ops.index_map import replaced
from ..ops.reshape import RENAME
from ..trace import FULL, number
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
    def dim(self) -> Dim:
        """The gathered dim, as the products call it."""
        assert isinstance(self.gather.op, AllGather)
        name = self.gather.op.dim
        return next(d for d, old in zip(self.value.dims, self.gather.outs[0].dims, strict=True) if old.name == name)


def rings(program: Program) -> tuple[Ring, ...]:
    """The gathers of the program's body that can become rings.

    All readers are products of two operands whose results are sharded over the gather's axes, the dim is gathered
    completely, and it is stored without padding under both its names.
    """
    readers = readers_of(program)
    gathers = (_named(eqn, readers.get(eqn.outs[0], ())) for eqn in program.eqns if isinstance(eqn.op, AllGather))
    outs = set(program.outs)
    return tuple(
        ring
        for ring in gathers
        if outs.isdisjoint((ring.gather.outs[0], ring.value)) and _fits(program, ring, readers.get(ring.value, ()))
    )


def _named(gather: Eqn, readers: Sequence[Eqn]) -> Ring:
    if len(readers) == 1 and readers[0].op is RENAME:
        return Ring(gather, readers[0], readers[0].outs[0])
    return Ring(gather, None, gather.outs[0])


def _fits(program: Program, ring: Ring, readers: Sequence[Eqn]) -> bool:
    (x,), op = ring.gather.ins, ring.gather.op
    assert isinstance(op, AllGather)
    gathered = next(d for d in x.dims if d.name == op.dim)
    n = program.mesh.count(op.axes)
    even = ring.dim.size > 0 and not any(program.extents.is_padded(d, n) for d in (gathered, ring.dim))
    complete = x.sharding.axes(op.dim) == op.axes and not x.sharding.partial
    return bool(readers) and even and complete and all(_turns_fit(r, ring) for r in readers)


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
    blocks: dict[Var, tuple[Var, ...]] = {}  # gathered value -> the blocks that a device has, one after another
    of = {ring.value: ring for ring in chosen}
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        value = next((v for v in eqn.ins if v in blocks), None)
        if eqn in starts:
            sends, blocks[starts[eqn].value] = _sent(program, starts[eqn])
            eqns += sends
        elif value is not None:
            eqns += _turns(eqn, of[value], blocks[value])
        elif eqn not in renames:
            eqns.append(eqn)
    return dce(program.replace(eqns=tuple(eqns)))


def _sent(program: Program, ring: Ring) -> tuple[list[Eqn], tuple[Var, ...]]:
    """The permutes of one ring, and the blocks that every device has after each of them."""
    gather, (x,), n = ring.gather, ring.gather.ins, program.mesh.count(ring.axes)
    eqns: list[Eqn] = []

    def add(op: Op | Collective, v: Var, out: Var, cause: Cause = NO_CAUSE, **params: Any) -> Var:
        eqns.append(Eqn(op, (v,), (out,), params, gather.where, gather.backward, cause))
        return out

    if ring.rename is not None:
        shape = ring.value.dims
        split = ring.value.sharding.with_split(ring.dim.name, ring.axes)
        x = add(RENAME, x, Var(shape, x.dtype, x.name, split), **ring.rename.params)
    block = fresh_dim(Dim(f"{ring.dim.name}__block", ring.dim.size), program.extents.multiple, program.known_dim_names)
    held = Var(
        replaced(x.dims, ring.dim, block), x.dtype, x.name, ring.value.sharding.with_split(block.name, ring.axes)
    )
    blocks = [add(RELABEL, x, held, shape=held.dims)]
    send = Exchange(block.name, ring.axes, tuple(((i + 1) % n, i) for i in range(n)))
    for _ in range(n - 1):
        cause = Cause(Because.TURNS, parts=(gather.cause,))
        blocks.append(add(send, blocks[-1], dataclasses.replace(held), cause))
    return eqns, tuple(blocks)


def _turns(eqn: Eqn, ring: Ring, blocks: tuple[Var, ...]) -> list[Eqn]:
    """A product as one turn for each block."""
    operand, (out,) = eqn.ins.index(ring.value), eqn.outs
    (block,) = (d for d in blocks[0].dims if d not in ring.value.dims)
    params = {"operand": operand, "ring": ring.dim, "block": block, "axes": ring.axes, "dtype": out.dtype}
    eqns: list[Eqn] = []

    def full(v: Var, value: int) -> Var:
        how = {"value": number(value, v.dtype), "shape": v.dims}
        eqns.append(Eqn(FULL, (), (v,), how, eqn.where, eqn.backward))
        return v

    total = full(dataclasses.replace(out), 0)
    for t, held in enumerate(blocks):
        turn = full(Var((), np.dtype(np.int32)), t)
        factors = *eqn.ins[:operand], held, *eqn.ins[operand + 1 :]
        result = out if t == len(blocks) - 1 else dataclasses.replace(out)
        eqns.append(Eqn(TURN, (*factors, total, turn), (result,), params, eqn.where, eqn.backward))
        total = result
    return eqns


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


TRIED = 6  # kinds of gathers, those with the most bytes first


def ring(planner: Planner) -> Candidates:
    """The gathers that only products read as rings: those that make the step faster; all of them, without other plans,
    or where the program does not fit in memory, because a ring never stores what it gathers.
    """
    found = rings(planner.unrolled) if "permute" in planner.machine.asynchronous or planner.too_large else ()
    if not found:
        raise planner.no_effect(no_rings(planner.unrolled, planner.machine))
    count, program = faster_rings(planner.unrolled, planner.in_order, planner.seconds)
    if count:
        yield f"{count} of {len(found)} rings", program
    if planner.too_large or (planner.alone and not count):
        yield f"{len(found)} rings", planner.listed(ring_products(planner.unrolled, found))


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
