"""Find the equations of one weight update, and rewrite them on the private dims by which it is split."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from ...dims import Dim, Shape
from ...errors import ShapeError
from ...ir import Eqn, Graph, Scan, Type, Var
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.dtypes import CAST
from .pending import ShardedGraph, Sums

__all__ = ["CannotShardError", "Format", "UpdateRegion", "Region", "equations", "renamed", "uses"]


class CannotShardError(Exception):
    """The update cannot be sharded; the text gives the reason."""


@dataclass(frozen=True)
class Format:
    """The split of an update: each split dim, its private name, and all axes that split it."""

    dims: tuple[tuple[Dim, Dim, Axes], ...]
    padding_ratio: float  # stored elements per real element
    ways: int  # number of shards

    def renamed(self, shape: Shape) -> Shape:
        """The dims, with split dims under their private names."""
        new = {old: to for old, to, _ in self.dims}
        return tuple(new.get(d, d) for d in shape)

    def cuts(self, v: Var) -> bool:
        """True if a value has one of the split dims."""
        return any(old in v.dims for old, _, _ in self.dims)


@dataclass(frozen=True, eq=False)
class UpdateRegion:
    """The equations of an update in one graph: the step, or a loop body whose stacked result is a gradient."""

    sums: tuple[Var, ...]
    eqns: frozenset[Eqn]
    inner: frozenset[Var]  # its values with a split dim, including the weight and the optimizer state
    loops: tuple[tuple[Eqn, int, UpdateRegion], ...]  # loops, with the number of the result that leaves them split


def equations(part: UpdateRegion) -> Iterator[Eqn]:
    yield from part.eqns
    for _, _, inner in part.loops:
        yield from equations(inner)


@lru_cache(maxsize=64)
def uses(graph: Graph) -> tuple[Mapping[Var, Eqn], Mapping[Var, set[Eqn]]]:
    """The equation that computes each value of a graph, and the equations that read it."""
    readers = defaultdict[Var, set[Eqn]](set)
    for eqn in graph.eqns:
        for v in eqn.ins:
            readers[v].add(eqn)
    return {v: eqn for eqn in graph.eqns for v in eqn.outs}, readers


class Region:
    """Collects one update: all values downstream of its sums with a split dim, and all values that only these read."""

    def __init__(
        self,
        placed: ShardedGraph,
        graph: Graph,
        form: Format,
        sums: Sums,
        group: Axes,
        pairs: Sequence[tuple[Var, Var]],
        owners: Mapping[Eqn, str],  # equations of other updates -> the name of their weight
    ):
        self.placed, self.graph, self.form, self.sums, self.group = placed, graph, form, sums, group
        self.replaced = dict(pairs)
        self.owners = owners
        self.eqns: set[Eqn] = set()
        self.inner: set[Var] = set()
        self.carried: list[Var] = []

    def grow(self) -> UpdateRegion:
        """Collect the whole update in this graph and in the loop bodies that compute its gradients.

        Raises `CannotShardError` if the update cannot be split.
        """
        graph = self.graph
        producers, readers = uses(graph)
        loops = tuple((eqn, i, self.body(eqn, i, inner)) for eqn, i, inner in self.sums.loops)
        stacked = [eqn.outs[i] for eqn, i, _ in loops]
        self.inner.update(stacked)
        queue = [*self.sums.in_graph, *stacked]
        while queue:
            for eqn in readers[queue.pop()] - self.eqns:
                queue += self.take(eqn)
        while True:
            needed = (
                {v for eqn in self.eqns for v in eqn.ins if self.form.cuts(v)} - self.inner - set(self.sums.in_graph)
            )
            inputs = [v for v in graph.ins if v in needed and self.replaced.get(v) in self.inner]
            inner_producers = {
                producers[v] for v in needed if v in producers and readers[v] <= self.eqns and v not in graph.outs
            }
            inner_producers = {eqn for eqn in inner_producers if eqn.control is None}
            for eqn in inner_producers:
                if any(set(self.placed.shardings.get(v, Sharding()).varying) & set(self.group) for v in eqn.outs):
                    raise CannotShardError(f"{eqn.op} at {eqn.where} differs between the devices of its group")
                self.take(eqn)
            self.carried += inputs
            self.inner.update(inputs)
            if not inputs and not inner_producers:
                break
        for v in self.carried:  # the all-gather sends the value that is read, after the cast to the compute dtype
            for eqn in readers[v] - self.eqns:
                if eqn.op is CAST and eqn.outs[0].dtype.itemsize < v.dtype.itemsize:
                    self.take(eqn)
        return UpdateRegion(self.sums.in_graph, frozenset(self.eqns), frozenset(self.inner), loops)

    def body(self, loop: Eqn, i: int, sums: Sums) -> UpdateRegion:
        """The part of a loop body that computes one of its stacked results."""
        assert isinstance(loop.control, Scan)
        body = loop.control.body
        part = Region(self.placed, body, self.form, sums, self.group, (), self.owners).grow()
        out = body.outs[i]
        other_reads = {v for eqn in body.eqns if eqn not in part.eqns for v in eqn.ins} | set(body.outs) - {out}
        if out not in part.inner | set(part.sums) or other_reads & part.inner:
            raise CannotShardError(f"the loop at {loop.where} reads its gradient")
        return part

    def take(self, eqn: Eqn) -> list[Var]:
        """Add an equation; returns its results that have a split dim."""
        if eqn.control is not None:
            raise CannotShardError(f"its update is inside a {eqn.op.name} at {eqn.where}")
        if eqn in self.owners:
            raise CannotShardError(f"it is computed together with the update of {self.owners[eqn]} at {eqn.where}")
        renamed(eqn, self.form)
        self.eqns.add(eqn)
        split_outs = [v for v in eqn.outs if self.form.cuts(v)]
        self.inner.update(split_outs)
        return split_outs


def renamed(eqn: Eqn, form: Format) -> Eqn:
    """The equation on private dims; raises `CannotShardError` if the operation's rule refuses them."""
    new = {old: to for old, to, _ in form.dims}
    params = {key: _substitute(value, new) for key, value in eqn.params.items()}
    ins = [Type(form.renamed(v.dims), v.dtype) for v in eqn.ins]
    outs = tuple(dataclasses.replace(v, dims=form.renamed(v.dims)) for v in eqn.outs)
    try:
        inferred = eqn.operation.infer(ins, params)
    except (ShapeError, KeyError, ValueError) as error:
        raise CannotShardError(f"{eqn.op} at {eqn.where} cannot take a part of it: {error}") from None
    if inferred != tuple(v.type for v in outs):
        raise CannotShardError(f"{eqn.op} at {eqn.where} fixes the dims of its result")
    return dataclasses.replace(eqn, params=params, outs=outs)


def _substitute(value: Any, new: Mapping[Dim, Dim]) -> Any:
    if isinstance(value, Dim):
        return new.get(value, value)
    if isinstance(value, tuple):
        return tuple(_substitute(item, new) for item in cast("tuple[Any, ...]", value))
    return value
