"""The FLOPs of the equations that every program of a graph contains, for the bounds of layouts by their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..control import KEEP
from ..cost.machine import Machine
from ..ir import Eqn, Fuses, Graph, Product, Scan, Var, While, cse, dce, operations
from ..lowering.partition.expansions import EXPANSIONS
from ..ops.placement import PREFER, SHARD
from .floor import kernel_kind, least_product

__all__ = ["Flops", "certain", "flops_of", "flops_seconds", "loops", "results_of_kernels"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of one equation, summed over all devices, and its trip count."""

    kind: str  # matmul, conv, attention, vector
    flops: float
    dtype: np.dtype[Any]
    slow: bool  # transcendental
    trips: int
    loop: int | None  # number of the enclosing top-level loop, or None
    dims: frozenset[str]  # whose axes may split it


def certain(graph: Graph) -> Graph:
    """The equations of every program: no operands of `keep`, which it may replace, and equal equations once."""
    same: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        ins = tuple(same.get(v, v) for v in eqn.ins)
        if eqn.op in (PREFER, SHARD):
            same[eqn.outs[0]] = ins[0]
            continue
        eqns.append(eqn.replace(ins=() if eqn.op is KEEP else ins).map_graphs(certain))
    outs = tuple(same.get(v, v) for v in graph.outs)
    return dce(cse(graph.replace(eqns=tuple(eqns), outs=outs)))


def loops(graph: Graph) -> list[Eqn]:
    """The loops of the top level, in order; a loop's number is its index here."""
    return [eqn for eqn in graph.eqns if isinstance(eqn.control, Scan | While)]


def flops_of(
    graph: Graph, tied: Mapping[str, frozenset[str]], trips: int = 1, loop: int | None = None
) -> Iterator[Flops]:
    numbers = {eqn: i for i, eqn in enumerate(loops(graph))}
    for eqn in graph.eqns:
        if eqn in numbers:
            for sub in eqn.graphs().values():
                yield from flops_of(sub, tied, trips * eqn.trips, numbers[eqn] if loop is None else loop)
            continue
        kind = _kind(eqn)
        if kind:
            flops = operations(eqn, lambda v: tuple(d.size for d in v.dims))
            dtype = (eqn.ins if kind != "vector" else eqn.outs)[0].dtype
            dims = frozenset[str]().union(*(tied[d.name] for v in (*eqn.ins, *eqn.outs) for d in v.dims))
            yield Flops(kind, flops, dtype, eqn.operation.transcendental, trips, loop, dims)


def _kind(eqn: Eqn) -> str:
    op = eqn.operation
    if op.product is not Product.NONE:
        return kernel_kind(eqn)
    plain = op.fuses is Fuses.MAP and op.rule is None and op not in EXPANSIONS
    return "vector" if plain and eqn.ins and eqn.control is None else ""


def results_of_kernels(graph: Graph) -> int:
    """The number of top-level equations, without loops and views, that make a result."""
    outs = set(graph.outs)
    return sum(_kind(eqn) != "" and not outs.isdisjoint(eqn.outs) for eqn in graph.eqns)


def flops_seconds(work: Flops, ways: int, machine: Machine) -> float:
    """Minimum seconds of one trip, without launches, if its FLOPs are divided over at most `ways` devices."""
    flops = work.flops / ways
    if work.kind != "vector":
        return least_product(work.kind, flops, work.dtype, machine)
    if machine.attention:
        return 0.0  # in a fused attention kernel, elementwise operations are free
    return flops / (machine.transcendental if work.slow and machine.transcendental else machine.vector)
