"""The pass: loops over micro-batches whose layers the layout maps to stages become loops over ticks."""

from __future__ import annotations

import dataclasses

from ...dims import Dim, fresh_dim
from ...errors.no_effect import NoEffectError
from ...ir import Eqn, Graph, Var, walk
from ...layouts import Layout, Mesh
from ...trace import location, trace
from ..hoist import hoist_casts
from ..simplify import simplify
from .find import Loop, find
from .one_tick import PipeDims
from .schedule import Schedule
from .stages import StageDims
from .ticks import run_ticks


def pipelined(
    graph: Graph, mesh: Mesh, layout: Layout, chunks: int = 1, late: bool = False, sharded: bool = False
) -> tuple[Graph, Layout, tuple[Schedule, ...]]:
    """The graph with pipelines, the layout with their dims of stages, and their schedules.

    If `late`, backward passes begin a tick after the last forward pass, so that the forward and the backward pass of a
    tick do not depend on each other, and run layer by layer in one loop. If `sharded`, weights are gathered after their
    updates; they are then cast once a step, before they are sent, as those of several chunks are.

    Raises `LayoutError`, with the user's line, for a loop over micro-batches whose layers are mapped to stages and that
    cannot run in stages; `NoEffectError` for chunks without a pipeline.
    """
    narrowed = hoist_casts(graph) if chunks > 1 or sharded else graph
    found = [loop for eqn, _ in walk(narrowed) if (loop := find(eqn, mesh, layout, chunks, late)) is not None]
    if not found and chunks > 1:
        raise NoEffectError(
            f"chunks={chunks} has no effect: no loop over micro-batches has layers in pipeline stages\n"
            "  map the dim of the layers to an axis and divide the batch with microbatches=, or leave chunks out"
        )
    if not found:
        return graph, layout, ()
    names = {d.name for eqn, _ in walk(narrowed) for v in (*eqn.ins, *eqn.outs) for d in v.dims}
    names |= set(layout.rules)
    replaced: dict[Eqn, Graph] = {}
    schedules: list[Schedule] = []
    rules = dict(layout.rules)
    for loop in found:
        dims = _dims(loop, names, layout)
        rules[dims.stages.stage.name] = layout.axes(loop.dim.name)
        names_of = {"layer": loop.dim.name, "stage": dims.stages.stage.name}
        ticks = tuple(dim.name for dim in dims.ticks)
        schedules.append(dataclasses.replace(loop.schedule, loops=ticks, **names_of))
        types = [v.type for v in loop.eqn.ins]
        with location(loop.eqn.where):
            replaced[loop.eqn] = trace(lambda *xs, loop=loop, dims=dims: run_ticks(loop, xs, dims), types)[0]
    graph = simplify(_with(narrowed, replaced))
    return graph, Layout(rules, overrides=layout.overrides), tuple(schedules)


def _dims(loop: Loop, names: set[str], layout: Layout) -> PipeDims:
    """PipeDims whose names nothing has yet; they are added to `names`."""

    def fresh(name: str, size: int) -> Dim:
        dim = fresh_dim(Dim(name, size), names)
        names.add(dim.name)
        return dim

    schedule = loop.schedule
    inner = fresh(f"{loop.dim.name}_of_stage", -(-loop.dim.size // (schedule.stages * schedule.chunks)))
    own = fresh(f"{loop.dim.name}_row", schedule.chunks * inner.size)
    others = {d.name for eqn, _ in walk(loop.body) for v in (*eqn.ins, *eqn.outs) for d in v.dims} - {loop.dim.name}
    axes = set(layout.axes(loop.dim.name))
    beside = frozenset(name for name in others if not axes.isdisjoint(layout.axes(name)))
    stages = StageDims(loop.dim, fresh("stage", schedule.stages), inner, own, beside)
    ticks = zip(("fill", "steady", "drain"), (schedule.warm, schedule.both, schedule.warm), strict=True)
    a, b, c = (fresh(name, size) for name, size in ticks)
    return PipeDims(stages, fresh("slot", schedule.slots), (a, b, c))


def _with(graph: Graph, replaced: dict[Eqn, Graph]) -> Graph:
    """The graph with the equations of some loops in place of the loops."""
    renamed: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        eqn_ins = tuple(renamed.get(v, v) for v in eqn.ins)
        if eqn not in replaced:
            eqns.append(eqn.replace(ins=eqn_ins).map_graphs(lambda inner: _with(inner, replaced)))
            continue
        ticks = replaced[eqn]
        inner = dict(zip(ticks.ins, eqn_ins, strict=True))
        eqns += [e.reading(inner) for e in ticks.eqns]
        renamed.update(zip(eqn.outs, (inner.get(v, v) for v in ticks.outs), strict=True))
    return graph.replace(eqns=tuple(eqns), outs=tuple(renamed.get(v, v) for v in graph.outs))
