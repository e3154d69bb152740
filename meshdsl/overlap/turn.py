"""`TURN`: a device multiplies the block of a sharded operand that it has in this turn of a ring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import Local, letters
from ..dims import Dim, Shape
from ..ir import Eqn, Labels, Op, Product, Type
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..ops.index_map import replaced

__all__ = ["TURN"]


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
