"""Operations of a program in parts: cut a part from each device's block, join, add, and count filled slots."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

from functools import reduce
from typing import Any

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Fuses, Linear, Op, Type

__all__ = ["FILLED_PART", "JOIN_PARTS", "PART", "SUM_PARTS", "resized"]


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
