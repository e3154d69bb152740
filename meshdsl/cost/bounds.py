"""Bounds on what every layout of a space costs, for a search to exclude most of them unseen.

The bytes sent are those of the program. The time is that of its kernels and collectives on the lanes of a `Timeline`,
in the program's order, as if nothing slowed down what runs beside it. The memory is arguments and results, and
between them what has to be stored under any fusion: what operations that are kernels of their own read and make.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..control import KEEP
from ..control.region import LOCAL
from ..ir import Eqn, Fuses, Graph, Scan, Var, While, walk
from ..ops.placement import PREFER, SHARD
from ..ops.ragged import RAGGED
from .body import Body, Loop, Plain
from .classes import State
from .fusion import holders, kind
from .joint import Joint
from .machine import Machine
from .network import Placement
from .segments import kernel_seconds
from .space import Space

__all__ = ["Bounds", "bounds"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """No program of the layout in a row takes less than this; rows known to be illegal are left out."""

    rows: tuple[np.ndarray, ...]  # of each space: int16 [layouts, dims]
    seconds: np.ndarray  # float64 [layouts], as the others
    peak_bytes: np.ndarray
    wire_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    @staticmethod
    def none(found: Space) -> Bounds:
        """That nothing costs less than nothing."""
        zero = np.zeros(len(found.rows))
        return Bounds((found.rows,), zero, zero, zero)

    @staticmethod
    def together(parts: Sequence[Bounds]) -> Bounds:
        """The bounds of several spaces, one after another."""
        return Bounds(
            tuple(rows for part in parts for rows in part.rows),
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.peak_bytes for part in parts]),
            np.concatenate([part.wire_bytes for part in parts]),
        )


def bounds(
    graph: Graph,
    found: Space,
    machine: Machine,
    placement: Placement,
    *,
    donated: Sequence[int] = (),
    results: Sequence[str] | None = None,
    gather_limit: float | None = None,
) -> Bounds:
    """The bounds of every legal layout of a space on a machine.

    Where what happens in one equation depends on more than its operands (`md.local`, kept values, ragged exchanges,
    preferences that others do not share), there are no bounds.
    """
    if not _separable(graph):
        return Bounds.none(found)
    joint = Joint(graph, found, results=results, gather_limit=gather_limit)
    table, body = joint.table, joint.body
    table.need(found.dims)
    table.sweep()
    columns = [table.dims.index(d) for d in found.dims]
    if not table.size:
        return Bounds((table.rows[:, columns],), np.zeros(0), np.zeros(0), np.zeros(0))
    clock = _Clock(machine, placement)
    seconds = clock.body(body, top=True).end
    return Bounds((table.rows[:, columns],), seconds, _Memory(joint).peak(donated), body.sent())


def _separable(graph: Graph) -> bool:
    """Whether each equation is lowered, and merged with equal ones, by itself."""
    graphs = [graph, *(sub for eqn, _ in walk(graph) for sub in eqn.graphs().values())]
    for sub in graphs:
        readers: dict[Var, int] = defaultdict(int)
        for eqn in sub.eqns:
            if eqn.op in (LOCAL, KEEP, RAGGED):
                return False
            for v in dict.fromkeys(eqn.ins):
                readers[v] += 1
        aliased = [eqn.ins[0] for eqn in sub.eqns if eqn.op in (PREFER, SHARD)]
        if any(readers[v] > 1 for v in aliased):
            return False
    return True


@dataclass(eq=False)
class _Lanes:
    """When each lane is free, by row, and which rows use it."""

    size: int
    compute: np.ndarray
    free: dict[Any, np.ndarray] = field(default_factory=dict[Any, np.ndarray])
    ready: dict[Var, np.ndarray] = field(default_factory=dict[Var, np.ndarray])

    def kernel(self, ready: np.ndarray, took: np.ndarray) -> np.ndarray:
        """Put a kernel behind the others, in the rows where it takes any time; when it has ended."""
        busy = took > 0
        end = np.where(busy, np.maximum(self.compute, ready) + took, ready)
        self.compute = np.where(busy, end, self.compute)
        return end

    @property
    def end(self) -> np.ndarray:
        """When all is done."""
        end = self.compute
        for free in self.free.values():
            end = np.maximum(end, free)
        return end


class _Clock:
    """The lanes of a timeline, for all rows at once."""

    def __init__(self, machine: Machine, placement: Placement):
        self.machine, self.placement = machine, placement
        self.known: dict[Any, Any] = {}

    def body(self, body: Body, top: bool = False) -> _Lanes:
        size = body.table.size
        lanes = _Lanes(size, np.zeros(size))
        zero = np.zeros(size)
        kernels, repeated = kernel_seconds(body, self.machine, self.known), body.repeated
        ordered = len(body.steps)  # from here on the order may be another: numbers summed in the update travel together
        if top:
            backward = [i for i, step in enumerate(body.steps) if step.eqn is not None and step.eqn.backward]
            update = body.steps[backward[-1] + 1 :] if backward else []
            numbers = [step for step in (*update, *body.ends) if isinstance(step, Plain) and _sums_numbers(step)]
            ordered -= len(update) if len(numbers) > 1 else 0
        for i, (step, took) in enumerate(zip(body.steps, kernels, strict=True)):
            waits = i < ordered
            if isinstance(step, Loop):
                self.loop(step, lanes, waits)
                continue
            ready = [lanes.ready.get(v, zero) for v in step.ins]
            early = np.min([ready[0], *ready], axis=0) if waits and ready else zero
            if step not in repeated:
                self.send(step, lanes, ready, waits)
            start = np.max([zero, *ready], axis=0) if waits else zero
            if took is not None:
                lanes.kernel(early, took[0] if step not in repeated else zero)
                start = lanes.kernel(start, took[1])
            lanes.ready.update(dict.fromkeys(step.outs, start))
        for end in body.ends:
            self.send(end, lanes, [lanes.ready.get(v, zero) for v in end.ins], ordered == len(body.steps))
        return lanes

    def send(self, step: Plain, lanes: _Lanes, ready: list[np.ndarray], waits: bool) -> None:
        """Put the collectives of a point on their lanes; `ready` becomes when its operands have arrived."""
        values = step.made.values
        most = max(len(made.sends) for made in values)
        given = list(ready)
        once = [
            step.eqn is None or sum(x is v for x in step.eqn.ins) == 1 for v in step.ins
        ]  # else not one after another
        zero = np.zeros(lanes.size)
        for k in range(most):
            kinds: dict[Any, list[int]] = defaultdict(list)
            took = np.zeros(len(values))
            for j, made in enumerate(values):
                if k < len(made.sends):
                    sent = made.sends[k]
                    took[j] = self.placement.seconds(sent.kind, sent.axes, sent.full)
                    kinds[sent.operand, sent.axes, sent.kind in self.machine.asynchronous, sent.number].append(j)
            for (operand, axes, aside, number), which in kinds.items():
                if number:
                    continue  # no time, and no order
                mask = np.zeros(len(values), bool)
                mask[which] = True
                rows = np.flatnonzero(mask[step.made.ids])
                free = lanes.free.setdefault(axes, np.zeros(lanes.size))
                if operand < 0:  # of something made on the way, nobody knows from what
                    arrived = np.min([given[0], *given], axis=0) if given else zero
                else:
                    arrived = (ready if once[operand] else given)[operand]
                start = free[rows]
                if waits:
                    start = np.maximum(start, arrived[rows])
                if not aside:
                    start = np.maximum(start, lanes.compute[rows])
                end = start + took[step.made.ids[rows]]
                free[rows] = end
                if not aside:
                    lanes.compute = lanes.compute.copy()
                    lanes.compute[rows] = end
                if waits and operand >= 0:
                    ready[operand] = ready[operand].copy()
                    ready[operand][rows] = np.maximum(ready[operand][rows], end)

    def loop(self, step: Loop, lanes: _Lanes, waits: bool) -> None:
        zero = np.zeros(lanes.size)
        start = zero
        for get in step.gets:
            ready = [lanes.ready.get(v, zero) for v in get.ins]
            self.send(get, lanes, ready, waits)
            start = np.maximum(start, ready[0]) if waits else start
        inner = self.body(step.body)
        start = np.maximum(start, lanes.compute)
        for axes, used in inner.free.items():
            free = lanes.free.setdefault(axes, np.zeros(lanes.size))
            start = np.where(used > 0, np.maximum(start, free), start)
        end = start + inner.end * step.eqn.trips
        lanes.compute = end
        for axes, used in inner.free.items():
            lanes.free[axes] = np.where(used > 0, end, lanes.free[axes])
        lanes.ready.update(dict.fromkeys(step.eqn.outs, end if waits else zero))


def _sums_numbers(step: Plain) -> bool:
    return any(sent.number for made in step.made.values for sent in made.sends)


class _Memory:
    """The least that is held at every equation of a graph, for all rows at once."""

    def __init__(self, joint: Joint):
        self.joint = joint

    def peak(self, donated: Sequence[int]) -> np.ndarray:
        body = self.joint.body
        ins = [self.bytes(body, [v]) for v in body.graph.ins]
        outs = [self.result(body, i) for i in range(len(body.ends))]
        given, made = np.sum([np.zeros(body.table.size), *ins], axis=0), np.sum(outs, axis=0)
        taken = np.sum([np.zeros(body.table.size), *(ins[i] for i in donated)], axis=0)
        return given + np.maximum(made - taken, 0) + self.inside(body)

    def inside(self, body: Body) -> np.ndarray:
        """The peak of what is neither an input nor a result."""
        graph, zero = body.graph, np.zeros(body.table.size)
        source = holders(graph)
        views: dict[Var, list[Var]] = defaultdict(list)
        for v, at in source.items():
            views[at].append(v)
        results = {source.get(v, v) for v in graph.outs}
        steps = [(step, step.eqn) for step in body.steps if step.eqn is not None]
        last: dict[Var, int] = {}
        shut: dict[Var, bool] = {}  # whether the last reader keeps it to its end: it does not write over it
        stored: set[Var] = set()
        for i, (_, eqn) in enumerate(steps):
            alone = kind(eqn) is Fuses.KERNEL
            carried = _carried(eqn)
            for v in dict.fromkeys(source.get(v, v) for v in eqn.ins):
                last[v], shut[v] = i, alone and v not in carried
                if alone:
                    stored.add(v)
            if alone:
                stored.update(eqn.outs)
        dies: dict[int, list[np.ndarray]] = defaultdict(list)
        held, most = zero, zero
        for i, (step, eqn) in enumerate(steps):
            for v in eqn.outs:
                if v in stored and v not in results and v not in source and v in last and v.shape:
                    n = self.bytes(body, [v, *views[v]])
                    held = held + n
                    dies[last[v] + 1 if shut[v] else last[v]].append(n)
            for n in dies.pop(i, []):
                held = held - n
            inner = self.inside(step.body) if isinstance(step, Loop) else zero
            most = np.maximum(most, held + inner)
        return most

    def bytes(self, body: Body, held: Sequence[Var]) -> np.ndarray:
        """The fewest bytes of a value on one device, in any version that there is of it; by row."""
        return np.min([self.size(body, v) for v in held if v in body.states], axis=0)

    def size(self, body: Body, v: Var) -> np.ndarray:
        """The bytes of the smallest version of a value."""
        mesh = self.joint.mesh
        dims = tuple(d for d in body.table.dims if d in {x.name for x in v.shape})

        def least(cut: Any, state: State) -> float:
            if state.lazy is not None or not state.versions:
                return 0.0
            extents = self.joint.setting(dims, cut).extents
            counts = [np.prod(extents.local_shape(v.shape, s, mesh), dtype=float) for s, _ in state.versions]
            return float(min(counts)) * v.dtype.itemsize

        return body.table.map(least, body.table.cuts(dims), body.states[v]).array(float)

    def result(self, body: Body, i: int) -> np.ndarray:
        """The bytes of one result as it is returned."""
        end = body.ends[i]
        (v,) = end.ins
        dims = tuple(d for d in body.table.dims if d in {x.name for x in v.shape})

        def whole(cut: Any, made: Any) -> float:
            extents = self.joint.setting(dims, cut).extents
            return float(np.prod(extents.local_shape(v.shape, made.wanted, self.joint.mesh), dtype=float))

        return body.table.map(whole, body.table.cuts(dims), end.made).array(float) * v.dtype.itemsize


def _carried(eqn: Eqn) -> set[Var]:
    """The operands of a loop whose place its carry takes."""
    match eqn.control:
        case Scan() as loop:
            consts, carries, stacks = loop.inputs(eqn.ins)
            return set(carries) - {*consts, *stacks}
        case While() as loop:
            consts, carries = loop.inputs(eqn.ins)
            return set(carries) - set(consts)
        case _:
            return set()
