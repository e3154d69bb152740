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
from ..ir import Eqn, Type
from ..ops.dynamic import dynamic_update_slice
from ..ops.elementwise import where
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

    @property
    def padded(self) -> int:
        """The number of layers if every stage had as many as the first."""
        return self.stage.size * self.inner.size


def staged(x: Tensor, stage: Dim) -> Tensor:
    """x with the dim `stage`, repeated if it lacks it."""
    return x if stage in x.dims else broadcast(x, (stage, *x.dims))


def layers_of_stages(x: Tensor, dims: StageDims, place: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """A stack [layer ...] as [stage inner ...]; its blocks stay where they are."""
    x = pad(x, dims.layer, 0, dims.padded - dims.layer.size) if dims.padded > dims.layer.size else x
    return unflatten(place(x), dims.layer.name, [dims.stage, dims.inner])


def own_layers(x: Tensor, dims: StageDims) -> Tensor:
    """A stack [stage layer ...], one for each stage, as [stage inner ...]: each stage takes its own layers."""
    every = Dim(f"{dims.stage.name}__of_layer", dims.stage.size)
    blocks = layers_of_stages(x, dataclasses.replace(dims, stage=every), lambda x: by_stage(x, dims))
    return take(blocks, iota(dims.stage), every)


def by_stage(x: Tensor, dims: StageDims) -> Tensor:
    """x, sharded by stages if it also has the dim of the layers, which the layout maps to the same axes."""
    return prefer(x, dims.stage) if dims.stage in x.dims and dims.layer.name in [d.name for d in x.dims] else x


def stacked_again(x: Tensor, dims: StageDims) -> Tensor:
    """A stack [stage inner ...] as [layer ...]."""
    x = flatten(x, [dims.stage, dims.inner], Dim(dims.layer.name, dims.padded))
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
    eqn: Eqn, ins: Sequence[Tensor], dims: StageDims, *, read: Rings | None = None, written: Rings | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The last carries [stage ...] and the rows [stage inner ...] of a loop over layers, of all stages, and its rings.

    `ins` are the operands of `eqn`: constants and carries may have the dim `stage`, rows are [stage inner ...]. Rows
    that are `read` from rings are missing in `ins`. The loop reads and writes a ring in place, one layer at a time.
    """
    loop, first = loop_of(eqn), [each.first for each in (read, written) if each is not None]
    reads, writes = (each.rows if each is not None else {} for each in (read, written))
    kept = [i for i in range(len(loop.body.ins) - loop.consts - loop.carries) if i not in reads]
    uneven = dims.padded > dims.layer.size
    number = iota(dims.inner)
    there = [broadcast(iota(dims.stage) * dims.inner.size, (dims.stage, dims.inner)) + number < dims.layer.size]
    consts, carries, rows = loop.inputs(ins)
    groups = [
        consts,
        first,
        list(reads.values()),
        carries,
        list(writes.values()),
        rows,
        [number],
        there if uneven else [],
    ]
    sizes = [len(group) for group in groups]

    def step(*xs: Tensor) -> list[Tensor]:
        rest = iter(xs)
        consts, first, old, carries, rings, rows, (number,), present = ([next(rest) for _ in range(n)] for n in sizes)
        by_number = dict(zip(kept, rows, strict=True))
        by_number |= {i: _at(x, first[0] + number) for i, x in zip(reads, old, strict=True)}
        outs = evaluate(loop.body, [*consts, *carries, *(by_number[i] for i in sorted(by_number))])
        after, new = loop.results(outs)
        if present:
            after = [where(present[0], x, before) for x, before in zip(after, carries, strict=True)]
        rings = [_with_row(x, new[i], first[-1] + number) for i, x in zip(writes, rings, strict=True)]
        return [*after, *rings, *new]

    def type_of(x: Tensor, *apart: Dim) -> Type:
        return Type(tuple(d for d in x.dims if d not in (dims.stage, *apart)), x.dtype)

    n, m = len(consts) + len(first) + len(reads), loop.carries + len(writes)
    ins = [x for group in groups for x in group]
    body = trace(step, [type_of(x, *((dims.inner,) if i >= n + m else ())) for i, x in enumerate(ins)])[0]
    control = dataclasses.replace(loop, dim=dims.inner, body=body, consts=n, carries=m)
    one = trace(lambda *xs: list(bind(SCAN, *xs, control=control)), [type_of(x) for x in ins])[0]
    outs = [staged(x, dims.stage) for x in batched(one, ins, dims.stage)]
    return outs[: loop.carries], outs[m:], outs[loop.carries : m]


def _at(ring: Tensor, number: Tensor) -> Tensor:
    return take(ring, number, ring.dims[0])


def _with_row(ring: Tensor, row: Tensor, number: Tensor) -> Tensor:
    slot = Dim(ring.dims[0].name, 1)
    return dynamic_update_slice(ring, broadcast(row, (slot, *row.dims)), slot.name, number)


def of_stage(x: Tensor, stage: Dim, number: int) -> Tensor:
    """The value of one stage, as a sum that is zero on all others."""
    return sum(where(iota(stage) == number, x, 0), stage)
