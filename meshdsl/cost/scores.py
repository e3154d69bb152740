"""The fusions of a program, and the attention scores of so many keys that the compiler stores them."""

from __future__ import annotations

import math

from ..ir import Eqn, Fuses, Graph, Op, Product, Var
from ..lowering import Program
from ..ops.dtypes import CAST

__all__ = ["batches", "kind", "long_scores", "names"]

LONG = 2048  # the TPU compiler computes scores inside the kernels that reduce them over at most this many keys


def kind(eqn: Eqn) -> Fuses:
    """The operation's `fuses`. A device's slice of its own block is a pick; other collectives run alone."""
    if isinstance(eqn.op, Op):
        return eqn.op.fuses
    return Fuses.KERNEL if eqn.sends else Fuses.PICK


def batches(graph: Graph) -> dict[Eqn, set[Var]]:
    """For each batched matrix product (for example scores by values), its operands before views and casts.

    An einsum counts as batched if some dim is in both operands and in the result; rows by weights is not.
    """
    source: dict[Var, Var] = {}  # through views and casts
    operands: dict[Eqn, set[Var]] = {}
    for eqn in graph.eqns:
        ins = [source.get(v, v) for v in eqn.ins]
        if ins and (kind(eqn) is Fuses.VIEW or eqn.op is CAST):
            source[eqn.outs[0]] = ins[0]
        elif isinstance(eqn.op, Op) and eqn.op.product is Product.MATMUL and len(ins) > 1:
            names = [{d.name for d in v.shape} for v in (*eqn.ins, eqn.outs[0])]
            if set.intersection(*names):
                operands[eqn] = set(ins)
    return operands


def long_scores(program: Program) -> set[frozenset[str]]:
    """The dims of scores (results of batched products) that are reduced over more than `LONG` elements.

    The compiler stores what such a reduction reads, for example the exponentials that a softmax sums, and the values
    between two of them in their own dtype. (At 1,024 and 2,048 keys it does not, at 4,096 it does.)
    """
    products = {names(eqn.outs[0]) for eqn in batches(program)}

    def size(v: Var) -> int:
        return math.prod(program.local_shape(v))

    reduced = [eqn for eqn in program.eqns if kind(eqn) is Fuses.REDUCE and names(eqn.ins[0]) in products]
    return {names(eqn.ins[0]) for eqn in reduced if size(eqn.ins[0]) > LONG * max(1, size(eqn.outs[0]))}


def names(v: Var) -> frozenset[str]:
    """The names of a value's dims."""
    return frozenset(d.name for d in v.shape)
