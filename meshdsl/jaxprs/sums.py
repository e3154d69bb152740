"""Partial sums: which equations keep a value partial over a contracted dim, and which make one."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .factors import MixesError, Value, dims_of
from .rules import FIRST, JOINT, PRODUCTS, RULES, Equation

__all__ = ["sums_of"]


def sums_of(e: Equation, name: str, ins: Sequence[Value]) -> Callable[[int], tuple[frozenset[str], bool]]:
    """For the number of a result: the dims over which it is a partial sum, and whether it is zero."""
    if name == "optimization_barrier":  # the only primitive whose results have operands of their own
        return lambda k: (ins[k].partial, ins[k].zero)
    before = [x.partial for x in ins]
    zero = _zero(name, ins)
    used = frozenset().union(*before) if before else frozenset()
    if used:
        dims = " ".join(sorted(used))
        linear = [x for x in ins if not x.zero]
        if name in JOINT:
            linear = linear[1:] if name == "select_n" else linear
            if any(x.partial != used for x in linear) or (name == "select_n" and ins[0].partial):
                raise MixesError(f"adds to a sum over {dims} that is not complete")
        elif name in PRODUCTS:
            if sum(bool(p) for p in before) > 1:
                raise MixesError(f"multiplies two sums over {dims} that are not complete")
        elif name not in FIRST or any(before[1:]) or not _keeps_sums(e, name):
            raise MixesError(f"reads a sum over {dims} that is not complete")
    result = used | frozenset(_summed(name, e, ins)), zero
    return lambda _: result


def _keeps_sums(e: Equation, name: str) -> bool:
    """True unless a primitive rounds to integers before the sum is complete, or fills in values that are not zero."""
    if name == "convert_element_type":
        return np.dtype(e.params["new_dtype"]).kind in "fcV"
    dtype = e.full.outvars[0].aval.dtype
    if name == "gather" and "FILL" in str(e.params["mode"]):
        fill = e.params["fill_value"]
        return dtype.kind in "fcV" if fill is None else bool(fill == 0 or fill != fill)  # NaN stays NaN in a sum
    return name != "div" or dtype.kind in "fcV"


def _zero(name: str, ins: Sequence[Value]) -> bool:
    if name in PRODUCTS:
        return any(x.zero for x in ins)
    return name in JOINT | FIRST and bool(ins) and all(x.zero for x in ins)


def _summed(name: str, e: Equation, ins: Sequence[Value]) -> set[str]:
    """The contracted dims that an equation sums over."""
    if name not in ("reduce_sum", "dot_general", "conv_general_dilated") or not e.sums:
        return set()
    before = {kind for x in ins for kind in dims_of(x.axes)}
    after = set(dims_of(axis for axes in RULES[name](e, [x.axes for x in ins]) for axis in axes))
    return (before - after) & e.sums
