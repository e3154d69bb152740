"""Run a traced function of md operations on one device's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import Call, Graph
from ..trace import run_kernel


def run_on(xp: Any, graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    """The results of a graph without loops and branches, by its kernels in one array library."""
    env = dict(zip(graph.ins, arrays, strict=True))
    for eqn in graph.eqns:
        xs = [env[v] for v in eqn.ins]
        if isinstance(eqn.control, Call):
            results = run_on(xp, eqn.control.graph, xs)
        else:
            types = [v.type for v in eqn.outs]
            results = run_kernel(eqn.operation, xp, xs, [v.dims for v in eqn.ins], types, eqn.params)
        env.update(zip(eqn.outs, results, strict=True))
    return [env[v] for v in graph.outs]
