"""The least seconds of a step on a number of devices, for every layout, weight update and overlap.

All kernels of a device share its compute lane, so their times add up. A kernel computes at most one product or
reduction (`fusion`), and each device computes at least its share of the FLOPs. Hence one kernel for each product and
each reduction. A kernel reads its operands, or what they are computed from; `_Reads` has the least bytes of that. At
the top level, each elementwise equation that makes a result writes it in a kernel of its own; it counts if no product
can be in that kernel. Other elementwise equations do not count, because they may run in any kernel.

Values that a loop takes from stacks or as constants count 0 bytes: rematerialisation replaces some of them, and casts
of weights may move out of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..control import KEEP
from ..cost.attention import PLAIN
from ..cost.machine import Machine
from ..ir import Eqn, Fuses, Graph, Op, Product, Scan, Var, While, cse, dce, operations, without
from ..lowering.partition.expansions import EXPANSIONS
from ..ops.placement import PREFER, SHARD


@dataclass(frozen=True)
class KernelWork:
    """The least FLOPs and bytes of one kernel, summed over all devices, and its trip count."""

    kind: str  # matmul, conv, attention, reduce, result
    flops: float
    reads: float
    writes: float
    dtype: np.dtype[Any]
    trips: int
    inside: bool  # of a loop


def floor(works: Iterable[KernelWork], machine: Machine, devices: int) -> float:
    """Seconds of these kernels on each of `devices` devices that share them evenly."""
    return sum(_kernel_seconds(each, machine, devices) * each.trips for each in works)


def _kernel_seconds(work: KernelWork, machine: Machine, devices: int) -> float:
    """Seconds of a kernel, once, on each of `devices` devices that share it evenly."""
    flops, moved = work.flops / devices, (work.reads + work.writes) / devices
    reach = max((y for _, y in machine.memory), default=1.0)
    # a fused attention kernel moves no scores, and its elementwise operations are free
    memory = 0.0 if machine.attention and work.kind != "result" else moved / (machine.hbm_bandwidth * reach)
    if work.kind in ("matmul", "conv", "attention"):
        computing = _least_product(work.kind, flops, work.dtype, machine)
    else:
        computing = 0.0 if machine.attention else flops / machine.vector
    return max(max(computing, memory) + machine.launch, machine.operation)


def _least_product(kind: str, flops: float, dtype: np.dtype[Any], machine: Machine) -> float:
    """Least seconds of products with this many FLOPs on one device, without launch and memory."""
    curve = (machine.convolution if kind == "conv" else ()) or machine.efficiency
    computing = machine.conv_seconds if kind == "conv" else machine.matmul_seconds
    best = max((y for _, y in curve), default=1.0)
    product = computing(flops, dtype) if _rises(curve) else flops / (machine.peak_of(dtype) * best)
    reached = machine.attention or (machine.fused_attention if kind == "attention" else 0.0)
    if reached and kind != "conv":
        part = 1.0 if kind == "attention" else PLAIN
        product = min(product, part * flops / (machine.peak_of(dtype) * reached))
    return min(product, flops / machine.vector)  # a product that sums over one local element is elementwise


def _rises(curve: Sequence[tuple[float, float]]) -> bool:
    """True if efficiency never falls and seconds never fall as FLOPs grow."""
    pairs = list(pairwise(curve))
    return all(y0 <= y1 and (y1 - y0) / math.log(x1 / x0) <= y0 for (x0, y0), (x1, y1) in pairs)


def kernels(graph: Graph) -> tuple[KernelWork, ...]:
    """The kernels that every program of a graph contains, loops included."""
    sure = certain(graph)
    return (*_inside(sure, {v: float(_bytes(v)) for v in sure.ins}), *_results(sure))


def certain(graph: Graph) -> Graph:
    """The equations of every program: no operands of `keep`, which it may replace, and equal equations once."""
    plain = without(graph, lambda eqn: eqn.op in (PREFER, SHARD))
    eqns = [(eqn.replace(ins=()) if eqn.op is KEEP else eqn).map_graphs(certain) for eqn in plain.eqns]
    return dce(cse(plain.replace(eqns=tuple(eqns))))


def _inside(
    graph: Graph, input_bytes: Mapping[Var, float], trips: int = 1, inside: bool = False
) -> Iterator[KernelWork]:
    reads = _Reads(graph, input_bytes)
    for eqn in graph.eqns:
        if isinstance(eqn.control, Scan | While):
            for sub in eqn.graphs().values():
                _, carries, *_ = eqn.control.inputs(sub.ins)
                read = {v: float(_bytes(v)) for v in carries}
                yield from _inside(sub, read, trips * eqn.trips, True)
        elif kind := _kernel_kind(eqn):
            flops = operations(eqn, lambda v: tuple(d.size for d in v.dims))
            read, _ = reads.of(eqn)
            yield KernelWork(kind, flops, read, 0.0, eqn.ins[0].dtype, trips, inside)


def _kernel_kind(eqn: Eqn) -> str:
    """The kind of an equation's kernel if every program has one for it and for no other product or reduction."""
    op = eqn.operation
    if op.product is not Product.NONE:
        several = op.product is Product.MATMUL and len(eqn.ins) != 2
        return "" if several else str(op.product)
    plain = op.rule is None and op not in EXPANSIONS and eqn.control is None and eqn.ins
    return "reduce" if op.fuses is Fuses.REDUCE and plain else ""


def _results(graph: Graph) -> Iterator[KernelWork]:
    """The kernels of top-level elementwise equations that make results and cannot be part of a product's kernel."""
    results = set(graph.outs)
    reads = _Reads(graph, {v: float(_bytes(v)) for v in graph.ins}, results)
    reduced = {v: _count(v) for eqn in graph.eqns if _fuses(eqn) is Fuses.REDUCE for v in eqn.outs}
    for eqn in graph.eqns:
        if _fuses(eqn) is not Fuses.MAP or not eqn.ins or results.isdisjoint(eqn.outs):
            continue
        (out,) = eqn.outs
        read, sources = reads.of(eqn)
        if all(reduced.get(v) != _count(out) for v in sources):
            yield KernelWork("result", 0.0, read, float(_bytes(out)), out.dtype, 1, False)


class _Reads:
    """For each value, the least bytes that a kernel reads to have it, and the stored values that it depends on.

    The kernel reads the value itself, or the elementwise equation that makes the value runs in the kernel and its
    operands are read. Operands that depend on different stored values are read one by one.
    """

    def __init__(self, graph: Graph, input_bytes: Mapping[Var, float], stored: Collection[Var] = ()):
        self.bytes: dict[Var, float] = {v: input_bytes.get(v, 0.0) for v in graph.ins}
        self.sources: dict[Var, frozenset[Var]] = {v: frozenset((v,)) for v in graph.ins}
        for eqn in graph.eqns:
            inside = _fuses(eqn) in (Fuses.MAP, Fuses.VIEW)
            read, sources = self.of(eqn) if inside else (math.inf, frozenset[Var]())
            unknown = eqn.op is KEEP or _fuses(eqn) is Fuses.PICK
            for v in eqn.outs:
                whole = inside and not (v in stored and _fuses(eqn) is Fuses.MAP)
                self.bytes[v] = 0.0 if unknown else min(float(_bytes(v)), read if whole else math.inf)
                self.sources[v] = sources if whole else frozenset((v,))

    def of(self, eqn: Eqn) -> tuple[float, frozenset[Var]]:
        """The least bytes that are read for the operands of an equation, and what they depend on."""
        ins = list(dict.fromkeys(eqn.ins))
        sources = frozenset[Var]().union(*(self.sources[v] for v in ins))
        apart = sum(len(self.sources[v]) for v in ins) == len(sources)
        amounts = [self.bytes[v] for v in ins]
        return float(sum(amounts) if apart else max(amounts, default=0.0)), sources


def _fuses(eqn: Eqn) -> Fuses:
    return eqn.op.fuses if isinstance(eqn.op, Op) and eqn.control is None else Fuses.KERNEL


def _bytes(v: Var) -> int:
    return _count(v) * v.dtype.itemsize


def _count(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
