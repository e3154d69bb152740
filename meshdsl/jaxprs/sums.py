"""Partial sums: which equations keep a value partial over a contracted dim, and which make one."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .factors import MixesError, Value, dims_of
from .rules import FIRST, JOINT, PRODUCTS, RULES, Equation

__all__ = ["sums_of"]


def sums_of(e: Equation, name: str, ins: Sequence[Value]) -> tuple[frozenset[str], bool]:
    """The dims over which the results are partial sums, and whether they are zero."""
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
    return used | frozenset(_summed(name, e, ins)), zero


def _keeps_sums(e: Equation, name: str) -> bool:
    """True if a conversion keeps sums: an integer would be rounded before the sum is complete."""
    return name != "convert_element_type" or np.dtype(e.params["new_dtype"]).kind in "fcV"


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
