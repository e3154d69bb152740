"""The dims whose rules may split a dim: its own, and those of dims that share a label with it in some operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from ..ir import Eqn, Graph, walk
from ..lowering.labels import labels_of
from ..lowering.partition.expansions import EXPANSIONS
from ..ops.attention.records import ATTENTION, ATTENTION_GRAD
from ..ops.reshape import RESHAPE

__all__ = ["tied_dims"]


def tied_dims(graph: Graph) -> dict[str, frozenset[str]]:
    """For each dim of a graph, the dims whose rules may split it.

    A dim takes the axes of its rule, or those of a dim that has the same label in some operation: a renamed or reshaped
    one. Where labels depend on the layout, all dims count that are not dims of both operands and results.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x: md.rename(x, length="memory") * 2, "all:4")
    >>> {d: sorted(dims) for d, dims in tied_dims(step.graph(md.spec("batch:4 length:8"))).items()}
    {'batch': ['batch'], 'length': ['length', 'memory'], 'memory': ['length', 'memory']}
    """
    tied: dict[str, frozenset[str]] = {}
    for eqn, _ in walk(graph):
        for v in (*eqn.ins, *eqn.outs):
            for d in v.dims:
                tied.setdefault(d.name, frozenset((d.name,)))
        for names in _alike(eqn) if eqn.control is None else ():
            joined = frozenset[str]().union(*(tied[d] for d in names))
            tied.update(dict.fromkeys(joined, joined))
    return tied


def _alike(eqn: Eqn) -> Iterator[Collection[str]]:
    """Groups of dims of an operation that may be split over the same axes."""
    ins, outs = ({d.name for v in values for d in v.dims} for values in (eqn.ins, eqn.outs))
    if eqn.op in (ATTENTION, ATTENTION_GRAD, RESHAPE):
        yield ins | outs
    elif eqn.op in EXPANSIONS:
        yield ins ^ outs
    else:
        labels, by_label = labels_of(eqn), defaultdict[str, set[str]](set)
        for names in (*labels.ins, *labels.outs):
            for d, label in names.items():
                if label is not None:
                    by_label[label].add(d)
        yield from by_label.values()
