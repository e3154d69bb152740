"""One tick of a pipeline: what every stage computes of its micro-batch, and what it sends.

A stage without a micro-batch, before its first and after its last one, computes what nobody reads; only what is added
to a sum is masked. A value of one micro-batch that several stages read at different ticks, such as a mask, is computed
by each of them from the rows of the batch, which all of them store.

Products before the layers are spread over the stages (`spread`). What all layers read of them goes along with the
carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...control import cond
from ...control.batching import batched
from ...dims import Dim, fresh_dim
from ...ir import Graph, Type, Var
from ...ops.creation import EMPTY, full, zeros_like
from ...ops.dtypes import cast
from ...ops.elementwise import add, maximum, minimum, where
from ...ops.indexing import iota, take
from ...ops.reductions import broadcast, total
from ...ops.slicing import roll, shift
from ...trace import Tensor, bind1, evaluate, trace, tree
from .find import Level, Loop, loop_of, values
from .flow import Flow, has_products, operands_of
from .spread import Spread, frequency
from .stages import (
    LoopResults,
    Rows,
    StageDims,
    StageLoop,
    by_stage,
    of_stage,
    own_layers,
    stacked_again,
    staged,
)

FILL = 0.0  # what stages receive before their first micro-batch; no result depends on it
Key = tuple[str, int]  # of a sum: rows or a carry of the backward loop, by number, or terms of a carry of the step
Sums = dict[Key, Tensor]


@dataclass(frozen=True)
class PipeDims:
    """The new dims of a pipeline."""

    stages: StageDims
    slot: Dim
    ticks: tuple[Dim, Dim, Dim]  # of forward passes, of both, of backward passes


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline and the operands of its loop over micro-batches; the methods compute one tick of all stages."""

    flow: Flow
    dims: PipeDims
    ins: Sequence[Tensor]
    fixed: Mapping[Var, Tensor]  # what the loops over layers read that no micro-batch changes
    fixed_layers: Mapping[Var, Tensor]  # of that, the stacks, as see `layers_of_stages`: weights of the layers

    @property
    def loop(self) -> Loop:
        return self.flow.loop

    @property
    def stage(self) -> Dim:
        return self.dims.stages.stage

    def row(self, number: Tensor) -> list[Tensor]:
        """The rows of a micro-batch, by its number; with the dim `stage` if each stage has its own number."""
        number = maximum(minimum(number, self.loop.schedule.microbatches - 1), 0)
        loop = loop_of(self.loop.eqn)
        return [by_stage(take(x, number, loop.dim), self.dims.stages) for x in loop.inputs(self.ins)[2]]

    def before_forward(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The ring, the carries of the forward loop, and what each stage computed, before the first tick."""
        stage, inner = self.stage, self.dims.stages.inner
        slot = Dim(self.dims.slot.name, self.dims.slot.size * inner.size)
        ring = [
            bind1(EMPTY, dtype=v.dtype, shape=(stage, slot, *v.dims[1:]), number=i)
            for i, v in enumerate(self.flow.saved)
        ]
        forward = [_filled((stage, *v.dims), v) for v in (*operands_of(self.loop.forward)[1], *self.flow.along)]
        collected = [_filled((stage, self._every, inner, *v.dims[1:]), v) for v in self.flow.collected]
        computed = [*forward, *collected]
        return ring, [*computed, *(forward if self.spread else ())], computed

    @cached_property
    def spread(self) -> Spread | None:
        """The `Spread` of the products before and after the layers; None if there are none, or with several chunks."""
        graphs = self.flow.entering, self.flow.after
        found = any(map(has_products, graphs)) and self.loop.schedule.chunks == 1
        return Spread(self.stage, self.loop.schedule.microbatches) if found else None

    @cached_property
    def _every(self) -> Dim:
        every = Dim(f"{self.stage.name}__collected", self.stage.size * self.loop.schedule.chunks)
        return fresh_dim(every, *(v.dims for v in self.flow.collected))

    def unit(self, number: Tensor) -> tuple[Tensor, Tensor | int]:
        """The micro-batch and the chunk of a stage's unit of work (`Schedule.unit`); in a bubble, any."""
        return self.loop.schedule.unit(maximum(number, 0) if self.loop.schedule.chunks > 1 else number)

    def _moved(self, xs: Sequence[Tensor], by: int) -> list[Tensor]:
        """Values that go to the next stage; with chunks, those of the last stage go to the next chunk of the first."""
        return [(roll if self.loop.schedule.chunks > 1 else shift)(x, self.stage, by) for x in xs]

    def before_backward(self) -> tuple[list[Tensor], Sums]:
        """The carries of the backward loop, and the sums, before the first tick with a backward pass."""
        carries, rows = loop_of(self.loop.backward).results(self.loop.backward.outs)
        states = [*(carries[i] for i in self.loop.shipped), *self.flow.crossing]
        own, sums = self.dims.stages.own, Sums()
        sums |= {("rows", n): self._zeros((own, *rows[n].dims[1:]), dtype) for n, dtype in self.loop.rows.items()}
        sums |= {("carry", n): self._zeros(carries[n].dims, dtype) for n, dtype in self.loop.carries.items()}
        for i, terms in enumerate(self.loop.terms):
            if terms.between or terms.after:
                sums["terms", i] = zeros_like(self.loop.eqn.outs[i].type)
        carried = [_filled((self.stage, *v.dims), v) for v in states]
        return [*carried, *(carried if self.spread else ())], sums

    def _zeros(self, dims: Sequence[Dim], dtype: np.dtype) -> Tensor:
        return zeros_like(Type((self.stage, *dims), dtype))

    def _in_ticks(self, tick: Tensor, every: range, needed: Callable[[Any], Any], f: Callable[[], Any]) -> Any:
        """f(), of tensors; with chunks, or if spread, only in the ticks of a loop that need it, and zeros in others.

        All devices are in the same tick, so all take the same branch.
        """
        how_often = frequency(every, needed)
        if how_often == 1 or not (self.spread or self.dims.stages.chunks > 1):
            return f()
        graph, held, results = trace(f, [])
        zeros = [zeros_like(v.type) for v in graph.outs]
        found = cond(needed(tick), lambda: evaluate(graph, held), lambda: zeros, frequency=how_often)
        return tree.tree_unflatten(results, found)

    def forward(
        self, tick: Tensor, every: range, ring: list[Tensor], state: list[Tensor]
    ) -> tuple[StageLoop, Callable[[LoopResults], Any]]:
        """The loop over layers, and a function of its results, which returns the ring, the carries for the next tick,
        and what each stage computed."""
        loop, n = self.loop, loop_of(self.loop.forward).carries
        consts, _, rows = operands_of(loop.forward)
        entered = n + len(self.flow.along)
        state, ahead = state[: entered + len(self.flow.collected)], state[entered + len(self.flow.collected) :]
        ahead = self.spread.entering(tick, every, ahead, self._entering) if self.spread else []
        entering = ahead or self._in_ticks(
            tick,
            every,
            lambda number: (loop.schedule.unit(number)[1] == 0) & (number < loop.schedule.units),
            lambda: self._entering(self.unit(tick)[0]),
        )
        is_first = (iota(self.stage) == 0) & (self.unit(tick)[1] == 0)
        carry = [where(is_first, x, old) for x, old in zip(entering, state[:entered], strict=True)]
        along = dict(zip(self.flow.along, carry[n:], strict=True))
        microbatch, chunk = self.unit(tick - iota(self.stage))
        block = chunk * self.stage.size + iota(self.stage)
        own = self._own(microbatch, block, consts, rows, along)
        numbers = {v: i for i, v in enumerate(loop.forward.outs[n:])}
        written = Rows(
            self._first_row(tick - iota(self.stage)),
            {numbers[v]: x for v, x in zip(self.flow.saved, ring, strict=True)},
        )
        operands = [*own[: len(consts)], *carry[:n], *own[len(consts) :]]
        weights = self._weights(chunk, rows)

        def results(found: LoopResults) -> Any:
            after, new_rows, ring = found
            by_row = {v: new_rows[i] for v, i in numbers.items()}
            here = broadcast(block, (self.stage, self._every)) == iota(self._every)
            collected = [where(here, by_row[v], x) for v, x in zip(self.flow.collected, state[entered:], strict=True)]
            computed = [*after, *along.values(), *collected]
            return ring, [*self._moved(computed, 1), *ahead], computed

        return StageLoop(loop.forward, operands, block, read=weights, written=written), results

    def _entering(self, number: Tensor) -> list[Tensor]:
        """The inputs of the first layer, and what goes along with them, for the micro-batch of this number.

        If `number` has the dim `stage`, each stage computes them for a micro-batch of its own.
        """
        known = [*self.ins[: len(self.flow.given[0])], *self.row(number)]
        return self._results(self.flow.entering, known, self.stage in number.dims)

    def _results(self, graph: Graph, known: Sequence[Tensor], each: bool) -> list[Tensor]:
        """The results of a graph, of all stages or of each of them."""
        if not each:
            return evaluate(graph, known)
        found = batched(graph, known, self.stage, lambda x: by_stage(x, self.dims.stages))
        return [staged(x, self.stage) for x in found]

    def _last(self, computed: Sequence[Tensor]) -> dict[Var, Tensor]:
        """The results of the last stage's forward pass, from what each stage computed."""
        stages, n = self.dims.stages, loop_of(self.loop.forward).carries + len(self.flow.along)
        names = [*self.loop.forward.outs[: n - len(self.flow.along)], *self.flow.along, *self.flow.collected]
        if self.dims.stages.beside:  # all stages compute a part of what comes between the loops; otherwise the last one
            computed = [of_stage(x, self.stage, self.stage.size - 1) for x in computed]
        complete = [
            stacked_again(x, StageDims(stages.layer, self._every, stages.inner, stages.inner)) for x in computed[n:]
        ]
        return dict(zip(names, (*computed[:n], *complete), strict=True))

    def _first_row(self, number: Tensor) -> Tensor:
        """The number in the ring of the first row of a unit of work."""
        return self.loop.schedule.slot(number) * self.dims.stages.inner.size

    def between(self, tick: Tensor, every: range, computed: Sequence[Tensor]) -> tuple[list[Tensor], Sums]:
        """What the last stage's backward pass begins with, and the terms computed from its forward pass."""
        before, schedule = self.stage.size - 1, self.loop.schedule
        return self._in_ticks(
            tick,
            every,
            lambda number: schedule.unit(number - before)[1] == schedule.chunks - 1,
            lambda: self._between(self.row(self.unit(tick - before)[0]), self._last(computed)),
        )

    def _between(self, rows: Sequence[Tensor], last: Mapping[Var, Tensor]) -> tuple[list[Tensor], Sums]:
        consts, graph = self.ins[: len(self.flow.given[0])], self.flow.between_graph
        known = [*consts, *rows, *(last.get(v) for v in graph.ins[len(consts) + len(rows) :])]
        graph, known = _without_missing(graph, known)
        found = batched(graph, known, self.stage, lambda x: by_stage(x, self.dims.stages))
        entering = len(self.loop.shipped) + len(self.flow.crossing)
        terms = iter(found[entering:])
        sums = {("terms", i): [next(terms) for _ in each.between] for i, each in enumerate(self.loop.terms)}
        last_stage = self.stage.size - 1
        totals = {key: total_of(xs) for key, xs in sums.items() if xs}
        return found[:entering], {
            key: of_stage(x, self.stage, last_stage) if self.stage in x.dims else x for key, x in totals.items()
        }

    def backward(
        self,
        tick: Tensor,
        every: range,
        ring: list[Tensor],
        state: list[Tensor],
        entering: list[Tensor] | None,
        sums: Sums,
    ) -> tuple[StageLoop, Callable[[LoopResults], tuple[list[Tensor], Sums, Sums]]]:
        """The loop over layers, and a function of its results, which returns the carries after the tick, the sums with
        the layers' gradients, and what is still to be added.

        `entering` goes into the last stage. If the loss is late, messages are sent after the loop, beside it.
        """
        loop, schedule, stages = self.loop, self.loop.schedule, self.dims.stages
        sent = len(loop.shipped) + len(self.flow.crossing)
        state, behind = state[:sent], state[sent:]
        state = state if schedule.late else self._moved(state, -1)
        number = tick - schedule.delay + iota(self.stage) + schedule.turn
        microbatch, turn = self.unit(number)
        chunk = schedule.chunks - 1 - turn
        block = chunk * self.stage.size + iota(self.stage)
        if entering is not None:
            is_last = block == schedule.blocks - 1
            state = [where(is_last, x, old) for x, old in zip(entering, state, strict=True)]
        valid = self._real(number)
        shipped = dict(zip(loop.shipped, state, strict=False))
        crossing = dict(zip(self.flow.crossing, state[len(shipped) :], strict=True))
        consts, carries, rows = operands_of(loop.backward)
        own = self._own(microbatch, block, consts, [v for v in rows if v not in self.flow.saved], crossing)
        carry = [shipped.get(i, zeros_like(v.type)) for i, v in enumerate(carries)]
        rings = dict(zip(self.flow.saved, ring, strict=True))
        forward = tick - schedule.delay + block * 2 - iota(self.stage)  # block q of n lives 2(n-1-q) ticks
        saved = Rows(self._first_row(forward), {i: rings[v] for i, v in enumerate(rows) if v in rings})
        added = Rows(chunk * stages.inner.size, {n: x for (kind, n), x in sums.items() if kind == "rows"})
        operands = [*own[: len(consts)], *carry, *own[len(consts) :]]
        read = [saved, *self._weights(chunk, rows)]

        def results(found: LoopResults) -> tuple[list[Tensor], Sums, Sums]:
            after, _, totals = found
            with_rows = sums | {("rows", n): x for n, x in zip(added.stacks, totals, strict=True)}
            more = {("carry", n): where(valid, after[n], 0) for n in loop.carries}
            computed = [*(after[i] for i in loop.shipped), *crossing.values()]
            now = self.spread.left(computed, behind) if self.spread else []
            more |= self._after_terms(tick, every, now or computed)
            return [*(self._moved(computed, -1) if schedule.late else computed), *now], with_rows, more

        return StageLoop(loop.backward, operands, block, read=read, added=added, valid=valid), results

    def _real(self, number: Tensor) -> Tensor:
        """False for stages in a bubble, by the number of the unit of work that would be theirs."""
        return (number >= 0) & (number < self.loop.schedule.units)

    def _weights(self, chunk: Tensor | int, rows: Sequence[Var]) -> list[Rows]:
        """The weights of the layers, if each stage reads those of one of its chunks."""
        stacks = {i: self.fixed_layers[v] for i, v in enumerate(rows) if v in self.fixed_layers}
        return [Rows(chunk * self.dims.stages.inner.size, stacks)] if self.dims.stages.chunks > 1 and stacks else []

    def _after_terms(self, tick: Tensor, every: range, state: list[Tensor]) -> Sums:
        """The terms that the first stage's micro-batch adds, whose backward pass is complete; of the last ones, if
        spread."""
        schedule, spread = self.loop.schedule, self.spread
        later = schedule.delay - schedule.turn
        microbatch = self.unit(tick - later)[0]

        def real(number: Any) -> Any:
            return (number >= later) & (schedule.unit(number - later)[1] == schedule.chunks - 1)

        if not any(each.after for each in self.loop.terms):
            return {}
        if spread is None:
            ends = self._in_ticks(
                tick, every, real, lambda: self._after_rows(microbatch, [of_stage(x, self.stage, 0) for x in state])
            )
            return {key: where(real(tick), x, 0) for key, x in ends.items()}

        def complete(number: Any) -> Any:
            return real(number) & spread.complete(number - later)

        numbers, new = spread.numbers(microbatch)
        found = self._in_ticks(tick, every, complete, lambda: self._after_rows(numbers, state))
        return {key: total(where(complete(tick) & new, x, 0), self.stage) for key, x in found.items()}

    def _after_rows(self, number: Tensor, state: list[Tensor]) -> Sums:
        """The terms after the layers of a micro-batch; with the dim `stage` if each stage has its own number."""
        carries = self.loop.backward.outs
        named = dict(zip([*(carries[i] for i in self.loop.shipped), *self.flow.crossing], state, strict=True))
        consts, rows, graph = (
            self.ins[: len(self.flow.given[0])],
            self.row(number),
            self.flow.after,
        )
        known = [*consts, *rows, *(named.get(v) for v in graph.ins[len(consts) + len(rows) :])]
        found = iter(self._results(*_without_missing(graph, known), self.stage in number.dims))
        sums = {("terms", i): [next(found) for _ in each.after] for i, each in enumerate(self.loop.terms)}
        return {key: total_of(xs) for key, xs in sums.items() if xs}

    def _own(
        self, number: Tensor, block: Tensor, consts: Sequence[Var], rows: Sequence[Var], known: Mapping[Var, Tensor]
    ) -> list[Tensor]:
        """Constants and rows (not those in stacks) of a loop over layers; each stage has another micro-batch."""
        loop, stages = self.loop, self.dims.stages
        own = [v for v in dict.fromkeys((*consts, *rows)) if loop.levels[v] is Level.BEFORE and v not in known]
        given = [*self.ins[: len(self.flow.given[0])], *(self.row(number) if own else ())]
        graph = values(loop.body, [*self.flow.given[0], *(self.flow.given[1] if own else ())], own)
        computed = dict(zip(own, self._results(graph, given, each=True), strict=True))
        rows = [v for v in rows if stages.chunks == 1 or v not in self.fixed_layers]

        def layers(v: Var) -> Tensor:
            if v in self.fixed_layers:
                return self.fixed_layers[v]
            return own_layers(computed[v] if v in computed else known[v], stages, block)

        either = {**self.fixed, **computed, **known}
        return [*(either[v] for v in consts), *(layers(v) for v in rows)]

    def results(self, sums: Sums) -> list[Tensor]:
        """The last carries of the loop over micro-batches."""
        loop, consts = self.loop, self.flow.given[0]
        carries, rows = loop_of(loop.backward).results(loop.backward.outs)
        known = {rows[n]: stacked_again(sums["rows", n], self.dims.stages) for n in loop.rows}
        known |= {carries[n]: total(sums["carry", n], self.stage) for n in loop.carries}
        graph = values(loop.body, [*consts, *known], [v for each in loop.terms for v in each.linear])
        linear = iter(evaluate(graph, [*self.ins[: len(consts)], *known.values()]))
        totals: list[Tensor] = []
        for i, (start, terms) in enumerate(zip(loop_of(loop.eqn).inputs(self.ins)[1], loop.terms, strict=True)):
            parts = [next(linear) for _ in terms.linear]
            parts += [sums["terms", i]] if ("terms", i) in sums else []
            totals.append(add(start, cast(total_of(parts), start.dtype)))
        return totals


def _without_missing(graph: Graph, known: Sequence[Tensor | None]) -> tuple[Graph, list[Tensor]]:
    """The graph without inputs that it does not read, and the values of the others."""
    kept = [(v, x) for v, x in zip(graph.ins, known, strict=True) if x is not None]
    return graph.replace(ins=tuple(v for v, _ in kept)), [x for _, x in kept]


def total_of(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = add(total, x)
    return total


def _filled(dims: Sequence[Dim], like: Var) -> Tensor:
    return full(dims, FILL if like.dtype.kind in "fVc" else 0, like.dtype)
