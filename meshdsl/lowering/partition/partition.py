"""Partition: from a graph, a mesh and a layout to a program with a sharding for every value, and collectives.

Equations are lowered in order (`equation`). The problems of a layout are collected along the way and raised together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...errors import NOWHERE, Where
from ...ir import Graph, Var, cse, dce, verify, walk
from ...layouts import Extents, Layout, Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.placement import PREFER, SHARD
from ..check import check
from ..labels import labels_of
from ..program import Program
from .annotations import annotated_splits, wanted_shardings
from .choose import Claims, choose
from .equation import lower
from .legality import all_in_one, named_by_layouts, report_conflict, shard_problems
from .placement_ops import counted_dims
from .planner import Seconds
from .scope import Reader, Scope, Setting
from .whole_dims import whole_dims


def partition(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Sequence[str] | None = None,
    homes: dict[Var, Sharding] | None = None,
    seconds: Seconds | None = None,
) -> Program:
    """The program that one device of the mesh runs.

    Inputs are named by their paths (`params/mlp/w1`), which the layout's overrides match; `results` are the paths of
    the results. A layout may mention any dim that the function mentions, so one layout serves a model's training and
    its initialisation. If `homes` is given, it is filled with the sharding in which each value of the graph is
    computed, with sums still pending. With `seconds`, reshards are planned by time (see `planner`). Raises one
    `LayoutError` with all problems of the layout.
    """
    problems: dict[str, Where | None] = dict.fromkeys(layout.problems(mesh, *named_by_layouts(graph, results)))
    misplaced = shard_problems(graph, mesh)
    if misplaced:
        raise all_in_one({**problems, **misplaced}, mesh, layout)
    requested, layout = layout, layout.on(mesh)  # without invalid rules, to find conflicts among the others too
    shards = [dict(eqn.params["split"]) for eqn, _ in walk(graph) if eqn.op is SHARD] if SHARD in graph.kinds else []
    setting = Setting(
        mesh,
        layout,
        graph.known_dim_names,
        extents_of(mesh, layout, shards),
        preferences(graph),
        problems,
        whole_dims(graph),
        counted_dims(graph),
        annotated_splits(graph, layout.rules) if shards else {},
        wanted_shardings(graph, mesh, layout, results or ()) if shards or layout.overrides else {},
        seconds=seconds,
    )
    scope = Scope(setting, graph)
    ins, outs = _lower_graph(scope, results)
    setting.attempts.clear()  # scopes, which have the setting and are freed with it
    scope.demand.inner.clear()
    if setting.problems:
        raise all_in_one(setting.problems, mesh, requested)
    if homes is not None:
        homes.update(scope.def_sharding)
    program = dce(cse(Program(ins, tuple(scope.eqns), outs, mesh=mesh, extents=setting.extents)))
    return check(verify(program, "partition"), "partition")


def _lower_graph(scope: Scope, results: Sequence[str] | None) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """Lower the whole graph of a scope; returns the inputs and results of its program."""
    graph = scope.graph
    ins = tuple(add_input(scope, v) for v in graph.ins)
    scope.def_sharding.update(scope.default_sharding)
    lower(scope, graph.eqns)
    paths = results or [""] * len(graph.outs)
    made_at = [graph.producers[v].where if v in graph.producers else NOWHERE for v in graph.outs]
    return ins, tuple(add_output(scope, *out) for out in zip(graph.outs, paths, made_at, strict=True))


def extents_of(mesh: Mesh, layout: Layout, shards: Sequence[Mapping[str, Axes]]) -> Extents:
    """The stored extents: every dim is padded to a multiple of all the axes that split it anywhere, or of each rule."""
    axes, least = dict[str, set[str]](), dict[str, int]()
    for rules in (layout.rules, *layout.overrides.values(), *shards):
        for dim, cut in rules.items():
            axes.setdefault(dim, set()).update(cut)
            least[dim] = math.lcm(least.get(dim, 1), mesh.count(cut))
    return Extents({dim: mesh.count(tuple(cut)) for dim, cut in axes.items()}, least)


@lru_cache(maxsize=16)
def preferences(graph: Graph) -> Mapping[Var, tuple[str, ...]]:
    """For each value, the dims that win conflicts, from its `md.prefer` or from that of an elementwise result of it."""
    names_of: dict[Var, tuple[str, ...]] = {}
    if PREFER not in graph.kinds:
        return names_of
    for eqn, _ in walk(graph):
        for sub in eqn.graphs().values():
            names_of.update(preferences(sub))
    for eqn in reversed(graph.eqns):
        if eqn.op is PREFER:
            names_of.setdefault(eqn.ins[0], eqn.params["names"])
        elif eqn.control is None and len(eqn.outs) == 1 and eqn.outs[0] in names_of:
            labels = labels_of(eqn)
            for v, names in zip(eqn.ins, labels.ins, strict=True):
                if names == labels.outs[0] and None not in names.values():
                    names_of.setdefault(v, names_of[eqn.outs[0]])
    return names_of


def add_input(scope: Scope, v: Var) -> Var:
    """Define an input, sharded by the layout's rules for its path. If two dims claim an axis, the preferred one gets
    it.
    """
    rules = scope.setting.layout.for_path(v.name)
    claims = Claims()
    for d in v.dims:
        claims.add(d.name, rules.get(d.name, ()))
    hint = scope.setting.hints.get(v, ())
    for conflict in claims.contested:
        if not {conflict.first, conflict.second} & set(hint):
            first_use = next((eqn.where for eqn in scope.graph.eqns if v in eqn.ins), None)
            report_conflict(scope, claims, conflict, v.name or "an input", v, first_use)
    return scope.define(v, Sharding.of(choose(claims, hint, lambda assigned: 0)))


def add_output(scope: Scope, v: Var, path: str, where: Where) -> Var:
    """Reshard a result by the layout's rules for its path. If these conflict, it stays sharded as computed."""
    axes_of = scope.canonical(v.dims, scope.setting.layout.for_path(path))
    used = [axis for axes in axes_of.values() for axis in axes]
    home = scope.default_sharding.get(v, Sharding()).whole()
    target = Sharding.of(axes_of) if len(used) == len(set(used)) else home
    return scope.get(v, target, Reader("the result", where))
