"""Find the equations of one weight update: what it computes from its pending sums, and what only it reads.

An update may take every equation that all devices of its group repeat (Xu et al., 2020, section 3.1). Any other reader
of its values gets them gathered: outside branches once, inside a branch as often as that branch runs (section 3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..dims import Dim
from ..ir import Eqn, Graph, Var, read_by
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..ops.dtypes import CAST
from ..ops.placement import SHARD
from ..passes.hoist import scaled_casts
from .pending import ShardedGraph, Sums
from .regions import BranchRegion, CannotShardError, Format, UpdateRegion, renamed, uses


@dataclass(frozen=True, eq=False)
class Step:
    """What all graphs of one update share."""

    placed: ShardedGraph
    form: Format
    group: Axes
    owners: Mapping[Eqn | Var, str]  # equations and results of branches of other updates -> the name of their weight

    def splits(self, v: Var) -> list[str]:
        """The axes of the group over which a value is split without the update."""
        return [axis for axis in self.placed.shardings.get(v, Sharding()).split_axes if axis in self.group]


@dataclass(frozen=True, eq=False)
class _Branch:
    """A branch that reads or computes values of an update, with the regions of its graphs."""

    eqn: Eqn
    entering: frozenset[int]
    leaving: frozenset[int]
    regions: Mapping[str, Region]

    def inputs(self, v: Var) -> list[tuple[str, Region, Var]]:
        """Where v enters the branch: the key and the region of each of its graphs, and the input that gets v."""
        return [
            (key, region, region.graph.ins[i])
            for i in self.entering
            if self.eqn.ins[1 + i] is v
            for key, region in self.regions.items()
        ]

    def wanted(self) -> set[Var]:
        """The operands that its graphs read as one shard, or return as one, and that do not enter it so."""
        found: set[Var] = set()
        for region in self.regions.values():
            graph = region.graph
            needed = region.needed() | {graph.outs[i] for i in self.leaving}
            found.update(self.eqn.ins[1 + i] for i, v in enumerate(graph.ins) if v in needed and v not in region.inner)
        return found


class Replaced:
    """Which result of a graph replaces each of some inputs: weights and optimizer state."""

    def __init__(self, pairs: Sequence[tuple[Var, Var]] = ()):
        self.by_input = dict(pairs)
        self._inputs: dict[Var, list[tuple[int, Var]]] = {}
        for i, (v, out) in enumerate(pairs):
            self._inputs.setdefault(out, []).append((i, v))

    def inputs(self, outs: Collection[Var]) -> list[Var]:
        """The inputs that these values replace, in order."""
        found = (each for out in outs for each in self._inputs.get(out, ()))
        return [v for _, v in sorted(found, key=lambda each: each[0])]


class Region:
    """The equations of one update in one graph, as `grow` collects them."""

    def __init__(
        self,
        step: Step,
        graph: Graph,
        sums: Sums,
        replaced: Replaced | None = None,
        entering: Collection[Var] = (),  # inputs of a branch that are split
    ):
        self.step, self.graph, self.sums = step, graph, sums
        self.replaced = replaced or Replaced()
        self.eqns: set[Eqn] = set()
        self.inner: set[Var] = set(entering)
        self.carried: list[Var] = []
        self.refused: dict[Eqn, str] = {}
        self.branches: dict[Eqn, _Branch] = {}
        self.loops: tuple[tuple[Eqn, int, UpdateRegion], ...] = ()

    def grow(self) -> Region:
        """Collect the whole update in this graph, in its branches, and in the loop bodies that compute its gradients.

        Raises `CannotShardError` if such a loop cannot be split.
        """
        producers, (readers, results, _) = self.graph.producers, uses(self.graph)
        self.loops = tuple((eqn, i, self.body(eqn, i, inner)) for eqn, i, inner in self.sums.loops)
        self.inner.update(eqn.outs[i] for eqn, i, _ in self.loops)
        found = [*self.sums.in_graph, *self.inner]
        while True:
            size = len(self.eqns), len(self.inner)
            self.take_readers(found)
            found = self.grow_branches()
            needed = self.needed()
            inputs = [v for v in self.replaced.inputs(self.inner) if self.may_be_stored(v, needed)]
            taken = self.eqns | set(self.branches)
            only_here = [v for v in needed if v in producers and readers[v] <= taken and v not in results]
            for eqn in {producers[v]: None for v in only_here if producers[v].control is None}:
                self.take(eqn)
            self.carried += inputs
            self.inner.update(inputs)
            if size == (len(self.eqns), len(self.inner)):
                break
        for v in self.carried:  # the all-gather sends the value that is read, after the cast to the compute dtype
            for eqn in self.narrow_copies(v):
                self.take(eqn)
        return self

    def may_be_stored(self, v: Var, needed: Collection[Var]) -> bool:
        """True if an input is stored as one shard between steps: one that the update reads, or that is gathered anyway.

        The weights of a float32 copy, in bfloat16, are computed by the update, which does not read them.
        """
        read = v in needed or (self.step.placed.regather and v not in self.inner and self.step.form.cuts(v))
        return read and not self.step.splits(v)

    def narrow_copies(self, v: Var) -> Sequence[Eqn]:
        """The casts of a weight to fewer bytes. If nothing else reads it, also what scales it before a cast."""
        path = scaled_casts(self.graph, v, lambda eqn: not self.refusal(eqn), self.eqns)
        direct = uses(self.graph).readers[v] - self.eqns
        return path or [eqn for eqn in direct if eqn.op is CAST and eqn.outs[0].dtype.itemsize < v.dtype.itemsize]

    def holds(self, v: Var) -> bool:
        """True if the update computes a value on one shard."""
        return v in self.inner or v in self.sums.in_graph

    def needed(self) -> set[Var]:
        """The values that the update reads as one shard and does not have as one."""
        read = {v for eqn in self.eqns for v in eqn.ins if self.step.form.cuts(v)}
        read.update(v for branch in self.branches.values() for v in branch.wanted())
        return read - self.inner - set(self.sums.in_graph)

    def take_readers(self, values: Sequence[Var]) -> None:
        """Take the equations that are computed from these values, as far as they can be split."""
        queue, readers = list(values), uses(self.graph).readers
        while queue:
            for eqn in readers[queue.pop()] - self.eqns:
                queue += self.take(eqn)

    def take(self, eqn: Eqn) -> list[Var]:
        """Take an equation if it can be split; returns its results that have a split dim."""
        reason = self.refusal(eqn)
        if reason:
            self.refused[eqn] = reason
            return []
        self.eqns.add(eqn)
        split_outs = [v for v in eqn.outs if self.step.form.cuts(v)]
        self.inner.update(split_outs)
        return split_outs

    def split_by_layout(self, eqn: Eqn) -> Dim | None:
        """The first dim that an equation introduces, and that the layout splits over axes of the group."""
        shape, group = {d for v in eqn.ins for d in v.dims}, set(self.step.group)
        new = (d for v in eqn.outs for d in v.dims if d not in shape)
        return next((d for d in new if not group.isdisjoint(self.step.placed.layout.axes(d.name))), None)

    def refusal(self, eqn: Eqn) -> str:
        """The reason why the update cannot take an equation, or nothing."""
        step = self.step
        if eqn.control is not None:
            return f"its update is inside a {eqn.op} at {eqn.where}"
        if eqn in step.owners:
            return f"it is computed together with the update of {step.owners[eqn]} at {eqn.where}"
        if eqn.operation.acts or eqn.op is SHARD:
            return f"{eqn.op} at {eqn.where} needs all of it"
        for v in eqn.ins:
            if not self.holds(v) and (axes := step.splits(v)):
                name = v.name or "a value"
                return f"{eqn.op} at {eqn.where} reads {name}, which is split over {', '.join(axes)} already"
        if (d := self.split_by_layout(eqn)) is not None:
            return f"the layout splits dim {d.name!r} of {eqn.op} at {eqn.where} over the same axes"
        try:
            renamed(eqn, step.form)
        except CannotShardError as problem:
            return str(problem)
        return ""

    def grow_branches(self) -> list[Var]:
        """Grow the update in the branches that read or compute its values; returns the results that are new in it."""
        pending = {eqn for eqn, _, _ in self.sums.branches}
        new: list[Var] = []
        for eqn in uses(self.graph).branches:
            entering = frozenset(i for i, v in enumerate(eqn.ins[1:]) if self.holds(v))
            if entering or eqn in pending:
                branch = self.branches[eqn] = self.branch(eqn, entering)
                new += [eqn.outs[i] for i in branch.leaving if eqn.outs[i] not in self.inner]
                self.inner.update(new)
        return new

    def branch(self, eqn: Eqn, entering: frozenset[int]) -> _Branch:
        regions: dict[str, Region] = {}
        for key, graph in eqn.graphs().items():
            inner = [sums for other, name, sums in self.sums.branches if other is eqn and name == key]
            sums = Sums(*(tuple(dict.fromkeys(x for part in inner for x in getattr(part, field))) for field in _FIELDS))
            regions[key] = Region(self.step, graph, sums, None, [graph.ins[i] for i in entering]).grow()
        leaving = frozenset(
            i
            for i, v in enumerate(eqn.outs)
            if self.step.form.cuts(v) and v not in self.step.owners
            if any(region.holds(region.graph.outs[i]) for region in regions.values())
        )
        return _Branch(eqn, entering, leaving, regions)

    def body(self, loop: Eqn, i: int, sums: Sums) -> UpdateRegion:
        """The part of a loop body that computes one of its stacked results, or adds to one of its carries."""
        scan = loop.scan
        assert scan is not None
        body = scan.body
        added = Replaced([(body.ins[scan.consts + i], body.outs[i])] if i < scan.carries else [])
        region = Region(self.step, body, sums, added).grow()
        out = body.outs[i]
        other_reads = read_by((eqn for eqn in body.eqns if eqn not in region.eqns), set(body.outs) - {out})
        if not region.holds(out) or other_reads & region.inner:
            raise CannotShardError(region.reason(out) or f"the loop at {loop.where} reads its gradient")
        return region.finished(frozenset([i]))

    def reason(self, out: Var) -> str:
        """The reason why the update does not reach a value: the last equation before it that refused."""
        producers, queue, seen = self.graph.producers, [out], {out}
        for v in queue:
            eqn = producers.get(v)
            if eqn in self.branches:
                for region in self.branches[eqn].regions.values():
                    if inner := region.reason(region.graph.outs[eqn.outs.index(v)]):
                        return inner
            elif eqn in self.refused:
                return self.refused[eqn]
            before = [] if eqn is None else [x for x in eqn.ins if x not in seen]
            queue += before
            seen.update(before)
        return ""

    def update(self) -> UpdateRegion:
        """The update in the graph of a step: the values that replace split inputs stay split."""
        split = {self.replaced.by_input[v] for v in self.carried}
        return self.finished(frozenset(i for v in split for i in uses(self.graph).results.get(v, ())))

    def finished(self, leaving: frozenset[int]) -> UpdateRegion:
        """The region, if these results leave its graph split: with only the splits in it that are read as such."""
        for eqn, branch in self.branches.items():
            unread = [i for i in branch.leaving if not self.reads_shard(eqn.outs[i], leaving)]
            self.branches[eqn] = _Branch(eqn, branch.entering, branch.leaving.difference(unread), branch.regions)
            self.inner.difference_update(eqn.outs[i] for i in unread)  # gathered inside the branches
        parts = [self.finished_branch(branch, leaving) for branch in self.branches.values()]
        gathered = [(v, 1.0) for v in self.inner if self.gathers(v, leaving) >= 1]
        for part in parts:
            for key, inner in part.graphs.items():
                gathered += [(v, part.eqn.runs(key) * often) for v, often in inner.gathered]
        return UpdateRegion(
            self.sums.in_graph, frozenset(self.eqns), frozenset(self.inner), self.loops, tuple(parts), tuple(gathered)
        )

    def finished_branch(self, branch: _Branch, leaving: frozenset[int]) -> BranchRegion:
        """The part in a branch. An operand that it only reads whole is gathered before it, if that is no more often."""
        entering = set(branch.entering)
        for i in branch.entering:
            v = branch.eqn.ins[1 + i]
            shard = any(region.reads_shard(x, branch.leaving) for _, region, x in branch.inputs(v))
            if not self.holds(v) or (not shard and self.gathers(v, leaving) >= 1):
                entering.discard(i)
                for region in branch.regions.values():
                    region.inner.discard(region.graph.ins[i])
        graphs = {key: region.finished(branch.leaving) for key, region in branch.regions.items()}
        return BranchRegion(branch.eqn, frozenset(entering), branch.leaving, graphs)

    def reads_shard(self, v: Var, leaving: frozenset[int]) -> bool:
        """True if an equation of the update reads a value as one shard, or a result that leaves split is it."""
        if uses(self.graph).readers[v] & self.eqns or any(self.graph.outs[i] is v for i in leaving):
            return True
        inputs = [(region, x, branch) for branch in self.branches.values() for _, region, x in branch.inputs(v)]
        return any(region.reads_shard(x, branch.leaving) for region, x, branch in inputs)

    def gathers(self, v: Var, leaving: frozenset[int]) -> float:
        """How often a run of the graph needs a value whole, branches by how often they run; at least 1 outside them."""
        readers, results, _ = uses(self.graph)
        if readers[v] - self.eqns - set(self.branches) or not leaving.issuperset(results.get(v, ())):
            return 1.0
        return sum(
            branch.eqn.runs(key, 0.5) * min(region.gathers(x, branch.leaving), 1.0)
            for branch in self.branches.values()
            for key, region, x in branch.inputs(v)
        )


_FIELDS = ("in_graph", "loops", "branches")  # of `Sums`
