"""Propagate the annotations of `md.shard` to operands (GShard, Lepikhin et al., 2020, section 3.2).

An annotation passes from a result to operands along dims that the operation keeps. It reaches a value if all its
readers ask for the same, and if the layout has no rule for the dim and uses its axes for no other dim of the value.
Where an operand already decides about the dim, or uses the axes, it wins.

The sharding in which a value's only reader takes it counts in the price of every operation (`wanted_shardings`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import Where
from ...ir import Because, Cause, Eqn, Graph, Labels, Var
from ...layouts import Layout, Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.placement import SHARD
from ..labels import labels_of
from .choose import Claims


@dataclass(frozen=True)
class Annotation:
    """The axes that an `md.shard` asks for, and its line."""

    axes: Axes
    where: Where = field(compare=False)


Split = dict[str, Annotation]  # by dim


def annotated_splits(graph: Graph, rules: Mapping[str, Axes]) -> dict[Var, Split]:
    """The axes that annotations ask for, by value and dim, beside the rules of a layout.

    >>> import meshdsl as md
    >>> f = lambda x, w: md.shard(md.einsum(md.relu(x), w, out="n k"), {"n": "a"})
    >>> graph = md.compile(f, "a:4", "").graph(md.spec("n:64 m:32"), md.spec("m:32 k:16"))
    >>> [{d: asked.axes for d, asked in split.items()} for split in annotated_splits(graph, {}).values()]
    [{'n': ('a',)}, {'n': ('a',)}, {'n': ('a',)}]
    """
    asked: dict[Var, Split] = dict.fromkeys(graph.outs, Split())
    found: dict[Var, Split] = {}
    for eqn in graph.eqns:
        for sub in eqn.graphs().values():
            found.update(annotated_splits(sub, rules))
    for eqn in reversed(graph.eqns):
        for v, split in _of_operands(eqn, asked):
            ruled = {axis for d in v.dims for axis in rules.get(d.name, ())}
            split = {d: by for d, by in split.items() if d not in rules and ruled.isdisjoint(by.axes)}
            asked[v] = split if asked.get(v, split) == split else {}
    return found | {v: split for v, split in asked.items() if split}


def _of_operands(eqn: Eqn, asked: Mapping[Var, Split]) -> Iterator[tuple[Var, Split]]:
    """The axes that one equation requests for the dims of each operand: an annotation's own, or those of its result."""
    if eqn.op is SHARD:
        split = dict(eqn.params["split"]).items()
        yield eqn.ins[0], {d: Annotation(tuple(axes), eqn.where) for d, axes in split if axes}
        return
    wanted = asked.get(eqn.outs[0], {}) if eqn.control is None and len(eqn.outs) == 1 else {}
    if not wanted:
        yield from ((v, {}) for v in eqn.ins)
        return
    labels = labels_of(eqn)
    asked_of = {label: wanted[d] for d, label in labels.outs[0].items() if label is not None and d in wanted}
    for v, names in zip(eqn.ins, labels.ins, strict=True):
        yield v, {d: asked_of[label] for d, label in names.items() if label in asked_of}


def wanted_shardings(graph: Graph, mesh: Mesh, layout: Layout, results: Sequence[str] = ()) -> dict[Var, Sharding]:
    """The shardings in which values with one reader are taken: by `md.shard`, or as a result that an override names.

    They pass on to operands of elementwise operations that have no other reader. `results` are the paths of the
    graph's results.
    """
    reads = Counter([v for eqn in graph.eqns for v in eqn.ins] + list(graph.outs))
    found = {v: target for v, target in _of_results(graph, layout, results) if reads[v] == 1}
    for eqn in reversed(graph.eqns):
        target = annotated(eqn, mesh) if eqn.op is SHARD else _of_elementwise(eqn, found)
        if target is not None:
            single = [v for v in eqn.ins if reads[v] == 1]
            found |= {v: target.along(v.dims) for v in single}
    for sub in (sub for eqn in graph.eqns for sub in eqn.graphs().values()):
        found |= wanted_shardings(sub, mesh, layout)
    return found


def _of_results(graph: Graph, layout: Layout, results: Sequence[str]) -> Iterator[tuple[Var, Sharding]]:
    """The results for which an override asks for other axes than the layout's rules."""
    for v, path in zip(graph.outs, results, strict=False):
        rules = layout.for_path(path)
        axes = [axis for d in v.dims for axis in rules.get(d.name, ())]
        if rules != layout.rules and len(axes) == len(set(axes)):
            yield v, Sharding.of({d.name: rules.get(d.name, ()) for d in v.dims})


def _of_elementwise(eqn: Eqn, found: Mapping[Var, Sharding]) -> Sharding | None:
    """The sharding wanted of an equation's one result, if its operands have the same dims and can be sharded alike."""
    target = found.get(eqn.outs[0]) if len(eqn.outs) == 1 and eqn.control is None else None
    if target is None:
        return None
    labels = labels_of(eqn)
    (out,) = labels.outs
    alike = None not in out.values() and all(names.items() <= out.items() for names in labels.ins)
    return target if alike else None


def annotated(eqn: Eqn, mesh: Mesh) -> Sharding:
    """The sharding that an `md.shard` asks for, without axes of size 1."""
    return Sharding.of({d: [a for a in axes if mesh.axes[a] > 1] for d, axes in eqn.params["split"]})


def claim_annotated(claims: Claims, outs: tuple[Var, ...], labels: Labels, asked: Mapping[Var, Split]) -> None:
    """Claim the axes that annotations ask for, where no operand decides."""
    for v, names in zip(outs, labels.outs, strict=True):
        for d, by in asked.get(v, {}).items():
            label = names[d]
            used = {axis for options in claims.options.values() for cut in options for axis in cut}
            if label is not None and not claims.options.get(label) and used.isdisjoint(by.axes):
                claims.add(label, by.axes)
                claims.annotations[label] = by


def with_annotations(eqns: list[Eqn], start: int, first: Var, asked: Mapping[str, Annotation]) -> None:
    """Note beside the equation that computes `first`, after `start`, which annotations decided about which dims."""
    words = [f"{d} over {','.join(by.axes)} by md.shard at {by.where}" for d, by in asked.items()]
    for k in range(start, len(eqns)) if words else ():
        if first in eqns[k].outs and not eqns[k].sends:
            cause = Cause(Because.ANNOTATED, dims=tuple(asked), what=" and ".join(words))
            eqns[k] = eqns[k].replace(cause=cause)
