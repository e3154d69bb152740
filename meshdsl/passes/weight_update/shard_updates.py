"""Automatic cross-replica sharding of the weight update (Xu et al., 2020).

Devices that store the same weight compute the same update. This pass splits that update, and all values that only it
reads: for each weight whose gradient is a pending sum over some mesh axes, it splits a dim over those axes too. The
split dim gets a private name (`io__rows`), so the rest of the model does not change. Where the gradient enters the
update, the split is a reduce-scatter; where the forward pass reads the weight, a rename is an all-gather. Both follow
from the types.
"""

from __future__ import annotations

import dataclasses
import glob
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...control import BARRIER
from ...dims import Shape
from ...errors import InternalError
from ...ir import NO_CAUSE, Because, Cause, Eqn, Graph, Op, Scan, Type, Var, verify, walk
from ...layouts import Layout, Sharding
from ...layouts.sharding import Axes
from ...ops.reshape import RENAME
from ..accumulate import running_sum
from .pending import ShardedGraph, pending_sums
from .regions import CannotShardError, Format, UpdateRegion, equations, renamed
from .updates import Update, carried, find_update

__all__ = ["RESHARD_TO_PRIVATE_DIM", "Decision", "Policy", "Verdict", "shard_updates"]


@dataclass(frozen=True)
class Decision:
    """The decision about one weight, and the reason. Bytes are per device, seconds per step."""

    weight: str
    shape: Shape
    group: Axes  # the axes over which the update is split, or, if it is not split, could be
    split: tuple[tuple[str, Axes], ...]  # the dims split for the update, and their axes
    sharded: bool
    reason: str
    bytes_saved: int = 0
    seconds_saved: float | None = None  # None without a machine
    pending: Axes = ()  # all axes over which the gradient is summed; outside the group, shards of it are summed


def _renamed_type(x: Type, *, shape: Shape, split: Any) -> Type:
    return Type(shape, x.dtype)


def _unreachable_kernel(*_: Any, **__: Any) -> Any:
    raise InternalError("partition replaces a cut by a rename and a collective")


RESHARD_TO_PRIVATE_DIM = Op(
    "cut", type=_renamed_type, kernel=_unreachable_kernel
)  # a sum under private names, scattered over the axes of `split`


Verdict = tuple[bool, "float | None", str]  # whether to shard an update, the seconds saved, and the reason if not


@dataclass(frozen=True)
class Policy:
    """Candidate device groups for a sharded update, and the decision whether sharding it pays.

    `groups` maps the axes over which a gradient is pending to candidate groups; `worth` judges an update. The group
    that saves the most is used, the first one in a tie.
    """

    groups: Callable[[Axes], Sequence[Axes]]
    worth: Callable[[Update], Verdict]


def shard_updates(placed: ShardedGraph, policy: Policy) -> tuple[Graph, Layout, tuple[Decision, ...]]:
    """The graph with private dims in its updates, a layout that splits them, and a decision for each weight.

    Weights are the arguments that results of the same path and type replace (`params/w` and `0/w`). Only the first
    argument with such leaves counts. The arguments that a loop over steps carries are weights too, if its body updates
    them. With `placed.regather` the backward pass gathers a weight again instead of keeping it, and loops over layers
    gather one layer at a time (ZeRO, stage 3: Rajbhandari et al., 2020).
    """
    pairs = carried(placed)
    root = next((v.name.partition("/")[0] for v, _ in pairs), "")
    weights = [(v, out) for v, out in pairs if v.name.partition("/")[0] == root or "/" not in v.name]
    looped, in_loops, updated = _in_loops(placed, policy)
    around = dataclasses.replace(placed, graph=looped, layout=_with_rules(placed.layout, _private(in_loops)))
    names = {v: v.name for v in placed.graph.ins}
    remaining = [(v, out) for v, out in weights if v.name not in updated]  # not updated in a loop
    chosen, decisions = _decide(around, pairs, remaining, policy, names)
    decisions = (*(d for d in updated.values() if d is not None), *decisions)
    _check_decided(weights, decisions, chosen, updated)
    if not in_loops and not chosen:
        return placed.graph, placed.layout, decisions
    graph = _rewritten(around, pairs, chosen) if chosen else looped
    layout = _with_private(around, chosen) if chosen else around.layout
    return verify(graph, "shard_updates"), layout, decisions


def _check_decided(
    weights: Sequence[tuple[Var, Var]],
    decisions: Sequence[Decision],
    chosen: Sequence[Update],
    updated: Mapping[str, Decision | None],
) -> None:
    """Raise `InternalError` unless each weight has a decision, or is optimizer state of a weight that has one."""
    decided = {d.weight for d in decisions} | set(updated) | {v.name for update in chosen for v in update.carried}
    missing = [v.name for v, _ in weights if v.name not in decided]
    if missing:
        raise InternalError(f"shard_updates decided nothing about the weights {', '.join(missing)}")


def _decide(
    placed: ShardedGraph,
    pairs: Sequence[tuple[Var, Var]],
    weights: Sequence[tuple[Var, Var]],
    policy: Policy,
    names: Mapping[Var, str],
) -> tuple[list[Update], list[Decision]]:
    """The updates to split, and a decision for each weight."""
    chosen: list[Update] = []
    decisions: list[Decision] = []
    for v, out in weights:
        if any(v in update.carried for update in chosen):  # optimizer state (a moment) of an earlier weight
            continue
        try:
            owners = {eqn: names[u.weight] for u in chosen for eqn in equations(u.part)}
            update = find_update(placed, v, out, pairs, owners, policy.groups, lambda u: policy.worth(u)[1] or 0.0)
        except CannotShardError as problem:
            decisions.append(Decision(names[v], v.shape, (), (), False, str(problem)))
            continue
        sharded, seconds, reason = policy.worth(update)
        form = update.format
        saved = (
            sum(n - int(n * form.padding_ratio / form.ways) for n in map(placed.bytes, update.carried))
            if sharded
            else 0
        )
        split = tuple((old.name, axes) for old, _, axes in form.dims)
        decisions.append(
            Decision(names[v], v.shape, update.group, split, sharded, reason, saved, seconds, update.pending)
        )
        if sharded:
            chosen.append(update)
    return chosen, decisions


def _in_loops(placed: ShardedGraph, policy: Policy) -> tuple[Graph, list[Update], dict[str, Decision | None]]:
    """Split the weights of loops over steps before the first step, and gather them after the last.

    Returns the graph, the split updates, and the arguments that such a loop updates, by name, with their decision (None
    for optimizer state). Only an argument can be a weight: a backward loop also carries cotangents, pending sums that
    change from layer to layer.
    """
    eqns: list[Eqn] = []
    every: list[Update] = []
    updated: dict[str, Decision | None] = {}
    for eqn in placed.graph.eqns:
        if not isinstance(eqn.control, Scan) or eqn.backward:
            eqns.append(eqn)
            continue
        consts, n, body = eqn.control.consts, eqn.control.carries, eqn.control.body
        outer = dict(zip(body.ins, eqn.ins, strict=True))
        pairs = [
            (v, out)
            for v, out in zip(body.ins[consts : consts + n], body.outs[:n], strict=True)
            if v.shape and v.type == out.type and not placed.shardings.get(out, Sharding()).partial
        ]
        pairs = [(v, out) for v, out in pairs if running_sum(body, v, out) is None]
        inside = dataclasses.replace(placed, graph=body)
        gradients = {v for step in body.eqns for v in step.outs if _has_backward(step)}
        weights = [
            (v, out)
            for v, out in pairs
            if outer[v] in placed.graph.ins and gradients.intersection(pending_sums(inside, body, out).all())
        ]
        chosen, decisions = _decide(inside, pairs, weights, policy, {v: outer[v].name for v in body.ins})
        eqns += _cut_around(eqn, eqn.control, inside, pairs, chosen) if chosen else [eqn]
        every += chosen
        updated |= {outer[v].name: None for update in chosen for v in update.carried if outer[v] in placed.graph.ins}
        updated |= {d.weight: d for d in decisions}
    return placed.graph.replace(eqns=tuple(eqns)), every, updated


def _has_backward(eqn: Eqn) -> bool:
    """True if an equation belongs to a backward pass, or contains one."""
    return eqn.backward or any(inner.backward for sub in eqn.graphs().values() for inner, _ in walk(sub))


def _cut_around(
    loop: Eqn, scan: Scan, inside: ShardedGraph, pairs: Sequence[tuple[Var, Var]], chosen: Sequence[Update]
) -> list[Eqn]:
    """A loop with split updates in its body, with renames that split its carries before it and gather them after it."""
    body, consts = _rewritten(inside, pairs, chosen), scan.consts
    ins, outs, before, after = list(loop.ins), list(loop.outs), list[Eqn](), list[Eqn]()
    for i, v in enumerate(body.ins):
        if not consts <= i < consts + scan.carries or v.shape == ins[i].shape:
            continue
        private_in = dataclasses.replace(v, name=ins[i].name)
        before.append(Eqn(RENAME, (ins[i],), (private_in,), {"shape": v.shape}, loop.where))
        ins[i], full_out = private_in, outs[i - consts]
        outs[i - consts] = Var(v.shape, v.dtype, full_out.name)
        cause = _cause(Because.WEIGHT_OUT_OF_LOOP, private_in.name, full_out.shape, private_in.shape)
        after.append(Eqn(RENAME, (outs[i - consts],), (full_out,), {"shape": full_out.shape}, loop.where, False, cause))
    new_loop = loop.replace(ins=tuple(ins), outs=tuple(outs)).with_control(body=body)
    return [*before, new_loop, *after]


def _rewritten(placed: ShardedGraph, pairs: Sequence[tuple[Var, Var]], chosen: Sequence[Update]) -> Graph:
    split_inputs = {v for update in chosen for v in update.carried}
    sharded_outs = {out for v, out in pairs if v in split_inputs}
    parts = [(update.format, update.part) for update in chosen]
    return _Rewrite(placed.graph, parts, placed.shardings, split_inputs, sharded_outs, placed.regather).graph()


class _Rewrite:
    """Rewrites a graph: its updates on private dims, with renames where values enter and leave the updates."""

    def __init__(
        self,
        graph: Graph,
        parts: Sequence[tuple[Format, UpdateRegion]],
        shardings: Mapping[Var, Sharding],
        carried: Collection[Var] = (),
        sharded_outs: Collection[Var] = (),
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
        self.carried = set(carried)  # inputs that are split
        self.sharded_outs = set(sharded_outs)  # results that are split
        self.regather = regather
        self.eqns: list[Eqn] = []
        self.inside: dict[tuple[Var, Format], Var] = {}  # the version of a value that an update reads
        self.outside: dict[Var, Var] = {}  # the version that the rest of the graph reads
        self.regathered: dict[Var, Var] = {}  # the version that the backward pass reads, if it gathers again

    def graph(self) -> Graph:
        old = self.old
        ins = tuple(self.define(v) if v in self.carried else v for v in old.ins)
        for eqn in old.eqns:
            if eqn in self.of:
                form, _ = self.of[eqn]
                new_eqn = dataclasses.replace(renamed(eqn, form), ins=tuple(self.enter(v, form, eqn) for v in eqn.ins))
                for v, new in zip(eqn.outs, new_eqn.outs, strict=True):
                    if v in self.owner:
                        self.inside[v, form] = new
                    else:
                        self.outside[v] = new
                self.eqns.append(new_eqn)
            else:
                if eqn in self.loops:
                    eqn = eqn.with_control(body=self.body(eqn))
                inside = self.by_layer(eqn, eqn.control) if self.regather and isinstance(eqn.control, Scan) else {}
                ins_ = tuple(inside[i] if i in inside else self.leave(v, eqn) for i, v in enumerate(eqn.ins))
                eqn = eqn.with_control(body=_renamed_inside(eqn, inside)) if inside else eqn
                outs = tuple(self.define(v) if v in self.owner else v for v in eqn.outs)
                self.eqns.append(eqn.replace(ins=ins_, outs=outs))
        outs = [self.result(v, old.eqns[-1]) for v in old.outs]
        return old.replace(ins=ins, eqns=tuple(self.eqns), outs=tuple(outs))

    def result(self, v: Var, last: Eqn) -> Var:
        if v not in self.sharded_outs:
            return self.leave(v, last)
        return self.enter(v, self.owner[v] if v in self.owner else self.sums[v], last)

    def define(self, v: Var) -> Var:
        """Split an input, or a loop's stacked result, under its private dims."""
        form = self.owner[v]
        self.inside[v, form] = dataclasses.replace(v, shape=form.renamed(v.shape))
        return self.inside[v, form]

    def body(self, loop: Eqn) -> Graph:
        body = _scan_of(loop).body
        parts = [(form, part) for _, form, part in self.loops[loop]]
        return _Rewrite(
            body, parts, self.shardings, sharded_outs=[body.outs[i] for i, _, _ in self.loops[loop]]
        ).graph()

    def enter(self, v: Var, form: Format, eqn: Eqn) -> Var:
        """A value as an update reads it: a pending sum is scattered, a replicated value is sliced."""
        if not form.cuts(v):
            return self.leave(v, eqn)
        if (v, form) not in self.inside:
            x, shape = self.leave(v, eqn), form.renamed(v.shape)
            cause = _cause(Because.UPDATE, v.name, v.shape, shape)
            if self.sums.get(v) == form:
                split = {to.name: axes for _, to, axes in form.dims}
                split |= {d: axes for d, axes in self.shardings[v].split if any(e.name == d for e in shape)}
                params = {"shape": shape, "split": tuple(split.items())}
                self.inside[v, form] = self.add(RESHARD_TO_PRIVATE_DIM, x, shape, eqn, cause, params)
            else:
                self.inside[v, form] = self.rename(x, shape, eqn, cause)
        return self.inside[v, form]

    def leave(self, v: Var, eqn: Eqn) -> Var:
        """A value as the rest of the graph reads it: gathered over the group."""
        if self.regather and eqn.backward and v in self.owner:
            if v not in self.regathered:
                source = self.inside[v, self.owner[v]]
                copy = self.add(BARRIER, source, source.shape, eqn, NO_CAUSE, {})  # so that cse keeps two gathers
                cause = _cause(Because.WEIGHT_AGAIN, v.name, v.shape, copy.shape)
                self.regathered[v] = self.rename(copy, v.shape, eqn, cause)
            return self.regathered[v]
        if v in self.owner and v not in self.outside:
            source = self.inside[v, self.owner[v]]
            cause = _cause(Because.WEIGHT_READ, v.name, v.shape, source.shape)
            self.outside[v] = self.rename(source, v.shape, eqn, cause)
        return self.outside.get(v, v)

    def by_layer(self, loop: Eqn, scan: Scan) -> dict[int, Var]:
        """The stacked operands that a loop takes split, to gather them one layer at a time inside."""
        first, dim = scan.consts + scan.carries, scan.dim
        stacks = {i: v for i, v in enumerate(loop.ins) if i >= first and v in self.owner}
        return {
            i: self.inside[v, self.owner[v]]
            for i, v in stacks.items()
            if dim in self.inside[v, self.owner[v]].shape  # the layer dim itself is not split
        }

    def rename(self, v: Var, shape: Shape, eqn: Eqn, cause: Cause) -> Var:
        return self.add(RENAME, v, shape, eqn, cause, {"shape": shape})

    def add(self, op: Op, v: Var, to: Shape, eqn: Eqn, cause: Cause, params: Mapping[str, Any]) -> Var:
        result = Var(to, v.dtype, v.name)
        self.eqns.append(Eqn(op, (v,), (result,), params, eqn.where, eqn.backward, cause))
        return result


def _cause(kind: Because, weight: str, whole: Shape, cut: Shape) -> Cause:
    """The cause of a split or gather of a weight, with the dims that have a private name."""
    return Cause(kind, dims=tuple(d.name for d in whole if d not in cut), tensors=(weight,))


def _scan_of(eqn: Eqn) -> Scan:
    assert isinstance(eqn.control, Scan)
    return eqn.control


def _renamed_inside(loop: Eqn, cut: Mapping[int, Var]) -> Graph:
    """A loop body that takes rows of these split stacks, and gathers them first."""
    scan = _scan_of(loop)
    body = scan.body
    ins, eqns = list(body.ins), list[Eqn]()
    for i, stack in cut.items():
        row = Var(tuple(d for d in stack.shape if d != scan.dim), stack.dtype, stack.name)
        cause = _cause(Because.WEIGHT_IN_LAYER, stack.name, ins[i].shape, row.shape)
        eqns.append(Eqn(RENAME, (row,), (ins[i],), {"shape": ins[i].shape}, loop.where, loop.backward, cause))
        ins[i] = row
    return body.replace(ins=tuple(ins), eqns=(*eqns, *body.eqns))


def _with_rules(layout: Layout, rules: Mapping[str, Axes]) -> Layout:
    return Layout({**layout.rules, **rules}, overrides=layout.overrides) if rules else layout


def _private(chosen: Sequence[Update]) -> dict[str, Axes]:
    return {to.name: axes for update in chosen for _, to, axes in update.format.dims}


def _with_private(placed: ShardedGraph, chosen: Sequence[Update]) -> Layout:
    """The layout with rules for the private dims; overrides by path become rules of exactly those paths."""
    private = _private(chosen)
    named = [
        *((v.name, v.shape) for v in placed.graph.ins),
        *zip(placed.results, (v.shape for v in placed.graph.outs), strict=True),
    ]
    renamed = {v.name: update.format for update in chosen for v in update.carried}
    renamed |= {
        path: renamed[v.name]
        for v, out in carried(placed)
        for path, result in zip(placed.results, placed.graph.outs, strict=True)
        if result is out and v.name in renamed
    }
    overrides: dict[str, dict[str, Axes]] = {}
    for path, shape in named:
        rules = placed.layout.for_path(path)
        dims = renamed[path].renamed(shape) if path in renamed else shape
        own = {d.name: rules.get(d.name, ()) for d in dims if d.name not in private}
        changed = {d: axes for d, axes in own.items() if axes != placed.layout.axes(d)}
        if changed:
            overrides[glob.escape(path)] = changed
    return Layout({**placed.layout.rules, **private}, overrides=overrides)
