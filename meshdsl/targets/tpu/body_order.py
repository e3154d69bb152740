"""The order in which compilers run the steps of a loop's body.

What the next trip needs is computed first in a backward loop, and the products for gradients of weights after it, so
their operands wait; but not if it recomputes a sum over devices of the forward pass. So it is in a forward loop with
collectives. An elementwise kernel runs with its first reader if that is no product.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cost.fusion import Kernel, Send, Step
from ...cost.scores import is_matmul, kind
from ...ir import Eqn, Fuses, Graph, Scan, Var, While, computed_from


def body_order(eqn: Eqn, steps: Sequence[Step], carried: set[Var]) -> list[Step]:
    """The steps of the body of loop `eqn` in a compiler's order; `carried`: the results of the body that it carries."""
    loop = eqn.control
    assert isinstance(loop, Scan | While)
    sends = any(isinstance(step, Send) for step in steps)
    if not _recomputes_sums(loop.body, loop.inputs(loop.body.ins)[1]) if eqn.backward else sends:
        steps = _carry_first(steps, carried)
    return _with_readers(steps)


def _recomputes_sums(body: Graph, carry: Sequence[Var]) -> bool:
    """True if a body sums across devices what does not depend on its carry: a value of the forward pass."""
    dependent = computed_from(body.eqns, carry)
    return any(eqn.effect.reduces and dependent.isdisjoint(eqn.ins) for eqn in body.eqns)


def _carry_first(order: Sequence[Step], carry: set[Var]) -> list[Step]:
    """The steps of a loop's body, without products that its carry does not need; then these and what reads them."""
    needed, delayed = set(carry), set[Var]()
    first: set[Step] = set()
    for step in reversed(order):
        if not needed.isdisjoint(step.writes):
            first.add(step)
            needed.update(step.reads)
    for step in order:
        if step not in first and (not delayed.isdisjoint(step.reads) or _multiplies(step)):
            delayed.update(step.writes)
    return sorted(order, key=lambda step: not delayed.isdisjoint(step.writes))


def _multiplies(step: Step) -> bool:
    return isinstance(step, Kernel) and any(map(is_matmul, step.eqns))


def _with_readers(order: Sequence[Step]) -> list[Step]:
    """The steps of a body with each elementwise kernel directly before its first reader, if that is no product.

    Compilers run the two in one kernel.
    """
    result: list[Step] = []  # from the last step to the first
    for step in reversed(order):
        readers = (i for i in range(len(result) - 1, -1, -1) if not set(step.writes).isdisjoint(result[i].reads))
        first = next(readers, None) if _consists_of(step, Fuses.MAP, Fuses.VIEW) else None
        if first is not None and _consists_of(result[first], Fuses.MAP, Fuses.VIEW, Fuses.REDUCE):
            result.insert(first + 1, step)
        else:
            result.append(step)
    return result[::-1]


def _consists_of(step: Step, *kinds: Fuses) -> bool:
    return isinstance(step, Kernel) and all(kind(eqn) in kinds for eqn in step.eqns)
