"""The loops over layers for all stages at once: values have the dim `stage`, and each stage loops over its own layers.

A stage has the layers of its block of the layout, so no weight moves. If the layers do not divide by the stages, the
last stages have fewer; they pass their carries on for the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ...control import SCAN
from ...control.batching import batched
from ...dims import Dim, fresh_dim
from ...ir import Eqn, Scan, Type
from ...ops.dtypes import cast
from ...ops.dynamic import dynamic_update_slice
from ...ops.elementwise import add, where
from ...ops.indexing import iota, take
from ...ops.placement import prefer
from ...ops.reductions import broadcast, total
from ...ops.reshape import flatten, unflatten
from ...ops.slicing import pad, slice, swap_blocks
from ...trace import Tensor, as_tensor, bind, evaluate, trace
from .find import loop_of


@dataclass(frozen=True)
class StageDims:
    """The dims of a pipeline: `layer` is `stage` times `own`, rounded up, and `own` is `chunks` times `inner`."""

    layer: Dim
    stage: Dim
    inner: Dim  # layers of one block
    own: Dim  # layers of one stage
    beside: frozenset[str] = frozenset()  # other dims mapped to the axes of the stages, such as the vocabulary

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
    """A stack of layers [layer ...] as [stage inner ...]: the layers of each stage.

    The layout stores a stack in blocks of consecutive layers, one a stage, so nothing is sent. With several chunks,
    stage s computes blocks s, s + S, s + 2 S, ... of the S stages: the result is [stage own ...], after one exchange.
    `place` is applied before the dim `layer` is divided, to choose how the stack is sharded.
    """
    x = pad(x, dims.layer, 0, dims.padded - dims.layer.size) if dims.padded > dims.layer.size else x
    x = swap_blocks(x, dims.layer.name, dims.chunks, dims.stage.size) if dims.chunks > 1 else x
    return unflatten(place(x), dims.layer.name, [dims.stage, dims.own if dims.chunks > 1 else dims.inner])


def own_layers(x: Tensor, dims: StageDims, block: Tensor) -> Tensor:
    """A stack [stage layer ...], one for each stage, as [stage inner ...]: each stage takes the layers of one block."""
    every = fresh_dim(Dim(f"{dims.stage.name}__of_layer", dims.stage.size * dims.chunks), x.dims, block.dims)
    blocks = layers_of_stages(x, StageDims(dims.layer, every, dims.inner, dims.inner), lambda x: by_stage(x, dims))
    return take(blocks, block, every)


def by_stage(x: Tensor, dims: StageDims) -> Tensor:
    """x, sharded by stages if it also has a dim that the layout maps to the same axes, such as that of the layers."""
    others = {dims.layer.name, *dims.beside}.intersection(d.name for d in x.dims)
    return prefer(x, dims.stage) if dims.stage in x.dims and others else x


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


@dataclass(frozen=True, eq=False)
class StageLoop:
    """A loop over the layers of all stages, with its operands.

    `ins` are the operands of `eqn`: constants and carries may have the dim `stage`, rows are [stage inner ...]. Rows
    that are `read` from stacks are missing in `ins`. New rows are `written` into stacks, or `added` to theirs on stages
    where `valid`. `block` [stage] is the number of each stage's block of layers.
    """

    eqn: Eqn
    ins: Sequence[Tensor]
    block: Tensor
    read: Sequence[Rows] = ()
    written: Rows | None = None
    added: Rows | None = None
    valid: Tensor | bool = True

    @property
    def scan(self) -> Scan:
        """The loop over all layers."""
        return loop_of(self.eqn)

    @property
    def stacks(self) -> int:
        """The number of the stacks that it changes."""
        return len([x for each in self.stored for x in each.stacks])

    @property
    def stored(self) -> list[Rows]:
        """The stacks that the loop changes."""
        return [each for each in (self.written, self.added) if each is not None]

    def operands(self, dims: StageDims) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Constants, carries and rows of the loop over the layers of a stage, as `_Layer.run` reads them."""
        consts, carries, rows = self.scan.inputs(self.ins)
        if dims.padded > dims.layer.size:
            first = broadcast(self.block * dims.inner.size, (dims.stage, dims.inner))
            rows = [*rows, first + iota(dims.inner) < dims.layer.size]
        consts = [*consts, as_tensor(self.valid), *(as_tensor(each.first) for each in (*self.read, *self.stored))]
        consts += [x for each in self.read for x in each.stacks.values()]
        return consts, [*carries, *(x for each in self.stored for x in each.stacks.values())], list(rows)


# last carries [stage ...], rows [stage inner ...], stacks
LoopResults = tuple[list[Tensor], list[Tensor], list[Tensor]]


def run_stages(loop: StageLoop, dims: StageDims, beside: StageLoop | None = None) -> list[LoopResults]:
    """The results of a loop over layers, and of the loop `beside` it over the same number of layers in reverse.

    Both run as one loop: a trip computes a layer of each. No rows are returned of the second one. It reads the stacks
    that the first one changes where they are, from rows that the first one does not write. Stacks are in the order
    written, added.
    """
    trip = _Trip.of([loop] if beside is None else [loop, beside], dims)
    ins = [x for kind in trip.kinds for each in kind for x in each]
    n, m = (len([x for each in kind for x in each]) for kind in trip.kinds[:2])
    types = [_type_of(x, dims.stage) for x in ins]
    inner_types = [*types[: n + m], *(_type_of(x, dims.stage, dims.inner) for x in ins[n + m :])]
    control = dataclasses.replace(loop.scan, dim=dims.inner, body=trace(trip.run, inner_types)[0], consts=n, carries=m)
    one = trace(lambda *xs: list(bind(SCAN, *xs, control=control)), types)[0]
    outs = iter([staged(x, dims.stage) for x in batched(one, ins, dims.stage)])
    loops = [layer.loop for layer in trip.layers]
    states = [(list(islice(outs, each.scan.carries)), list(islice(outs, each.stacks))) for each in loops]
    return [(state, list(outs), stacks) for state, stacks in states]


Operands = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class _Trip:
    """One trip of the loop over the layers of a stage: a layer of a loop, and one of the loop beside it, if any.

    `kinds` are the constants, carries and rows of each loop; but the rows of the second are constants, which it reads
    in reverse, and the last row is the number of the trip.
    """

    layers: list[_Layer]
    inner: Dim
    kinds: tuple[Operands, Operands, Operands]

    @classmethod
    def of(cls, loops: Sequence[StageLoop], dims: StageDims) -> _Trip:
        consts, carries, rows = map(list, zip(*(each.operands(dims) for each in loops), strict=True))
        kinds = ([*consts, *rows[1:]], carries, [*rows[:1], [iota(dims.inner)]])
        return cls([_Layer(each, dims.padded > dims.layer.size) for each in loops], dims.inner, kinds)

    def run(self, *xs: Tensor) -> list[Tensor]:
        values = iter(xs)
        consts, carries, (rows, (number,)) = ([list(islice(values, len(each))) for each in kind] for kind in self.kinds)
        # the second loop first, because it reads what the first one overwrites
        others = self._beside(consts, carries, number) if len(self.layers) > 1 else []
        after, new = self.layers[0].run(consts[0], carries[0], rows, number)
        return [*after, *others, *new]

    def _beside(self, consts: Operands, carries: Operands, number: Tensor) -> list[Tensor]:
        """The carries of the second loop after its layer. The stacks that the first one changes are carries of it."""
        changed = {id(x): now for x, now in zip(self.kinds[1][0], carries[0], strict=True)}
        held = [changed.get(id(x), value) for x, value in zip(self.kinds[0][1], consts[1], strict=True)]
        last = self.inner.size - 1 - number
        rows = [take(x, last, self.inner) for x in consts[2]]
        return self.layers[1].run(held, carries[1], rows, last)[0]


def _type_of(x: Tensor, *apart: Dim) -> Type:
    return Type(tuple(d for d in x.dims if d not in apart), x.dtype)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One trip of a loop over the layers of a stage, some of whose rows are in stacks."""

    loop: StageLoop
    uneven: bool

    def run(
        self, consts: Sequence[Tensor], carries: Sequence[Tensor], rows: Sequence[Tensor], number: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The carries with the stacks, and the rows after the layer of this number in its stage.

        `consts` are the loop's, whether the stage's unit of work is valid, the first row of each group of stacks, and
        the stacks that are read; `carries` are the loop's and the stacks that are written; `rows` are the loop's that
        are not in stacks, and, if `uneven`, whether the stage has such a layer.
        """
        loop, present = self.loop.scan, rows[-1] if self.uneven else None
        rows = rows[:-1] if self.uneven else rows
        before, stacks = carries[: loop.carries], iter(carries[loop.carries :])
        valid, *rest = consts[loop.consts :]
        firsts = iter(rest)
        given = dict[int, Tensor]()
        old = iter(rest[len(self.loop.read) + len(self.loop.stored) :])
        for each in self.loop.read:
            row = next(firsts) + number
            given |= {i: _at(next(old), row) for i in each.stacks}
        others = iter(rows)
        rows = [given[i] if i in given else next(others) for i in range(len(rows) + len(given))]
        after, new = loop.results(evaluate(loop.body, [*consts[: loop.consts], *before, *rows]))
        if present is not None:
            after = [where(present, x, old) for x, old in zip(after, before, strict=True)]
        stored: list[Tensor] = []
        for each in self.loop.stored:
            row = next(firsts) + number
            for i in each.stacks:
                x = next(stacks)
                added = cast(where(valid, new[i], 0), x.dtype)
                value = new[i] if each is self.loop.written else add(_at(x, row), added)
                stored.append(_with_row(x, value, row))
        return [*after, *stored], list(new)


def _at(ring: Tensor, number: Tensor) -> Tensor:
    return take(ring, number, ring.dims[0])


def _with_row(ring: Tensor, row: Tensor, number: Tensor) -> Tensor:
    slot = Dim(ring.dims[0].name, 1)
    return dynamic_update_slice(ring, broadcast(row, (slot, *row.dims)), slot.name, number)


def of_stage(x: Tensor, stage: Dim, number: int) -> Tensor:
    """The value of one stage, as a sum that is zero on all others."""
    return total(where(iota(stage) == number, x, 0), stage)
