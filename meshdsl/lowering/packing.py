"""Pack blocks of several tensors into one flat block `[other, way, packed]`, and unpack it. Sends nothing.

`way` numbers the chunks that a reduce_scatter distributes or an all_gather collects. Each tensor's chunk along its own
dim is one run of a row, so that each tensor gets the same shard as from a collective of its own; a dim without a whole
number of chunks is padded before it is packed, and trimmed after it is unpacked. `other` numbers the devices that store
different blocks along other dims. A dim of size 1 is left out. If `packed` is longer than the runs, zeros follow them.
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
from ..ops.reshape import resized

Chunk = tuple[str, int]  # the dim of a tensor whose chunks are rows of `way`, and the stored size of a chunk
Chunks = Sequence[Chunk | None]  # for each tensor; None if it is one row


def _rows(c: Local, x: Any, block: Block, chunk: Chunk | None, ways: int) -> Any:
    """A block as `[ways, flat]`: its chunks along a dim one after the other, each in row-major order."""
    if chunk is None or ways == 1:
        return c.xp.reshape(x, (ways, -1))
    dim, size = block.position(chunk[0]), chunk[1]
    x = resized(c, x, {dim: ways * size})
    chunks = c.xp.reshape(x, (*block.sizes[:dim], ways, size, *block.sizes[dim + 1 :]))
    return c.xp.reshape(c.xp.moveaxis(chunks, dim, 0), (ways, -1))


def _block(c: Local, rows: Any, block: Block, chunk: Chunk | None, ways: int) -> Any:
    """The inverse of `_rows`."""
    if chunk is None or ways == 1:
        return c.xp.reshape(rows, block.sizes)
    dim, size = block.position(chunk[0]), chunk[1]
    chunks = c.xp.reshape(rows, (ways, *block.sizes[:dim], size, *block.sizes[dim + 1 :]))
    whole = c.xp.reshape(c.xp.moveaxis(chunks, 0, dim), (*block.sizes[:dim], ways * size, *block.sizes[dim + 1 :]))
    return resized(c, whole, {dim: block.sizes[dim]})


def _length(block: Block, chunk: Chunk | None, ways: int) -> int:
    """The elements of a tensor in one row."""
    if chunk is None or ways == 1:
        return math.prod(block.sizes) // ways
    dim = block.position(chunk[0])
    return math.prod(block.sizes[:dim]) * chunk[1] * math.prod(block.sizes[dim + 1 :])


def _ways(block: Block) -> int:
    """The number of rows of `way` on one device."""
    return block.sizes[-2] if len(block.sizes) > 1 else 1


def _pack(c: Local, *xs: Any, shape: Shape, chunks: Chunks) -> Any:
    (out,) = c.outs
    ways = _ways(out)
    rows = [_rows(c, x, b, chunk, ways) for x, b, chunk in zip(xs, c.ins, chunks, strict=True)]
    unused = out.sizes[-1] - sum(row.shape[1] for row in rows)
    rows += [c.xp.zeros((ways, unused), rows[0].dtype)] if unused else []
    return c.xp.reshape(c.xp.concatenate(rows, 1), out.sizes)


def _unpack(c: Local, x: Any, *, result: Sequence[Shape], chunks: Chunks) -> list[Any]:
    ways = _ways(c.ins[0])
    rows = c.xp.reshape(x, (ways, -1))
    ends = accumulate((_length(b, chunk, ways) for b, chunk in zip(c.outs, chunks, strict=True)), initial=0)
    return [
        _block(c, rows[:, start:end], b, chunk, ways)
        for (start, end), b, chunk in zip(pairwise(ends), c.outs, chunks, strict=True)
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
    for v, chunk in zip(tensors, eqn.params["chunks"], strict=True):
        minor = packed.sharding.axes(minor_dim) if chunk is not None else ()
        cut = v.sharding.axes(chunk[0]) if chunk is not None else ()
        others = set(v.sharding.split_axes) - set(minor)
        same = (v.sharding.partial, v.sharding.kind) == (packed.sharding.partial, packed.sharding.kind)
        if not same or cut[len(cut) - len(minor) :] != minor or others != set(packed.sharding.split_axes) - set(minor):
            raise InternalError(f"{eqn.op} at {eqn.where} has {v} as {v.sharding} in {packed.sharding}")
    return [v.sharding for v in eqn.outs]


PACK = Op(
    "pack",
    type=lambda *xs, shape, chunks: Type(shape, xs[0].dtype),
    kernel=_pack,
    linear=Linear.JOINT,
    flops=no_flops,
    shardings=_packed_shardings,
    fuses=Fuses.MAP,
    rule=lambda *xs, shape, chunks: _apart(xs, [Type(shape, xs[0].dtype)]),
)
UNPACK = Op(
    "unpack",
    type=lambda x, *, result, chunks: tuple(Type(shape, x.dtype) for shape in result),
    kernel=_unpack,
    linear=Linear.JOINT,
    flops=no_flops,
    shardings=_packed_shardings,
    rule=lambda x, *, result, chunks: _apart([x], [Type(shape, x.dtype) for shape in result]),
)
