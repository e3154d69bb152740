"""Two transposes in a row become one, or none if the dims are in the first order again."""

from __future__ import annotations

from ..ir import Eqn, Graph, Var, verify
from ..ops.reshape import TRANSPOSE

__all__ = ["join_transposes"]


def join_transposes(graph: Graph) -> Graph:
    """The graph in which no transpose reads another one; the graph itself if none does."""
    return verify(_joined(graph), "join_transposes")


def _joined(graph: Graph) -> Graph:
    sources: dict[Var, Var] = {}  # result of a transpose -> its operand
    renamed: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        eqn = eqn.map_graphs(_joined)
        ins = tuple(renamed.get(v, v) for v in eqn.ins)
        if eqn.op is TRANSPOSE:
            ins = (sources.get(ins[0], ins[0]),)
            if ins[0].type == eqn.outs[0].type:
                renamed[eqn.outs[0]] = ins[0]
                continue
            sources[eqn.outs[0]] = ins[0]
        eqns.append(eqn if ins == eqn.ins else eqn.replace(ins=ins))
    if all(a is b for a, b in zip(eqns, graph.eqns, strict=False)) and len(eqns) == len(graph.eqns):
        return graph
    return graph.replace(eqns=tuple(eqns), outs=tuple(renamed.get(v, v) for v in graph.outs))
