"""Lower bounds of a layout's cost from its rules alone, without lowering anything.

A *partial* layout leaves dims undecided (option -1). Its bound holds for every completion.

Seconds. All kernels share one lane, so their times add up. An axis splits at most one label of an operation, and only
if the layout gives it to a dim that is tied to one of the operation's dims (`tied_dims`). Each device does at least the
share of an operation that these axes leave to it. This bounds the kernels of each loop, and those outside, in two ways;
the larger bound counts.

* By FLOPs: the program contains every product and elementwise operation of the graph, once per trip of the enclosing
  loops, and `roofline` charges a kernel at least for its FLOPs. No kernel contains two reductions (`fusion`) or writes
  the results of two equations. Launches are therefore at least: inside loops, one per product; outside, one per product
  or one per equation that makes a result, whichever are more.
* By kernels: each product, reduction and update has a kernel of its own, with its FLOPs and the bytes that it reads
  and writes (`floor`).

Equations that become equal once placement operations are removed may be merged, and count once; equations that a `keep`
may replace, and arms of conditionals, do not count.

Memory. An input is split at most by its rules, as `add_input` gives it one of their claims. The same holds for a
result, unless two of its dims claim one axis: then it is split at most by all axes of the layout. Inputs and results
are stored for the whole run, and a result reuses the buffer of at most one donated input of equal size.

Bytes sent: 0.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..cost.machine import Machine
from ..ir import Graph, Var
from ..layouts.layout import matches
from ..lowering.partition.partition import shard_splits
from .evaluate import watts
from .floor import Work, floor, kernel_seconds, kernels
from .flops import Flops, certain, flops_of, flops_seconds, loops, results_of_kernels
from .space import Space
from .tied_dims import tied_dims

__all__ = ["Amounts", "RuleBound", "rule_bound"]

UNDECIDED = -1
CHUNK = 100_000  # layouts bounded at once
Least = tuple[float, dict[int, float]]  # seconds, and the part of them in each loop


@dataclass(frozen=True, eq=False)
class Amounts:
    """One number per layout for each objective."""

    seconds: np.ndarray
    peak_bytes: np.ndarray
    wire_bytes: np.ndarray
    energy: np.ndarray


@dataclass(frozen=True, eq=False)
class RuleBound:
    """Lower bounds for every layout of a space."""

    graph: Graph
    space: Space
    machine: Machine
    donated: frozenset[Var]
    results: tuple[str, ...]
    work: tuple[Flops, ...]
    kernels: tuple[Work, ...]  # of every program
    makers: int  # top-level equations, without loops and views, that make a result
    pinned: int  # axes that occur in every layout, as bits
    plain: bool  # True if programs are plain `partition` output; otherwise all bounds are `loose`
    _least: dict[tuple[int, ...], Least] = field(default_factory=dict[tuple[int, ...], Any], repr=False)

    def of(self, rows: np.ndarray) -> Amounts:
        """The bounds of layouts given as rows of option numbers; -1 for an undecided dim."""
        if not self.plain:
            return self._amounts(*(np.full(len(rows), amount) for amount in self.loose))
        ways = np.array([self.ways(axes) for axes in range(1 << len(self.space.bits))])
        used = self._axes(rows, self.space.dims)
        chunks = [self._parts(rows[i : i + CHUNK]).sum(axis=0) for i in range(0, len(rows), CHUNK)]
        return self._amounts(np.concatenate([np.zeros(0), *chunks]), self._memory(rows, ways[used]))

    def _axes(self, rows: np.ndarray, dims: Collection[str]) -> np.ndarray:
        """By layout, the axes of these dims, as bits."""
        used = np.full(len(rows), self.pinned, np.int64)
        for d, masks, options in zip(self.space.dims, self._masks, rows.T, strict=True):
            if d in dims:
                used |= masks[options]
        return used

    def _amounts(self, seconds: np.ndarray, peak: np.ndarray) -> Amounts:
        return Amounts(seconds, peak, np.zeros(len(seconds)), seconds * watts(self.machine, self.space.mesh))

    @cached_property
    def loose(self) -> tuple[float, float]:
        """Seconds and peak bytes of every layout and every weight update and overlap: kernels and inputs, divided.

        Sharded updates divide the update's elementwise operations and the weights further than the layout does, and
        casts may move out of loops; no pass removes a product or divides it over more devices than there are.
        """
        ways = self.space.mesh.size
        stored = sum(math.prod(d.size for d in v.dims) * v.dtype.itemsize for v in self.graph.ins)
        return floor(self.kernels, self.machine, ways), stored / ways

    def ways(self, used: int) -> int:
        """Number of devices that these axes can split a value over."""
        sizes = self.space.mesh.axes
        return math.prod(n for axis, n in sizes.items() if used & self.space.bits[axis])

    def least(self, row: Sequence[int]) -> Least:
        """Minimum seconds of a layout, and the part of them in each loop, by loop number."""
        masks = [masks[n] for masks, n in zip(self._mask_lists, row, strict=True)]
        key = tuple([functools.reduce(int.__or__, [masks[i] for i in group], self.pinned) for group in self._groups])
        if key not in self._least:
            parts = [seconds[:, :, axes] for seconds, axes in zip(self._groups.values(), key, strict=True)]
            outside, *inside = np.sum(parts, axis=0).max(axis=0).tolist()
            self._least[key] = outside + sum(inside), dict(enumerate(inside))
        return self._least[key]

    def _parts(self, rows: np.ndarray) -> np.ndarray:
        """Minimum seconds outside loops and in each loop, by layout: [1 + loops, layouts]."""
        parts = np.zeros((2, 1 + len(loops(self.graph)), len(rows)))
        for group, seconds in self._groups.items():
            parts += seconds[:, :, self._axes(rows, [self.space.dims[i] for i in group])]
        return parts.max(axis=0)

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], np.ndarray]:
        """The seconds of operations, by the numbers of the dims whose axes may split them.

        Each array has the bounds by FLOPs and by kernels, outside loops and in each loop, by the bits of the axes:
        [2, 1 + loops, sets of axes].
        """
        sets = 1 << len(self.space.bits)
        zero = np.zeros((2, 1 + len(loops(self.graph)), sets))
        groups: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: zero.copy())
        ways = [self.ways(axes) for axes in range(sets)]
        groups[()][0, 0] = self._launches
        for by, each in (*((0, work) for work in self.work), *((1, work) for work in self.kernels)):
            group = tuple(i for i, d in enumerate(self.space.dims) if d in each.dims)
            part = 0 if each.loop is None else 1 + each.loop
            for axes, n in enumerate(ways):
                groups[group][by, part, axes] += self._seconds(each, n) * each.trips
        return dict(groups)

    def _seconds(self, work: Flops | Work, ways: int) -> float:
        if isinstance(work, Work):
            return kernel_seconds(work, self.machine, ways)
        launched = work.kind != "vector" and work.loop is not None
        return flops_seconds(work, ways, self.machine) + self.machine.launch * launched

    @cached_property
    def _launches(self) -> float:
        """Seconds of the launches outside loops, in the bound by FLOPs."""
        products = sum(each.kind != "vector" and each.loop is None for each in self.work)
        return self.machine.launch * max(products, self.makers)

    @cached_property
    def _masks(self) -> list[np.ndarray]:
        """Per dim, the axes of each option; the last entry, for an undecided dim, has all axes of its options."""
        return [np.append(masks, np.bitwise_or.reduce(masks)) for masks in self.space.masks]

    @cached_property
    def _mask_lists(self) -> list[list[int]]:
        return [masks.tolist() for masks in self._masks]

    def _memory(self, rows: np.ndarray, ways: np.ndarray) -> np.ndarray:
        ins = {v: self._local(v, v.name, rows)[0] for v in self.graph.ins}
        outs = np.zeros(len(rows))
        for v, path in zip(self.graph.outs, self.results, strict=True):
            local, contested = self._local(v, path, rows)
            anyhow = math.prod(d.size for d in v.dims) * v.dtype.itemsize / ways
            outs += np.where(contested, np.minimum(local, anyhow), local)
        zero = np.zeros(len(rows))
        kept = sum((local for v, local in ins.items() if v not in self.donated), zero)
        return np.maximum(sum(ins.values(), zero), kept + outs)

    def _local(self, v: Var, path: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of a value on one device if its rules split it; and whether two of its dims claim one axis."""
        space, mesh = self.space, self.space.mesh
        fixed = space.fixed.on(mesh)
        own = {d: cut for pattern, rule in fixed.overrides.items() if matches(path, pattern) for d, cut in rule.items()}
        local, used = np.full(len(rows), float(v.dtype.itemsize)), np.zeros(len(rows), np.int64)
        contested = np.zeros(len(rows), bool)
        for d in v.dims:
            if d.name in space.dims and d.name not in own:
                i = space.dims.index(d.name)
                counts = np.array([mesh.count(cut) for cut in space.options[i]])
                pieces, mask = np.append(counts, counts.max())[rows[:, i]], self._masks[i][rows[:, i]]
            else:
                cut = own.get(d.name, fixed.axes(d.name))
                pieces, mask = np.array(mesh.count(cut)), np.array(sum(space.bits[axis] for axis in cut))
            contested |= (used & mask) != 0
            used |= mask
            local *= -(-d.size // pieces)
        return local, contested


def rule_bound(
    graph: Graph,
    space: Space,
    machine: Machine,
    donated: Sequence[int] = (),
    results: Sequence[str] | None = None,
    plain: bool = True,
) -> RuleBound:
    """The bounds of all layouts of a space on a machine; `donated` are input numbers, `results` the results' paths.

    >>> import meshdsl as md
    >>> from meshdsl.search.space import space
    >>> graph = md.compile(lambda x, w: md.dot(x, w, "io"), "all:4").graph(md.spec("n:8 io:8"), md.spec("io:8 h:8"))
    >>> candidates = space(graph, md.Mesh("all:4"))
    >>> bound = rule_bound(graph, candidates, md.machine("tpu-v5e"))
    >>> whole, rows, undecided = bound.of(np.array([[0, 0, 0], [1, 0, 0], [-1, -1, -1]])).peak_bytes.tolist()
    >>> whole, rows, undecided  # x, w and the result have 256 bytes each
    (768.0, 384.0, 48.0)
    """
    fixed = space.fixed.on(space.mesh)
    rules = (fixed.rules, *fixed.overrides.values(), *shard_splits(graph))
    axes = {axis for rule in rules for cut in rule.values() for axis in cut}
    pinned = sum(bit for axis, bit in space.bits.items() if axis in axes)
    paths = tuple(results) if results else ("",) * len(graph.outs)
    donated_inputs = frozenset(graph.ins[i] for i in donated)
    sure, tied = certain(graph), tied_dims(graph)
    work, makers = tuple(flops_of(sure, tied)), results_of_kernels(sure)
    return RuleBound(graph, space, machine, donated_inputs, paths, work, kernels(sure, tied), makers, pinned, plain)
