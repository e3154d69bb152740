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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..dims import Shape
from ..errors import InternalError
from ..ir import Because, Eqn, Graph, Scan, Var, verify, walk
from ..layouts import Layout, Sharding
from ..layouts.sharding import Axes
from ..ops.reshape import RENAME
from ..passes.accumulate import running_sum
from .grow import Replaced
from .pending import ShardedGraph, pending_sums
from .regions import CannotShardError, equations, leaving_branches, uses
from .rewrite import rewrite_updates, update_cause
from .update import Update, carried, find_update


@dataclass(frozen=True)
class Decision:
    """The decision about one weight, and the reason. Bytes are per device, seconds per step."""

    weight: str
    dims: Shape
    group: Axes  # the axes over which the update is split, or, if it is not split, could be
    split: tuple[tuple[str, Axes], ...]  # the dims split for the update, and their axes
    sharded: bool
    reason: str
    bytes_saved: int = 0
    seconds_saved: float | None = None  # None without a machine
    pending: Axes = ()  # all axes over which the gradient is summed; outside the group, shards of it are summed
    by_layout: bool = False  # no devices repeat the update, because the layout splits the weight


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
    rules = {**placed.layout.rules, **_private(in_loops)}
    around = dataclasses.replace(placed, graph=looped, layout=Layout(rules, overrides=placed.layout.overrides))
    names = {v: v.name for v in placed.graph.ins}
    remaining = [(v, out) for v, out in weights if v.name not in updated]  # not updated in a loop
    chosen, decisions = _decide(around, pairs, remaining, policy, names)
    decisions = (*(d for d in updated.values() if d is not None), *decisions)
    _check_decided(weights, decisions, chosen, updated)
    if not in_loops and not chosen:
        return placed.graph, placed.layout, decisions
    graph, layout = rewritten(around, chosen, pairs)
    return verify(graph, "shard_updates"), layout, decisions


def rewritten(placed: ShardedGraph, chosen: Sequence[Update], pairs: Sequence[tuple[Var, Var]]) -> tuple[Graph, Layout]:
    """The graph with the private dims of these updates, and a layout that splits them."""
    if not chosen:
        return placed.graph, placed.layout
    replaced = ((i, v) for v, out in pairs for i in uses(placed.graph).results.get(out, ()))
    return rewrite_updates(placed, replaced, chosen), _with_private(placed, chosen)


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
    replaced, carried, owners = Replaced(pairs), set[Var](), dict[Eqn | Var, str]()
    for v, out in weights:
        if v in carried:  # optimizer state (a moment) of an earlier weight
            continue
        try:
            update = find_update(placed, v, out, replaced, owners, policy.groups, lambda u: policy.worth(u)[1] or 0.0)
        except CannotShardError as problem:
            decisions.append(Decision(names[v], v.dims, (), (), False, str(problem), by_layout=problem.by_layout))
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
            Decision(names[v], v.dims, update.group, split, sharded, reason, saved, seconds, update.pending)
        )
        if sharded:
            chosen.append(update)
            carried.update(update.carried)
            owners |= dict.fromkeys((*equations(update.part), *leaving_branches(update.part)), names[v])
    return chosen, decisions


def _carried_by(placed: ShardedGraph, loop: Scan) -> list[tuple[Var, Var]]:
    """The carries of a loop that may be weights or their state, with their next values: no sum runs through them."""
    consts, n, body = loop.consts, loop.carries, loop.body
    return [
        (v, out)
        for v, out in zip(body.ins[consts : consts + n], body.outs[:n], strict=True)
        if v.dims and v.type == out.type and not placed.shardings.get(out, Sharding()).partial
        if running_sum(body, v, out) is None
    ]


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
        if eqn.scan is None or eqn.backward:
            eqns.append(eqn)
            continue
        body = eqn.scan.body
        outer = dict(zip(body.ins, eqn.ins, strict=True))
        pairs = _carried_by(placed, eqn.scan)
        inside = dataclasses.replace(placed, graph=body)
        gradients = {v for step, _ in walk(body) for v in step.outs if _has_backward(step)}
        weights = [
            (v, out)
            for v, out in pairs
            if outer[v] in placed.graph.ins and gradients.intersection(pending_sums(inside, body, out).all())
        ]
        chosen, decisions = _decide(inside, pairs, weights, policy, {v: outer[v].name for v in body.ins})
        eqns += _cut_around(eqn, eqn.scan, inside, chosen) if chosen else [eqn]
        every += chosen
        updated |= {outer[v].name: None for update in chosen for v in update.carried if outer[v] in placed.graph.ins}
        updated |= {d.weight: d for d in decisions}
    return placed.graph.replace(eqns=tuple(eqns)), every, updated


def _has_backward(eqn: Eqn) -> bool:
    """True if an equation belongs to a backward pass, or contains one."""
    return eqn.backward or any(inner.backward for sub in eqn.graphs().values() for inner, _ in walk(sub))


def _cut_around(loop: Eqn, scan: Scan, inside: ShardedGraph, chosen: Sequence[Update]) -> list[Eqn]:
    """A loop with split updates in its body, with renames that split its carries before it and gather them after it."""
    consts = scan.consts
    body = rewrite_updates(inside, enumerate(inside.graph.ins[consts : consts + scan.carries]), chosen)
    ins, outs, before, after = list(loop.ins), list(loop.outs), list[Eqn](), list[Eqn]()
    for i, v in enumerate(body.ins):
        if not consts <= i < consts + scan.carries or v.dims == ins[i].dims:
            continue
        private_in = dataclasses.replace(v, name=ins[i].name)
        before.append(Eqn(RENAME, (ins[i],), (private_in,), {"shape": v.dims}, loop.where))
        ins[i], full_out = private_in, outs[i - consts]
        outs[i - consts] = Var(v.dims, v.dtype, full_out.name)
        cause = update_cause(Because.WEIGHT_OUT_OF_LOOP, private_in.name, full_out.dims, private_in.dims)
        after.append(Eqn(RENAME, (outs[i - consts],), (full_out,), {"shape": full_out.dims}, loop.where, False, cause))
    new_loop = loop.replace(ins=tuple(ins), outs=tuple(outs)).with_control(body=body)
    return [*before, new_loop, *after]


def _private(chosen: Sequence[Update]) -> dict[str, Axes]:
    return {to.name: axes for update in chosen for _, to, axes in update.format.dims}


def _with_private(placed: ShardedGraph, chosen: Sequence[Update]) -> Layout:
    """The layout with rules for the private dims; overrides by path become rules of exactly those paths."""
    private = _private(chosen)
    named = [
        *((v.name, v.dims) for v in placed.graph.ins),
        *zip(placed.results, (v.dims for v in placed.graph.outs), strict=True),
    ]
    renamed = {v.name: update.format for update in chosen for v in update.carried}
    renamed |= {
        path: renamed[v.name]
        for v, out in carried(placed)
        for path in (placed.results[i] for i in uses(placed.graph).results.get(out, ()))
        if v.name in renamed
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
