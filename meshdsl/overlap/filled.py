"""Products of the filled slots of a part: each part multiplies the run of slots that its tokens fill, and no others.

They are einsums whose operands are zero in the other slots, computed as grouped products (`md.grouped_dot`): a slot
selects the matrix of its expert, or none. `share` is the expected fraction of filled slots; it scales the operations
that the cost model counts. The blocks that a device visits are those with filled slots.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Block, Local
from ..dims import Dim, Shape, names
from ..ir import Eqn, Op, Product, Reduce, Type, Var


def _matrices(c: Local, x: Any, block: Block, *dims: Sequence[Dim]) -> Any:
    """The array with one axis for each group of dims, and its dims in this order."""
    order = [block.position(d) for group in dims for d in group]
    sizes = [math.prod(block.size(d) for d in group) for group in dims]
    return c.xp.reshape(c.xp.transpose(x, order), sizes)


def _restored(c: Local, y: Any, *dims: Sequence[Dim]) -> Any:
    """An array with these groups of dims as axes, as the result."""
    out, flat = c.outs[0], [d for group in dims for d in group]
    y = c.xp.reshape(y, [out.size(d) for d in flat])
    return c.xp.transpose(y, [flat.index(d) for d in out.dims])


def _groups(c: Local, run: Any, slots: Dim, own: Sequence[Dim]) -> tuple[Any, int]:
    """For each slot of each cell its place in the dims `own`, or their size if it is not filled; and their size."""
    cells = c.ins[2].dims[:-1]
    total, number = 1, np.zeros((), np.int32)
    for d in own:
        axis = cells.index(d)
        at = np.arange(c.ins[2].sizes[axis], dtype=np.int32).reshape((-1,) + (1,) * (len(cells) - axis - 1))
        number, total = number * c.ins[2].sizes[axis] + at, total * c.ins[2].sizes[axis]
    at = c.xp.arange(c.ins[0].size(slots), dtype=np.int32)
    first, count = run[..., 0, None], run[..., 1, None]
    group = c.xp.where((at >= first) & (at < first + count), np.asarray(number)[..., None], np.int32(total))
    return group.reshape(-1).astype(np.int32), total


def _dot(c: Local, x: Any, w: Any, run: Any, *, out: Shape, slots: Dim, dtype: np.dtype, share: float) -> Any:
    cells = c.ins[2].dims[:-1]
    rows, own = (*cells, slots), [d for d in c.ins[1].dims if d in cells]
    over = [d for d in c.ins[0].dims if d not in rows]
    new = [d for d in c.ins[1].dims if d not in (*own, *over)]
    group, _ = _groups(c, run, slots, own)
    vectors, matrices = _matrices(c, x, c.ins[0], rows, over), _matrices(c, w, c.ins[1], own, over, new)
    return _restored(c, c.xp.grouped_dot(vectors, matrices, group, dtype, few=True), rows, new)


def _outer(c: Local, x: Any, y: Any, run: Any, *, out: Shape, slots: Dim, dtype: np.dtype, share: float) -> Any:
    cells = c.ins[2].dims[:-1]
    rows, own = (*cells, slots), [d for d in cells if d in out]
    left, right = ([d for d in block.dims if d not in rows] for block in c.ins[:2])
    group, total = _groups(c, run, slots, own)
    xs, ys = _matrices(c, x, c.ins[0], rows, left), _matrices(c, y, c.ins[1], rows, right)
    return _restored(c, c.xp.grouped_outer(xs, ys, group, total, dtype, few=True), own, left, right)


def _flops(ins: Sequence[Any], outs: Any, *, shapes: Sequence[Shape], share: float, **_: Any) -> float:
    sizes = {
        name: n
        for shape, local in zip(shapes[:2], ins, strict=False)
        for name, n in zip(names(shape), local, strict=True)
    }
    return share * 2.0 * math.prod(sizes.values())


FILLED_DOT, FILLED_OUTER = (
    Op(
        name,
        type=lambda x, y, run, *, out, slots, dtype, share: Type(out, dtype),
        kernel=kernel,
        flops=_flops,
        reduce=Reduce.SUM,
        product=Product.MATMUL,
        mask=0,
    )
    for name, kernel in (("filled_dot", _dot), ("filled_outer", _outer))
)


def is_dot(eqn: Eqn, rows: Var, matrices: Var, names: tuple[str, ...]) -> bool:
    """True if each slot's row is multiplied by the matrix of the slot's cell, and summed over all its dims."""
    own, out = {d.name for d in rows.dims} - set(names), {d.name for d in eqn.outs[0].dims}
    return set(names) <= out and not own & out and names[-1] not in {d.name for d in matrices.dims}


def is_outer(eqn: Eqn, x: Var, y: Var, names: tuple[str, ...]) -> bool:
    """True if the products of all pairs of two rows are summed over the slots."""
    first, second, out = ({d.name for d in v.dims} for v in (x, y, eqn.outs[0]))
    left, right = first - set(names), second - set(names)
    return set(names) <= second and names[-1] not in out and left | right <= out and not left & right
