"""Choose the gathers that become ring products: those with which the step is faster by the timeline."""

from __future__ import annotations

from collections.abc import Callable

from ..lowering.program import Program
from .ring_products import Ring, ring_products, rings

__all__ = ["faster_rings"]

TRIED = 6  # kinds of gathers, those with the most bytes first


def faster_rings(
    program: Program, order: Callable[[Program], Program], seconds: Callable[[Program], float]
) -> tuple[int, Program]:
    """The number of rings and the program in the order that `order` gives, with each kind of ring that is faster.

    Gathers of equal axes, shapes and dtypes are one kind (the layers of a model), which is taken or left together.
    """
    kinds: dict[object, list[Ring]] = {}
    for ring in rings(program):
        v = ring.value
        kinds.setdefault((ring.axes, ring.dim.name, v.type, ring.gather.backward), []).append(ring)
    chosen: list[Ring] = []
    best = order(program)
    least = seconds(best)
    largest = sorted(kinds.values(), key=lambda alike: -len(alike) * program.local_bytes(alike[0].value))
    for alike in largest[:TRIED]:
        candidate = order(ring_products(program, [*chosen, *alike]))
        now = seconds(candidate)
        if now < least:
            chosen, best, least = [*chosen, *alike], candidate, now
    return len(chosen), best
