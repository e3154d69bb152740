"""Kernels with products, which windows should hold."""

from __future__ import annotations

from ..lowering.program import Program
from ..targets.fusion import Kernel, holders, steps
from .fences import Kernels, is_product

__all__ = ["kernels_with_products"]


def kernels_with_products(program: Program) -> Kernels:
    """The products of the kernels that a program runs, and the values that are in memory, with their views."""
    launched = steps(program)
    products = {
        step.eqns[-1]: tuple(filter(is_product, step.eqns))
        for step in launched
        if isinstance(step, Kernel) and any(map(is_product, step.eqns))
    }
    stored = {v for step in launched for v in (*step.reads, *step.writes)}
    return Kernels(products, stored | {view for view, v in holders(program).items() if v in stored})
