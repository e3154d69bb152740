"""The three loops over ticks that replace the loop over micro-batches. Every stage computes in every tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...control import scan
from ...ops.dtypes import cast
from ...ops.elementwise import add
from ...ops.indexing import iota
from ...trace import Tensor, as_tensor, evaluate
from .find import Level, Loop, loop_of, values
from .flow import Flow, operands_of
from .one_tick import Pipe, PipeDims, Sums, total_of
from .stages import layers_of_stages, run_stages


def run_ticks(loop: Loop, ins: Sequence[Tensor], dims: PipeDims) -> list[Tensor]:
    """The results of the loop over micro-batches, from its operands."""
    pipe, schedule = _pipe(loop, dims, ins), loop.schedule
    starts = (0, schedule.warm, schedule.both + schedule.warm)
    ticks = [iota(dim) + start if start else iota(dim) for dim, start in zip(dims.ticks, starts, strict=True)]
    first, both, last = (range(start, start + dim.size) for dim, start in zip(dims.ticks, starts, strict=True))

    def fill(state: Any, tick: Tensor) -> Any:
        ring, forward, _ = state
        loop, after = pipe.forward(tick, first, ring, forward)
        return after(run_stages(loop, dims.stages)[0]), None

    def steady(state: Any, tick: Tensor) -> Any:
        ring, forward, backward, sums = state
        loop, after = pipe.forward(tick, both, ring, forward)
        ring, forward, computed = after(run_stages(loop, dims.stages)[0])
        entering, terms = pipe.between(tick, both, computed)
        loop, after = pipe.backward(tick, both, ring, backward, entering, sums)
        backward, sums, more = after(run_stages(loop, dims.stages)[0])
        return (ring, forward, backward, _added(sums, terms, more)), None

    def paired(state: Any, tick: Tensor) -> Any:
        ring, forward, backward, entering, sums = state
        f, after_f = pipe.forward(tick, both, ring, forward)
        b, after_b = pipe.backward(tick, both, ring, backward, entering, sums)
        of_f, of_b = run_stages(f, dims.stages, beside=b)
        ring, forward, computed = after_f(of_f)
        backward, sums, more = after_b(of_b)
        entering, terms = pipe.between(tick, both, computed)
        return (ring, forward, backward, entering, _added(sums, terms, more)), None

    def drain(state: Any, tick: Tensor) -> Any:
        backward, sums = state
        loop, after = pipe.backward(tick, last, ring, backward, entering, sums)
        backward, sums, terms = after(run_stages(loop, dims.stages)[0])
        return (backward, _added(sums, terms)), None

    ring, forward, computed = pipe.before_forward()
    (ring, forward, computed), _ = scan(fill, (ring, forward, computed), ticks[0], over=dims.ticks[0])
    backward, sums = pipe.before_backward()
    entering: list[Tensor] | None = None
    if schedule.late:
        tick = as_tensor(schedule.warm - 1)
        entering, terms = pipe.between(tick, range(schedule.warm - 1, schedule.warm), computed)
        state = (ring, forward, backward, entering, {**sums, **terms})  # sums are zeros until here
        (ring, _, backward, entering, sums), _ = scan(paired, state, ticks[1], over=dims.ticks[1])
    else:
        state = (ring, forward, backward, sums)
        (ring, _, backward, sums), _ = scan(steady, state, ticks[1], over=dims.ticks[1])
    (_, sums), _ = scan(drain, (backward, sums), ticks[2], over=dims.ticks[2])
    return pipe.results(sums)


def _pipe(loop: Loop, dims: PipeDims, ins: Sequence[Tensor]) -> Pipe:
    body, scans = loop.body, (loop.forward, loop.backward)
    wanted = [v for v in dict.fromkeys(v for eqn in scans for v in eqn.ins) if loop.levels[v] is Level.FIXED]
    consts = loop_of(loop.eqn).consts
    fixed = dict(zip(wanted, evaluate(values(body, body.ins[:consts], wanted), ins[:consts]), strict=True))
    rows = [v for eqn in scans for v in operands_of(eqn)[2] if v in fixed]
    return Pipe(Flow(loop), dims, ins, fixed, {v: layers_of_stages(fixed[v], dims.stages) for v in rows})


def _added(sums: Sums, *terms: Sums) -> Sums:
    more = {k: [each[k] for each in terms if k in each] for k in sums}
    return {k: add(total, cast(total_of(more[k]), total.dtype)) if more[k] else total for k, total in sums.items()}
