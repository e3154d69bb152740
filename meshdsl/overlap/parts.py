"""Operations of a program in parts: cut a part from each device's block, join, add, and count filled slots.

Operations that read or make single parts of a cut dim, and reshapes whose outer dim has one element per device.

An `index` reads one row of a dim, and a `stack` of rows makes one. If the dim is cut, a row is in one part, so an
index needs only that part, and each part of a stack needs only its rows. (A model that routes its tokens in parts has
such rows; see `meshdsl.nn.moe`.)

A reshape passes on the cut of the outer dim of a merge or split. If a device stores one element of the outer dim, its
block is cut along the next one: a batch, for example, of one group of several sequences per device.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Eqn, Fuses, Linear, Op, Type
from ..layouts import Mesh
from ..ops.joining import INDEX, STACK
from ..ops.reshape import RESHAPE, groups

__all__ = ["FILLED_PART", "JOIN_PARTS", "PART", "SUM_PARTS", "resized", "inner_cut", "row_of", "rows_of_parts"]


def resized(shape: Shape, dim: str, factor: float) -> Shape:
    """The shape with one dim `factor` times as large."""
    return tuple(Dim(d.name, round(d.size * factor)) if d.name == dim else d for d in shape)


def _part(c: Local, x: Any, *, dim: str, index: int, parts: int, chunks: int) -> Any:
    axis = c.ins[0].position(dim)
    sizes = x.shape
    each = sizes[axis] // (parts * chunks)
    x = c.xp.reshape(x, (*sizes[:axis], chunks, parts, each, *sizes[axis + 1 :]))
    x = x[(slice(None),) * (axis + 1) + (index,)]
    return c.xp.reshape(x, (*sizes[:axis], chunks * each, *sizes[axis + 1 :]))


def _join(c: Local, *xs: Any, dim: str, chunks: int) -> Any:
    axis = c.ins[0].position(dim)
    sizes = xs[0].shape
    each = sizes[axis] // chunks
    rows = [c.xp.reshape(x, (*sizes[:axis], chunks, 1, each, *sizes[axis + 1 :])) for x in xs]
    return c.xp.reshape(c.xp.concatenate(rows, axis + 1), (*sizes[:axis], len(xs) * sizes[axis], *sizes[axis + 1 :]))


def _no_flops(*_: Any, **__: Any) -> float:
    return 0.0


PART = Op(
    "part",
    type=lambda x, *, dim, index, parts, chunks: Type(resized(x.dims, dim, 1 / parts), x.dtype),
    kernel=_part,
    flops=_no_flops,
    linear=Linear.JOINT,
    fuses=Fuses.PICK,
)
JOIN_PARTS = Op(
    "join_parts",
    type=lambda *xs, dim, chunks: Type(resized(xs[0].dims, dim, len(xs)), xs[0].dtype),
    kernel=_join,
    flops=_no_flops,
    linear=Linear.JOINT,
    fuses=Fuses.MAP,
)
SUM_PARTS = Op(
    "sum_parts",
    type=lambda *xs: xs[0],
    kernel=lambda c, *xs: reduce(lambda a, b: a + b, xs),
    linear=Linear.JOINT,
    fuses=Fuses.MAP,
)
FILLED_PART = Op(  # of the first x slots of a block: how many are among the `size` slots from `start`
    "filled_part",
    type=lambda x, *, start, size: x,
    kernel=lambda c, x, *, start, size: c.xp.clip(x - start, 0, size).astype(x.dtype),
    flops=_no_flops,
    fuses=Fuses.MAP,
)


def row_of(eqn: Eqn, dim: str, parts: int) -> tuple[int, int] | None:
    """The part that an index along the cut `dim` reads, and the row of that part; None for another equation."""
    if eqn.op is not INDEX or eqn.params["dim"].name != dim or eqn.params["dim"].size % parts:
        return None
    return divmod(eqn.params["at"], eqn.params["dim"].size // parts)


def rows_of_parts(eqn: Eqn, parts: int) -> list[slice] | None:
    """The operands of a stack that each part of its new dim consists of; None for another equation."""
    if eqn.op is not STACK or len(eqn.ins) % parts or eqn.outs[0].sharding.axes(eqn.params["dim"].name):
        return None
    each = len(eqn.ins) // parts
    return [slice(i * each, (i + 1) * each) for i in range(parts)]


def inner_cut(eqn: Eqn, dim: str, mesh: Mesh) -> str | None:
    """The dim of a reshape's result along which a device's block is cut if that of the operand is cut along `dim`.

    Only for reshapes whose outer dim, before or after, has one element per device; None for another equation.
    """
    if eqn.op is not RESHAPE or not all(d.size for d in eqn.ins[0].dims):
        return None
    x, y = eqn.ins[0], eqn.outs[0]

    def local(v_dims: Shape, axes_of: Sequence[tuple[str, ...]]) -> list[Dim]:
        """The dims of which a device has more than one element."""
        return [d for d, axes in zip(v_dims, axes_of, strict=True) if d.size > mesh.count(axes)]

    for left, right in groups(x.dims, y.dims):
        if dim not in [d.name for d in left] or left == right:
            continue
        inner = local(left, [x.sharding.axes(d) for d in left]), local(right, [y.sharding.axes(d) for d in right])
        if not all(inner) or inner[0][0].name != dim:
            return None
        outer_moved = inner[0][0] != left[0] or inner[1][0] != right[0]
        return inner[1][0].name if outer_moved else None
    return None
