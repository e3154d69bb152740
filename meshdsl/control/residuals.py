"""Where a loop's body is cut in two: what runs forward, what runs backward, and what the one saves for the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..autodiff import vjp_of_graph
from ..ir import Graph, Var, dce

__all__ = ["split"]


def split(body: Graph, consts: int, carries: int, active: Sequence[bool]):
    """The body's forward half with its residuals as further results, and the backward half.

    Residuals are the forward values that the backward half uses, less what it can have for nothing: constants of the
    loop and slices of its inputs are passed again, and what follows from constants alone, or cheaply from what is
    kept anyway, is computed again.
    """
    joint, forward_values, want = vjp_of_graph(body, active)
    n, outs = len(body.ins), len(body.outs)
    made = {v: eqn for eqn in joint.eqns for v in eqn.outs}
    free = {v for i, v in enumerate(joint.ins[:n]) if not consts <= i < consts + carries}
    constant = set(joint.ins[:consts])
    for eqn in joint.eqns:
        if not eqn.operation.effects and eqn.control is None and all(v in constant for v in eqn.ins):
            constant.update(eqn.outs)
    later = [eqn for eqn in joint.eqns if eqn.outs[0] not in forward_values]
    cts, known = joint.ins[n:], {v for eqn in later for v in eqn.outs}
    used = dict.fromkeys(v for v in (*(v for eqn in later for v in eqn.ins), *joint.outs[outs:]) if v not in known)
    residuals = {v for v in used if v not in cts}

    def derived(v: Var) -> bool:
        """Whether v follows cheaply from inputs, constants and other residuals."""
        eqn = made.get(v)
        return eqn is not None and (
            v in constant or (eqn.operation.cheap and all(x in free or x in residuals or derived(x) for x in eqn.ins))
        )

    again: set[Var] = set()
    for eqn in reversed([eqn for eqn in joint.eqns if eqn.outs[0] in forward_values]):
        if eqn.outs[0] in residuals | again and derived(eqn.outs[0]):
            again.update(eqn.outs)
            residuals -= set(eqn.outs)
            again.update(v for v in eqn.ins if v not in free and v not in residuals)
    redo = [eqn for eqn in joint.eqns if eqn.outs[0] in again]
    saved = [v for v in (*joint.ins[:n], *made) if v in residuals and v not in free]
    needed = {v for eqn in (*redo, *later) for v in eqn.ins} | set(joint.outs[outs:])
    kept = [i for i, v in enumerate(joint.ins[:n]) if v in free and v in needed]
    first = tuple(eqn for eqn in joint.eqns if eqn.outs[0] in forward_values)
    forward = dce(Graph(joint.ins[:n], first, (*joint.outs[:outs], *saved)))
    backward = dce(Graph((*(joint.ins[i] for i in kept), *saved, *cts), (*redo, *later), joint.outs[outs:]))
    return forward, backward, kept, want
