"""Loops, branches and other primitives with bodies: the same check inside, with carries at a fixed point."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .factors import MixesError, Value, free, join, plain
from .kernels import pallas
from .rules import Equation

__all__ = ["CONTROL"]

Run = Callable[[Any, Any, Sequence[Value], frozenset[str]], list[Value]]


def _same(a: Value, b: Value) -> Value:
    """A value that is either of two."""
    axes = tuple(join(x, y) for x, y in zip(a.axes, b.axes, strict=True))
    if a.partial != b.partial and not a.zero and not b.zero:
        raise MixesError(f"carries a sum over {' '.join(sorted(a.partial ^ b.partial))} that is not complete")
    return Value(axes, a.partial | b.partial, a.zero and b.zero)


def _settle(first: Sequence[Value], step: Callable[[Sequence[Value]], Sequence[Value]]) -> list[Value]:
    """The carry of a loop that its body maps to itself."""
    carry = list(first)
    for _ in range(2 * len(carry) + 2):
        after = [_same(a, b) for a, b in zip(carry, step(carry), strict=True)]
        if after == carry:
            return carry
        carry = after
    raise MixesError("carries a value that has other places after every trip")


def _scan(e: Equation, ins: Sequence[Value], sums: frozenset[str], run: Run) -> list[Value]:
    p, q = e.params, e.block.params
    if (p["length"], p["reverse"]) != (q["length"], q["reverse"]):
        raise MixesError("loops over places that are split")
    consts, carries = p["num_consts"], p["num_carry"]
    rows = ins[consts + carries :]
    for x in rows:
        free(x.axes[0])
    fixed, inner = ins[:consts], [x._replace(axes=x.axes[1:]) for x in rows]

    def body(carry: Sequence[Value]) -> list[Value]:
        return run(p["jaxpr"], q["jaxpr"], [*fixed, *carry, *inner], sums)

    carry = _settle(ins[consts : consts + carries], lambda carry: body(carry)[:carries])
    stacked = [y._replace(axes=(plain(p["length"], p["length"]), *y.axes)) for y in body(carry)[carries:]]
    return [*carry, *stacked]


def _while(e: Equation, ins: Sequence[Value], sums: frozenset[str], run: Run) -> list[Value]:
    p, q = e.params, e.block.params
    test, body = p["cond_nconsts"], p["body_nconsts"]
    tested, fixed, first = ins[:test], ins[test : test + body], ins[test + body :]
    carry = _settle(first, lambda carry: run(p["body_jaxpr"], q["body_jaxpr"], [*fixed, *carry], sums))
    (condition,) = run(p["cond_jaxpr"], q["cond_jaxpr"], [*tested, *carry], sums)
    if condition.partial:
        raise MixesError("decides by a sum that is not complete")
    return carry


def _cond(e: Equation, ins: Sequence[Value], sums: frozenset[str], run: Run) -> list[Value]:
    if ins[0].partial:
        raise MixesError("decides by a sum that is not complete")
    branches = zip(e.params["branches"], e.block.params["branches"], strict=True)
    results = [run(a, b, ins[1:], sums) for a, b in branches]
    merged = results[0]
    for other in results[1:]:
        merged = [_same(a, b) for a, b in zip(merged, other, strict=True)]
    return merged


def _linear_solve(e: Equation, ins: Sequence[Value], sums: frozenset[str], run: Run) -> list[Value]:
    counts, bodies, others = e.params["const_lengths"], e.params["jaxprs"], e.block.params["jaxprs"]
    before = counts.matvec + counts.vecmat
    fixed, operands = ins[before : before + counts.solve], ins[sum(counts) :]
    if any(x.partial for x in ins):
        raise MixesError("solves with a sum that is not complete")
    return run(bodies.solve, others.solve, [*fixed, *operands], sums)


CONTROL = {
    "scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _linear_solve, "pallas_call": pallas,
}  # fmt: skip
