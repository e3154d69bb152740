"""Find dims that every reader of a value scans row by row, in this graph or in loops around and inside it.

A scan needs such a dim complete on every device. If the loop that stacked the value split the dim as the layout says,
the next loop would gather it again.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Eqn, Graph, Scan, Var

__all__ = ["row_dims"]

RowDims = dict[Var, frozenset[str]]


def row_dims(graph: Graph) -> Mapping[Var, frozenset[str]]:
    """For values of a graph and of its loops, the dims that all their readers scan; values without such dims are
    absent.
    """
    found: RowDims = {}
    _collect(graph, dict.fromkeys(graph.outs, frozenset[str]()), found)
    return {v: dims for v, dims in found.items() if dims}


def _collect(graph: Graph, results: Mapping[Var, frozenset[str]], found: RowDims) -> None:
    """Add the values of one graph, given the dims that the readers of its results scan."""
    found.update(results)
    for eqn in reversed(graph.eqns):
        for i, v in enumerate(eqn.ins):
            dims = _read(eqn, eqn.control, i, found) if isinstance(eqn.control, Scan) else frozenset[str]()
            found[v] = found.get(v, dims) & dims


def _read(loop: Eqn, scan: Scan, i: int, found: RowDims) -> frozenset[str]:
    """The dims of operand i that a scan reads row by row."""
    body, carried = scan.body, scan.consts + scan.carries
    if body.ins and i == 0:
        n = scan.carries
        results = {v: frozenset[str]() for v in body.outs[:n]}
        for v, out in zip(body.outs[n:], loop.outs[n:], strict=True):
            dims = found.get(out, frozenset[str]())
            results[v] = results.get(v, dims) & dims
        _collect(body, results, found)
    inside = found.get(body.ins[i], frozenset[str]())
    if i >= carried:
        return inside | {scan.dim.name}
    return inside if i < scan.consts else frozenset()
