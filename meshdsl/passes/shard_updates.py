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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sums:
    """Where an update starts, in one graph: its pending sums, and, by loop and result, those inside loop bodies."""

    here: tuple[Var, ...] = ()
    loops: tuple[tuple[Eqn, int, Sums], ...] = ()

    def all(self) -> Iterator[Var]:
        """Every pending sum."""
        yield from self.here
        for _, _, inner in self.loops:
            yield from inner.all()


@dataclass(frozen=True, eq=False)
class Part:
    """What an update computes in one graph: the step, or a loop body whose stacked result is a gradient."""

    sums: tuple[Var, ...]
    eqns: frozenset[Eqn]
    inner: frozenset[Var]  # its values with a cut dim, the weight and the optimizer's state among them
    loops: tuple[tuple[Eqn, int, Part], ...]  # loops with the result that comes out of them cut


@dataclass(frozen=True, eq=False)
class Update:
    """The update of one weight: what it computes, and how it would be cut."""

    weight: Var
    sums: tuple[Var, ...]
    axes: Axes  # over which the sums are pending, so the update is redundant
    format: Format
    part: Part
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
    carried = {v for update in chosen for v in update.carried}
    kept = {out for v, out in pairs if v in carried}
    parts = [(update.format, update.part) for update in chosen]
    graph = _Rewrite(placed.graph, parts, placed.homes, carried, kept).graph()
    return verify(graph, "shard_updates"), _with_private(placed, chosen), tuple(decisions)


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
    found = _sums(placed, placed.graph, out)
    sums = tuple(found.all())
    if not sums:
        raise CannotShardError("its gradient is not a sum over devices")
    pending = {placed.homes[g].partial for g in sums}
    if len(pending) > 1:
        raise CannotShardError("its gradients are pending over different axes")
    axes = tuple(a for a in placed.mesh.axes if a in next(iter(pending)))
    form = _format(v.shape, axes, placed.mesh, placed.homes[sums[0]])
    others_eqns = {eqn: other.weight.name for other in others for eqn in _equations(other.part)}
    region = _Region(placed, placed.graph, form, found, axes, pairs, others_eqns)
    part = region.grow()
    return Update(v, sums, axes, form, part, tuple(region.carried))


def _equations(part: Part) -> Iterator[Eqn]:
    yield from part.eqns
    for _, _, inner in part.loops:
        yield from _equations(inner)


def _sums(placed: Placed, graph: Graph, out: Var) -> Sums:
    """The first pending sums of the same dims that a value is computed from, element by element, through loops too."""
    made = {v: eqn for eqn in graph.eqns for v in eqn.outs}
    queue, seen = [out], {out}
    here: list[Var] = []
    loops: list[tuple[Eqn, int, Sums]] = []
    while queue:
        v = queue.pop()
        eqn = made.get(v)
        same = [] if eqn is None or eqn.op.control else [x for x in eqn.ins if set(x.shape) == set(out.shape)]
        home = placed.homes.get(v, Sharding())
        if home.partial and home.kind == "sum" and not any(placed.homes.get(x, Sharding()).partial for x in same):
            here.append(v)
            continue
        if eqn is not None and eqn.op.name == "scan" and (i := eqn.outs.index(v)) >= eqn.params["carries"]:
            body: Graph = eqn.params["body"]
            inner = _sums(placed, body, body.outs[i])
            if any(inner.all()) and body.outs.count(body.outs[i]) == 1:
                loops.append((eqn, i, inner))
        queue += [x for x in same if x not in seen]
        seen.update(same)
    return Sums(tuple(here), tuple(loops))


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


class _Region:
    """What one update computes: everything downstream of its sums that has a cut dim, and what only that reads."""

    def __init__(
        self,
        placed: Placed,
        graph: Graph,
        form: Format,
        sums: Sums,
        axes: Axes,
        pairs: Sequence[tuple[Var, Var]],
        taken: Mapping[Eqn, str],  # the equations of other updates, with whose they are
    ):
        self.placed, self.graph, self.form, self.sums, self.axes = placed, graph, form, sums, axes
        self.replaced = dict(pairs)
        self.taken = taken
        self.eqns: set[Eqn] = set()
        self.inner: set[Var] = set()
        self.carried: list[Var] = []

    def grow(self) -> Part:
        """Everything the update computes in this graph, and in the bodies its gradients come from."""
        graph, readers = self.graph, defaultdict[Var, set[Eqn]](set)
        for eqn in graph.eqns:
            for v in eqn.ins:
                readers[v].add(eqn)
        made = {v: eqn for eqn in graph.eqns for v in eqn.outs}
        loops = tuple((eqn, i, self.body(eqn, i, inner)) for eqn, i, inner in self.sums.loops)
        stacked = [eqn.outs[i] for eqn, i, _ in loops]
        self.inner.update(stacked)
        queue = [*self.sums.here, *stacked]
        while queue:
            for eqn in readers[queue.pop()] - self.eqns:
                queue += self.take(eqn)
        while True:
            needed = {v for eqn in self.eqns for v in eqn.ins if self.form.cuts(v)} - self.inner - set(self.sums.here)
            inputs = [v for v in graph.ins if v in needed and self.replaced.get(v) in self.inner]
            own = {made[v] for v in needed if v in made and readers[v] <= self.eqns and v not in graph.outs}
            own = {eqn for eqn in own if not eqn.op.control}
            for eqn in own:
                if any(set(self.placed.homes.get(v, Sharding()).varying) & set(self.axes) for v in eqn.outs):
                    raise CannotShardError(f"{eqn.op} at {eqn.where} differs between the devices of its group")
                self.take(eqn)
            self.carried += inputs
            self.inner.update(inputs)
            if not inputs and not own:
                break
        for v in self.carried:  # the gather moves what is read, after the cast to the compute dtype
            for eqn in readers[v] - self.eqns:
                if eqn.op.name == "cast" and eqn.outs[0].dtype.itemsize < v.dtype.itemsize:
                    self.take(eqn)
        return Part(self.sums.here, frozenset(self.eqns), frozenset(self.inner), loops)

    def body(self, loop: Eqn, i: int, sums: Sums) -> Part:
        """The part of a loop body that makes one of its stacked results."""
        body: Graph = loop.params["body"]
        part = _Region(self.placed, body, self.form, sums, self.axes, (), self.taken).grow()
        out = body.outs[i]
        others = {v for eqn in body.eqns if eqn not in part.eqns for v in eqn.ins} | set(body.outs) - {out}
        if out not in part.inner | set(part.sums) or others & part.inner:
            raise CannotShardError(f"the loop at {loop.where} reads its gradient")
        return part

    def take(self, eqn: Eqn) -> list[Var]:
        """Add an equation; returns its results with a cut dim."""
        if eqn.op.control:
            raise CannotShardError(f"its update is inside a {eqn.op.name} at {eqn.where}")
        if eqn in self.taken:
            raise CannotShardError(f"it is computed together with the update of {self.taken[eqn]} at {eqn.where}")
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
    """A graph with its updates on private dims, and renames where values enter and leave them."""

    def __init__(
        self,
        graph: Graph,
        parts: Sequence[tuple[Format, Part]],
        homes: Mapping[Var, Sharding],
        carried: Collection[Var] = (),
        kept: Collection[Var] = (),
    ):
        self.old, self.homes = graph, homes
        self.of = {eqn: found for found in parts for eqn in found[1].eqns}
        self.sums = {v: form for form, part in parts for v in part.sums}
        self.owner = {v: form for form, part in parts for v in part.inner}
        self.loops: dict[Eqn, list[tuple[int, Format, Part]]] = defaultdict(list)
        for form, part in parts:
            for eqn, i, inner in part.loops:
                self.loops[eqn].append((i, form, inner))
        self.carried = set(carried)  # inputs that are cut
        self.kept = set(kept)  # results that are
        self.eqns: list[Eqn] = []
        self.inside: dict[tuple[Var, Format], Var] = {}  # a value as an update reads it
        self.outside: dict[Var, Var] = {}  # and as everything else does

    def graph(self) -> Graph:
        old = self.old
        ins = tuple(self.define(v) if v in self.carried else v for v in old.ins)
        for eqn in old.eqns:
            if eqn in self.of:
                form, _ = self.of[eqn]
                made = dataclasses.replace(_renamed(eqn, form), ins=tuple(self.enter(v, form, eqn) for v in eqn.ins))
                for v, new in zip(eqn.outs, made.outs, strict=True):
                    if v in self.owner:
                        self.inside[v, form] = new
                    else:
                        self.outside[v] = new
                self.eqns.append(made)
            else:
                ins_, params = tuple(self.leave(v, eqn) for v in eqn.ins), eqn.params
                if eqn in self.loops:
                    params = {**params, "body": self.body(eqn)}
                outs = tuple(self.define(v) if v in self.owner else v for v in eqn.outs)
                self.eqns.append(dataclasses.replace(eqn, ins=ins_, outs=outs, params=params))
        outs = [self.result(v, old.eqns[-1]) for v in old.outs]
        return old.replace(ins=ins, eqns=tuple(self.eqns), outs=tuple(outs))

    def result(self, v: Var, last: Eqn) -> Var:
        if v not in self.kept:
            return self.leave(v, last)
        return self.enter(v, self.owner[v] if v in self.owner else self.sums[v], last)

    def define(self, v: Var) -> Var:
        """An input, or a loop's stacked result, that is cut."""
        form = self.owner[v]
        self.inside[v, form] = dataclasses.replace(v, shape=form.renamed(v.shape))
        return self.inside[v, form]

    def body(self, loop: Eqn) -> Graph:
        body: Graph = loop.params["body"]
        parts = [(form, part) for _, form, part in self.loops[loop]]
        return _Rewrite(body, parts, self.homes, kept=[body.outs[i] for i, _, _ in self.loops[loop]]).graph()

    def enter(self, v: Var, form: Format, eqn: Eqn) -> Var:
        """A value as an update reads it: a sum is scattered, what every device has is cut."""
        if not form.cuts(v):
            return self.leave(v, eqn)
        if (v, form) not in self.inside:
            made = self.rename(self.leave(v, eqn), form.renamed(v.shape), eqn, "its update is split")
            if self.sums.get(v) == form:
                split = {to.name: axes for _, to, axes in form.dims}
                split |= {d: axes for d, axes in self.homes[v].split if any(e.name == d for e in made.shape)}
                made = self.add(SHARD, made, made.shape, eqn, "its update is split", split=tuple(split.items()))
            self.inside[v, form] = made
        return self.inside[v, form]

    def leave(self, v: Var, eqn: Eqn) -> Var:
        """A value as the rest of the graph reads it: whole over the group again."""
        if v in self.owner and v not in self.outside:
            cause = f"{v.name or 'a weight'} is used here, its update is split"
            self.outside[v] = self.rename(self.inside[v, self.owner[v]], v.shape, eqn, cause)
        return self.outside.get(v, v)

    def rename(self, v: Var, shape: Shape, eqn: Eqn, cause: str) -> Var:
        return self.add(RENAME, v, shape, eqn, cause, shape=shape)

    def add(self, op: Any, v: Var, to: Shape, eqn: Eqn, cause: str, **params: Any) -> Var:
        made = Var(to, v.dtype, v.name)
        self.eqns.append(Eqn(op, (v,), (made,), params, eqn.where, eqn.backward, cause))
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
