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
from ..ir import Eqn, Fuses, Product, Var
from ..layouts import Mesh
from .digest import BLOCKED, Digest, Loop, Work
from .space import Role

Numbers = np.ndarray[Any, Any]  # one for each candidate
Homes = tuple[Numbers, ...]  # by axis: the number of the dim that has it, or -1


MESSAGES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SMALL, LARGE = 1e3, 1e9  # bytes at which a collective is timed for its latency and its bandwidth
PARTS = 16  # micro-batches for which the products' times are estimated; between 1 and these, by their logarithm
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
        places = [place(machine.network, mesh) for mesh in meshes]
        axes = [[*mesh.axes, *[""] * (self.count - len(mesh.axes))] for mesh in meshes]

        def by_axis(value: Any) -> list[Numbers]:
            return [np.array([value(i, row[k]) for i, row in enumerate(axes)], float)[which] for k in range(self.count)]

        def seconds(kind: str, size: float) -> Any:
            return lambda i, axis: places[i].seconds(kind, (axis,), size) if axis else 0.0

        self.sizes = by_axis(lambda i, axis: meshes[i].axes[axis] if axis else 1)
        self.latency = {kind: by_axis(seconds(kind, SMALL)) for kind in MESSAGES}
        long = {kind: by_axis(seconds(kind, LARGE)) for kind in MESSAGES}
        self.per_byte = {
            kind: [(b - a) / (LARGE - SMALL) for a, b in zip(self.latency[kind], long[kind], strict=True)]
            for kind in MESSAGES
        }
        roles = [
            [frozenset(each.roles[k]) if k < len(each.roles) else frozenset[str]() for each in candidates]
            for k in range(self.count)
        ]
        dims = [sorted(frozenset[str]().union(*set(column))) for column in roles]
        self.ruled: list[Mapping[str, Numbers]] = [
            {d: np.array([d in role for role in column]) for d in names}
            for names, column in zip(dims, roles, strict=True)
        ]

    def seconds(self, kind: str, k: int, size: Numbers) -> Numbers:
        """Seconds of a collective of this many bytes (V of `cost.transfer`) over axis `k`."""
        return self.latency[kind][k] + self.per_byte[kind][k] * size

    def degree(self, dim: str) -> Numbers:
        """The number of blocks of a dim."""
        return math.prod(
            (np.where(rules[dim], n, 1.0) for n, rules in zip(self.sizes, self.ruled, strict=True) if dim in rules),
            start=np.ones(len(self.sizes[0])),
        )


@dataclass
class _Sums:
    """Seconds of equations on one device."""

    compute: Numbers
    small: Numbers  # more seconds of products where a micro-batch has 1 / `PARTS` of the samples
    critical: Numbers  # communication of values that depend on the data
    weights: list[Numbers]  # communication of weights and of their gradients, by axis
    launches: float = 0.0

    def add(self, other: _Sums, trips: float) -> None:
        """Add the seconds of an equation that runs so many times."""
        self.compute = self.compute + trips * other.compute
        self.small = self.small + trips * other.small
        self.critical = self.critical + trips * other.critical
        self.weights = [a + trips * b for a, b in zip(self.weights, other.weights, strict=True)]
        self.launches += trips * other.launches


@dataclass(frozen=True)
class _Outcome:
    """What one equation costs, and where its results are."""

    sums: _Sums
    homes: tuple[Homes | None, ...]
    bytes: Numbers | float  # of results that are stored and depend on the data
    bad: Numbers | None  # where the layout is illegal
    pending: tuple[Numbers, ...] = ()  # by axis: where the gradient of a weight is a pending sum


class Screen:
    """The estimate of a step's forward and backward pass under every candidate."""

    def __init__(self, work: Digest, axes: Axes, machine: Machine):
        self.work, self.axes, self.machine = work, axes, machine
        n = len(axes.sizes[0])
        self.zero = np.zeros(n)
        self.none = np.full(n, -1, np.int8)
        self._interned: dict[bytes, Numbers] = {self.none.tobytes(): self.none}
        self._known: dict[tuple[Any, ...], _Outcome] = {}
        self._fractions: dict[tuple[int, ...], Numbers] = {}
        self.homes: dict[Var, Homes | None] = {v: self.by_rules(v) for v in work.graph.ins}
        self.by_loop: dict[str, _Sums] = {}
        self.bad = np.zeros(n, bool)
        self.temporary = self.zero
        keys = {work.key_of(v) for v in work.weights}
        self.pending = {key: [np.zeros(n, bool) for _ in axes.sizes] for key in keys}
        self.saved = self.zero  # bytes of the forward pass that the backward pass reads
        self.sent: dict[Var, Numbers] = {}  # seconds of communication in the equations of values
        self._run(work.works, 1.0, "")
        self.saved = sum((self.bytes_of(v, self.homes.get(v)) for v in work.saved), self.saved)

    def _run(self, works: Iterable[Work | Loop], trips: float, loop: str) -> None:
        for each in works:
            if isinstance(each, Loop):
                self._loop(each, trips)
                continue
            if each.eqn.op is KEEP:
                self._keep(each.eqn, trips, loop)
                continue
            homes = tuple(self.homes.get(v) for v in each.eqn.ins)
            key = (each.key, *(None if h is None else tuple(map(id, h)) for h in homes))
            if key not in self._known:
                self._known[key] = self._equation(each, homes)
                self.temporary = np.maximum(self.temporary, self._known[key].bytes)
            known = self._known[key]
            self.sent.update(dict.fromkeys(each.eqn.outs, known.sums.critical))
            self.homes.update(zip(each.eqn.outs, known.homes, strict=True))
            self.by_loop.setdefault(loop, self._nothing()).add(known.sums, trips)
            if known.bad is not None:
                self.bad = self.bad | known.bad
            for k, pending in enumerate(known.pending):
                of = self.pending[frozenset(d.name for d in each.eqn.outs[0].dims)]
                of[k] = of[k] | pending

    def _nothing(self) -> _Sums:
        return _Sums(self.zero, self.zero, self.zero, [self.zero] * self.axes.count)

    def _keep(self, eqn: Eqn, trips: float, loop: str) -> None:
        """Store a value of the forward pass where recomputing it would send data."""
        _, recomputed = eqn.ins
        (kept,) = eqn.outs
        self.homes[kept] = self.homes.get(recomputed)
        sent = self.sent.get(recomputed, self.zero)
        self.saved = self.saved + np.where(sent > 0, self.bytes_of(kept, self.homes[kept]) * trips, 0.0)
        sums = self.by_loop[loop]
        sums.critical = sums.critical - sent * trips

    def _loop(self, loop: Loop, trips: float) -> None:
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
        names = [d.name for d in w.dims]
        table = np.array([*(names.index(d.name) if d in w.dims else -1 for d in v.dims), -1], np.int8)
        moved = [table[h] for h in homes]
        for k, rules in enumerate(self.axes.ruled):
            for i, d in enumerate(w.dims):
                if d not in v.dims and d.name in rules:
                    moved[k] = np.where(rules[d.name], i, moved[k]).astype(np.int8)
        return tuple(map(self._shared, moved))

    def by_rules(self, v: Var) -> Homes:
        """Where the layout's rules split a value; of several dims with one axis, the first."""
        homes = [self.none] * self.axes.count
        for k, rules in enumerate(self.axes.ruled):
            for i, d in reversed([*enumerate(v.dims)]):
                if d.name in rules:
                    homes[k] = np.where(rules[d.name], i, homes[k]).astype(np.int8)
        return tuple(map(self._shared, homes))

    def _shared(self, numbers: Numbers) -> Numbers:
        """One array for all with the same contents, so that equal homes are the same objects."""
        return self._interned.setdefault(numbers.tobytes(), numbers)

    def ways(self, homes: Homes | None) -> Numbers:
        """The number of blocks of a value."""
        key = tuple(map(id, homes or ()))
        if key not in self._fractions:
            total = self.zero + 1
            for n, h in zip(self.axes.sizes, homes or (), strict=False):
                total = total if h is self.none else total * np.where(h >= 0, n, 1.0)
            self._fractions[key] = total
        return self._fractions[key]

    def bytes_of(self, v: Var, homes: Homes | None) -> Numbers:
        """The bytes of a value on one device."""
        return math.prod(d.size for d in v.dims) * v.dtype.itemsize / self.ways(homes)

    def ruled(self, k: int, v: Var) -> Numbers | None:
        """Where a rule gives axis `k` to a dim of a value; None: nowhere."""
        found = [self.axes.ruled[k][d.name] for d in v.dims if d.name in self.axes.ruled[k]]
        return np.logical_or.reduce(found) if found else None

    def _equation(self, work: Work, homes: tuple[Homes | None, ...]) -> _Outcome:
        eqn = work.eqn
        operands = [
            _Operand(v, h, numbers, data, self.bytes_of(v, h))
            for v, h, numbers, data in zip(eqn.ins, homes, work.ins, work.from_data, strict=True)
            if h is not None
        ]
        sums = self._nothing()
        outs = [[self.none] * self.axes.count for _ in eqn.outs]
        ways, kept, bad = self.zero + 1, self.zero + 1, None  # blocks of the work; of the results
        pending: list[Numbers] = []
        for k in reversed(range(self.axes.count)):  # an inner axis first: outer ones then reduce and gather its blocks
            pick, illegal = self._pick(work, operands, k, kept, sums)
            bad = illegal if bad is None else bad if illegal is None else bad | illegal
            ways = ways * np.where(pick >= 0, self.axes.sizes[k], 1.0)
            gone = np.isin(pick, list(work.vanishing)) if work.vanishing else np.zeros(len(pick), bool)
            for v, numbers, out in zip(eqn.outs, work.outs, outs, strict=True):
                out[k] = self._result(k, v, numbers, pick, gone)
            kept = kept * np.where(outs[0][k] >= 0, self.axes.sizes[k], 1.0)
            if work.of_weight:
                rule = self.ruled(k, eqn.outs[0])
                pending.insert(0, gone if rule is None else gone & ~rule)
        made = [tuple(out) for out in outs]
        written = sum((self.bytes_of(v, h) for v, h in zip(eqn.outs, made, strict=True)), self.zero)
        read = sum((each.bytes for each in operands), self.zero)
        self._compute(work, sums, read, written, ways)
        stored = written if any(work.from_data) and work.fuses in (Fuses.KERNEL, Fuses.REDUCE) else 0.0
        return _Outcome(sums, tuple(made if operands else (None,) * len(made)), stored, bad, tuple(pending))

    def _pick(
        self, work: Work, operands: Sequence[_Operand], k: int, kept: Numbers, sums: _Sums
    ) -> tuple[Numbers, Numbers | None]:
        """The label that takes axis `k`, -1 for none; adds what is sent for it to `sums`."""
        held = [each.label(k, self.none) for each in operands]
        claimed = self._claims(work, held, k)
        if not claimed and all(h is self.none for h in held):
            return self.none, None
        n, v = self.axes.sizes[k], work.eqn.outs[0]
        gathered = [self.axes.seconds("all_gather", k, each.bytes * n) for each in operands]
        written = sum(math.prod(d.size for d in w.dims) * w.dtype.itemsize for w in work.eqn.outs) / kept
        best, pick = np.full(len(n), math.inf), self.none
        critical, weights = self.zero, self.zero
        for each, h, gather in zip(operands, held, gathered, strict=True):  # if no label takes the axis
            gather = np.where(h == BLOCKED, gather, 0.0)
            critical, weights = (critical + gather, weights) if each.data else (critical, weights + gather)
        for label, claim in claimed.items():
            here, of_weights = self.zero, self.zero
            for each, h, gather in zip(operands, held, gathered, strict=True):
                if h is self.none:
                    continue
                cost = self.axes.seconds("all_to_all", k, each.bytes * n) if label in each.numbers else gather
                cost = np.where((h == -1) | (h == label), 0.0, cost)
                here, of_weights = (here + cost, of_weights) if each.data else (here, of_weights + cost)
            if label in work.vanishing:
                rule = self.ruled(k, v)
                reduced = self.axes.seconds("all_reduce", k, written)
                scattered = self.axes.seconds("reduce_scatter", k, written)
                if work.of_weight:
                    of_weights = of_weights + (0.0 if rule is None else np.where(rule, scattered, 0.0))
                else:
                    here = here + (reduced if rule is None else np.where(rule, scattered, reduced))
            price = here + of_weights - (1e6 if label in work.preferred else 0.0)
            better = claim & (price < best)
            best, pick = np.where(better, price, best), np.where(better, label, pick).astype(np.int8)
            critical, weights = np.where(better, here, critical), np.where(better, of_weights, weights)
        sums.critical = sums.critical + np.where(n > 1, critical, 0.0)
        sums.weights[k] = np.where(n > 1, weights, 0.0)
        bad = None
        for a, b in work.contested:
            if a in claimed and b in claimed and not {a, b} & work.fresh:
                both = claimed[a] & claimed[b] & (n > 1)
                bad = both if bad is None else bad | both
        return pick, bad

    def _claims(self, work: Work, held: Sequence[Numbers], k: int) -> dict[int, Numbers]:
        """By label: where an operand holds axis `k` along it, or, for a new dim, a rule gives it the axis."""
        claimed: dict[int, Numbers] = {}
        labels = dict.fromkeys(i for each in work.ins for i in each if i != BLOCKED and i not in work.fresh)
        for h in {id(h): h for h in held if h is not self.none}.values():
            for label in labels:
                here = h == label
                if here.any():
                    claimed[label] = claimed[label] | here if label in claimed else here
        for v, numbers in zip(work.eqn.outs, work.outs, strict=True):
            for d, label in zip(v.dims, numbers, strict=True):
                if label in work.fresh and d.name in self.axes.ruled[k]:
                    here = self.axes.ruled[k][d.name]
                    taken = [claim for other, claim in claimed.items() if other not in work.fresh and other in numbers]
                    if taken and label not in work.preferred:
                        here = here & ~np.logical_or.reduce(taken)
                    claimed[label] = claimed[label] | here if label in claimed else here
        return claimed

    def _result(self, k: int, v: Var, numbers: Sequence[int], pick: Numbers, gone: Numbers) -> Numbers:
        """The home of a result along axis `k`: the dim of the label; for a sum, a dim to which a rule scatters it."""
        labels = {label: i for i, label in enumerate(numbers) if label != BLOCKED}
        table = np.full(max(labels, default=-1) + 2, -1, np.int8)
        for label, i in labels.items():
            table[label] = i
        home = self.none if pick is self.none else table[np.where(pick < len(table) - 1, pick, -1)]
        for i, d in enumerate(v.dims):
            rule = self.axes.ruled[k].get(d.name)
            if rule is not None:
                takes = gone | (pick == -1) if numbers[i] == BLOCKED else gone
                home = np.where(takes & rule & (home < 0), i, home).astype(np.int8)
        return self._shared(home)

    def _compute(self, work: Work, sums: _Sums, read: Numbers, written: Numbers, ways: Numbers) -> None:
        """Add the seconds of the kernel to `sums`."""
        machine = self.machine
        if work.product is Product.NONE:
            share = {Fuses.VIEW: 0.0, Fuses.MAP: WRITES * written, Fuses.PICK: written, Fuses.REDUCE: WRITES * read}
            moved = share.get(work.fuses, read + written)
            sums.compute = sums.compute + moved / machine.hbm_bandwidth
            sums.launches = float(work.fuses not in (Fuses.VIEW, Fuses.MAP))
            return
        flops = np.maximum(work.flops / ways, 1.0)
        dtype = work.eqn.ins[0].dtype
        fused = machine.attention or machine.fused_attention
        moved = (read + written) / machine.hbm_bandwidth

        def seconds(parts: float) -> Numbers:
            if work.product is Product.ATTENTION and fused:
                reached: Any = fused
            elif machine.efficiency:
                sizes, fractions = zip(*machine.efficiency, strict=True)
                reached = np.interp(np.log(flops / parts), np.log(sizes), fractions)
            else:
                reached = 1.0
            factor = machine.reached.get(dtype.name, 1.0)
            return np.maximum(flops / (machine.peak_of(dtype) * reached * factor), moved)

        time = seconds(1.0)
        sums.small = sums.small + np.maximum(0.0, seconds(PARTS) - time)
        sums.compute = sums.compute + time
        sums.launches = 1.0


@dataclass(frozen=True, eq=False)
class _Operand:
    """An operand that is stored: its homes, the numbers of its labels, and its bytes on one device."""

    v: Var
    homes: Homes
    numbers: Sequence[int]
    data: bool
    bytes: Numbers

    def label(self, k: int, none: Numbers) -> Numbers:
        """The label that holds axis `k`: -1 for none, `BLOCKED` for a dim that the operation needs whole."""
        home = self.homes[k]
        return home if home is none else np.array([*self.numbers, -1], np.int8)[home]
