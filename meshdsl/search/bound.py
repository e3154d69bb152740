"""Lower bounds of a layout's cost from its rules alone, without lowering anything.

A *partial* layout leaves dims undecided (option -1). Its bound holds for every completion.

Seconds. The program contains every einsum, convolution and elementwise operation of the graph, once per trip of the
enclosing loops. An axis splits at most one label of an operation, so its FLOPs on one device are at least the global
FLOPs over the sizes of all axes in the layout, and `roofline` charges a kernel at least for its products and its
elementwise FLOPs. All kernels share one lane, so their times add up. No kernel contains two reductions (`fusion`) or
writes the results of two equations. Launches are therefore at least: inside loops, one per product; outside, one per
product or one per equation that makes a result, whichever are more. Equations that become equal once placement
operations are removed may be merged, and count once; equations that a `keep` may replace, and arms of conditionals,
do not count.

Memory. An input is split at most by its rules, as `add_input` gives it one of their claims. The same holds for a
result, unless two of its dims claim one axis: then it is split at most by all axes of the layout. Inputs and results
are stored for the whole run, and a result reuses the buffer of at most one donated input of equal size.

Bytes sent: 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..control import KEEP
from ..cost.machine import Machine
from ..ir import Eqn, Fuses, Graph, Product, Scan, Var, While, cse, dce, operations
from ..layouts.layout import matches
from ..lowering.partition.expansions import EXPANSIONS
from ..lowering.partition.partition import shard_splits
from ..ops.placement import PREFER, SHARD
from .evaluate import watts
from .floor import Work, floor, kernel_kind, kernels, least_product
from .space import Space

__all__ = ["Amounts", "RuleBound", "loops", "rule_bound"]

UNDECIDED = -1


@dataclass(frozen=True, eq=False)
class Amounts:
    """One number per layout for each objective."""

    seconds: np.ndarray
    peak_bytes: np.ndarray
    wire_bytes: np.ndarray
    energy: np.ndarray


@dataclass(frozen=True)
class _Work:
    """FLOPs of one equation, summed over all devices, and its trip count."""

    kind: str  # matmul, conv, attention, vector
    flops: float
    dtype: np.dtype[Any]
    slow: bool  # transcendental
    trips: int
    loop: int | None  # number of the enclosing top-level loop, or None


@dataclass(frozen=True, eq=False)
class RuleBound:
    """Lower bounds for every layout of a space."""

    graph: Graph
    space: Space
    machine: Machine
    donated: frozenset[Var]
    results: tuple[str, ...]
    work: tuple[_Work, ...]
    kernels: tuple[Work, ...]  # of every program
    makers: int  # top-level equations, without loops and views, that make a result
    pinned: int  # axes that occur in every layout, as bits
    plain: bool  # True if programs are plain `partition` output; otherwise all bounds are `loose`
    _least: dict[int, tuple[float, dict[int, float]]] = field(default_factory=dict[int, Any], repr=False)

    def of(self, rows: np.ndarray) -> Amounts:
        """The bounds of layouts given as rows of option numbers; -1 for an undecided dim."""
        if not self.plain:
            return self._amounts(*(np.full(len(rows), amount) for amount in self.loose))
        used = np.full(len(rows), self.pinned, np.int64)
        for masks, options in zip(self._masks, rows.T, strict=True):
            used |= masks[options]
        kinds, which = np.unique(used, return_inverse=True)
        seconds = np.array([self.least(int(mask))[0] for mask in kinds])[which]
        ways = np.array([self.ways(int(mask)) for mask in kinds])[which]
        return self._amounts(seconds, self._memory(rows, ways))

    def _amounts(self, seconds: np.ndarray, peak: np.ndarray) -> Amounts:
        return Amounts(seconds, peak, np.zeros(len(seconds)), seconds * watts(self.machine, self.space.mesh))

    @cached_property
    def loose(self) -> tuple[float, float]:
        """Seconds and peak bytes of every layout and every weight update and overlap: kernels and inputs, divided.

        Sharded updates divide the update's elementwise operations and the weights further than the layout does, and
        casts may move out of loops; no pass removes a product or divides it over more devices than there are.
        """
        ways = self.space.mesh.size
        stored = sum(math.prod(d.size for d in v.shape) * v.dtype.itemsize for v in self.graph.ins)
        return floor(self.kernels, self.machine, ways), stored / ways

    def used(self, row: Sequence[int]) -> int:
        """The axes that occur in a layout, as bits."""
        return self.pinned | int(np.bitwise_or.reduce([0, *(m[n] for m, n in zip(self._masks, row, strict=True))]))

    def ways(self, used: int) -> int:
        """Number of devices that these axes can split a value over."""
        sizes = self.space.mesh.axes
        return math.prod(n for axis, n in sizes.items() if used & self.space.bits[axis])

    def least(self, used: int) -> tuple[float, dict[int, float]]:
        """Minimum seconds with these axes, and the part of them in each loop, by loop number."""
        if used not in self._least:
            ways, launch = self.ways(used), self.machine.launch
            parts, products = defaultdict[int | None, float](float), 0
            for each in self.work:
                launched = each.kind != "vector"
                products += launched and each.loop is None
                seconds = _seconds(each, ways, self.machine) + launch * (launched and each.loop is not None)
                parts[each.loop] += seconds * each.trips
            total = sum(parts.values()) + launch * max(products, self.makers)
            self._least[used] = total, {n: part for n, part in parts.items() if n is not None}
        return self._least[used]

    @cached_property
    def _masks(self) -> list[np.ndarray]:
        """Per dim, the axes of each option; the last entry, for an undecided dim, has all axes of its options."""
        return [np.append(masks, np.bitwise_or.reduce(masks)) for masks in self.space.masks]

    def _memory(self, rows: np.ndarray, ways: np.ndarray) -> np.ndarray:
        ins = {v: self._local(v, v.name, rows)[0] for v in self.graph.ins}
        outs = np.zeros(len(rows))
        for v, path in zip(self.graph.outs, self.results, strict=True):
            local, contested = self._local(v, path, rows)
            anyhow = math.prod(d.size for d in v.shape) * v.dtype.itemsize / ways
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
        for d in v.shape:
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
    given = frozenset(graph.ins[i] for i in donated)
    sure = _certain(graph)
    sure_outs = set(sure.outs)
    makers = sum(_kind(eqn) != "" and not sure_outs.isdisjoint(eqn.outs) for eqn in sure.eqns)
    return RuleBound(graph, space, machine, given, paths, tuple(_work(sure)), kernels(sure), makers, pinned, plain)


def _certain(graph: Graph) -> Graph:
    """The equations of every program: no operands of `keep`, which it may replace, and equal equations once."""
    same: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        ins = tuple(same.get(v, v) for v in eqn.ins)
        if eqn.op in (PREFER, SHARD):
            same[eqn.outs[0]] = ins[0]
            continue
        eqns.append(eqn.replace(ins=() if eqn.op is KEEP else ins).map_graphs(_certain))
    outs = tuple(same.get(v, v) for v in graph.outs)
    return dce(cse(graph.replace(eqns=tuple(eqns), outs=outs)))


def loops(graph: Graph) -> list[Eqn]:
    """The loops of the top level, in order; a loop's number is its index here."""
    return [eqn for eqn in graph.eqns if isinstance(eqn.control, Scan | While)]


def _work(graph: Graph, trips: int = 1, loop: int | None = None) -> Iterator[_Work]:
    numbers = {eqn: i for i, eqn in enumerate(loops(graph))}
    for eqn in graph.eqns:
        if eqn in numbers:
            for sub in eqn.graphs().values():
                yield from _work(sub, trips * eqn.trips, numbers[eqn] if loop is None else loop)
            continue
        kind = _kind(eqn)
        if kind:
            flops = operations(eqn, lambda v: tuple(d.size for d in v.shape))
            dtype = (eqn.ins if kind != "vector" else eqn.outs)[0].dtype
            yield _Work(kind, flops, dtype, eqn.operation.transcendental, trips, loop)


def _kind(eqn: Eqn) -> str:
    op = eqn.operation
    if op.product is not Product.NONE:
        return kernel_kind(eqn)
    plain = op.fuses is Fuses.MAP and op.rule is None and op not in EXPANSIONS
    return "vector" if plain and eqn.ins and eqn.control is None else ""


def _seconds(work: _Work, ways: int, machine: Machine) -> float:
    """Minimum seconds of one trip, without launches, if its FLOPs are divided over at most `ways` devices."""
    flops = work.flops / ways
    if work.kind != "vector":
        return least_product(work.kind, flops, work.dtype, machine)
    if machine.attention:
        return 0.0  # in a fused attention kernel, elementwise operations are free
    return flops / (machine.transcendental if work.slow and machine.transcendental else machine.vector)
