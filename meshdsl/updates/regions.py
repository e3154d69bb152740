"""The equations of one weight update, and the private dims by which they are split; `grow` finds them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..dims import Dim, Shape
from ..errors import ShapeError
from ..ir import Cond, Eqn, Graph, Type, Var, params_with, walk
from ..layouts.sharding import Axes
from ..ops.placement import PREFER


class CannotShardError(Exception):
    """The update cannot be sharded; the text gives the reason. `by_layout`: the layout shards it already."""

    def __init__(self, reason: str, by_layout: bool = False):
        super().__init__(reason)
        self.by_layout = by_layout


@dataclass(frozen=True)
class Format:
    """The split of an update: each split dim, its private name, and all axes that split it."""

    dims: tuple[tuple[Dim, Dim, Axes], ...]
    padding_ratio: float  # stored elements per real element
    ways: int  # number of shards
    kept: tuple[tuple[str, Axes], ...] = ()  # other dims that the layout splits

    def renamed(self, shape: Shape) -> Shape:
        """The dims, with split dims under their private names."""
        new = {old: to for old, to, _ in self.dims}
        return tuple(new.get(d, d) for d in shape)

    def cuts(self, v: Var) -> bool:
        """True if a value has one of the split dims."""
        return any(old in v.dims for old, _, _ in self.dims)


@dataclass(frozen=True, eq=False)
class UpdateRegion:
    """The equations of an update in one graph: the step, a branch, or a loop body that stacks a gradient."""

    sums: tuple[Var, ...]
    eqns: frozenset[Eqn]
    inner: frozenset[Var]  # its values with a split dim, including the weight and the optimizer state
    loops: tuple[tuple[Eqn, int, UpdateRegion], ...]  # loops, with the number of the result that leaves them split
    branches: tuple[BranchRegion, ...]
    gathered: tuple[tuple[Var, float], ...]  # values that others read, with how often they are gathered for that


@dataclass(frozen=True, eq=False)
class BranchRegion:
    """The part of an update in the two graphs of a branch."""

    eqn: Eqn
    entering: frozenset[int]  # operands, without the predicate, that enter it split
    leaving: frozenset[int]  # results that leave it split
    graphs: Mapping[str, UpdateRegion]  # by name of the graph


def equations(part: UpdateRegion) -> Iterator[Eqn]:
    yield from part.eqns
    for _, _, inner in part.loops:
        yield from equations(inner)
    for branch in part.branches:
        for inner in branch.graphs.values():
            yield from equations(inner)


def leaving_branches(part: UpdateRegion) -> Iterator[Var]:
    """The results of branches that an update computes as one shard, also of branches inside them."""
    for branch in part.branches:
        yield from (branch.eqn.outs[i] for i in branch.leaving)
        for inner in branch.graphs.values():
            yield from leaving_branches(inner)


class Uses(NamedTuple):
    """For each value of a graph: the equations that read it, and the numbers of its results."""

    readers: Mapping[Var, set[Eqn]]
    results: Mapping[Var, Sequence[int]]
    branches: Sequence[Eqn]  # of the graph


@lru_cache(maxsize=64)
def uses(graph: Graph) -> Uses:
    """How the values of a graph are used."""
    readers, results = defaultdict[Var, set[Eqn]](set), dict[Var, list[int]]()
    for v, eqns in graph.readers.items():
        readers[v].update(eqns)
    for i, v in enumerate(graph.outs):
        results.setdefault(v, []).append(i)
    branches = [eqn for eqn in graph.eqns if isinstance(eqn.control, Cond)]
    return Uses(readers, results, branches)


def is_loop_over_parts(eqn: Eqn) -> bool:
    """True for a loop with a forward and a backward pass in each trip: over steps, micro-batches or ticks."""
    return eqn.scan is not None and not eqn.backward and any(inner.backward for inner, _ in walk(eqn.scan.body))


def renamed(eqn: Eqn, form: Format) -> Eqn:
    """The equation on private dims; raises `CannotShardError` if the operation's rule refuses them."""
    new = {old: to for old, to, _ in form.dims}
    params = params_with(eqn, new)
    if eqn.op is PREFER:
        names = {old.name: to.name for old, to in new.items()}
        params["names"] = tuple(names.get(name, name) for name in eqn.params["names"])
    ins = [Type(form.renamed(v.dims), v.dtype) for v in eqn.ins]
    outs = tuple(dataclasses.replace(v, dims=form.renamed(v.dims)) for v in eqn.outs)
    try:
        inferred = eqn.operation.infer(ins, params)
    except (ShapeError, KeyError, ValueError) as error:
        raise CannotShardError(f"{eqn.op} at {eqn.where} cannot take a part of it: {error}") from None
    if inferred != tuple(v.type for v in outs):
        raise CannotShardError(f"{eqn.op} at {eqn.where} fixes the dims of its result")
    return dataclasses.replace(eqn, params=params, outs=outs)
