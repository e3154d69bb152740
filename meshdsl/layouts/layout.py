"""A `Layout` maps dim names to mesh axes. It changes the cost of a program, never its results.

A rule applies to every tensor that has the dim; `overrides` replace rules for parameters whose path matches.
A rule for an axis the mesh lacks, or for a dim or parameter the program lacks, is an error.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping

from ..dims import ByDim, Shape, name_of, names
from ..errors import LayoutError, expect, nearest
from ..errors.markup import page_part
from .mesh import Mesh
from .sharding import Axes

Rules = dict[str, Axes]
PARAMS = "params"  # the name of the parameters in a layout: `params:rows` shards each of them over these axes


class Layout:
    """Rules that map dims to mesh axes, such as `batch:rows; hidden:cols`.

    >>> Layout("batch:rows; hidden:cols")
    Layout('batch:rows hidden:cols')
    >>> Layout({"batch": ("rows", "cols")}, overrides={"moe/*/wi": {"expert": "rows"}}).rules
    {'batch': ('rows', 'cols')}

    A dim may be sharded over several axes, major to minor: write `batch:rows,cols` or `batch:rows+cols`. The rule
    `params:rows` is for the parameters of a function instead of a dim (fully sharded data parallelism, ZeRO stage 3):
    each is sharded over these axes along the dim or dims with the least padding, gathered where it is read, in loops
    over layers one layer at a time, and so is the optimizer's state; gradients are reduced and scattered.
    Raises `LayoutError` if the text is malformed or names a dim twice.
    """

    rules: Rules
    overrides: dict[str, Rules]

    def __init__(
        self,
        rules: str | ByDim[str | Iterable[str]] = "",
        *,
        overrides: Mapping[str, str | Mapping[str, str | Iterable[str]]] | None = None,
    ):
        self.rules = _rules(rules)
        self.overrides = {pattern: _rules(rule) for pattern, rule in (overrides or {}).items()}

    def __repr__(self) -> str:
        extra = f", overrides={self.overrides}" if self.overrides else ""
        return f"Layout({str(self)!r}{extra})"

    def _repr_html_(self) -> str:
        axes = dict.fromkeys(
            axis for rules in (self.rules, *self.overrides.values()) for rule in rules.values() for axis in rule
        )
        rows = [f"{dim}:{','.join(rule) or '(not sharded)'}" for dim, rule in self.rules.items()]
        rows += [
            f"{pattern}  {dim}:{','.join(rule) or '(not sharded)'}"
            for pattern, rules in self.overrides.items()
            for dim, rule in rules.items()
        ]
        return page_part("layout" if rows else "empty layout: nothing is sharded", "\n".join(rows), axes)

    def __str__(self) -> str:
        return " ".join(f"{dim}:{','.join(axes)}" for dim, axes in self.rules.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.rules, self.overrides) == (other.rules, other.overrides)

    def __hash__(self) -> int:
        overrides = frozenset((path, frozenset(rules.items())) for path, rules in self.overrides.items())
        return hash((frozenset(self.rules.items()), overrides))  # equal layouts may have their rules in another order

    def axes(self, dim: str) -> Axes:
        """The mesh axes of a dim; empty if no rule names it."""
        return self.rules.get(dim, ())

    def for_path(self, path: str) -> Rules:
        """The rules for the parameter at `path`: the layout's rules, updated by each matching override in order.

        A pattern matches the full path or any suffix that starts after a `/`.

        >>> Layout("io:rows", overrides={"mlp/w*": "io:"}).for_path("params/mlp/w1")
        {'io': ()}
        """
        rules = dict(self.rules)
        for pattern, rule in self.overrides.items():
            if matches(path, pattern):
                rules.update(rule)
        return rules

    def problems(self, mesh: Mesh, dim_names: Iterable[str], paths: Mapping[str, Shape]) -> list[str]:
        """Messages for all errors in the layout: unknown dims, axes or paths, and an axis twice in a rule."""
        dim_names = sorted(set(dim_names))
        messages: list[str] = []
        for dim, axes in self.rules.items():
            if dim not in dim_names:
                messages.append(f"the layout names dim {dim!r}, which the program lacks; {nearest(dim, dim_names)}")
            messages += _axis_problems(f"dim {dim!r}", axes, mesh)
        for pattern, rule in self.overrides.items():
            matched = [shape for path, shape in paths.items() if matches(path, pattern)]
            if not matched:
                messages.append(f"the override {pattern!r} matches no parameter; {nearest(pattern, sorted(paths))}")
            matched_dims = sorted({dim.name for shape in matched for dim in shape})
            for dim, axes in rule.items():
                if matched and dim not in matched_dims:
                    messages.append(f"the override {pattern!r} names dim {dim!r}; {nearest(dim, matched_dims)}")
                messages += _axis_problems(f"dim {dim!r} (override {pattern!r})", axes, mesh)
        return messages

    def on(self, mesh: Mesh) -> Layout:
        """The same layout without axes that have no effect: axes of size 1, unknown axes, and repeated axes."""

        def drop(rules: Rules) -> Rules:
            return {d: tuple(dict.fromkeys(a for a in axes if mesh.axes.get(a, 1) > 1)) for d, axes in rules.items()}

        return Layout(drop(self.rules), overrides={p: drop(rule) for p, rule in self.overrides.items()})


def matches(path: str, pattern: str) -> bool:
    """True if an override's pattern matches this parameter path."""
    parts = path.split("/")
    return any(fnmatch.fnmatchcase("/".join(parts[i:]), pattern) for i in range(len(parts)))


def _axis_problems(what: str, axes: Axes, mesh: Mesh) -> list[str]:
    messages = [
        f"{what} is mapped to axis {axis!r}, which the mesh '{mesh}' lacks; {nearest(axis, mesh.axes)}"
        for axis in axes
        if axis not in mesh.axes
    ]
    if len(set(axes)) != len(axes):
        repeated = next(axis for axis in axes if axes.count(axis) > 1)
        messages.append(
            f"{what} is mapped to the axis {repeated!r} twice\n"
            f"  it is given {','.join(axes)}, and an axis cuts a tensor once; give it {','.join(dict.fromkeys(axes))}"
        )
    return messages


def _rules(rules: str | ByDim[str | Iterable[str]]) -> Rules:
    if isinstance(rules, Mapping):
        return {name_of(dim): _axes(axes) for dim, axes in rules.items()}
    expect("a layout", rules, str, dict)
    parsed: Rules = {}
    for word in re.split(r"\s*;\s*|\s+", re.sub(r"\s*([:,+])\s*", r"\1", rules.strip())):
        if not word:
            continue
        for dim, axes in _pairs(word):
            if dim in parsed:
                raise LayoutError(f"the layout gives dim {dim!r} twice; write its axes together: '{dim}:a,b'")
            parsed[dim] = axes
    return parsed


def _pairs(word: str) -> list[tuple[str, Axes]]:
    # 'a:x,y,b:z' means a:(x,y) b:(z): a comma starts a new rule if and only if a colon follows the next name
    pairs: list[tuple[str, Axes]] = []
    for piece in word.split(","):
        dim, colon, axes = piece.partition(":")
        if colon:
            pairs.append((dim, _axes(axes)))
        elif pairs and dim:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + _axes(dim))
        if not (dim.isidentifier() and (colon or pairs)) or any(not a.isidentifier() for a in pairs[-1][1]):
            raise LayoutError(f"a layout rule is written dim:axis, for example 'batch:rows; hidden:cols'; got {word!r}")
    return pairs


def _axes(axes: str | Iterable[str]) -> Axes:
    if isinstance(axes, str):
        return tuple(a for a in re.split(r"[\s,+]+", axes) if a)
    return tuple(axes)


def within(layout: Layout, dim_names: Collection[str], paths: Mapping[str, Shape]) -> Layout:
    """The rules of a layout that name one of these dims, and the overrides of these inputs and results."""
    found = {
        pattern: {dim for path, shape in paths.items() if matches(path, pattern) for dim in names(shape)}
        for pattern in layout.overrides
    }
    overrides = {p: {d: axes for d, axes in rule.items() if d in found[p]} for p, rule in layout.overrides.items()}
    rules = {d: axes for d, axes in layout.rules.items() if d in dim_names}
    return Layout(rules, overrides={p: rule for p, rule in overrides.items() if rule})
