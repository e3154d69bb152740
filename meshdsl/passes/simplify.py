"""Simplify a graph before partition: inline calls and checkpoints, remove equal and dead equations, weigh branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..control.host import keep_on_device
from ..ir import Call, Eqn, Graph, Var, cse, dce, verify
from .accumulate import sums_begin_with_zero
from .frequencies import learn_frequencies
from .narrow_products import narrow_products
from .transposes import join_transposes
from .unmade import recompute_inside_loops

__all__ = ["inline", "simplify"]


def inline(graph: Graph) -> Graph:
    """Inline `checkpoint` and `call` equations, which after differentiation are equal to their bodies."""
    renamed: dict[Var, Var] = {}
    eqns = tuple(_opened(graph.eqns, renamed))
    return verify(graph.replace(eqns=eqns, outs=tuple(renamed.get(v, v) for v in graph.outs)), "inline")


def _opened(eqns: tuple[Eqn, ...], renamed: dict[Var, Var], fresh: bool = False) -> Iterator[Eqn]:
    # a body may be inlined twice (forward, and again in a gradient), so its values get new variables
    for eqn in eqns:
        ins = tuple(renamed.get(v, v) for v in eqn.ins)
        if isinstance(eqn.control, Call):
            body = eqn.control.graph
            inner = dict(zip(body.ins, ins, strict=True))
            for e in _opened(body.eqns, inner, fresh=True):
                yield e.replace(backward=e.backward or eqn.backward)
            renamed.update(zip(eqn.outs, (inner.get(v, v) for v in body.outs), strict=True))
            continue
        outs = tuple(dataclasses.replace(v) for v in eqn.outs) if fresh else eqn.outs
        renamed.update(zip(eqn.outs, outs, strict=True))
        yield eqn.replace(ins=ins, outs=outs).map_graphs(inline)


def simplify(graph: Graph) -> Graph:
    """Inline, rewrite for fewer bytes and faster products, then remove common subexpressions and dead code."""
    graph = recompute_inside_loops(sums_begin_with_zero(narrow_products(join_transposes(inline(graph)))))
    graph = graph.replace(eqns=tuple(keep_on_device(graph.eqns, graph.ins)))
    return verify(learn_frequencies(dce(cse(graph))), "simplify")
