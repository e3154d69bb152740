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
from ..ops.elementwise import add, where
from ..ops.indexing import iota, take
from ..ops.placement import prefer
from ..ops.reductions import broadcast, sum
from ..ops.reshape import flatten, unflatten
from ..ops.slicing import pad, slice, swap_blocks
from ..trace import Tensor, as_tensor, bind, evaluate, trace
from .find import loop_of


@dataclass(frozen=True)
class StageDims:
    """The dims of a pipeline: `layer` is `stage` times `own`, rounded up, and `own` is `chunks` times `inner`."""

    layer: Dim
    stage: Dim
    inner: Dim  # layers of one block
    own: Dim  # layers of one stage

    @property
    def chunks(self) -> int:
        """Blocks of layers of a stage."""
        return self.own.size // self.inner.size

    @property
    def padded(self) -> int:
        """The number of layers if every block had as many as the first."""
        return self.stage.size * self.own.size


def staged(x: Tensor, stage: Dim) -> Tensor:
    """x with the dim `stage`, repeated if it lacks it."""
    return x if stage in x.dims else broadcast(x, (stage, *x.dims))


def layers_of_stages(x: Tensor, dims: StageDims, place: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """A stack [layer ...] as [stage inner ...], whose blocks stay where they are; with several chunks [stage own ...].

    Then one exchange brings block q to stage q mod S.
    """
    x = pad(x, dims.layer, 0, dims.padded - dims.layer.size) if dims.padded > dims.layer.size else x
    x = swap_blocks(x, dims.layer.name, dims.chunks, dims.stage.size) if dims.chunks > 1 else x
    return unflatten(place(x), dims.layer.name, [dims.stage, dims.own if dims.chunks > 1 else dims.inner])


def own_layers(x: Tensor, dims: StageDims, block: Tensor) -> Tensor:
    """A stack [stage layer ...], one for each stage, as [stage inner ...]: each stage takes the layers of one block."""
    every = Dim(f"{dims.stage.name}__of_layer", dims.stage.size * dims.chunks)
    blocks = layers_of_stages(x, StageDims(dims.layer, every, dims.inner, dims.inner), lambda x: by_stage(x, dims))
    return take(blocks, block, every)


def by_stage(x: Tensor, dims: StageDims) -> Tensor:
    """x, sharded by stages if it also has the dim of the layers, which the layout maps to the same axes."""
    return prefer(x, dims.stage) if dims.stage in x.dims and dims.layer.name in [d.name for d in x.dims] else x


def stacked_again(x: Tensor, dims: StageDims) -> Tensor:
    """A stack [stage own ...] as [layer ...]."""
    x = flatten(x, [dims.stage, dims.own], Dim(dims.layer.name, dims.padded))
    x = swap_blocks(x, dims.layer.name, dims.stage.size, dims.chunks) if dims.chunks > 1 else x
    return slice(x, dims.layer.name, 0, dims.layer.size) if dims.padded > dims.layer.size else x


@dataclass(frozen=True)
class Rows:
    """Stacks [stage row ...] of which a loop over layers uses some rows in place, by their number among its rows.

    They are rings of saved values, weights of several chunks, or sums of gradients. `first` is the number of the first
    row, one for all stages or one for each; the layers of a stage use the rows from there on.
    """

    first: Tensor | int
    stacks: Mapping[int, Tensor]


def run_stages(
    eqn: Eqn,
    ins: Sequence[Tensor],
    dims: StageDims,
    block: Tensor,
    *,
    read: Sequence[Rows] = (),
    written: Rows | None = None,
    added: Rows | None = None,
    valid: Tensor | bool = True,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The last carries [stage ...] and rows [stage inner ...] of a loop over layers, of all stages, and its stacks.

    `ins` are the operands of `eqn`: constants and carries may have the dim `stage`, rows are [stage inner ...]. Rows
    that are `read` from stacks are missing in `ins`. New rows are `written` into stacks, or `added` to theirs on stages
    where `valid`; the results have these stacks, those that are written first. `block` [stage] is the number of each
    stage's block of layers.
    """
    consts, carries, rows = loop_of(eqn).inputs(ins)
    number = iota(dims.inner)
    rows = [*rows, number]
    if dims.padded > dims.layer.size:
        here = broadcast(block * dims.inner.size, (dims.stage, dims.inner)) + number < dims.layer.size
        rows.append(here)
    stored = [each for each in (written, added) if each is not None]
    consts = [*consts, as_tensor(valid), *(as_tensor(each.first) for each in (*read, *stored))]
    consts += [x for each in read for x in each.stacks.values()]
    carries = [*carries, *(x for each in stored for x in each.stacks.values())]
    ins, n, m = [*consts, *carries, *rows], len(consts), len(carries)
    one_layer = _Layer(loop_of(eqn), dims.padded > dims.layer.size, tuple(read), written, added)
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
    """One trip of a loop over the layers of a stage, some of whose rows are in stacks."""

    loop: Scan
    uneven: bool
    read: tuple[Rows, ...]
    written: Rows | None
    added: Rows | None

    def run(self, consts: Sequence[Tensor], carries: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """The carries, the stacks and the rows after the layer.

        `consts` are the loop's, whether the stage's unit of work is valid, the first row of each group of stacks, and
        the stacks that are read; `carries` are the loop's and the stacks that are written; `rows` are the loop's that
        are not in stacks, the number of the layer in its stage, and, if `uneven`, whether the stage has such a layer.
        """
        loop, present = self.loop, rows[-1] if self.uneven else None
        *rows, number = rows[:-1] if self.uneven else rows
        before, stacks = carries[: loop.carries], iter(carries[loop.carries :])
        valid, *rest = consts[loop.consts :]
        firsts = iter(rest)
        given = dict[int, Tensor]()
        old = iter(rest[len(self.read) + (self.written is not None) + (self.added is not None) :])
        for each in self.read:
            row = next(firsts) + number
            given |= {i: _at(next(old), row) for i in each.stacks}
        others = iter(rows)
        rows = [given[i] if i in given else next(others) for i in range(len(rows) + len(given))]
        after, new = loop.results(evaluate(loop.body, [*consts[: loop.consts], *before, *rows]))
        if present is not None:
            after = [where(present, x, old) for x, old in zip(after, before, strict=True)]
        stored: list[Tensor] = []
        for each in (self.written, self.added):
            row = None if each is None else next(firsts) + number
            for i in () if each is None else each.stacks:
                assert row is not None
                x = next(stacks)
                value = new[i] if each is self.written else add(_at(x, row), where(valid, new[i], 0))
                stored.append(_with_row(x, value, row))
        return [*after, *stored, *new]


def _at(ring: Tensor, number: Tensor) -> Tensor:
    return take(ring, number, ring.dims[0])


def _with_row(ring: Tensor, row: Tensor, number: Tensor) -> Tensor:
    slot = Dim(ring.dims[0].name, 1)
    return dynamic_update_slice(ring, broadcast(row, (slot, *row.dims)), slot.name, number)


def of_stage(x: Tensor, stage: Dim, number: int) -> Tensor:
    """The value of one stage, as a sum that is zero on all others."""
    return sum(where(iota(stage) == number, x, 0), stage)
