"""Find pairs of inputs whose shardings interact: an equation reads values that depend on both.

An input is followed through elementwise operations and views, which keep its sharding, and through one other operation
(a product, a reduction), whose result is sharded as its operands were. Bodies of loops, branches and other operations
are followed too. This is a heuristic: inputs that do not interact here can still change each other's cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..ir import Eqn, Graph, Scan, Var, While

__all__ = ["interacting_inputs"]

REACH = 1  # operations that are neither elementwise nor views
KEEPS = ("map", "view")

Reached = dict[int, int]  # input number -> such operations on the path to it


def interacting_inputs(graph: Graph, groups: Mapping[Var, int]) -> set[tuple[int, int]]:
    """Pairs `i < j` of input groups that interact.

    >>> import meshdsl as md
    >>> f = lambda x, w, v, u: md.dot(md.dot(md.dot(x, w, "a"), v, "b"), u, "c")
    >>> specs = md.spec("n:2 a:2"), md.spec("a:2 b:2"), md.spec("b:2 c:2"), md.spec("c:2 d:2")
    >>> graph = md.compile(f, "all:1").graph(*specs)
    >>> sorted(interacting_inputs(graph, {v: i for i, v in enumerate(graph.ins)}))
    [(0, 1), (0, 2), (1, 2), (2, 3)]
    """
    pairs: set[tuple[int, int]] = set()
    _follow(graph, [{groups[v]: 0} if v in groups else {} for v in graph.ins], pairs)
    return pairs


def _follow(graph: Graph, ins: list[Reached], pairs: set[tuple[int, int]]) -> list[Reached]:
    at: dict[Var, Reached] = dict(zip(graph.ins, ins, strict=True))
    for eqn in graph.eqns:
        read = [at.get(v, {}) for v in eqn.ins]
        if eqn.graphs():
            outs = _inside(eqn, read, pairs)
        else:
            joint = _joint(read)
            pairs.update(itertools.combinations(sorted(joint), 2))
            more = 0 if eqn.operation.fuses in KEEPS else 1
            outs = [{i: n + more for i, n in joint.items() if n + more <= REACH}] * len(eqn.outs)
        at.update(zip(eqn.outs, outs, strict=True))
    return [at.get(v, {}) for v in graph.outs]


def _inside(eqn: Eqn, read: list[Reached], pairs: set[tuple[int, int]]) -> list[Reached]:
    """Inputs that the results of an equation with bodies depend on; loops repeat until nothing changes."""
    loop = eqn.control if isinstance(eqn.control, Scan | While) else None  # its bodies return the carry that they take
    while True:
        results = [_follow(sub, _taken(read, len(sub.ins)), pairs) for sub in eqn.graphs().values()]
        outs = [_joint([outs[i] for outs in results if i < len(outs)]) for i in range(len(eqn.outs))]
        if loop is None:
            return outs
        carries = loop.carries if isinstance(loop, Scan) else len(eqn.outs)
        again = list(read)
        for i in range(carries):
            again[loop.consts + i] = _joint([read[loop.consts + i], outs[i]])
        if again == read:
            return outs
        read = again


def _taken(read: list[Reached], count: int) -> list[Reached]:
    """The operands that a body takes: the last ones, without a leading predicate."""
    return read[-count:] if 0 < count <= len(read) else [_joint(read)] * count


def _joint(some: list[Reached]) -> Reached:
    least: Reached = {}
    for each in some:
        for i, n in each.items():
            least[i] = min(n, least.get(i, n))
    return least
