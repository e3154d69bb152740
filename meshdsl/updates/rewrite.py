"""The graph in which chosen updates are computed on one shard: weights and states enter it cut, and leave it cut."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..control import BARRIER
from ..dims import Shape
from ..ir import NO_CAUSE, Because, Cause, Eqn, Graph, Op, Scan, Var
from ..layouts import Sharding
from ..ops.placement import RESHARD_TO_PRIVATE_DIM
from ..ops.reshape import RENAME
from ..trace import FULL
from .pending import ShardedGraph
from .regions import BranchRegion, Format, UpdateRegion, is_loop_over_parts, renamed
from .update import Update


def rewrite_updates(placed: ShardedGraph, replaced: Iterable[tuple[int, Var]], chosen: Sequence[Update]) -> Graph:
    """The graph with the chosen updates on private dims; `replaced` are numbers of results and the inputs they replace.

    Other results are complete, also if they are the same value.
    """
    form_of = {v: update.format for update in chosen for v in update.carried}
    leaving = {i: form_of[v] for i, v in replaced if v in form_of}
    parts = [(update.format, update.part) for update in chosen]
    return _Rewrite(placed.graph, parts, placed.shardings, set(form_of), leaving, placed.regather).graph()


class _Rewrite:
    """Rewrites a graph: its updates on private dims, with renames where values enter and leave the updates."""

    def __init__(
        self,
        graph: Graph,
        parts: Sequence[tuple[Format, UpdateRegion]],
        shardings: Mapping[Var, Sharding],
        entering: Collection[Var],  # inputs that are split
        leaving: Mapping[int, Format],  # results that are split
        regather: bool = False,
    ):
        self.old, self.shardings = graph, shardings
        self.of = {eqn: pair for pair in parts for eqn in pair[1].eqns}
        self.sums = {v: form for form, part in parts for v in part.sums}
        self.owner = {v: form for form, part in parts for v in part.inner}
        self.loops: dict[Eqn, list[tuple[int, Format, UpdateRegion]]] = defaultdict(list)
        for form, part in parts:
            for eqn, i, inner in part.loops:
                self.loops[eqn].append((i, form, inner))
        self.branches: dict[Eqn, list[tuple[Format, BranchRegion]]] = defaultdict(list)
        for form, part in parts:
            for branch in part.branches:
                self.branches[branch.eqn].append((form, branch))
        self.entering, self.leaving, self.regather = entering, leaving, regather
        self.eqns: list[Eqn] = []
        self.inside: dict[tuple[Var, Format], Var] = {}  # the version of a value that an update reads
        self.outside: dict[Var, Var] = {}  # the version that the rest of the graph reads
        self.names: Mapping[Var, str] = {}  # of the weights that a loop over parts takes
        self.regathered: dict[Var, Var] = {}  # the version that the backward pass reads, if it gathers again

    def graph(self, around: Eqn | None = None) -> Graph:
        """The rewritten graph; `around` is the branch that it belongs to."""
        old = self.old
        ins = tuple(self.define(v) if v in self.entering else v for v in old.ins)
        for eqn in old.eqns:
            rewritten = self.sharded if eqn in self.of else self.branch if eqn in self.branches else self.whole
            self.eqns.append(rewritten(eqn))
        last = old.eqns[-1] if old.eqns else around
        assert last is not None
        outs = [
            self.enter(v, self.leaving[i], last) if i in self.leaving else self.leave(v, last)
            for i, v in enumerate(old.outs)
        ]
        return old.replace(ins=ins, eqns=tuple(self.eqns), outs=tuple(outs))

    def sharded(self, eqn: Eqn) -> Eqn:
        """An equation of an update, on shards."""
        form, _ = self.of[eqn]
        new_eqn = dataclasses.replace(renamed(eqn, form), ins=tuple(self.enter(v, form, eqn) for v in eqn.ins))
        for v, new in zip(eqn.outs, new_eqn.outs, strict=True):
            if v in self.owner:
                self.inside[v, form] = new
            else:
                self.outside[v] = new
        return new_eqn

    def whole(self, eqn: Eqn) -> Eqn:
        """An equation beside the updates, which may be a loop with updates of its rows or parts."""
        inside: dict[int, Var] = {}
        if self.regather and is_loop_over_parts(eqn):
            eqn, inside = self.by_part(eqn, _scan_of(eqn))
        else:
            if eqn in self.loops:
                eqn = eqn.with_control(body=self.body(eqn))
            inside = self.by_layer(eqn, eqn.scan) if self.regather and eqn.scan is not None else {}
            eqn = eqn.with_control(body=_renamed_inside(eqn, inside)) if inside else eqn
        ins = tuple(inside[i] if i in inside else self.leave(v, eqn) for i, v in enumerate(eqn.ins))
        return eqn.replace(ins=ins, outs=tuple(self.define(v) if v in self.owner else v for v in eqn.outs))

    def branch(self, eqn: Eqn) -> Eqn:
        """A branch whose graphs take and return shards of the updates that it is part of."""
        entering = {i: form for form, branch in self.branches[eqn] for i in branch.entering}
        leaving = {i: form for form, branch in self.branches[eqn] for i in branch.leaving}
        graphs: dict[str, Graph] = {}
        for key, graph in eqn.graphs().items():
            parts = [(form, branch.graphs[key]) for form, branch in self.branches[eqn]]
            inside = _Rewrite(graph, parts, self.shardings, {graph.ins[i] for i in entering}, leaving, self.regather)
            graphs[key] = inside.graph(eqn)
        ins = [self.leave(eqn.ins[0], eqn)]
        ins += [
            self.enter(v, entering[i], eqn) if i in entering else self.leave(v, eqn) for i, v in enumerate(eqn.ins[1:])
        ]
        outs = tuple(self.define(v) if i in leaving else v for i, v in enumerate(eqn.outs))
        return eqn.replace(ins=tuple(ins), outs=outs).with_control(**graphs)

    def define(self, v: Var) -> Var:
        """Split an input, or a loop's stacked result, under its private dims."""
        form = self.owner[v]
        self.inside[v, form] = dataclasses.replace(v, dims=form.renamed(v.dims), name=self.names.get(v, v.name))
        return self.inside[v, form]

    def body(self, loop: Eqn) -> Graph:
        parts = [(form, part) for _, form, part in self.loops[loop]]
        leaving = {i: form for i, form, _ in self.loops[loop]}
        return _Rewrite(_scan_of(loop).body, parts, self.shardings, (), leaving).graph(loop)

    def enter(self, v: Var, form: Format, eqn: Eqn) -> Var:
        """A value as an update reads it: a pending sum is scattered, a replicated value is sliced."""
        if not form.cuts(v):
            return self.leave(v, eqn)
        if (v, form) not in self.inside:
            maker = self.old.producers.get(v)
            if maker is not None and maker.op is FULL:  # the zero from which a total starts
                self.eqns.append(renamed(maker, form))
                self.inside[v, form] = self.eqns[-1].outs[0]
                return self.inside[v, form]
            x, shape = self.leave(v, eqn), form.renamed(v.dims)
            cause = update_cause(Because.UPDATE, v.name, v.dims, shape)
            if self.shardings.get(v, Sharding()).partial:
                split = {to.name: axes for _, to, axes in form.dims} | dict((*form.kept, *self.shardings[v].split))
                names = {d.name for d in shape}
                params = {"shape": shape, "split": tuple(each for each in split.items() if each[0] in names)}
                self.inside[v, form] = self.add(RESHARD_TO_PRIVATE_DIM, x, shape, eqn, cause, params)
            else:
                self.inside[v, form] = self.rename(x, shape, eqn, cause)
        return self.inside[v, form]

    def leave(self, v: Var, eqn: Eqn) -> Var:
        """A value as the rest of the graph reads it: gathered over the group."""
        if self.regather and eqn.backward and v in self.owner:
            if v not in self.regathered:
                source = self.inside[v, self.owner[v]]
                copy = self.add(BARRIER, source, source.dims, eqn, NO_CAUSE, {})  # so that cse keeps two gathers
                cause = update_cause(Because.WEIGHT_AGAIN, source.name, v.dims, copy.dims)
                self.regathered[v] = self.rename(copy, v.dims, eqn, cause)
            return self.regathered[v]
        if v in self.owner and v not in self.outside:
            source = self.inside[v, self.owner[v]]
            cause = update_cause(Because.WEIGHT_READ, source.name, v.dims, source.dims)
            self.outside[v] = self.rename(source, v.dims, eqn, cause)
        return self.outside.get(v, v)

    def by_layer(self, loop: Eqn, scan: Scan) -> dict[int, Var]:
        """The stacked operands that a loop takes split, to gather them one layer at a time inside."""
        first, dim = scan.consts + scan.carries, scan.dim
        stacks = {i: v for i, v in enumerate(loop.ins) if i >= first and v in self.owner}
        return {
            i: self.inside[v, self.owner[v]]
            for i, v in stacks.items()
            if dim in self.inside[v, self.owner[v]].dims  # the layer dim itself is not split
        }

    def by_part(self, loop: Eqn, scan: Scan) -> tuple[Eqn, dict[int, Var]]:
        """A loop over parts of the data that takes weights split, to gather them in each trip, and adds up shards of
        gradients; and its operands that are split.
        """
        weights = {i: self.owner[v] for i, v in enumerate(loop.ins[: scan.consts]) if v in self.owner}
        parts, leaving = [(form, part) for _, form, part in self.loops[loop]], {i: f for i, f, _ in self.loops[loop]}
        totals = {scan.consts + i: form for i, form in leaving.items() if i < scan.carries}
        entering = {scan.body.ins[i]: form for i, form in (weights | totals).items()}
        inner = _Rewrite(scan.body, parts, self.shardings, entering, leaving, regather=True)
        inner.owner.update(entering)
        inner.names = {scan.body.ins[i]: loop.ins[i].name for i in weights}
        operands = {i: self.inside[loop.ins[i], form] for i, form in weights.items()}
        operands |= {i: self.enter(loop.ins[i], form, loop) for i, form in totals.items()}
        return loop.with_control(body=inner.graph(loop)), operands

    def rename(self, v: Var, shape: Shape, eqn: Eqn, cause: Cause) -> Var:
        return self.add(RENAME, v, shape, eqn, cause, {"shape": shape})

    def add(self, op: Op, v: Var, to: Shape, eqn: Eqn, cause: Cause, params: Mapping[str, Any]) -> Var:
        result = Var(to, v.dtype, v.name)
        self.eqns.append(Eqn(op, (v,), (result,), params, eqn.where, eqn.backward, cause))
        return result


def update_cause(kind: Because, weight: str, whole: Shape, cut: Shape) -> Cause:
    """The cause of a split or gather of a weight, with the dims that have a private name."""
    return Cause(kind, dims=tuple(d.name for d in whole if d not in cut), tensors=(weight,))


def _scan_of(eqn: Eqn) -> Scan:
    assert eqn.scan is not None
    return eqn.scan


def _renamed_inside(loop: Eqn, cut: Mapping[int, Var]) -> Graph:
    """A loop body that takes rows of these split stacks, and gathers them first."""
    scan = _scan_of(loop)
    body = scan.body
    ins, eqns = list(body.ins), list[Eqn]()
    for i, stack in cut.items():
        row = Var(tuple(d for d in stack.dims if d != scan.dim), stack.dtype, stack.name)
        cause = update_cause(Because.WEIGHT_IN_LAYER, stack.name, ins[i].dims, row.dims)
        eqns.append(Eqn(RENAME, (row,), (ins[i],), {"shape": ins[i].dims}, loop.where, loop.backward, cause))
        ins[i] = row
    return body.replace(ins=tuple(ins), eqns=(*eqns, *body.eqns))
