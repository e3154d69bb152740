"""Parameters of a function, found by the paths of its inputs, and the candidate splits of each."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import LayoutError, nearest
from ..ir import Graph, Var
from ..layouts import Layout, Mesh
from ..layouts.layout import matches
from ..layouts.sharding import Axes

__all__ = ["Parameter", "Rules", "overriding", "parameters", "splits"]

Rules = dict[str, Axes]


@dataclass(frozen=True, eq=False)
class Parameter:
    """One variable: an input and everything else that its path names."""

    path: str
    var: Var
    patterns: Mapping[str, frozenset[str]]  # overrides that match it alone -> dims of the values that they match
    members: tuple[Var, ...]  # inputs


def parameters(graph: Graph, results: Sequence[str], tensors: Collection[str] | None) -> list[Parameter]:
    """The variables: by default inputs that are also returned (same path within the argument), otherwise those named.

    Raises `LayoutError` if there are none, for a pattern that matches nothing, and for paths that no override can
    distinguish.
    """
    inputs = [v for v in graph.ins if any(d.size > 1 for d in v.dims)]
    if tensors is None:
        back = {
            (tail, out.type) for path, out in zip(results, graph.outs, strict=False) for tail in {path, _tail(path)}
        }
        selected = [v for v in inputs if (_tail(v.name), v.type) in back]
        why = "no input comes back among the results, as a parameter does that is updated"
    else:
        names = [v.name for v in inputs]
        nothing = [p for p in tensors if not any(matches(name, p) for name in names)]
        if nothing:
            raise LayoutError(
                "\n".join(f"tensors={p!r} matches no input with a dim to split; {nearest(p, names)}" for p in nothing)
            )
        selected = [v for v in inputs if any(matches(v.name, p) for p in tensors)]
        why = "tensors= is empty"
    if not selected:
        raise LayoutError(f"there is no parameter to override: {why}\n  name inputs, for example tensors='w*'")
    leading: list[Var] = []
    for v in selected:
        if not any(_follows(v.name, other.name) for other in leading):
            leading.append(v)
    return [_parameter(v, leading, graph, results) for v in leading]


def _tail(path: str) -> str:
    return path.partition("/")[2] or path


def _follows(path: str, other: str) -> bool:
    """True if `path` is in another argument and ends like the parameter `other`: `state/m/w` for `params/w`."""
    return path.partition("/")[0] != other.partition("/")[0] and f"/{path}".endswith(f"/{_tail(other)}")


def _parameter(v: Var, leading: Sequence[Var], graph: Graph, results: Sequence[str]) -> Parameter:
    def owner(path: str) -> Var | None:
        """The parameter whose path this path ends in; of several, the longest."""
        ends = [each for each in leading if path == each.name or _follows(path, each.name)]
        return max(ends, key=lambda each: (path == each.name, len(each.name)), default=None)

    shapes = {path: out.dims for path, out in zip(results, graph.outs, strict=False) if path}
    shapes |= {each.name: each.dims for each in graph.ins}
    paths = list(shapes)
    mine = {path for path in paths if owner(path) is v}
    for patterns in ([_tail(v.name)], sorted(mine)):
        named = {p: {path for path in paths if matches(path, p)} for p in map(glob.escape, patterns)}
        if set().union(*named.values()) == mine:
            dims = {p: frozenset(d.name for path in some for d in shapes[path]) for p, some in named.items()}
            return Parameter(v.name, v, dims, tuple(each for each in graph.ins if each.name in mine))
    more = sorted({path for path in paths if matches(path, glob.escape(_tail(v.name)))} - mine)
    raise LayoutError(
        f"no override names {v.name} alone: its path also ends {', '.join(more)}\n"
        "  rename one of them, or leave it out (tensors=)"
    )


def splits(parameter: Parameter, layout: Layout, mesh: Mesh) -> Iterator[Rules]:
    """Splits of one or two dims over free axes, appended to those they have; each axis set in mesh order."""
    rules = layout.on(mesh).for_path(parameter.path)
    dims = parameter.var.dims
    used = {axis for d in dims for axis in rules.get(d.name, ())}
    free = [axis for axis, n in mesh.axes.items() if n > 1 and axis not in used]
    sets = [axes for n in range(1, len(free) + 1) for axes in itertools.combinations(free, n)]
    for count in (1, 2):
        for some in itertools.combinations(dims, count):
            for taken in itertools.product(sets, repeat=count):
                cut = {d.name: (*rules.get(d.name, ()), *axes) for d, axes in zip(some, taken, strict=True)}
                apart = len({axis for axes in taken for axis in axes}) == sum(map(len, taken))
                if apart and all(mesh.count(cut[d.name]) <= d.size for d in some):
                    yield cut


def overriding(parameter: Parameter, rules: Rules) -> dict[str, Rules]:
    """Overrides that give these rules to a parameter, and to the other values of its path that have the dims."""
    each = {p: {d: axes for d, axes in rules.items() if d in dims} for p, dims in parameter.patterns.items()}
    return {pattern: own for pattern, own in each.items() if own}
