"""Evaluate a graph by its kernels, without `bind`, and list its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl import backend
from meshdsl.control.autodiff import vjp_of_graph
from meshdsl.ir import Call, Cond, Control, Graph, Op, Scan, While, walk
from meshdsl.trace import run_kernel


def run(graph: Graph, arrays: Sequence[Any], xp: Any) -> list[Any]:
    """Run a graph by its kernels in one array library, on undivided arrays; an evaluator independent of `bind`."""
    env = dict(zip(graph.ins, arrays, strict=True))
    for eqn in graph.eqns:
        ins = [env[v] for v in eqn.ins]
        if eqn.control is not None:
            outs = _control(eqn.control, ins, xp)
        else:
            types = [v.type for v in eqn.outs]
            outs = run_kernel(eqn.operation, xp, ins, [v.dims for v in eqn.ins], types, eqn.params)
        for v, x in zip(eqn.outs, outs, strict=True):
            assert (np.shape(x), np.dtype(x.dtype)) == (tuple(d.size for d in v.dims), v.dtype), f"{eqn.op}: {v}"
            env[v] = x
    return [env[v] for v in graph.outs]


def _control(control: Control, ins: Sequence[Any], xp: Any) -> Sequence[Any]:
    match control:
        case Scan():
            return _scan(control, ins, xp)
        case While():
            return _while(control, ins, xp)
        case Cond():
            yes, no = (lambda *xs, g=graph: tuple(run(g, xs, xp)) for graph in (control.yes, control.no))
            if xp is backend.Jax:
                return jax.lax.cond(ins[0], yes, no, *ins[1:])
            return (yes if ins[0] else no)(*ins[1:])
        case Call():
            return run(control.graph, ins, xp)


def _scan(loop: Scan, ins: Sequence[Any], xp: Any) -> list[Any]:
    body, carries, dim = loop.body, loop.carries, loop.dim
    held, carry, xs = loop.inputs(ins)
    rows = []
    for i in reversed(range(dim.size)) if loop.reverse else range(dim.size):
        outs = run(body, [*held, *carry, *(x[i] for x in xs)], xp)
        carry = outs[:carries]
        rows.append(outs[carries:])
    rows = rows[::-1] if loop.reverse else rows
    empty = [xp.zeros((0, *(d.size for d in v.dims)), v.dtype) for v in body.outs[carries:]]
    return [*carry, *([xp.stack(y) for y in zip(*rows, strict=True)] if rows else empty)]


def _while(loop: While, ins: Sequence[Any], xp: Any) -> Sequence[Any]:
    held, carry = loop.inputs(ins)
    more, step = (lambda c: run(loop.test, [*held, *c], xp)[0]), (lambda c: run(loop.body, [*held, *c], xp))
    if xp is backend.Jax:
        return jax.lax.while_loop(more, step, [jnp.asarray(x) for x in carry])
    while more(carry):
        carry = step(carry)
    return carry


def operations(graph: Graph) -> set[Op]:
    """Every operation of a graph, including those of loop bodies and branches."""
    return {eqn.operation for eqn, _ in walk(graph)}


def gradient(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph and its pullback as one graph, and the operands that got a cotangent; see `vjp_of_graph`."""
    joint, _, want = vjp_of_graph(graph, [True] * len(graph.ins), [True] * len(graph.outs))
    return joint, want
