"""The values of a softmax that the TPU compiler stores, by its size and by what reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...control import BARRIER
from ...cost.scores import Scores, batches, elements, is_matmul, kind, names
from ...ir import Eqn, Fuses, Op, Reduce, Var
from ...lowering import Program
from .emission import LONG

LARGEST = 8192  # elements of a softmax for which it has a kernel (8,192 yes, 12,288 no)


def softmaxes(program: Program) -> Scores:
    """The scores that the compiler stores for softmaxes: matrix products whose exponentials are summed.

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
    makers = program.producers
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
    makers = program.producers
    for eqn in program.eqns:
        if kind(eqn) is not Fuses.REDUCE or (v := eqn.ins[0]) not in makers:
            continue
        if names(v) in products and _is_transcendental(makers[v]):
            shape, (out, *_) = program.local_shape(v), eqn.outs
            recognised = not out.sharding.partial and (len(shape) < 5 if products[names(v)] else 1 not in shape)
            in_kernel = recognised and LONG < elements(program, v, out) <= LARGEST
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
