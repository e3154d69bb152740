"""Offload: a value waits in the host's memory between the forward and the backward pass.

`offload` copies a value to the host, and only `fetch`, which copies it back, reads the copy; so do loops that stack it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..ir import Eqn, Graph, Op, Var, borders

OFFLOAD = Op(
    "offload", type=lambda x: x, kernel=lambda c, x: c.xp.to_host(x), vjp=lambda ct, x: (ct,), flops=lambda *_: 0
)
FETCH = Op(
    "fetch",
    type=lambda x: x,
    kernel=lambda c, x: c.xp.to_device(x),
    vjp=lambda ct, x: (ct,),
    flops=lambda *_: 0,
    effects=True,  # each reader fetches its own copy, late
)


def moves_to_or_from_host(eqn: Eqn) -> bool:
    """True for `offload` and `fetch`."""
    return eqn.op in (OFFLOAD, FETCH)


def host_values(graph: Graph, ins: Collection[Var] = ()) -> set[Var]:
    """The values of a graph and of its loops that are in the host's memory; `ins` are those of the graph's inputs."""
    values = set(ins)
    for eqn in graph.eqns:
        if eqn.op is OFFLOAD:
            values.update(eqn.outs)
        elif eqn.scan is not None:
            pairs = [(outer, inner) for _, outer, inner, _ in borders(eqn)]
            values |= host_values(eqn.scan.body, {inner for outer, inner in pairs if outer in values})
            values.update(outer for outer, inner in pairs if inner in values)
    return values


def keep_on_device(eqns: Collection[Eqn], kept: Collection[Var]) -> Iterator[Eqn]:
    """The equations without the offloading of values that are kept in the device's memory anyway."""
    renamed: dict[Var, Var] = {}
    for eqn in eqns:
        source = renamed.get(eqn.ins[0], eqn.ins[0]) if eqn.ins else None
        if (eqn.op is OFFLOAD and source in kept) or (eqn.op is FETCH and eqn.ins[0] in renamed):
            assert source is not None
            renamed[eqn.outs[0]] = source
        else:
            yield eqn.reading(renamed)
