"""The kernels that a fence keeps in their windows: those with products, and the values they read and write."""

from __future__ import annotations

from ...cost.fusion import Kernel, holders, steps
from ...ir import Eqn
from ...lowering.program import Program
from ...schedule.fences import Held, is_product

__all__ = ["kernels_with_products"]


def kernels_with_products(program: Program) -> dict[Eqn, Held]:
    """The kernels with products, by their last equation, with the values they read from and write to memory."""
    held: dict[Eqn, Held] = {}
    source = holders(program)
    for step in steps(program):
        if isinstance(step, Kernel) and any(map(is_product, step.eqns)):
            stored = set(step.reads)
            reads = tuple((eqn, v) for eqn in step.eqns for v in eqn.ins if source.get(v, v) in stored)
            held[step.eqns[-1]] = Held(reads, step.writes)
    return held
