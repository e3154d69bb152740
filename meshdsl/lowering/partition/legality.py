"""Find all problems that make a layout illegal for a graph, and report them at once, with the model's source lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from ...dims import Shape, show
from ...errors import LayoutError, MeshdslError, Where, at, nearest
from ...ir import Graph, Var, walk
from ...layouts import Layout, Mesh
from ...layouts.sharding import Axes
from ...ops.placement import SHARD
from .choose import Claims, Conflict
from .scope import Scope

MOST_SHOWN = 10  # of the problems of one layout


def all_in_one(problems: Mapping[str, Where | None], mesh: Mesh, layout: Layout) -> MeshdslError:
    """One error with the first ten problems, each with its source line in the model, and the number of all."""
    lines = [where for where in problems.values() if where is not None]
    if len(problems) == 1:
        error = LayoutError(next(iter(problems)))
    else:
        shown = islice(problems.items(), MOST_SHOWN)
        texts = [text if where is None else str(at(LayoutError(text), where)) for text, where in shown]
        title = f"{len(problems)} problems with the layout '{_cut(layout)}' on the mesh '{_cut(mesh)}'"
        more = [f"and {len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
        error = LayoutError("\n\n".join([title, *texts, *more]))
    return at(error, lines[0]) if lines else error


def _cut(value: Layout | Mesh) -> str:
    text = str(value)
    return text if len(text) <= 500 else f"{text[:497]}..."


def named_by_layouts(graph: Graph, results: Sequence[str] | None) -> tuple[set[str], dict[str, Shape]]:
    """The names that a layout of a graph can use: dims, and the paths of inputs and results, with their dims."""
    named = [*((v.name, v.dims) for v in graph.ins), *zip(results or [], (v.dims for v in graph.outs), strict=False)]
    return set(graph.known_dim_names), {name: shape for name, shape in named if name}


def shard_problems(graph: Graph, mesh: Mesh) -> dict[str, Where]:
    problems: dict[str, Where] = {}
    for eqn, _ in walk(graph) if SHARD in graph.kinds else ():
        if eqn.op is SHARD:
            shape, split = show(eqn.ins[0].dims), dict(eqn.params["split"])
            axes = [axis for cut in split.values() for axis in cut]
            for axis in dict.fromkeys(axes):
                if axis not in mesh.axes:
                    problems[
                        f"md.shard names the axis {axis!r}, which the mesh '{mesh}' lacks\n"
                        f"  the requested split is {_shown(split)} of {shape}\n  {nearest(axis, mesh.axes)}"
                    ] = eqn.where
    return problems


def _shown(split: Mapping[str, Axes]) -> str:
    return " ".join(f"{d}:{','.join(axes)}" for d, axes in split.items())


def report_conflict(scope: Scope, claims: Claims, conflict: Conflict, what: str, v: Var, where: Where | None) -> None:
    """Add a conflict between two claims to the layout's problems; the way out names axes that nothing claims."""
    used = {axis for options in claims.options.values() for axes in options for axis in axes}
    free = [repr(axis) for axis, size in scope.setting.mesh.axes.items() if axis not in used and size > 1]
    way_out = f"map one to another axis (free: {', '.join(free)})" if free else "leave one of them unmapped"
    tensor, end = v.name.rpartition("/")[2], ""
    if not tensor:  # the error ends with the line that computes it
        tensor, end = "x", " of what this line computes"
    scope.setting.problems.setdefault(
        f"cannot split dim {conflict.second!r} over mesh axis {conflict.axis!r}\n"
        f"  {what} has shape {show(v.dims)}; the layout maps {conflict.first} and {conflict.second} to "
        f"{conflict.axis!r}, and a tensor can use an axis once\n"
        f"  prefer one of them with md.prefer({tensor}, {conflict.second!r}){end}, or {way_out}",
        where,
    )
