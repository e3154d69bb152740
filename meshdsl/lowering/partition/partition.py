"""Partition: from a graph, a mesh and a layout to a program with a sharding for every value, and collectives.

An operation takes its operands under one assignment of axes to labels (`choose`). Pending sums pass through linear
operations while that saves bytes (`demand`). Missing shardings are produced by the cheapest plan (`planner`). The
problems of a layout are collected along the way and raised together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ...control.region import LOCAL
from ...dims import Dim, show
from ...errors import MeshdslError, Where, at
from ...ir import Because, Cause, Eqn, Graph, Linear, Type, Var, cse, dce, verify, walk
from ...layouts import Extents, Layout, Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.contraction import BROADCAST
from ...ops.dtypes import CAST
from ...ops.placement import PREFER, SHARD
from ...ops.reshape import RENAME
from ...trace import FULL
from ..check import check
from ..labels import Labels, apply, labels_of, vanishing
from ..program import Program
from . import placement_ops as views
from .choose import Claims, Conflict, choose
from .control import lower_control
from .demand import may_stay_pending
from .expansions import EXPANSIONS
from .index_map import lower_index_map
from .legality import all_in_one, report_conflict, shard_problems
from .ring import find_ring, multiply_around
from .row_dims import row_dims
from .scope import Reader, Scope, Setting

__all__ = [
    "add_input",
    "add_output",
    "assemble",
    "extents_of",
    "lower",
    "lower_graph",
    "partition",
    "preferences",
    "shard_splits",
]


def partition(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Sequence[str] | None = None,
    gather_limit: float | None = None,
    homes: dict[Var, Sharding] | None = None,
) -> Program:
    """The program that one device of the mesh runs.

    Inputs are named by their paths (`params/mlp/w1`), which the layout's overrides match; `results` are the paths of
    the results. A layout may mention any dim that the function mentions, so one layout serves a model's training and
    its initialisation. If `homes` is given, it is filled with the sharding in which each value of the graph is
    computed, with sums still pending. Raises one `LayoutError` with all problems of the layout.
    """
    named = [*((v.name, v.shape) for v in graph.ins), *zip(results or [], (v.shape for v in graph.outs), strict=False)]
    names = {name: shape for name, shape in named if name}
    dims = graph.mentions | {d.name for eqn, _ in walk(graph) for v in (*eqn.ins, *eqn.outs) for d in v.shape}
    dims |= {d.name for v in graph.ins for d in v.shape}
    problems: dict[str, Where | None] = dict.fromkeys(layout.problems(mesh, dims, names))
    misplaced = shard_problems(graph, mesh)
    if misplaced:
        raise all_in_one({**problems, **misplaced}, mesh, layout)
    asked, layout = layout, layout.on(mesh)  # without invalid rules, to find conflicts among the others too
    setting = Setting(
        mesh,
        layout,
        extents_of(mesh, layout, shard_splits(graph)),
        preferences(graph),
        gather_limit,
        problems,
        row_dims(graph),
    )
    scope = Scope(setting, graph)
    ins, outs = lower_graph(scope, results)
    if setting.problems:
        raise all_in_one(setting.problems, mesh, asked)
    if homes is not None:
        homes.update(scope.def_sharding)
    return check(verify(assemble(scope, ins, outs), "partition"), "partition")


def lower_graph(scope: Scope, results: Sequence[str] | None = None) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """Lower the whole graph of a scope; returns the inputs and results of its program."""
    graph = scope.graph
    ins = tuple(add_input(scope, v, scope.setting.layout.for_path(v.name)) for v in graph.ins)
    scope.def_sharding.update(scope.default_sharding)
    for eqn in graph.eqns:
        lower(scope, eqn)
    paths = results or [""] * len(graph.outs)
    return ins, tuple(add_output(scope, v, path) for v, path in zip(graph.outs, paths, strict=True))


def assemble(scope: Scope, ins: tuple[Var, ...], outs: tuple[Var, ...]) -> Program:
    """The program of a scope after lowering."""
    setting = scope.setting
    return dce(cse(Program(ins, tuple(scope.eqns), outs, mesh=setting.mesh, extents=setting.extents)))


def shard_splits(graph: Graph) -> list[dict[str, Axes]]:
    """The split of every `md.shard` in a graph."""
    return [dict(eqn.params["split"]) for eqn, _ in walk(graph) if eqn.op is SHARD]


def extents_of(mesh: Mesh, layout: Layout, shards: Sequence[Mapping[str, Axes]]) -> Extents:
    """The stored extents: every dim is padded to a multiple of all the axes that split it anywhere."""
    axes: dict[str, set[str]] = {}
    for rules in (layout.rules, *layout.overrides.values(), *shards):
        for dim, cut in rules.items():
            axes.setdefault(dim, set()).update(cut)
    return Extents({dim: mesh.count(tuple(cut)) for dim, cut in axes.items()})


def preferences(graph: Graph) -> dict[Var, tuple[str, ...]]:
    """For each value, the dims that win conflicts, from its `md.prefer` or from that of an elementwise result of it."""
    found: dict[Var, tuple[str, ...]] = {}
    for eqn, _ in walk(graph):
        for sub in eqn.graphs().values():
            found.update(preferences(sub))
    for eqn in reversed(graph.eqns):
        if eqn.op is PREFER:
            found.setdefault(eqn.ins[0], eqn.params["names"])
        elif eqn.control is None and len(eqn.outs) == 1 and eqn.outs[0] in found:
            labels = labels_of(eqn)
            for v, names in zip(eqn.ins, labels.ins, strict=True):
                if names == labels.outs[0] and None not in names.values():
                    found.setdefault(v, found[eqn.outs[0]])
    return found


def add_input(scope: Scope, v: Var, rules: Mapping[str, Axes]) -> Var:
    """Define an input, sharded by the layout's rules for its path. If two dims claim an axis, the preferred one gets
    it.
    """
    claims = Claims()
    for d in v.shape:
        claims.add(d.name, rules.get(d.name, ()))
    hint = scope.setting.hints.get(v, ())
    first_use = next((eqn.where for eqn in scope.graph.eqns if v in eqn.ins), None)
    for conflict in claims.contested():
        if not {conflict.first, conflict.second} & set(hint):
            report_conflict(scope, conflict, v.name or "an input", v, first_use)
    return scope.define(v, Sharding.of(choose(claims, hint, lambda assigned: 0)))


def add_output(scope: Scope, v: Var, path: str) -> Var:
    """Reshard a result by the layout's rules for its path. If these conflict, it stays sharded as computed."""
    wanted = scope.canonical(v.shape, scope.setting.layout.for_path(path))
    used = [axis for axes in wanted.values() for axis in axes]
    home = scope.default_sharding.get(v, Sharding()).whole()
    target = Sharding.of(wanted) if len(used) == len(set(used)) else home
    return scope.get(v, target, Reader("the result", _made_at(scope, v)))


def _made_at(scope: Scope, v: Var) -> Where:
    return next((eqn.where for eqn in scope.graph.eqns if v in eqn.outs), Where("", 0))


def lower(scope: Scope, eqn: Eqn) -> None:
    """Add one graph equation to the program under construction."""
    memo = scope.setting.memo
    if memo is None:
        _lower_now(scope, eqn)
    else:
        memo.lower(scope, eqn, _lower_now)


def _lower_now(scope: Scope, eqn: Eqn) -> None:
    n = len(scope.eqns)
    _lower(scope, eqn)
    scope.def_sharding.update((v, scope.default_sharding[v]) for v in eqn.outs if v in scope.default_sharding)
    made = scope.eqns[n:]
    if _sends(made) or any(v in scope.received for e in made for v in e.ins):
        scope.required_collectives.update(eqn.outs)


def _sends(eqns: Sequence[Eqn]) -> bool:
    inner = [e for eqn in eqns for sub in eqn.graphs().values() for e, _ in walk(sub)]
    return any(eqn.sends for eqn in (*eqns, *inner))


def _lower(scope: Scope, eqn: Eqn) -> None:
    op = eqn.operation
    if eqn.control is not None:
        lower_control(scope, eqn, eqn.control, lower)
    elif op is BROADCAST and eqn.ins[0] in scope.unmaterialized and scope.unmaterialized[eqn.ins[0]].op is FULL:
        born = scope.unmaterialized[eqn.ins[0]]
        params = {**born.params, "shape": eqn.outs[0].shape}
        scope.unmaterialized[eqn.outs[0]] = dataclasses.replace(eqn, op=FULL, ins=(), params=params)
    elif op is CAST and scope.is_zero(eqn.ins[0]):
        params = {**scope.unmaterialized[eqn.ins[0]].params, "dtype": eqn.outs[0].dtype}
        scope.unmaterialized[eqn.outs[0]] = dataclasses.replace(eqn, op=FULL, ins=(), params=params)
    elif eqn.outs[0] in scope.demand.unmade and (eqn.outs[0].shape or not eqn.ins):
        scope.unmaterialized[eqn.outs[0]] = eqn
    elif op in views.PLACEMENTS:
        views.PLACEMENTS[op](scope, eqn)
    elif op is RENAME and views.padded_otherwise(scope, eqn):
        views.rename_first(scope, eqn)
    else:
        _operate(scope, eqn)


def _pending(scope: Scope, eqn: Eqn) -> Axes:
    """The axes over which the operation's operands stay pending; empty if their sums are reduced first."""
    op = eqn.operation
    waiting = [v for v in dict.fromkeys(eqn.ins) if scope.is_pending(v)]
    if not all(may_stay_pending(eqn, v) for v in waiting) or not any(scope.should_defer(v, eqn) for v in waiting):
        return ()
    axes = scope.default_sharding[waiting[0]].partial
    if any(scope.default_sharding[v].partial != axes for v in waiting):
        return ()
    others = [v for v in eqn.ins if v not in waiting]
    if op.linear in (Linear.JOINT, Linear.PADDED) and not all(scope.is_zero(v) for v in others):
        return ()
    if op.linear is Linear.BRANCHES and not all(scope.is_zero(v) for v in others if v is not eqn.ins[0]):
        return ()
    if op.linear in (Linear.EACH, Linear.FIRST, Linear.SECOND) and len(waiting) > 1:
        return ()
    split = {
        axis
        for v in others
        if v in scope.default_sharding
        for axis in scope.default_sharding[v].split_axes + scope.default_sharding[v].partial
    }
    return () if split & set(axes) else axes


def _claims(scope: Scope, eqn: Eqn, labels: Labels, pending: Axes) -> Claims:
    """The axes that operands and the layout request for each label, without those that are unavailable.

    Labels that first appear in the result, and renamed dims, take the layout's axes.
    """
    layout, claims = scope.setting.layout, Claims()
    fresh = labels.from_layout | {label for label in labels.from_layout_if_ruled if label in layout.rules}
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        if v in scope.unmaterialized:
            continue
        home = scope.default_sharding[v]
        brought = home if home.partial and pending else scope.whole_version(v) or home
        for d, label in names.items():
            if label is not None and label not in fresh:
                claims.add(label, brought.axes(d))
        if (
            brought.partial and brought.kind == "sum" and not pending
        ):  # a reduce-scatter may split dims as the layout requests
            for d, label in names.items():
                axes = layout.axes(d)
                if label is not None and axes and set(axes) <= set(brought.partial) | set(brought.axes(d)):
                    claims.add(label, axes)
    known = set(claims.options) - fresh
    for names in labels.outs:
        for d, label in names.items():
            if label is not None and label not in known:
                claims.add(label, layout.axes(d))
    for label, options in claims.options.items():
        claims.options[label] = [axes for axes in options if _divides(scope, eqn, labels, label, axes)]
    return claims.without(frozenset(pending))


def _divides(scope: Scope, eqn: Eqn, labels: Labels, label: str, axes: Axes) -> bool:
    """Whether the axes divide every dim with this label, and whether its blocks match where the label requires it."""
    n, extents = scope.setting.mesh.count(axes), scope.setting.extents
    pairs = [*zip(eqn.ins, labels.ins, strict=True), *zip(eqn.outs, labels.outs, strict=True)]
    there = [d for v, names in pairs for d in v.shape if names[d.name] == label]
    if any(extents.padded(d) % n for d in there):
        return False
    if label in labels.must_divide and label not in labels.from_layout_if_ruled:
        return not any(extents.is_padded(d) for d in there)
    return label not in labels.from_layout or len({extents.padded(d) for d in there}) == 1


def _operate(scope: Scope, eqn: Eqn) -> None:
    setting, op = scope.setting, eqn.operation
    expansion = EXPANSIONS.get(op)
    labels = expansion.labels(scope, eqn) if expansion is not None else labels_of(eqn)
    pending = _pending(scope, eqn)
    moves = op.moves(*(v.type for v in eqn.ins), **eqn.params) if op.moves is not None else None
    sent_for_nothing = (expansion is not None or moves is not None) and all(v in scope.unmaterialized for v in eqn.ins)
    claims = Claims() if sent_for_nothing else _claims(scope, eqn, labels, pending)
    preferred = _settle_conflicts(scope, eqn, labels, claims)
    gone = vanishing(labels)

    def demanded(v: Var, names: Mapping[str, str | None], assigned: Mapping[str, Axes]) -> Sharding:
        keeps = pending and (scope.is_zero(v) or scope.default_sharding.get(v, Sharding()).partial == pending)
        return apply(names, assigned, pending if keeps else ())

    def price(assigned: Mapping[str, Axes]) -> float:
        sent = sum(scope.price(v, demanded(v, n, assigned)) for v, n in zip(eqn.ins, labels.ins, strict=True))
        n = setting.mesh.count([axis for label in gone for axis in assigned.get(label, ())])
        for v, names in zip(eqn.outs, labels.outs, strict=True):
            local = setting.extents.local_shape(v.shape, apply(names, assigned), setting.mesh)
            sent += 2 * (n - 1) / n * v.dtype.itemsize * _product(local)
        return sent

    assigned = choose(claims, preferred, price)
    if eqn.op is LOCAL:
        assigned = _blocks(scope, eqn, labels, assigned)
    kept = {d.name for v in eqn.outs for d in v.shape}
    ring = None if pending else find_ring(scope, eqn, labels, lambda v, names: demanded(v, names, assigned), assigned)
    ins: list[Var] = []
    for k, (v, names) in enumerate(zip(eqn.ins, labels.ins, strict=True)):
        if ring is not None and k == ring.operand:
            continue
        x = scope.get(v, demanded(v, names, assigned), eqn)
        if op.mask is not None:
            x = scope.masked(x, tuple(d for d in v.shape if names[d.name] in gone or d.name not in kept), op.mask, eqn)
        ins.append(x)
    sums = expansion is None or expansion.sums
    summed = [] if not sums else [axis for label in gone for axis in assigned.get(label, ())]
    outs: list[Var] = []
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        split = apply(names, assigned)
        kind = op.reduce if summed else "sum"
        outs.append(scope.define(v, Sharding.of(dict(split.split), (*pending, *summed), kind)))
        if summed:
            over = tuple(label.rstrip("*") for label in gone if assigned.get(label))
            cause = Cause(Because.REDUCES, op.name, over, what=op.reduce)
            scope.reasons[v] = (cause, eqn.where, eqn.backward)
        elif pending:
            scope.reasons[v] = next(scope.reasons[x] for x in eqn.ins if x in scope.reasons)
    if ring is not None:
        around = demanded(eqn.ins[ring.operand], labels.ins[ring.operand], assigned)
        multiply_around(scope, eqn, ring, ins, around, outs[0], mask=True)
        return
    if expansion is not None and expansion.needed(scope, eqn, assigned):
        expansion.build(scope, eqn, ins, assigned, outs)
        return
    if moves is not None and assigned.get(moves.out.name):
        lower_index_map(scope, eqn, ins, moves, assigned[moves.out.name], outs[0])
    else:
        scope.eqns.append(dataclasses.replace(eqn, ins=tuple(ins), outs=tuple(outs)))
    for v, names in zip(eqn.outs, labels.outs, strict=True):
        if (None in names.values() or sent_for_nothing) and not scope.default_sharding[v].partial:
            scope.shard_free_dims(v, eqn)  # every device has the complete value and takes its part


def _blocks(scope: Scope, eqn: Eqn, labels: Labels, assigned: Mapping[str, Axes]) -> Mapping[str, Axes]:
    """The splits of the operands of an `md.local` region; its gradient uses the same blocks as the region itself."""
    setting, key = scope.setting, eqn.params["key"]
    if eqn.params["follows"]:
        assigned = setting.regions.get(key, assigned)
    setting.regions[key] = assigned
    extents, mesh = setting.extents, setting.mesh
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        for d in v.shape:
            axes = assigned.get(names[d.name] or "", ())
            if axes and (extents.is_padded(d) or d.size % mesh.count(axes)):
                setting.problems.setdefault(
                    f"md.local cannot split dim {d.name!r} over mesh axis {', '.join(map(repr, axes))}\n"
                    f"  an operand has shape {show(v.shape)}; {d.name} is stored as {extents.padded(d)} to have equal "
                    f"blocks, and the function would see the padding\n"
                    f"  take it whole, md.local(..., whole={d.name!r}), or give the dim a size that divides",
                    eqn.where,
                )
                assigned = {label: cut for label, cut in assigned.items() if label != names[d.name]}

    def block(v: Var, names: Mapping[str, str | None]) -> Type:
        sizes = (d.size // mesh.count(assigned.get(names[d.name] or "", ())) for d in v.shape)
        return Type(tuple(Dim(d.name, n) for d, n in zip(v.shape, sizes, strict=True)), v.dtype)

    types = [block(v, names) for v, names in zip(eqn.ins, labels.ins, strict=True)]
    try:
        eqn.operation.type(*types, **{**eqn.params, "result": block(eqn.outs[0], labels.outs[0]).shape})
    except MeshdslError as error:
        raise at(error, eqn.where) from None
    return assigned


def _settle_conflicts(scope: Scope, eqn: Eqn, labels: Labels, claims: Claims) -> list[str]:
    """The labels that win by `md.prefer`; unresolved conflicts are reported."""
    hints = [(v, names, scope.setting.hints.get(v, ())) for v, names in zip(eqn.outs, labels.outs, strict=True)]
    preferred = [label for _, names, hint in hints for d in hint if (label := names[d]) is not None]
    for conflict in claims.contested():
        pair = {conflict.first, conflict.second}
        tensor = next((v for v, names, _ in hints if pair <= set(names.values())), None)
        alike = any(pair <= set(names.values()) for names in labels.ins)
        if tensor is not None and not alike and not eqn.backward and not pair & set(preferred):
            by_label = {label: d for names in labels.outs for d, label in names.items()}
            named = Conflict(conflict.axis, str(by_label[conflict.first]), str(by_label[conflict.second]))
            report_conflict(scope, named, f"the result of {eqn.op}", tensor, eqn.where)
    return preferred


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total
