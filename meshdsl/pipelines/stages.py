"""The loops over layers for all stages at once: values have the dim `stage`, and each stage loops over its own layers.

A stage has the layers of its block of the layout, so no weight moves. If the layers do not divide by the stages, the
last stages have fewer; they pass their carries on for the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..control import SCAN
from ..control.batching import batched
from ..dims import Dim
from ..ir import Eqn, Graph, Scan, Type
from ..ops.elementwise import where
from ..ops.indexing import iota, take
from ..ops.placement import prefer
from ..ops.reductions import broadcast, sum
from ..ops.reshape import flatten, unflatten
from ..ops.slicing import pad, slice
from ..trace import Tensor, bind, evaluate, trace
from .find import loop_of

__all__ = [
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


def run_stages(eqn: Eqn, ins: Sequence[Tensor], dims: StageDims) -> tuple[list[Tensor], list[Tensor]]:
    """The last carries [stage ...] and the rows [stage inner ...] of a loop over layers, of all stages.

    `ins` are the operands of `eqn`: constants and carries may have the dim `stage`, rows are [stage inner ...].
    """
    loop = loop_of(eqn)
    uneven = dims.padded > dims.layer.size
    rows = [Type((dims.inner, *v.dims[1:]), v.dtype) for v in loop.inputs(eqn.ins)[2]]
    types = [*(v.type for v in eqn.ins[: loop.consts + loop.carries]), *rows]
    if uneven:
        first = iota(dims.stage) * dims.inner.size
        present = broadcast(first, (dims.stage, dims.inner)) + iota(dims.inner) < dims.layer.size
        ins, types = [*ins, present], [*types, Type((dims.inner,), present.dtype)]
    control = dataclasses.replace(loop, dim=dims.inner, body=_skipping(loop) if uneven else loop.body)
    one, _, _ = trace(lambda *xs: list(bind(SCAN, *xs, control=control)), types)
    outs = [staged(x, dims.stage) for x in batched(one, ins, dims.stage)]
    return outs[: loop.carries], outs[loop.carries :]


def _skipping(loop: Scan) -> Graph:
    """The body with one more row, which tells whether there is such a layer; without one, carries stay as they are."""

    def step(*xs: Tensor) -> list[Tensor]:
        *ins, present = xs
        carries, rows = loop.results(evaluate(loop.body, ins))
        before = loop.inputs(ins)[1]
        return [*(where(present, new, old) for new, old in zip(carries, before, strict=True)), *rows]

    return trace(step, [*(v.type for v in loop.body.ins), Type((), np.dtype(bool))])[0]


def of_stage(x: Tensor, stage: Dim, number: int) -> Tensor:
    """The value of one stage, as a sum that is zero on all others."""
    return sum(where(iota(stage) == number, x, 0), stage)
