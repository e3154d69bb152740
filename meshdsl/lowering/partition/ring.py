"""Contractions that send an operand around a ring of devices, block by block, instead of gathering it.

Each device multiplies the block it has while the next block is being sent, so no device stores the complete operand
(Cannon, 1969; GShard, Lepikhin et al., 2020, figure 4c). The ring sends as many bytes as an all-gather, in n - 1 trips
of a loop. Use it if the gathered operand would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend import Local, letters
from ...control import SCAN
from ...dims import Dim, Shape
from ...ir import NO_CAUSE, Because, Cause, Eqn, Labels, Op, Product, Scan, Type, Var
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.contraction import EINSUM
from ...ops.index_map import replaced
from ...ops.indexing import IOTA
from ...trace import FULL
from ..blocks import RELABEL
from ..program import Program
from .index_map import Exchange
from .scope import Scope

__all__ = ["TURN", "Ring", "find_ring", "multiply_around"]


@dataclass(frozen=True)
class Ring:
    """Send operand number `operand` around the devices along `axes`, which split its dim `dim`."""

    operand: int
    dim: Dim
    axes: Axes


def find_ring(
    scope: Scope, eqn: Eqn, labels: Labels, demanded: Callable[[Var, Any], Sharding], assigned: Mapping[str, Axes]
) -> Ring | None:
    """The operand whose gathered size exceeds the limit, if it can be sent around a ring; else None."""
    limit = scope.setting.gather_limit
    if limit is None or eqn.op is not EINSUM or len(eqn.ins) != 2:
        return None
    used = {axis for axes in assigned.values() for axis in axes}
    for k, (v, names) in enumerate(zip(eqn.ins, labels.ins, strict=True)):
        if v in scope.unmaterialized or scope.default_sharding[v].partial:
            continue
        stored, needed = scope.whole_version(v) or scope.default_sharding[v], demanded(v, names)
        grown = [d for d in v.dims if stored.axes(d) and not needed.axes(d)]
        same = all(stored.axes(d) == needed.axes(d) for d in v.dims if d not in grown)
        available = any(x.sharding == needed for x in scope.versions[v])
        sizes = scope.setting.extents.local_shape(v.dims, needed, scope.setting.mesh)
        too_large = math.prod(sizes) * v.dtype.itemsize > limit
        if len(grown) == 1 and same and not available and too_large and set(stored.axes(grown[0])) <= used:
            return Ring(k, grown[0], stored.axes(grown[0]))
    return None


def multiply_around(
    scope: Scope, eqn: Eqn, ring: Ring, ins: Sequence[Var], demanded: Sharding, out: Var, mask: bool
) -> None:
    """Add the loop that multiplies the current block and sends it on, and one last product after the loop.

    `ins` does not include the ring's operand.
    """
    mesh, extents = scope.setting.mesh, scope.setting.extents
    n, v = mesh.count(ring.axes), eqn.ins[ring.operand]
    x = scope.get(v, demanded.with_split(ring.dim.name, ring.axes), eqn)
    x = scope.masked(x, tuple(d for d in v.dims if mask and d.name not in {e.name for e in out.dims}), 0, eqn)
    block = Dim(f"{ring.dim.name}__block", extents.padded(ring.dim))
    shape = replaced(v.dims, ring.dim, block)
    sharding = Sharding.of({**dict(demanded.split), block.name: ring.axes})
    held, acc = Var(shape, v.dtype, "", sharding), Var(out.dims, out.dtype, "", out.sharding)
    turns = Var((Dim("turn", n - 1),), np.dtype(np.int32), "", Sharding())

    def equation(op: Any, ins: Sequence[Var], out: Var, cause: Cause = NO_CAUSE, **params: Any) -> Eqn:
        return Eqn(op, tuple(ins), (out,), params, eqn.where, eqn.backward, cause)

    turns_dim = turns.dims[0]
    scope.eqns += [
        equation(RELABEL, [x], held, shape=shape, label=(ring.dim.name, block.name)),
        equation(FULL, [], acc, value=0, shape=out.dims, dtype=out.dtype),
        equation(IOTA, [], turns, dim=turns_dim, dtype=turns.dtype),
    ]

    def clone(var: Var) -> Var:
        return Var(var.dims, var.dtype, "", var.sharding)

    def product(others: Sequence[Var], held: Var, acc: Var, turn: Var, result: Var) -> Eqn:
        operands = [*others[: ring.operand], held, *others[ring.operand :], acc, turn]
        how = {"operand": ring.operand, "ring": ring.dim, "block": block, "axes": ring.axes, "dtype": out.dtype}
        return Eqn(TURN, tuple(operands), (result,), how, eqn.where, eqn.backward)

    inner, b, a, t = [clone(var) for var in ins], clone(held), clone(acc), Var((), turns.dtype, "", Sharding())
    sent, summed = clone(held), clone(acc)
    routes = tuple(((i + 1) % n, i) for i in range(n))
    cause = Cause(Because.RING, eqn.op.name, (ring.dim.name,))
    steps = (equation(Exchange(block.name, ring.axes, routes), [b], sent, cause), product(inner, b, a, t, summed))
    body = Program((*inner, b, a, t), steps, (sent, summed), mesh=mesh, extents=extents)
    last, most = clone(held), clone(acc)
    loop = {"control": Scan(body, len(ins), 2, turns_dim)}
    end = Var((), turns.dtype, "", Sharding())
    scope.eqns += [
        Eqn(SCAN, (*ins, held, acc, turns), (last, most), loop, eqn.where, eqn.backward),
        equation(FULL, [], end, value=n - 1, shape=(), dtype=turns.dtype),
        product(ins, last, most, end, out),
    ]


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
