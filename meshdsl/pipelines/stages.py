"""The loops over layers for all stages at once: values have the dim `stage`, and each stage loops over its own layers.

A stage has the layers of its block of the layout, so no weight moves. If the layers do not divide by the stages, the
last stages have fewer; they pass their carries on for the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..control import SCAN
from ..control.batching import batched
from ..dims import Dim
from ..ir import Eqn, Scan, Type
from ..ops.dynamic import dynamic_update_slice
from ..ops.elementwise import minimum, where
from ..ops.indexing import iota, take
from ..ops.placement import prefer
from ..ops.reductions import broadcast, sum
from ..ops.reshape import flatten, unflatten
from ..ops.slicing import pad, slice
from ..trace import Tensor, bind, evaluate, trace
from .find import loop_of

__all__ = [
    "Rings",
    "StageDims",
    "by_stage",
    "layers_of_stages",
    "of_stage",
    "own_layers",
    "run_stages",
    "stacked_again",
    "staged",
]


@dataclass(frozen=True)
class StageDims:
    """The dims of a pipeline: `layer` is `stage` times `inner`, rounded up."""

    layer: Dim
    stage: Dim
    inner: Dim
    chunk: Dim | None = None  # if a stage has several blocks of layers
    home: Dim | None = None  # then: the stages, as the layout stores their layers

    @property
    def chunks(self) -> int:
        """Blocks of layers of a stage."""
        return 1 if self.chunk is None else self.chunk.size

    @property
    def padded(self) -> int:
        """The number of layers if every block had as many as the first."""
        return self.stage.size * self.chunks * self.inner.size


def staged(x: Tensor, stage: Dim) -> Tensor:
    """x with the dim `stage`, repeated if it lacks it."""
    return x if stage in x.dims else broadcast(x, (stage, *x.dims))


def layers_of_stages(x: Tensor, dims: StageDims, place: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """A stack [layer ...] as [stage inner ...]; its blocks stay where they are. With chunks, see `interleaved`."""
    x = pad(x, dims.layer, 0, dims.padded - dims.layer.size) if dims.padded > dims.layer.size else x
    if dims.chunk is not None:
        return interleaved(x, dims)
    return unflatten(place(x), dims.layer.name, [dims.stage, dims.inner])


def interleaved(x: Tensor, dims: StageDims) -> Tensor:
    """A stack [layer ...], padded, as [stage chunk inner ...]: one exchange brings block q to stage q mod S.

    The layout stores blocks hv to hv+v-1 on stage h, so h has at most one block for each stage if v is at most S.
    """
    home, rank, chunk = _interleaved_dims(dims)
    x = unflatten(x, dims.layer.name, [home, rank, dims.inner])
    to = take(x, prefer(minimum(_block(dims), rank.size - 1), home), rank)  # of what is not there, nobody reads it
    came = prefer(prefer(to, home), dims.stage)
    return take(came, _sums(iota(chunk) * dims.stage.size, iota(dims.stage)) // rank.size, home)


def layered(x: Tensor, dims: StageDims) -> Tensor:
    """The inverse of `interleaved`: [stage chunk inner ...] as [layer ...], padded."""
    home, rank, chunk = _interleaved_dims(dims)
    number = (_block(dims) + iota(home) * rank.size) // dims.stage.size
    to = take(x, prefer(minimum(number, chunk.size - 1), dims.stage), chunk)
    came = prefer(prefer(to, dims.stage), home)
    x = take(came, _sums(iota(home) * rank.size, iota(rank)) % dims.stage.size, dims.stage)
    return flatten(x, [home, rank, dims.inner], Dim(dims.layer.name, dims.padded))


def _interleaved_dims(dims: StageDims) -> tuple[Dim, Dim, Dim]:
    """The stages as the layout stores their layers, the number of a block there, and the chunks."""
    assert dims.home is not None and dims.chunk is not None
    return dims.home, Dim(f"{dims.home.name}__block", dims.chunk.size), dims.chunk


def _sums(x: Tensor, y: Tensor) -> Tensor:
    """[x y]: every sum of an element of x and one of y."""
    return broadcast(x, (*x.dims, *y.dims)) + y


def _block(dims: StageDims) -> Tensor:
    """[home stage]: which of a home's blocks goes to a stage; from v on, none of them does."""
    home, rank, _ = _interleaved_dims(dims)
    s = dims.stage.size
    stage = prefer(broadcast(iota(dims.stage), (home, dims.stage)), home)
    return (stage + (s - iota(home) * rank.size % s)) % s


def own_layers(x: Tensor, dims: StageDims, block: Tensor) -> Tensor:
    """A stack [stage layer ...], one for each stage, as [stage inner ...]: each stage takes the layers of one block."""
    every = Dim(f"{dims.stage.name}__of_layer", dims.stage.size * dims.chunks)
    blocks = layers_of_stages(x, StageDims(dims.layer, every, dims.inner), lambda x: by_stage(x, dims))
    return take(blocks, block, every)


def by_stage(x: Tensor, dims: StageDims) -> Tensor:
    """x, sharded by stages if it also has the dim of the layers, which the layout maps to the same axes."""
    return prefer(x, dims.stage) if dims.stage in x.dims and dims.layer.name in [d.name for d in x.dims] else x


def stacked_again(x: Tensor, dims: StageDims) -> Tensor:
    """A stack [stage inner ...], or [stage chunk inner ...], as [layer ...]."""
    x = (
        layered(x, dims)
        if dims.chunk is not None
        else flatten(x, [dims.stage, dims.inner], Dim(dims.layer.name, dims.padded))
    )
    return slice(x, dims.layer.name, 0, dims.layer.size) if dims.padded > dims.layer.size else x


@dataclass(frozen=True)
class Rings:
    """Rows of a loop over layers that stay in rings [stage slot ...], by their number among the loop's rows.

    A slot of `inner` rows has those of one micro-batch. `first` is the number of its first row: one for all stages
    where the loop writes rows, one for each stage where it reads them.
    """

    first: Tensor
    rows: Mapping[int, Tensor]


def run_stages(
    eqn: Eqn,
    ins: Sequence[Tensor],
    dims: StageDims,
    block: Tensor,
    *,
    read: Rings | None = None,
    written: Rings | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The last carries [stage ...] and the rows [stage inner ...] of a loop over layers, of all stages, and its rings.

    `ins` are the operands of `eqn`: constants and carries may have the dim `stage`, rows are [stage inner ...]. Rows
    that are `read` from rings are missing in `ins`. `block` [stage] is the number of each stage's block of layers. The
    loop reads and writes a ring in place, one layer at a time.
    """
    consts, carries, rows = loop_of(eqn).inputs(ins)
    number = iota(dims.inner)
    rows = [*rows, number]
    if dims.padded > dims.layer.size:
        here = broadcast(block * dims.inner.size, (dims.stage, dims.inner)) + number < dims.layer.size
        rows.append(here)
    kept = [each for each in (read, written) if each is not None]
    consts = [*consts, *(each.first for each in kept), *(read.rows.values() if read else ())]
    carries = [*carries, *(written.rows.values() if written else ())]
    ins, n, m = [*consts, *carries, *rows], len(consts), len(carries)
    one_layer = _Layer(loop_of(eqn), dims.padded > dims.layer.size, read, written)
    types = [_type_of(x, dims.stage) for x in ins]
    row_types = [_type_of(x, dims.stage, dims.inner) for x in rows]
    body = trace(lambda *xs: one_layer.run(xs[:n], xs[n : n + m], xs[n + m :]), [*types[: n + m], *row_types])[0]
    control = dataclasses.replace(loop_of(eqn), dim=dims.inner, body=body, consts=n, carries=m)
    one = trace(lambda *xs: list(bind(SCAN, *xs, control=control)), types)[0]
    outs = [staged(x, dims.stage) for x in batched(one, ins, dims.stage)]
    last = loop_of(eqn).carries
    return outs[:last], outs[m:], outs[last:m]


def _type_of(x: Tensor, *apart: Dim) -> Type:
    return Type(tuple(d for d in x.dims if d not in apart), x.dtype)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One trip of a loop over the layers of a stage, whose rows may be in rings."""

    loop: Scan
    uneven: bool
    read: Rings | None
    written: Rings | None

    def run(self, consts: Sequence[Tensor], carries: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """The carries, the rings and the rows after the layer.

        `consts` are the loop's, the first row of each ring, and the rings that are read; `carries` are the loop's and
        the rings that are written; `rows` are the loop's that are not in rings, the number of the layer in its stage,
        and, if `uneven`, whether the stage has such a layer.
        """
        loop, present = self.loop, rows[-1] if self.uneven else None
        *rows, number = rows[:-1] if self.uneven else rows
        before, rings = carries[: loop.carries], carries[loop.carries :]
        outs = evaluate(
            loop.body, [*consts[: loop.consts], *before, *self._all_rows(consts[loop.consts :], rows, number)]
        )
        after, new = loop.results(outs)
        if present is not None:
            after = [where(present, x, old) for x, old in zip(after, before, strict=True)]
        if self.written is not None:
            first = consts[loop.consts + (self.read is not None)]
            rings = [_with_row(x, new[i], first + number) for i, x in zip(self.written.rows, rings, strict=True)]
        return [*after, *rings, *new]

    def _all_rows(self, rings: Sequence[Tensor], rows: Sequence[Tensor], number: Tensor) -> list[Tensor]:
        """The loop's rows in order; those in the ring at `rings[0]` and further are read there."""
        if self.read is None:
            return list(rows)
        first, old, rest = rings[0], rings[1 + (self.written is not None) :], iter(rows)
        there = {i: _at(x, first + number) for i, x in zip(self.read.rows, old, strict=True)}
        return [there[i] if i in there else next(rest) for i in range(len(rows) + len(there))]


def _at(ring: Tensor, number: Tensor) -> Tensor:
    return take(ring, number, ring.dims[0])


def _with_row(ring: Tensor, row: Tensor, number: Tensor) -> Tensor:
    slot = Dim(ring.dims[0].name, 1)
    return dynamic_update_slice(ring, broadcast(row, (slot, *row.dims)), slot.name, number)


def of_stage(x: Tensor, stage: Dim, number: int) -> Tensor:
    """The value of one stage, as a sum that is zero on all others."""
    return sum(where(iota(stage) == number, x, 0), stage)
