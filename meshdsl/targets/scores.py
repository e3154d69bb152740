"""The fusions of a program, and the attention scores of so many keys that the compiler stores them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..control import BARRIER
from ..ir import Eqn, Fuses, Graph, Op, Product, Reduce, Var
from ..lowering import Program
from ..lowering.emit import LONG
from ..ops.dtypes import CAST
from ..ops.joining import INDEX, STACK

__all__ = ["Scores", "batches", "inside_softmaxes", "is_matmul", "kind", "long_scores", "names", "softmaxes"]

LARGEST = 8192  # elements of a softmax for which it has a kernel (8,192 yes, 12,288 no)


def kind(eqn: Eqn) -> Fuses:
    """The operation's `fuses`. A device's slice of its own block is a pick; other collectives run alone.

    A stack of one row is a view of it, and the other way round.
    """
    if (eqn.op is STACK and len(eqn.ins) == 1) or (eqn.op is INDEX and eqn.params["dim"].size == 1):
        return Fuses.VIEW
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
        elif is_matmul(eqn):
            names = [{d.name for d in v.dims} for v in (*eqn.ins, eqn.outs[0])]
            if set.intersection(*names):
                operands[eqn] = set(ins)
    return operands


class Scores(NamedTuple):
    """The scores of one program that a compiler stores."""

    dims: set[frozenset[str]]  # of scores that a kernel reads rather than computes again, if that reads fewer bytes
    stored: set[Var]  # scores, and values of their size, that are stored because a reduction reads them
    recomputed_by_products: bool  # products recompute elementwise operands, also if several products read one


def long_scores(program: Program) -> Scores:
    """Scores (results of batched products) that are reduced over more than `LONG` elements, as times count them.

    The figures of machines were fitted with this rule, which stores whatever of that size a reduction reads. Memory
    follows the finer `softmaxes`.
    """
    products = {names(eqn.outs[0]) for eqn in batches(program)}
    reduced = [(v, eqn.outs[0]) for eqn in program.eqns if kind(eqn) is Fuses.REDUCE for v in eqn.ins[:1]]
    dims = {names(v) for v, out in reduced if names(v) in products and _elements(program, v, out) > LONG}
    return Scores(dims, {v for v, _ in reduced if names(v) in dims}, False)


def _elements(program: Program, v: Var, out: Var) -> int:
    """The elements of one reduction from `v` to `out`."""
    return math.prod(program.local_shape(v)) // max(1, math.prod(program.local_shape(out)))


def softmaxes(program: Program) -> Scores:
    """The scores that the TPU compiler stores for softmaxes: matrix products whose exponentials are summed.

    It stores the weights of attention once, instead of computing them in each reader. A softmax of at most `LONG`
    elements runs in the kernel of the product. One of at most `LARGEST` elements is a kernel of its own, which reads
    the scores and stores them less their maximum, unless its readers read a loop's stack: then it computes the scores
    too (`inside_softmaxes`) and writes the weights there. Of more elements, or if the compiler does not recognise the
    softmax, only the scores are stored. It recognises neither one that other devices have a part of, nor that of
    grouped queries (five dims), nor that of a product without batch dims in which a dim has size 1.
    """
    sums = list(_softmax_sums(program))
    exponentials = {each.v for each in sums if each.in_kernel and not _stacked_from(each.v, program)}
    long = set(map(names, exponentials))
    reductions = [eqn for eqn in program.eqns if kind(eqn) is Fuses.REDUCE]
    scores = {eqn.ins[0] for eqn in reductions if eqn.operation.reduce is Reduce.MAX and names(eqn.ins[0]) in long}
    return Scores({names(each.v) for each in sums if each.batched}, scores | exponentials, True)


def inside_softmaxes(program: Program) -> set[Var]:
    """The scores that are not stored: the kernel of their softmax computes them and writes the weights into a stack."""
    makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
    inside: set[Var] = set()
    for each in _softmax_sums(program):
        reach = [each.v] if each.in_kernel and _stacked_from(each.v, program) else []
        while reach:
            v = reach.pop()
            inside.add(v)
            if v in makers and not is_matmul(makers[v]):
                reach += [u for u in makers[v].ins if names(u) == names(v) and u not in inside]
    return inside


class _SoftmaxSum(NamedTuple):
    """A sum of the exponentials of a matrix product."""

    v: Var  # the exponentials
    batched: bool  # the product has batch dims: attention, not logits
    in_kernel: bool  # the compiler has a kernel for this softmax that reads all of its scores


def _softmax_sums(program: Program) -> Iterator[_SoftmaxSum]:
    batched = set(batches(program))
    products = {names(eqn.outs[0]): eqn in batched for eqn in program.eqns if is_matmul(eqn)}
    makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
    for eqn in program.eqns:
        v = eqn.ins[0] if kind(eqn) is Fuses.REDUCE else None
        if v in makers and names(v) in products and _is_transcendental(makers[v]):
            shape, (out, *_) = program.local_shape(v), eqn.outs
            recognised = not out.sharding.partial and (len(shape) < 5 if products[names(v)] else 1 not in shape)
            in_kernel = recognised and LONG < _elements(program, v, out) <= LARGEST
            yield _SoftmaxSum(v, products[names(v)], in_kernel)


def _stacked_from(v: Var, program: Program) -> bool:
    """True if v, after elementwise operations, is a row that its readers read from a loop's stack."""
    derived = {v}
    for eqn in program.eqns:
        if not derived.isdisjoint(eqn.ins):
            if eqn.op is BARRIER:
                return True
            if kind(eqn) in (Fuses.MAP, Fuses.VIEW) and names(eqn.outs[0]) == names(v):
                derived.update(eqn.outs)
    return False


def _is_transcendental(eqn: Eqn) -> bool:
    return isinstance(eqn.op, Op) and bool(eqn.op.transcendental)


def is_matmul(eqn: Eqn) -> bool:
    """True for a matrix product of two or more operands."""
    return isinstance(eqn.op, Op) and eqn.op.product is Product.MATMUL and len(eqn.ins) > 1


def names(v: Var) -> frozenset[str]:
    """The names of a value's dims."""
    return frozenset(d.name for d in v.dims)
