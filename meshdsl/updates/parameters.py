"""The layout's rule for parameters, `params:rows`: what it stands for, in a function with an update and in one without.

Parameters that the function updates are those of a sharded update with `regather`. In a function without an update,
such as a loss, they enter it under private dims, as weights enter an update (`shard_updates`), so that no dim of the
model competes for the axes. A function that makes parameters returns them in the sharding of an override.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace

from ..errors import LayoutError
from ..ir import Eqn, Graph, Var, walk
from ..layouts import PARAMS, Layout, Mesh, Sharding
from ..layouts.sharding import Axes
from ..lowering.partition import partition
from ..ops.dtypes import CAST
from ..passes.hoist import hoist_casts
from .groups import RefinedMesh
from .pending import ShardedGraph
from .regions import UpdateRegion, uses
from .shard_updates import Decision, rewritten
from .update import Update, carried, least_padded
from .weight_update import ShardedUpdates, UpdateTable, WeightUpdate


def of_params(
    graph: Graph, mesh: Mesh, layout: Layout, results: Sequence[str], request: WeightUpdate
) -> tuple[Layout, WeightUpdate, Axes]:
    """The layout without its rule for parameters, the weight update that it stands for, and its axes.

    A dim of the name `params` has its own rule as any other. Raises `LayoutError` for an axis that the mesh lacks, for
    an update that the rule contradicts, and if there are no parameters.
    """
    axes = layout.rules.get(PARAMS)
    if axes is None or PARAMS in graph.known_dim_names:
        return layout, request, ()
    if problems := Layout({PARAMS: axes}).problems(mesh, [PARAMS], {}):
        raise LayoutError(problems[0])
    rest = Layout({d: cut for d, cut in layout.rules.items() if d != PARAMS}, overrides=layout.overrides)
    axes = tuple(axis for axis in axes if mesh.axes[axis] > 1)
    if request.mode == "auto" or request.group is not None:
        what = f"group={request.group!r}" if request.group is not None else "weight_update='auto'"
        raise LayoutError(
            f"the layout has a rule for the parameters, params:{','.join(axes)}, and {what} says how they are sharded\n"
            "  leave one of them out"
        )
    if not axes:
        return rest, request, ()
    if not _given(graph):
        return _made(graph, mesh, rest, results, axes), request, ()
    if any(eqn.backward for eqn, _ in walk(graph)):
        request = replace(request, mode="sharded", group=dict.fromkeys(axes), regather=True)
    return rest, request, axes


def _given(graph: Graph) -> list[Var]:
    """The leaves of the argument `params`, or else of the first argument that is a tree."""
    roots = [v.name.partition("/")[0] for v in graph.ins if "/" in v.name]
    root = PARAMS if PARAMS in roots else next(iter(roots), "")
    return [v for v in graph.ins if root and v.name.startswith(f"{root}/")]


def _made(graph: Graph, mesh: Mesh, layout: Layout, results: Sequence[str], axes: Axes) -> Layout:
    """The layout with an override for each result that is a leaf of a tree."""
    overrides = dict(layout.overrides)
    made = [(path, v) for path, v in zip(results, graph.outs, strict=True) if "/" in path]
    if not made:
        raise LayoutError(
            "the layout has a rule for the parameters (params), and the function has no argument that is a tree of "
            "tensors\n  give the parameters as a dict, or name their dims in the layout"
        )
    for path, v in made:
        rules = layout.for_path(path)
        own = Sharding.of({d.name: rules.get(d.name, ()) for d in v.dims})
        if v.dims and (free := tuple(axis for axis in axes if axis not in own.split_axes)):
            form = least_padded(mesh, v.dims, own, free, frozenset())
            overrides[glob.escape(path)] = {old.name: by for old, _, by in form.dims}
    return Layout(layout.rules, overrides=overrides)


def stored_as_shards(graph: Graph, mesh: Mesh, layout: Layout, results: Sequence[str], axes: Axes) -> ShardedUpdates:
    """The graph of a function without an update that takes its parameters as shards, along dims with the least padding.

    No dim of a loop is split. A result of the path and type of a parameter, such as its gradient, leaves it as a shard.
    """
    hoisted, shardings = hoist_casts(graph), dict[Var, Sharding]()
    extents = partition(hoisted, mesh, layout, results, shardings).extents
    placed = ShardedGraph(hoisted, results, shardings, mesh, extents, layout, regather=True)
    looped = {eqn.scan.dim.name for eqn, _ in walk(hoisted) if eqn.scan is not None}
    chosen: list[Update] = []
    for v in _given(hoisted):
        own = shardings.get(v, Sharding())
        free = tuple(axis for axis in axes if axis not in own.split_axes)
        shape = tuple(d for d in v.dims if d.name not in looped)
        if free and shape:
            form = least_padded(mesh, shape, own, free, hoisted.known_dim_names)
            casts = frozenset(eqn for eqn in uses(hoisted).readers[v] if _narrows(eqn))
            inner = frozenset([v, *(x for eqn in casts for x in eqn.outs)])
            part = UpdateRegion((), casts, inner, (), (), tuple((x, 1.0) for x in inner))
            chosen.append(Update(hoisted, v, (), free, free, form, part, (v,)))
    new, private = rewritten(placed, chosen, carried(placed))
    decisions = tuple(
        Decision(
            u.weight.name,
            u.weight.dims,
            u.group,
            tuple((old.name, by) for old, _, by in u.format.dims),
            True,
            "",
            (n := placed.bytes(u.weight)) - int(n * u.format.padding_ratio / u.format.ways),
            pending=u.group,
        )
        for u in chosen
    )
    return ShardedUpdates(new, private, RefinedMesh(mesh, mesh), UpdateTable("sharded", decisions))


def _narrows(eqn: Eqn) -> bool:
    """True for a cast to fewer bytes: the result is gathered, and not its operand."""
    return eqn.op is CAST and eqn.outs[0].dtype.itemsize < eqn.ins[0].dtype.itemsize
