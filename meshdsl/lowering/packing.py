"""Pack blocks of several tensors into one flat block `[other, way, packed]`, and unpack it. Sends nothing.

`way` numbers the chunks that a reduce_scatter distributes or an all_gather collects. Each tensor's chunk along its own
dim is one run of a row, so that each tensor gets the same shard as from a collective of its own. `other` numbers the
devices that store different blocks along other dims. A dim of size 1 is left out. If `packed` is longer than the runs,
zeros follow them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (arrays of two libraries, and parameters of equations, are only partly typed)

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from ..backend import Block, Local
from ..dims import Shape
from ..errors import InternalError
from ..ir import Eqn, Fuses, Labels, Linear, Op, Type, no_flops, only_named
from ..layouts import Sharding

Dims = Sequence["str | None"]  # for each tensor, the dim whose chunks are rows of `way`, or None


def _rows(c: Local, x: Any, sizes: Sequence[int], dim: int | None, ways: int) -> Any:
    """A block as `[ways, flat]`: its chunks along a dim one after the other, each in row-major order."""
    if dim is None or ways == 1:
        return c.xp.reshape(x, (ways, -1))
    chunks = c.xp.reshape(x, (*sizes[:dim], ways, sizes[dim] // ways, *sizes[dim + 1 :]))
    return c.xp.reshape(c.xp.moveaxis(chunks, dim, 0), (ways, -1))


def _block(c: Local, rows: Any, sizes: Sequence[int], dim: int | None, ways: int) -> Any:
    """The inverse of `_rows`."""
    if dim is None or ways == 1:
        return c.xp.reshape(rows, tuple(sizes))
    chunks = c.xp.reshape(rows, (ways, *sizes[:dim], sizes[dim] // ways, *sizes[dim + 1 :]))
    return c.xp.reshape(c.xp.moveaxis(chunks, 0, dim), tuple(sizes))


def _at(block: Block, dim: str | None) -> int | None:
    return None if dim is None else block.position(dim)


def _ways(block: Block) -> int:
    """The number of rows of `way` on one device."""
    return block.sizes[-2] if len(block.sizes) > 1 else 1


def _pack(c: Local, *xs: Any, shape: Shape, dims: Dims) -> Any:
    (out,) = c.outs
    ways = _ways(out)
    rows = [_rows(c, x, b.sizes, _at(b, dim), ways) for x, b, dim in zip(xs, c.ins, dims, strict=True)]
    unused = out.sizes[-1] - sum(row.shape[1] for row in rows)
    rows += [c.xp.zeros((ways, unused), rows[0].dtype)] if unused else []
    return c.xp.reshape(c.xp.concatenate(rows, 1), out.sizes)


def _unpack(c: Local, x: Any, *, result: Sequence[Shape], dims: Dims) -> list[Any]:
    ways = _ways(c.ins[0])
    rows = c.xp.reshape(x, (ways, -1))
    ends = accumulate((math.prod(b.sizes) // ways for b in c.outs), initial=0)
    return [
        _block(c, rows[:, start:end], b.sizes, _at(b, dim), ways)
        for (start, end), b, dim in zip(pairwise(ends), c.outs, dims, strict=True)
    ]


def _apart(ins: Sequence[Type], outs: Sequence[Type]) -> Labels:
    """Labels that connect no dim of an operand with a dim of a result; `_packed_shardings` is the sharding rule."""
    return Labels(tuple(only_named(t.dims) for t in ins), tuple(only_named(t.dims) for t in outs))


def _packed_shardings(eqn: Eqn) -> list[Sharding]:
    """The shardings of the results of a pack or an unpack.

    Raises `InternalError` if a tensor is split over other axes than its packed block.
    """
    packs = eqn.op is PACK
    (packed,) = eqn.outs if packs else eqn.ins
    tensors = eqn.ins if packs else eqn.outs
    minor_dim = packed.dims[-2].name if len(packed.dims) > 1 else ""
    for v, dim in zip(tensors, eqn.params["dims"], strict=True):
        minor = packed.sharding.axes(minor_dim) if dim is not None else ()
        cut = v.sharding.axes(dim) if dim is not None else ()
        others = set(v.sharding.split_axes) - set(minor)
        same = (v.sharding.partial, v.sharding.kind) == (packed.sharding.partial, packed.sharding.kind)
        if not same or cut[len(cut) - len(minor) :] != minor or others != set(packed.sharding.split_axes) - set(minor):
            raise InternalError(f"{eqn.op} at {eqn.where} has {v} as {v.sharding} in {packed.sharding}")
    return [v.sharding for v in eqn.outs]


PACK = Op(
    "pack",
    type=lambda *xs, shape, dims: Type(shape, xs[0].dtype),
    kernel=_pack,
    linear=Linear.JOINT,
    flops=no_flops,
    shardings=_packed_shardings,
    fuses=Fuses.MAP,
    rule=lambda *xs, shape, dims: _apart(xs, [Type(shape, xs[0].dtype)]),
)
UNPACK = Op(
    "unpack",
    type=lambda x, *, result, dims: tuple(Type(shape, x.dtype) for shape in result),
    kernel=_unpack,
    linear=Linear.JOINT,
    flops=no_flops,
    shardings=_packed_shardings,
    rule=lambda x, *, result, dims: _apart([x], [Type(shape, x.dtype) for shape in result]),
)
