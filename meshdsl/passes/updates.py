"""The weight updates of a train step: where their gradients become whole, what they compute, how each could be cut.

An update starts from pending sums (gradients) and ends in the values that replace the weight and its optimizer state.
Devices along the axes of those sums all compute it: it is redundant. Where values lie is what the partitioner found.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, cast

from ..dims import Dim, Shape
from ..errors import ShapeError
from ..ir import Eqn, Graph, Type, Var
from ..layouts import Extents, Layout, Mesh, Sharding
from ..layouts.sharding import Axes

__all__ = [
    "CannotShardError", "Format", "Part", "Placed", "Update", "carried", "equations", "find_update", "pending_sums",
    "recut", "renamed", "stages", "uses",
]  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """A graph with where its values lie: what the partitioner found without this pass."""

    graph: Graph
    results: Sequence[str]  # the paths of the results
    homes: Mapping[Var, Sharding]
    mesh: Mesh
    extents: Extents
    layout: Layout
    regather: bool = False  # weights are gathered anew for the backward pass, those of a loop's layers one by one

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

    graph: Graph  # the step, or the body of a loop over steps
    weight: Var
    sums: tuple[Var, ...]
    pending: Axes  # over which the sums are pending, so the update is redundant
    group: Axes  # over which it would be cut; the shards are summed over the others
    format: Format
    part: Part
    carried: tuple[Var, ...]  # inputs of the step that stay cut between steps

    @property
    def across(self) -> Axes:
        """The axes between groups: over these the shards are summed, and every group computes all of the update."""
        return tuple(axis for axis in self.pending if axis not in self.group)


class CannotShardError(Exception):
    """This update stays as it is; the text says why."""


def carried(placed: Placed) -> list[tuple[Var, Var]]:
    """Inputs with the results that take their places: of the same type, and of the same path, the argument's and the
    result's own name aside; of several, the one that stands where the argument does. Arguments that are tensors
    themselves go with such results in order.
    """
    results = list(zip(placed.results, placed.graph.outs, strict=True))
    arguments = list(dict.fromkeys(v.name.partition("/")[0] for v in placed.graph.ins))
    inputs = [v for v in placed.graph.ins if v.shape]
    found: dict[Var, Var] = {}
    for v in inputs:
        argument, _, tail = v.name.partition("/")
        same = {path: out for path, out in results if tail in (path, path.partition("/")[2]) and out.type == v.type}
        own = [same[path] for path in (v.name, f"{arguments.index(argument)}/{tail}") if path in same]
        if tail and (own or len(same) == 1):
            found[v] = (own or list(same.values()))[0]
    single = [out for path, out in results if "/" not in path and out not in found.values()]
    for v in inputs:
        if "/" not in v.name and (alike := [out for out in single if out.type == v.type]):
            found[v] = alike[0]
            single.remove(alike[0])
    return [(v, found[v]) for v in inputs if v in found]


def find_update(
    placed: Placed,
    v: Var,
    out: Var,
    pairs: Sequence[tuple[Var, Var]],
    taken: Mapping[Eqn, str],
    groups: Callable[[Axes], Sequence[Axes]],
    saved: Callable[[Update], float],
) -> Update:
    """The update of one weight, cut over that one of the groups of its pending axes where most is saved.

    Raises `CannotShardError` where it can be cut over none.
    """
    found = pending_sums(placed, placed.graph, out)
    sums = tuple(found.all())
    if not sums:
        made = next((eqn for eqn in placed.graph.eqns if out in eqn.outs), None)
        if made is not None and made.op.control:
            raise CannotShardError(f"its update is inside a {made.op.name} at {made.where}")
        raise CannotShardError("its gradient is not a sum over devices")
    pending = {placed.homes[g].partial for g in sums}
    if len(pending) > 1:
        raise CannotShardError("its gradients are pending over different axes")
    axes = tuple(a for a in placed.mesh.axes if a in next(iter(pending)))
    dims = _dims(v, sums)
    if not dims:
        raise CannotShardError("it has no dim to cut")

    def cut(group: Axes) -> Update:
        form = _format(placed, dims, group, placed.homes[sums[0]])
        region = _Region(placed, placed.graph, form, found, group, pairs, taken)
        return Update(placed.graph, v, sums, axes, group, form, region.grow(), tuple(region.carried))

    first, *others = groups(axes) or [()]
    if not first:
        raise CannotShardError(f"its gradient is a sum over {', '.join(axes)}, and no axis of the group is among them")
    update = cut(first)
    best = max((update, *(recut(placed, update, group) for group in others)), key=saved)
    return update if best is update else cut(best.group)


def recut(placed: Placed, update: Update, group: Axes) -> Update:
    """The update as it would be if another group shared it, as far as bytes go: what it computes is not looked at."""
    form = _format(placed, _dims(update.weight, update.sums), group, placed.homes[update.sums[0]])
    return dataclasses.replace(update, group=group, format=form)


def _dims(weight: Var, sums: Sequence[Var]) -> Shape:
    """The dims that can be cut: not the layers, if they come one by one."""
    return tuple(d for d in weight.shape if all(d in g.shape for g in sums))


def stages(mesh: Mesh, cuts: Iterable[Axes]) -> list[Axes]:
    """The order in which a sum is scattered along the axes that cut its dims: what is left is least where most goes.

    The most devices first, and of equal numbers the minor axes, which lie closer together.
    """
    places = list(mesh.axes)
    return sorted(cuts, key=lambda axes: (-mesh.count(axes), -max(map(places.index, axes))))


def equations(part: Part) -> Iterator[Eqn]:
    yield from part.eqns
    for _, _, inner in part.loops:
        yield from equations(inner)


def pending_sums(placed: Placed, graph: Graph, out: Var) -> Sums:
    """The first pending sums of the same dims that a value is computed from, element by element, through loops too."""
    made = {v: eqn for eqn in graph.eqns for v in eqn.outs}
    queue, seen = [out], {out}
    here: list[Var] = []
    loops: list[tuple[Eqn, int, Sums]] = []
    while queue:
        v = queue.pop()
        eqn = made.get(v)
        same = [] if eqn is None or eqn.op.control else [x for x in eqn.ins if set(x.shape) == set(out.shape)]
        same = list(dict.fromkeys(same))  # a square has one operand
        home = placed.homes.get(v, Sharding())
        pending = home.partial and home.kind == "sum"
        if eqn is not None and eqn.op.name == "scan" and (placed.regather or not pending):
            i, body = eqn.outs.index(v), eqn.params["body"]
            inner = pending_sums(placed, body, body.outs[i]) if i >= eqn.params["carries"] else Sums()
            if any(inner.all()) and body.outs.count(body.outs[i]) == 1:
                loops.append((eqn, i, inner))
                continue
        if pending and not any(placed.homes.get(x, Sharding()).partial for x in same):
            here.append(v)
            continue
        queue += [x for x in same if x not in seen]
        seen.update(same)
    return Sums(_together(placed, graph, here), tuple(loops))


def _together(placed: Placed, graph: Graph, sums: Sequence[Var]) -> tuple[Var, ...]:
    """The sums, those that are only added up as one: what several uses of a weight give it is reduced once."""
    readers = Counter(v for eqn in graph.eqns for v in set(eqn.ins))
    readers.update(graph.outs)
    found = {v: v for v in sums}  # how far a sum was followed, and where it was last added to another
    for eqn in graph.eqns:
        ours = [found[x] for x in set(eqn.ins) if x in found]
        if not ours or len(eqn.outs) != 1 or any(readers[x] > 1 for x in eqn.ins if x in found):
            continue
        out = eqn.outs[0]
        home = placed.homes.get(out, Sharding())
        if home.partial and home.kind == "sum" and set(out.shape) == set(sums[0].shape):
            for x in set(eqn.ins):
                found.pop(x, None)
            found[out] = out if len(ours) > 1 else ours[0]
    return tuple(found.values())


def _format(placed: Placed, shape: Shape, axes: Axes, home: Sharding) -> Format:
    """A dim that divides, the fewest and the earliest; else what needs the least padding.

    A dim that the layout splits comes last if it does not divide: under its private name its blocks are other ones.
    """
    mesh, extents = placed.mesh, placed.extents

    def name(d: Dim, by: Axes) -> Dim:
        return Dim(f"{d.name}__{'_'.join(by).replace('.', '__')}", d.size)

    def cut(places: Sequence[Dim]) -> tuple[int, Format]:
        cuts: dict[Dim, Axes] = {}
        for axis, d in zip(axes, places, strict=True):
            cuts[d] = (*cuts.get(d, home.axes(d)), axis)
        stored = {d: -(-d.size // mesh.count(by)) * mesh.count(by) for d, by in cuts.items()}
        moved = sum(bool(home.axes(d)) and n != extents.padded(d) for d, n in stored.items())
        waste = math.prod(n / max(d.size, 1) for d, n in stored.items())
        dims = tuple((d, name(d, by), by) for d, by in cuts.items())
        return moved, Format(dims, waste, mesh.count(axes))

    for d in shape:
        moved, form = cut([d] * len(axes))
        if not moved and form.waste == 1:
            return form
    every = (cut(places) for places in product(shape, repeat=len(axes)))
    return min(every, key=lambda found: (found[0], found[1].waste, len(found[1].dims)))[1]


@lru_cache(maxsize=64)
def uses(graph: Graph) -> tuple[Mapping[Var, Eqn], Mapping[Var, set[Eqn]]]:
    """Which equation makes each value of a graph, and which read it."""
    readers = defaultdict[Var, set[Eqn]](set)
    for eqn in graph.eqns:
        for v in eqn.ins:
            readers[v].add(eqn)
    return {v: eqn for eqn in graph.eqns for v in eqn.outs}, readers


class _Region:
    """What one update computes: everything downstream of its sums that has a cut dim, and what only that reads."""

    def __init__(
        self,
        placed: Placed,
        graph: Graph,
        form: Format,
        sums: Sums,
        group: Axes,
        pairs: Sequence[tuple[Var, Var]],
        taken: Mapping[Eqn, str],  # the equations of other updates, with whose they are
    ):
        self.placed, self.graph, self.form, self.sums, self.group = placed, graph, form, sums, group
        self.replaced = dict(pairs)
        self.taken = taken
        self.eqns: set[Eqn] = set()
        self.inner: set[Var] = set()
        self.carried: list[Var] = []

    def grow(self) -> Part:
        """Everything the update computes in this graph, and in the bodies its gradients come from."""
        graph = self.graph
        made, readers = uses(graph)
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
                if any(set(self.placed.homes.get(v, Sharding()).varying) & set(self.group) for v in eqn.outs):
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
        part = _Region(self.placed, body, self.form, sums, self.group, (), self.taken).grow()
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
        renamed(eqn, self.form)
        self.eqns.add(eqn)
        cut = [v for v in eqn.outs if self.form.cuts(v)]
        self.inner.update(cut)
        return cut


def renamed(eqn: Eqn, form: Format) -> Eqn:
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
