"""The estimate of many plans at once: seconds and bytes as arrays over candidates, from the equations of one graph.

A candidate is a mesh with a role for each axis: the dims that have the axis. For each value and axis, an array has the
dim that holds the axis in each candidate. Each equation takes for each axis the label that moves the fewest bytes, as
the partition does; equations that are equal, with operands sharded alike, are estimated once. A screen knows no
padding, no pending sums but those of weights, no fusion and no schedule: search corrects it by exact costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..control import KEEP
from ..cost.machine import Machine
from ..cost.network import place
from ..dims import Dim
from ..ir import Eqn, Fuses, Product, Var
from ..layouts import Mesh
from .digest import BLOCKED, Digest, EquationWork, LoopWork, names_of
from .space import Role

Numbers = np.ndarray[Any, Any]  # one for each candidate
Homes = tuple[Numbers, ...]  # by axis: the number of the dim that has it, or -1
Rows = list[Numbers]  # of each kind below; the last ones are by axis

COMPUTE, MORE, CRITICAL, KERNELS, WEIGHTS = range(
    5
)  # `MORE`: of products whose micro-batch has 1 / `PARTS` of the samples


MESSAGES: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SMALL, LARGE = 1e3, 1e9  # bytes at which a collective is timed for its latency and its bandwidth
PARTS = 16  # micro-batches for which the products' times are estimated; between 1 and these, by their logarithm
PREFERRED = 1e6  # seconds by which a label of `md.prefer` comes before the others
WRITES = 0.5  # of an elementwise equation's results: the others stay inside kernels


@dataclass(frozen=True)
class Candidate:
    """A mesh, and the dims that have each of its axes."""

    mesh: Mesh
    roles: tuple[Role, ...]


class Axes:
    """The axes of candidates as arrays: devices, dims, and the time of collectives, each by position of the axis."""

    def __init__(self, candidates: Sequence[Candidate], machine: Machine):
        self.count = max(len(each.roles) for each in candidates)
        meshes = list(dict.fromkeys(each.mesh for each in candidates))
        number = {mesh: i for i, mesh in enumerate(meshes)}
        which = np.array([number[each.mesh] for each in candidates])
        timed = [self._timed(mesh, machine) for mesh in meshes]  # by mesh, axis, and (devices, seconds of messages)
        table = np.array([rows + [(1.0, *[0.0] * 2 * len(MESSAGES))] * (self.count - len(rows)) for rows in timed])
        self.sizes, *times = np.moveaxis(table[which], 0, -1).transpose(1, 0, 2)
        self.latency: dict[str, Numbers] = dict(zip(MESSAGES, times[: len(MESSAGES)], strict=True))
        long = dict(zip(MESSAGES, times[len(MESSAGES) :], strict=True))
        self.per_byte: dict[str, Numbers] = {
            kind: (long[kind] - self.latency[kind]) / (LARGE - SMALL) for kind in MESSAGES
        }
        n = len(candidates)
        self.zero, self.never, self.none = np.zeros(n), np.zeros(n, bool), np.full(n, -1, np.int8)
        self.outcomes: dict[tuple[Any, ...], Outcome] = {}  # of equations, by what they cost
        self._interned: dict[bytes, Numbers] = {self.none.tobytes(): self.none}
        self._ruled: list[dict[str, Numbers]] = [{} for _ in range(self.count)]
        for i, each in enumerate(candidates):
            for rules, role in zip(self._ruled, each.roles, strict=False):
                for d in role:
                    rules.setdefault(d, self.never.copy())[i] = True

    def _timed(self, mesh: Mesh, machine: Machine) -> list[tuple[float, ...]]:
        at = place(machine.network, mesh)
        sizes = (SMALL, LARGE)
        return [(n, *(at.seconds(kind, (a,), v) for v in sizes for kind in MESSAGES)) for a, n in mesh.axes.items()]

    def shared(self, numbers: Numbers) -> Numbers:
        """One array for all with the same contents, so that equal homes are the same objects."""
        return self._interned.setdefault(numbers.tobytes(), numbers)

    def renumbered(self, home: Numbers, numbers: Sequence[int]) -> Numbers:
        """The label that holds an axis, by the numbers of the labels of a value's dims: -1 for none."""
        return home if home is self.none else self.shared(np.array([*numbers, -1], np.int8)[home])

    def rule(self, k: int, dim: str) -> Numbers:
        """True for the candidates whose role for axis `k` has this dim."""
        return self._ruled[k].get(dim, self.never)

    def has(self, k: int, dim: str) -> bool:
        """True if some role for axis `k` has this dim."""
        return dim in self._ruled[k]

    def rules(self, k: int, v: Var) -> Numbers:
        """True for the candidates whose role for axis `k` has a dim of this value."""
        found = [self._ruled[k][d.name] for d in v.dims if d.name in self._ruled[k]]
        return np.logical_or.reduce(found) if found else self.never

    def share(self, k: int, other: int, v: Var) -> Numbers:
        """True for the candidates whose roles for both axes have one dim of this value."""
        return np.logical_or.reduce([self.never, *(self.rule(k, d.name) & self.rule(other, d.name) for d in v.dims)])

    def seconds(self, kind: str, k: int, size: Numbers) -> Numbers:
        """Seconds of a collective of this many bytes (V of `cost.transfer`) over axis `k`; 0 on one device."""
        return np.where(self.sizes[k] > 1, self.latency[kind][k] + self.per_byte[kind][k] * size, 0.0)

    def degree(self, dim: str) -> Numbers:
        """The number of blocks of a dim."""
        return np.prod([np.where(self.rule(k, dim), n, 1.0) for k, n in enumerate(self.sizes)], axis=0)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The cost of one equation, and the shardings of its results."""

    rows: Rows
    homes: tuple[Homes | None, ...]
    bytes: Numbers  # of results that are stored and depend on the data
    bad: Numbers  # where the layout is illegal
    weight: frozenset[str] | None  # the dims of the weight, if it computes a gradient of one
    pending: list[Numbers]  # by axis: where that gradient is a pending sum


@dataclass(frozen=True, eq=False)
class _Operand:
    """An operand that is stored: its homes, the numbers of its labels, and its bytes on one device.

    The label `BLOCKED` is that of dims that the operation needs whole.
    """

    homes: Homes
    numbers: Sequence[int]
    data: bool
    bytes: Numbers


class Screen:
    """The estimate of a step's forward and backward pass under every candidate."""

    def __init__(self, work: Digest, axes: Axes, machine: Machine):
        self.work, self.axes, self.machine = work, axes, machine
        self.zero, self.none = axes.zero, axes.none
        self.nothing: Rows = [self.zero] * (WEIGHTS + axes.count)
        self._ways: dict[tuple[int, ...], Numbers] = {}
        nowhere = {v: tuple(self.none for _ in range(axes.count)) for v in work.graph.ins}
        self.homes: dict[Var, Homes | None] = {v: self._ruled(v, h) for v, h in nowhere.items()}
        self.saved = self.zero  # bytes of the forward pass that the backward pass reads
        self._runs: dict[str, dict[Outcome, float]] = {}  # by loop: how often each equation runs, equal ones together
        self._sent: dict[Var, tuple[Numbers, Numbers]] = {}  # seconds in which equations send data, and gather weights
        self._spared: dict[str, Numbers] = {}  # by loop: seconds that are not sent, because a value is stored
        self._run(work.works, 1.0, "")
        self.saved = sum((self.bytes_of(v, self.homes.get(v)) for v in work.saved), self.saved)
        self.by_loop = {loop: self._sum(loop, runs) for loop, runs in self._runs.items()}
        each = list(dict.fromkeys(outcome for runs in self._runs.values() for outcome in runs))
        self.bad = np.logical_or.reduce([axes.never, *(outcome.bad for outcome in each)])
        self.temporary = np.maximum.reduce([self.zero, *(outcome.bytes for outcome in each)])
        self.pending = {work.key_of(v): [axes.never] * axes.count for v in work.weights}
        for outcome in each:
            if outcome.weight is not None:
                known = self.pending[outcome.weight]
                self.pending[outcome.weight] = [a | b for a, b in zip(known, outcome.pending, strict=True)]

    def _sum(self, loop: str, runs: Mapping[Outcome, float]) -> Rows:
        """The rows of all equations of a loop."""
        rows = list(self.nothing)
        for k, zero in enumerate(rows):
            rows[k] = sum((n * each.rows[k] for each, n in runs.items() if each.rows[k] is not zero), zero)
        rows[CRITICAL] = rows[CRITICAL] - self._spared.get(loop, 0.0)
        return rows

    def _run(self, works: Iterable[EquationWork | LoopWork], trips: float, loop: str) -> None:
        runs = self._runs.setdefault(loop, {})
        for each in works:
            if isinstance(each, LoopWork):
                self._loop(each, trips)
            elif each.eqn.op is KEEP:
                self._keep(each.eqn, trips, loop)
            else:
                known = self._outcome(each)
                self.homes.update(zip(each.eqn.outs, known.homes, strict=True))
                self._sent.update(
                    dict.fromkeys(each.eqn.outs, (known.rows[CRITICAL], sum(known.rows[WEIGHTS:], self.zero)))
                )
                runs[known] = runs.get(known, 0.0) + trips

    def _outcome(self, work: EquationWork) -> Outcome:
        """The cost of an equation, computed once for all equal ones with operands sharded alike."""
        homes, known = tuple(self.homes.get(v) for v in work.eqn.ins), self.axes.outcomes
        key = (work.key, *(None if h is None else tuple(map(id, h)) for h in homes))
        if key not in known:
            known[key] = self._equation(work, homes)
        return known[key]

    def _keep(self, eqn: Eqn, trips: float, loop: str) -> None:
        """Store a value of the forward pass where recomputing it would send data."""
        (_, recomputed), (kept,) = eqn.ins, eqn.outs
        self.homes[kept] = self.homes.get(recomputed)
        sent, gathered = self._sent.get(recomputed, (self.zero, self.zero))
        self.saved = self.saved + np.where(sent + gathered > 0, self.bytes_of(kept, self.homes[kept]) * trips, 0.0)
        self._spared[loop] = self._spared.get(loop, self.zero) + sent * trips

    def _loop(self, loop: LoopWork, trips: float) -> None:
        body = loop.scan.body
        for v, w in zip(loop.eqn.ins, body.ins, strict=True):
            self.homes[w] = self._renamed(self.homes.get(v), v, w)
        self._run(loop.body, trips * loop.scan.trips, loop.scan.dim.name)
        for v, w in zip(body.outs, loop.eqn.outs, strict=True):
            self.homes[w] = self._renamed(self.homes.get(v), v, w)

    def _renamed(self, homes: Homes | None, v: Var, w: Var) -> Homes | None:
        """The homes of a slice of a stack, or of a stack of slices, which the rule of the loop's dim may split."""
        if homes is None or v.dims == w.dims:
            return homes
        numbers = {d.name: i for i, d in enumerate(w.dims)}
        table = np.array([*(numbers.get(d.name, -1) for d in v.dims), -1], np.int8)
        return self._ruled(w, tuple(table[h] for h in homes), without=v.dims)

    def _ruled(self, v: Var, homes: Homes, without: Sequence[Dim] = ()) -> Homes:
        """Homes of a value, where they have none by the layout's rules; of several dims with one axis, the first."""
        found = list(homes)
        for k, _ in enumerate(found):
            for i, d in enumerate(v.dims):
                if d not in without:
                    found[k] = np.where(self.axes.rule(k, d.name) & (found[k] < 0), i, found[k]).astype(np.int8)
        return tuple(map(self.axes.shared, found))

    def ways(self, homes: Homes | None) -> Numbers:
        """The number of blocks of a value."""
        key = tuple(map(id, homes or ()))
        if key not in self._ways:
            split = [np.where(h >= 0, n, 1.0) for n, h in zip(self.axes.sizes, homes or (), strict=False)]
            self._ways[key] = np.prod([self.zero + 1, *split], axis=0)
        return self._ways[key]

    def bytes_of(self, v: Var, homes: Homes | None) -> Numbers:
        """The bytes of a value on one device."""
        return _bytes(v) / self.ways(homes)

    def _equation(self, work: EquationWork, homes: tuple[Homes | None, ...]) -> Outcome:
        eqn, rows = work.eqn, list(self.nothing)
        each = zip(eqn.ins, homes, work.ins, work.from_data, strict=True)
        operands = [_Operand(h, labels, data, self.bytes_of(v, h)) for v, h, labels, data in each if h is not None]
        outs = [[self.none] * self.axes.count for _ in eqn.outs]
        pending = [self.axes.never] * self.axes.count
        ways, kept, bad = self.zero + 1, self.zero + 1, self.axes.never  # blocks of the work; of the results
        for k in reversed(range(self.axes.count)):  # an inner axis first: outer ones then reduce and gather its blocks
            n = self.axes.sizes[k]
            pick, (critical, rows[WEIGHTS + k]), illegal = self._pick(work, operands, k, kept)
            rows[CRITICAL] = rows[CRITICAL] + critical
            bad = bad | illegal
            ways = ways * np.where(pick >= 0, n, 1.0)
            gone = np.logical_or.reduce([self.axes.never, *(pick == label for label in work.vanishing)])
            for v, numbers, out in zip(eqn.outs, work.outs, outs, strict=True):
                out[k] = self._result(k, v, numbers, pick, gone)
            kept = kept * np.where(outs[0][k] >= 0, n, 1.0)
            if work.of_weight:
                pending[k] = gone & ~self.axes.rules(k, eqn.outs[0])
        made = [tuple(out) for out in outs]
        written = sum((self.bytes_of(v, h) for v, h in zip(eqn.outs, made, strict=True)), self.zero)
        read = sum((operand.bytes for operand in operands), self.zero)
        self._compute(work, rows, read, written, ways)
        stored = written if any(work.from_data) and work.fuses in (Fuses.KERNEL, Fuses.REDUCE) else self.zero
        found = tuple(made if operands else (None,) * len(made))
        weight = names_of(eqn.outs[0]) if work.of_weight else None
        return Outcome(rows, found, stored, bad, weight, pending)

    def _pick(
        self, work: EquationWork, operands: Sequence[_Operand], k: int, kept: Numbers
    ) -> tuple[Numbers, Sequence[Numbers], Numbers]:
        """The label that takes axis `k`, -1 for none; seconds sent of data and of weights; where that is illegal."""
        held = [self.axes.renumbered(each.homes[k], each.numbers) for each in operands]
        split = list({id(h): h for h in held if h is not self.none}.values())
        if len(split) == 1 and work.plain:
            return split[0], (self.zero, self.zero), self.axes.never
        claimed = self._claims(work, split, k)
        if not claimed and not split:
            return self.none, (self.zero, self.zero), self.axes.never
        best, pick, sent = self.zero + math.inf, self.none, self._moved(operands, held, k, BLOCKED - 1)
        for label, claim in claimed.items():
            cost = self._moved(operands, held, k, label)
            if label in work.vanishing:
                cost[int(work.of_weight)] += self._reduced(work, k, kept)
            price = cost.sum(axis=0) - (PREFERRED if label in work.preferred else 0.0)
            better = claim & (price < best)
            best, pick = np.where(better, price, best), np.where(better, label, pick).astype(np.int8)
            sent = np.where(better, cost, sent)
        pairs = [(a, b) for a, b in work.contested if {a, b} <= claimed.keys() and not {a, b} & work.fresh]
        both = [claimed[a] & claimed[b] & (self.axes.sizes[k] > 1) for a, b in pairs]
        return pick, tuple(sent), np.logical_or.reduce(both) if both else self.axes.never

    def _moved(self, operands: Sequence[_Operand], held: Sequence[Numbers], k: int, label: int) -> Numbers:
        """Seconds in which operands that have axis `k` elsewhere give it to a label: of data, and of weights."""
        sent = np.zeros((2, len(self.zero)))
        for each, h in zip(operands, held, strict=True):
            if h is not self.none:
                kind = "all_to_all" if label in each.numbers else "all_gather"
                seconds = self.axes.seconds(kind, k, each.bytes * self.axes.sizes[k])
                sent[int(not each.data)] += np.where((h == -1) | (h == label), 0.0, seconds)
        return sent

    def _reduced(self, work: EquationWork, k: int, kept: Numbers) -> Numbers:
        """Seconds of the sum of the results over axis `k`; sums of weights' gradients that no rule splits wait.

        Gradients are scattered as the partition does: the axes of one dim together, those of several dims in order.
        """
        out, size = work.eqn.outs[0], self.zero + sum(map(_bytes, work.eqn.outs))
        if not work.of_weight:
            size = size / kept
            whole = self.axes.seconds("all_reduce", k, size)
        else:
            whole = self.zero
            for other, n in enumerate(self.axes.sizes):
                together = self.axes.share(k, other, out)
                before = together if other > k else self.axes.rules(other, out) & ~together & (other < k)
                size = np.where(before, size / n, size)
        return np.where(self.axes.rules(k, out), self.axes.seconds("reduce_scatter", k, size), whole)

    def _claims(self, work: EquationWork, split: Sequence[Numbers], k: int) -> dict[int, Numbers]:
        """By label: where an operand holds axis `k` along it, or, for a new dim, a rule gives it the axis."""
        claimed: dict[int, Numbers] = {}
        labels = dict.fromkeys(i for each in work.ins for i in each if i != BLOCKED and i not in work.fresh)
        for label in labels if split else ():
            here = np.logical_or.reduce([h == label for h in split])
            if here.any():
                claimed[label] = here
        for numbers, d, label in work.new_dims:
            taken = [claim for other, claim in claimed.items() if other not in work.fresh and other in numbers]
            free = ~np.logical_or.reduce(taken) if taken and label not in work.preferred else True
            if self.axes.has(k, d.name):
                claimed[label] = claimed.get(label, self.axes.never) | (self.axes.rule(k, d.name) & free)
        return claimed

    def _result(self, k: int, v: Var, numbers: Sequence[int], pick: Numbers, gone: Numbers) -> Numbers:
        """The home of a result along axis `k`: the dim of the label; for a sum, a dim to which a rule scatters it."""
        if pick is self.none and not any(self.axes.has(k, d.name) for d in v.dims):
            return pick
        home = self.none
        for i, (d, label) in enumerate(zip(v.dims, numbers, strict=True)):
            scattered = (gone | (pick == -1) if label == BLOCKED else gone) & self.axes.rule(k, d.name)
            home = np.where((pick == label) | (scattered & (home < 0)), i, home).astype(np.int8)
        return self.axes.shared(home)

    def _compute(self, work: EquationWork, rows: Rows, read: Numbers, written: Numbers, ways: Numbers) -> None:
        """Add the seconds of the kernel to the rows."""
        machine = self.machine
        if work.product is Product.NONE:
            share = {Fuses.VIEW: 0.0, Fuses.MAP: WRITES * written, Fuses.PICK: written, Fuses.REDUCE: WRITES * read}
            rows[COMPUTE] = self.zero + share.get(work.fuses, read + written) / machine.hbm_bandwidth
            rows[KERNELS] = self.zero + float(work.fuses not in (Fuses.VIEW, Fuses.MAP))
            return
        moved, flops = (read + written) / machine.hbm_bandwidth, np.maximum(work.flops / ways, 1.0)
        once, small = (np.maximum(self._product(work, flops, parts), moved) for parts in (1, PARTS))
        rows[COMPUTE], rows[MORE], rows[KERNELS] = once, np.maximum(0.0, small - once), self.zero + 1.0

    def _product(self, work: EquationWork, flops: Numbers, parts: int) -> Numbers:
        """Seconds of a product that runs in so many parts."""
        machine, dtype = self.machine, work.eqn.ins[0].dtype
        reached: Any = machine.reached.get(dtype.name, 1.0)
        if fused := work.product is Product.ATTENTION and (machine.attention or machine.fused_attention):
            reached = fused
        elif machine.efficiency:
            sizes, fractions = zip(*machine.efficiency, strict=True)
            reached = reached * np.interp(np.log(flops / parts), np.log(sizes), fractions)
        return flops / (machine.peak_of(dtype) * reached)


def _bytes(v: Var) -> int:
    return math.prod(d.size for d in v.dims) * v.dtype.itemsize
