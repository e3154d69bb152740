"""What a fusion model asks of an equation, and the scores that a compiler stores."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..ir import Eqn, Fuses, Op, Product, Var, learn
from ..lowering import Program
from ..ops.dtypes import CAST
from ..ops.joining import INDEX, STACK

LONG = 2048  # elements of a reduction, above which times count its operand as stored; machines were fitted with it


def kind(eqn: Eqn) -> Fuses:
    """The operation's `fuses`. A device's slice of its own block is a pick; other collectives run alone.

    A stack of one row is a view of it, and the other way round.
    """
    if "kind" not in eqn.__dict__:  # the cost model asks hundreds of times
        learn(eqn, "kind", _kind(eqn))
    return eqn.__dict__["kind"]


def _kind(eqn: Eqn) -> Fuses:
    if (eqn.op is STACK and len(eqn.ins) == 1) or (eqn.op is INDEX and eqn.params["dim"].size == 1):
        return Fuses.VIEW
    if isinstance(eqn.op, Op):
        return eqn.op.fuses
    return Fuses.KERNEL if eqn.sends else Fuses.PICK


def batches(program: Program) -> dict[Eqn, set[Var]]:
    """For each batched matrix product (for example scores by values), its operands before views and casts.

    An einsum counts as batched if some dim of more than one element on a device is in both operands and in the result:
    rows by weights is not, also not those of one stage of a pipeline.
    """
    source: dict[Var, Var] = {}  # through views and casts
    operands: dict[Eqn, set[Var]] = {}
    for eqn in program.eqns:
        ins = [source.get(v, v) for v in eqn.ins]
        if ins and (kind(eqn) is Fuses.VIEW or eqn.op is CAST):
            source[eqn.outs[0]] = ins[0]
        elif is_matmul(eqn):
            longer = (
                {d.name for d, n in zip(v.dims, program.local_shape(v), strict=True) if n > 1}
                for v in [*eqn.ins, *eqn.outs]
            )
            if set.intersection(*longer):
                operands[eqn] = set(ins)
    return operands


class Scores(NamedTuple):
    """The scores of one program that a compiler stores, and what it computes inside the kernels of products."""

    dims: set[frozenset[str]]  # of scores that a kernel reads rather than computes again, if that reads fewer bytes
    stored: set[Var]  # scores, and values of their size, that are stored because a reduction reads them
    recomputed_by_products: bool  # products recompute elementwise operands, also if several products read one
    products_alone: bool = False  # a product reads its operands from memory, and stores its result


def long_scores(program: Program) -> Scores:
    """Scores (results of batched products) that are reduced over more than `LONG` elements, as times count them.

    The figures of machines were fitted with this rule, which stores whatever of that size a reduction reads. Memory
    follows the finer rule of the target.
    """
    products = {names(eqn.outs[0]) for eqn in batches(program)}
    reduced = [(v, eqn.outs[0]) for eqn in program.eqns if kind(eqn) is Fuses.REDUCE for v in eqn.ins[:1]]
    dims = {names(v) for v, out in reduced if names(v) in products and elements(program, v, out) > LONG}
    return Scores(dims, {v for v, _ in reduced if names(v) in dims}, False)


def no_scores(program: Program) -> Scores:
    """Nothing is stored for a softmax; products are calls of a library."""
    return Scores(set(), set(), False, products_alone=True)


def elements(program: Program, v: Var, out: Var) -> int:
    """The elements of one reduction from `v` to `out`."""
    return math.prod(program.local_shape(v)) // max(1, math.prod(program.local_shape(out)))


def is_matmul(eqn: Eqn) -> bool:
    """True for a matrix product of two or more operands."""
    return isinstance(eqn.op, Op) and eqn.op.product is Product.MATMUL and len(eqn.ins) > 1


def is_product(eqn: Eqn) -> bool:
    """True for a convolution, and for a matrix product that sums over more than one element."""
    if isinstance(eqn.op, Op) and eqn.op.product is Product.CONV:
        return True
    return is_matmul(eqn) and any(d not in eqn.outs[0].dims for v in eqn.ins for d in v.dims)


def names(v: Var) -> frozenset[str]:
    """The names of a value's dims."""
    return frozenset(d.name for d in v.dims)
