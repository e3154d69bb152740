"""Automatic cross-replica sharding of the weight update (Xu et al., 2020).

Devices that hold the same weight compute the same update. This pass splits that work, and what only it needs: of
each weight whose gradient is a pending sum over some mesh axes it cuts a dim over those axes too. The cut dim gets a
name of its own (`io__rows`), so the rest of the model stays as it was: where the gradient comes in, the rename is a
reduce-scatter; where the forward pass reads the weight, it is an all-gather. Both follow from the types.

The redundancy analysis is the partitioner's own: `homes` says how every value lies, loops at their fixed point.
"""

from __future__ import annotations

import dataclasses
import glob
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

from ..dims import Dim, Shape
from ..errors import ShapeError
from ..ir import Eqn, Graph, Type, Var, verify
from ..layouts import Extents, Layout, Mesh, Sharding
from ..layouts.sharding import Axes
from ..ops.placement import SHARD
from ..ops.reshape import RENAME

__all__ = ["Decision", "Format", "Placed", "Update", "Worth", "shard_updates"]


@dataclass(frozen=True)
class Placed:
    """A graph with where its values lie: what the partitioner found without this pass."""

    graph: Graph
    results: Sequence[str]  # the paths of the results
    homes: Mapping[Var, Sharding]
    mesh: Mesh
    extents: Extents
    layout: Layout

    def bytes(self, v: Var) -> int:
        """What one device stores of a value."""
        sizes = self.extents.local_shape(v.shape, self.homes[v].whole(), self.mesh)
        return math.prod(sizes) * v.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """How an update is cut: each cut dim with its private name and all axes that cut it then."""

    dims: tuple[tuple[Dim, Dim, Axes], ...]
    waste: float  # stored elements per real one
    ways: int  # shards

    def renamed(self, shape: Shape) -> Shape:
        """These dims with the cut ones under their private names."""
        new = {old: to for old, to, _ in self.dims}
        return tuple(new.get(d, d) for d in shape)

    def cuts(self, v: Var) -> bool:
        """Whether a value has one of the cut dims."""
        return any(old in v.shape for old, _, _ in self.dims)


@dataclass(frozen=True, eq=False)
class Update:
    """The update of one weight: the pending sums that it starts from, and how it would be cut."""

    weight: Var
    sums: tuple[Var, ...]
    axes: Axes  # over which the sums are pending, so the update is redundant
    format: Format
    eqns: frozenset[Eqn]
    inner: frozenset[Var]  # its values with a cut dim, the weight and the optimizer's state among them
    carried: tuple[Var, ...]  # inputs of the step that stay cut between steps


@dataclass(frozen=True)
class Decision:
    """What was done with one weight, and why. Bytes are of one device, seconds of one step."""

    weight: str
    shape: Shape
    group: Axes  # the axes over which its update was redundant
    split: tuple[tuple[str, Axes], ...]  # the dims cut for the update, and by what
    sharded: bool
    reason: str
    bytes_saved: int = 0
    seconds_saved: float | None = None  # where a machine was asked


Worth = Callable[[Update], tuple[bool, float | None, str]]  # whether to shard, seconds saved, why


class CannotShardError(Exception):
    """This update stays as it is; the text says why."""


def shard_updates(placed: Placed, worth: Worth) -> tuple[Graph, Layout, tuple[Decision, ...]]:
    """The graph with private dims in its updates, a layout that cuts them, and a decision for each weight.

    Weights are the inputs that results of the same path and type replace (`params/w` and `0/w`), of the first argument
    that has such.
    """
    pairs = _carried(placed)
    root = next((v.name.partition("/")[0] for v, _ in pairs), "")
    chosen: list[Update] = []
    decisions: list[Decision] = []
    for v, out in pairs:
        if v.name.partition("/")[0] != root:
            continue
        try:
            update = _update(placed, v, out, pairs, chosen)
        except CannotShardError as problem:
            decisions.append(Decision(v.name, v.shape, (), (), False, str(problem)))
            continue
        wanted, seconds, reason = worth(update)
        form = update.format
        saved = sum(n - int(n * form.waste / form.ways) for n in map(placed.bytes, update.carried)) if wanted else 0
        split = tuple((old.name, axes) for old, _, axes in form.dims)
        decisions.append(Decision(v.name, v.shape, update.axes, split, wanted, reason, saved, seconds))
        if wanted:
            chosen.append(update)
    if not chosen:
        return placed.graph, placed.layout, tuple(decisions)
    graph = verify(_Rewrite(placed, chosen, pairs).graph(), "shard_updates")
    return graph, _with_private(placed, chosen), tuple(decisions)


def _carried(placed: Placed) -> list[tuple[Var, Var]]:
    """Inputs with the results that have the same path and type, the argument's and the result's own name aside."""
    tails: dict[str, list[Var]] = defaultdict(list)
    for v, path in zip(placed.graph.outs, placed.results, strict=True):
        for tail in {path, path.partition("/")[2]} - {""}:
            tails[tail].append(v)
    pairs: list[tuple[Var, Var]] = []
    for v in placed.graph.ins:
        same = [out for out in tails[v.name.partition("/")[2]] if out.type == v.type]
        if len(same) == 1 and v.shape:
            pairs.append((v, same[0]))
    return pairs


def _update(placed: Placed, v: Var, out: Var, pairs: Sequence[tuple[Var, Var]], others: Sequence[Update]) -> Update:
    """The update of one weight; raises `CannotShardError`."""
    sums = _sums(placed, out)
    if not sums:
        raise CannotShardError("its gradient is not a sum over devices")
    pending = {placed.homes[g].partial for g in sums}
    if len(pending) > 1:
        raise CannotShardError("its gradients are pending over different axes")
    axes = tuple(a for a in placed.mesh.axes if a in next(iter(pending)))
    form = _format(v.shape, axes, placed.mesh, placed.homes[sums[0]])
    eqns, inner, carried = _Region(placed, form, sums, axes, pairs, others).grow()
    return Update(v, sums, axes, form, frozenset(eqns), frozenset(inner), tuple(carried))


def _sums(placed: Placed, out: Var) -> tuple[Var, ...]:
    """The first pending sums of the same dims that a value is computed from, element by element."""
    made = {v: eqn for eqn in placed.graph.eqns for v in eqn.outs}
    queue, seen, found = [out], {out}, list[Var]()
    while queue:
        v = queue.pop()
        eqn = made.get(v)
        same = [] if eqn is None or eqn.op.control else [x for x in eqn.ins if set(x.shape) == set(out.shape)]
        home = placed.homes.get(v, Sharding())
        if home.partial and home.kind == "sum" and not any(placed.homes.get(x, Sharding()).partial for x in same):
            found.append(v)
            continue
        queue += [x for x in same if x not in seen]
        seen.update(same)
    return tuple(found)


def _format(shape: Shape, axes: Axes, mesh: Mesh, home: Sharding) -> Format:
    """A dim that divides, the fewest and the earliest; else what needs the least padding."""

    def cut(places: Sequence[Dim]) -> Format:
        cuts: dict[Dim, Axes] = {}
        for axis, d in zip(axes, places, strict=True):
            cuts[d] = (*cuts.get(d, home.axes(d)), axis)
        waste = math.prod(-(-d.size // mesh.count(by)) * mesh.count(by) / max(d.size, 1) for d, by in cuts.items())
        dims = tuple((d, Dim(f"{d.name}__{'_'.join(by)}", d.size), by) for d, by in cuts.items())
        return Format(dims, waste, mesh.count(axes))

    return min((cut(places) for places in product(shape, repeat=len(axes))), key=lambda f: (f.waste, len(f.dims)))


@dataclass
class _Region:
    """What one update computes: everything downstream of its sums that has a cut dim, and what only that reads."""

    placed: Placed
    form: Format
    sums: tuple[Var, ...]
    axes: Axes
    pairs: Sequence[tuple[Var, Var]]
    others: Sequence[Update]
    eqns: set[Eqn] = field(default_factory=set[Eqn])
    inner: set[Var] = field(default_factory=set[Var])

    def grow(self) -> tuple[set[Eqn], set[Var], list[Var]]:
        """Its equations, its values, and the inputs of the step among them."""
        graph, homes = self.placed.graph, self.placed.homes
        readers: dict[Var, set[Eqn]] = defaultdict(set)
        for eqn in graph.eqns:
            for v in eqn.ins:
                readers[v].add(eqn)
        made = {v: eqn for eqn in graph.eqns for v in eqn.outs}
        queue = list(self.sums)
        while queue:
            for eqn in readers[queue.pop()] - self.eqns:
                queue += self.take(eqn)
        replaced = dict(self.pairs)
        carried: list[Var] = []
        grown = True
        while grown:
            needed = {v for eqn in self.eqns for v in eqn.ins if self.form.cuts(v)} - self.inner - set(self.sums)
            inputs = [v for v in graph.ins if v in needed and replaced.get(v) in self.inner]
            own = {made[v] for v in needed if v in made and readers[v] <= self.eqns and v not in graph.outs}
            own = {eqn for eqn in own if not eqn.op.control}
            for eqn in own:
                if any(set(homes.get(v, Sharding()).varying) & set(self.axes) for v in eqn.outs):
                    raise CannotShardError(f"{eqn.op} at {eqn.where} differs between the devices of its group")
                self.take(eqn)
            carried += inputs
            self.inner.update(inputs)
            grown = bool(inputs or own)
        for v in carried:  # the gather moves what is read, after the cast to the compute dtype
            for eqn in readers[v] - self.eqns:
                if eqn.op.name == "cast" and eqn.outs[0].dtype.itemsize < v.dtype.itemsize:
                    self.take(eqn)
        return self.eqns, self.inner, carried

    def take(self, eqn: Eqn) -> list[Var]:
        """Add an equation; returns its results with a cut dim."""
        if eqn.op.control:
            raise CannotShardError(f"its update is inside a {eqn.op.name} at {eqn.where}")
        other = next((other.weight.name for other in self.others if eqn in other.eqns), None)
        if other is not None:
            raise CannotShardError(f"it is computed together with the update of {other} at {eqn.where}")
        _renamed(eqn, self.form)
        self.eqns.add(eqn)
        cut = [v for v in eqn.outs if self.form.cuts(v)]
        self.inner.update(cut)
        return cut


def _renamed(eqn: Eqn, form: Format) -> Eqn:
    """The equation on private dims; raises `CannotShardError` where the operation's rule refuses them."""
    new = {old: to for old, to, _ in form.dims}
    params = {key: _substitute(value, new) for key, value in eqn.params.items()}
    ins = [Type(form.renamed(v.shape), v.dtype) for v in eqn.ins]
    outs = tuple(dataclasses.replace(v, shape=form.renamed(v.shape)) for v in eqn.outs)
    try:
        inferred = eqn.op.infer(ins, params)
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


class _Rewrite:
    """The graph with its updates on private dims, and renames where values enter and leave them."""

    def __init__(self, placed: Placed, chosen: Sequence[Update], pairs: Sequence[tuple[Var, Var]]):
        self.placed = placed
        self.of = {eqn: update for update in chosen for eqn in update.eqns}
        self.owner = {v: update for update in chosen for v in update.inner}
        carried = {v for update in chosen for v in update.carried}
        self.kept = {out for v, out in pairs if v in carried}  # results that stay cut
        self.eqns: list[Eqn] = []
        self.inside: dict[tuple[Var, Format], Var] = {}  # a value as an update reads it
        self.outside: dict[Var, Var] = {}  # and as everything else does

    def graph(self) -> Graph:
        old = self.placed.graph
        for v in old.ins:
            if v in self.owner:
                form = self.owner[v].format
                self.inside[v, form] = dataclasses.replace(v, shape=form.renamed(v.shape))
        for eqn in old.eqns:
            update = self.of.get(eqn)
            if update is None:
                self.eqns.append(dataclasses.replace(eqn, ins=tuple(self.leave(v, eqn) for v in eqn.ins)))
                continue
            ins = tuple(self.enter(v, update, eqn) for v in eqn.ins)
            made = dataclasses.replace(_renamed(eqn, update.format), ins=ins)
            for v, new in zip(eqn.outs, made.outs, strict=True):
                (self.inside.__setitem__((v, update.format), new) if v in self.owner else self.outside.update({v: new}))
            self.eqns.append(made)
        last = old.eqns[-1]
        outs = [self.inside[v, self.owner[v].format] if v in self.kept else self.leave(v, last) for v in old.outs]
        ins = tuple(self.inside[v, self.owner[v].format] if v in self.owner else v for v in old.ins)
        return old.replace(ins=ins, eqns=tuple(self.eqns), outs=tuple(outs))

    def enter(self, v: Var, update: Update, eqn: Eqn) -> Var:
        """A value as an update reads it: a sum is scattered, what every device has is cut."""
        form = update.format
        if not form.cuts(v):
            return self.leave(v, eqn)
        if (v, form) not in self.inside:
            made = self.rename(self.leave(v, eqn), form.renamed(v.shape), eqn)
            if v in update.sums:
                split = {to.name: axes for _, to, axes in form.dims}
                split |= {d: axes for d, axes in self.placed.homes[v].split if any(e.name == d for e in made.shape)}
                made = self.add(SHARD, made, made.shape, eqn, split=tuple(split.items()))
            self.inside[v, form] = made
        return self.inside[v, form]

    def leave(self, v: Var, eqn: Eqn) -> Var:
        """A value as the rest of the graph reads it: whole over the group again."""
        if v in self.owner and v not in self.outside:
            self.outside[v] = self.rename(self.inside[v, self.owner[v].format], v.shape, eqn)
        return self.outside.get(v, v)

    def rename(self, v: Var, shape: Shape, eqn: Eqn) -> Var:
        return self.add(RENAME, v, shape, eqn, shape=shape)

    def add(self, op: Any, v: Var, to: Shape, eqn: Eqn, **params: Any) -> Var:
        made = Var(to, v.dtype, v.name)
        self.eqns.append(Eqn(op, (v,), (made,), params, eqn.where, eqn.backward))
        return made


def _with_private(placed: Placed, chosen: Sequence[Update]) -> Layout:
    """The layout with rules for the private dims; overrides by path become rules of exactly those paths."""
    private = {to.name: axes for update in chosen for _, to, axes in update.format.dims}
    named = [
        *((v.name, v.shape) for v in placed.graph.ins),
        *zip(placed.results, (v.shape for v in placed.graph.outs), strict=True),
    ]
    renamed = {v.name: update.format for update in chosen for v in update.carried}
    renamed |= {
        path: renamed[v.name]
        for v, out in _carried(placed)
        for path, result in zip(placed.results, placed.graph.outs, strict=True)
        if result is out and v.name in renamed
    }
    overrides: dict[str, dict[str, Axes]] = {}
    for path, shape in named:
        rules = placed.layout.for_path(path)
        there = renamed[path].renamed(shape) if path in renamed else shape
        own = {d.name: rules.get(d.name, ()) for d in there if d.name not in private}
        changed = {d: axes for d, axes in own.items() if axes != placed.layout.axes(d)}
        if changed:
            overrides[glob.escape(path)] = changed
    return Layout({**placed.layout.rules, **private}, overrides=overrides)
