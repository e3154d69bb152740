"""Find dims that every reader of a value needs unsplit, in this graph or in loops around and inside it.

A scan reads its rows unsplit, and `dynamic_update_slice` the written dim of its update. If every device has such a dim
whole, it is not split as the layout says: the readers would gather it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...ir import Eqn, Fuses, Graph, Reduce, Scan, Var
from ...ops.attention.records import ATTENTION, ATTENTION_GRAD
from ..labels import labels_of
from .expansions import EXPANSIONS

WholeDims = dict[Var, frozenset[str]]
NONE: frozenset[str] = frozenset()


@lru_cache(maxsize=16)
def whole_dims(graph: Graph) -> Mapping[Var, frozenset[str]]:
    """For values of a graph and of its loops, the dims that all their readers need whole; others are absent.

    >>> import meshdsl as md
    >>> def write(cache, x, position):
    ...     return md.dynamic_update_slice(cache, x * 2, "memory", position)
    >>> args = md.spec("memory:8 head:2"), md.spec("memory:1 head:2"), md.spec("", "int32")
    >>> {v.name: set(dims) for v, dims in whole_dims(md.compile(write, "all:2").graph(*args)).items() if v.name}
    {'x': {'memory'}}
    """
    whole: WholeDims = {}
    _collect(graph, dict.fromkeys(graph.outs, NONE), whole)
    return {v: dims for v, dims in whole.items() if dims}


def _collect(graph: Graph, results: Mapping[Var, frozenset[str]], whole: WholeDims) -> None:
    """Add the values of one graph, given the dims that the readers of its results need whole."""
    whole.update(results)
    for eqn in reversed(graph.eqns):
        scan, n = eqn.scan, len(eqn.ins)
        read = _read(eqn, whole) if scan is None else (_read_by_loop(eqn, scan, i, whole) for i in range(n))
        for v, dims in zip(eqn.ins, read, strict=True):
            whole[v] = whole.get(v, dims) & dims


def _read(eqn: Eqn, whole: WholeDims) -> Sequence[frozenset[str]]:
    """The dims of each operand that an operation needs whole; elementwise ones pass on the needs of their result."""
    if eqn.control is not None:
        return [NONE] * len(eqn.ins)
    op = eqn.operation
    splits = op in EXPANSIONS or op in (ATTENTION, ATTENTION_GRAD)  # the labels are those without split positions
    if splits or op.moves is not None:
        return [NONE] * len(eqn.ins)
    passes = op.fuses in (Fuses.MAP, Fuses.VIEW) and op.reduce is Reduce.NONE and len(eqn.outs) == 1
    needed = whole.get(eqn.outs[0], NONE) if passes else NONE
    if op.rule is None and op.blocked is None and not needed:
        return [NONE] * len(eqn.ins)
    labels = labels_of(eqn)
    passed = {None, *(labels.outs[0][d] for d in needed)}
    return [frozenset([d for d, label in names.items() if label in passed]) for names in labels.ins]


def _read_by_loop(loop: Eqn, scan: Scan, i: int, whole: WholeDims) -> frozenset[str]:
    """The dims of operand i that a scan reads row by row, or that its body needs whole."""
    body, carried = scan.body, scan.consts + scan.carries
    if body.ins and i == 0:
        n = scan.carries
        results = dict.fromkeys(body.outs[:n], NONE)
        for v, out in zip(body.outs[n:], loop.outs[n:], strict=True):
            dims = whole.get(out, NONE) & {d.name for d in v.dims}  # the scanned dim is not a dim of the row
            results[v] = results.get(v, dims) & dims
        _collect(body, results, whole)
    inside = whole.get(body.ins[i], NONE)
    if i >= carried:
        return inside | {scan.dim.name}
    return inside if i < scan.consts else NONE
