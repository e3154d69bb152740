"""Split a loop's body into a forward half, a backward half, and the residuals saved between them."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Eqn, Graph, Var, dce
from .autodiff import vjp_of_graph
from .host import keep_on_device
from .recompute import choose

__all__ = ["split"]


def split(body: Graph, consts: int, carries: int, active: Sequence[bool]):
    """Returns (forward, backward, primal_inputs, wrt): two graphs, and the indices of two sets of the body's inputs.

    `forward` returns the body's results and the residuals. `backward` takes the inputs `primal_inputs`, the residuals
    and the cotangents of the results; it returns the cotangents of the inputs `wrt`.

    Residuals are the forward values that the backward half uses, or from which it computes those again, whichever costs
    less (`recompute.choose`). Constants of the loop and slices of its inputs are passed again, and values that depend
    on constants alone are always computed again.
    """
    joint, forward_values, wrt = vjp_of_graph(body, active)
    n, outs = len(body.ins), len(body.outs)
    ins, cts = joint.ins[:n], joint.ins[n:]
    free = {*ins[:consts], *ins[consts + carries :]}
    eqns = list(keep_on_device(joint.eqns, free))
    forward_eqns = [eqn for eqn in eqns if eqn.outs[0] in forward_values]
    backward_eqns = [eqn for eqn in eqns if eqn.outs[0] not in forward_values]
    used = _read(backward_eqns, joint.outs[outs:]) - {v for eqn in backward_eqns for v in eqn.outs} - set(cts)
    residuals, recomputed = choose(forward_eqns, used, free, _constant(forward_eqns, ins[:consts]))
    recompute_eqns = [eqn for eqn in forward_eqns if not recomputed.isdisjoint(eqn.outs)]
    saved = [v for v in (*ins, *(v for eqn in forward_eqns for v in eqn.outs)) if v in residuals]
    needed = _read([*recompute_eqns, *backward_eqns], joint.outs[outs:])
    primal_inputs = [i for i, v in enumerate(ins) if v in free & needed]
    forward = dce(Graph(ins, tuple(forward_eqns), (*joint.outs[:outs], *saved)))
    backward = dce(
        Graph((*(ins[i] for i in primal_inputs), *saved, *cts), (*recompute_eqns, *backward_eqns), joint.outs[outs:])
    )
    return forward, backward, primal_inputs, wrt


def _read(eqns: Sequence[Eqn], outs: Sequence[Var]) -> set[Var]:
    """The values that the equations read, and the results `outs`."""
    return {v for eqn in eqns for v in eqn.ins} | set(outs)


def _constant(eqns: Sequence[Eqn], consts: Sequence[Var]) -> set[Var]:
    """The constants of the loop and the values that depend on them alone."""
    constant = set(consts)
    for eqn in eqns:
        if not eqn.operation.effects and eqn.control is None and all(v in constant for v in eqn.ins):
            constant.update(eqn.outs)
    return constant
