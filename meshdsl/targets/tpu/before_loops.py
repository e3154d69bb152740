"""Products run before a loop if that frees memory, although compilers have a reason to run them after it.

The gradient of the last product of a model is computed before the loop of the backward pass, where it frees the
logits. Compilers may delay it until after the loop: if it is added to a gradient that the loop computes, as for an
embedding that is also the last product, or if it is summed over devices, which they do after the loop, often together
with the gradients of the loop. A fence ties such a product to what the loop carries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from ...cost.fusion import Kernel, Step, holders, steps
from ...cost.scores import is_matmul, kind
from ...ir import Eqn, Fuses, Var, computed_from
from ...lowering.asynchrony import FENCE, Start
from ...lowering.program import Program
from .softmaxes import softmaxes


def products_before_loops(program: Program) -> Program:
    """The program with a fence before each loop that a product should not wait for; itself if there is none.

    A program with started collectives keeps the order of its plan.

    >>> import meshdsl as md
    >>> def loss(table, w, x):
    ...     h = md.einsum(x, table, out="batch model")
    ...     h, _ = md.scan(lambda h, row: (md.tanh(h * row), None), h, w, over="layer")
    ...     return md.sum(md.square(md.softmax(md.einsum(h, table, out="batch vocab"), "vocab")))
    >>> step = md.compile(md.grad(loss, (0, 1)), "rows:2", "batch:rows")
    >>> arguments = md.spec("vocab:64 model:4"), md.spec("layer:3 model:4"), md.spec("batch:256 vocab:64")
    >>> [eqn.op.name for eqn in products_before_loops(step.program(*arguments)).eqns].count("fence")
    1
    """
    program = program.replace(eqns=tuple(eqn.map_graphs(products_before_loops) for eqn in program.eqns))
    if any(isinstance(eqn.op, Start) for eqn in program.eqns):
        return program
    for loop in [eqn for eqn in program.eqns if eqn.scan is not None and eqn.trips > 1]:
        program = _fenced(program, loop)
    return program


def _fenced(program: Program, loop: Eqn) -> Program:
    """The program with the products that free memory before one of its loops tied to the loop."""
    place = next(i for i, eqn in enumerate(program.eqns) if eqn.outs == loop.outs)
    loop = program.eqns[place]  # as other fences changed it
    assert loop.scan is not None
    _, carry, _ = loop.scan.inputs(loop.ins)
    computed = [v for v in carry if v not in program.ins]
    delayed = _delayed(program, place)
    results = [v for v in delayed if _frees(program, place, v)] if computed else []
    if not results:
        return program
    tied = (max(computed, key=program.local_bytes), *results)
    new = {v: dataclasses.replace(v) for v in tied}
    fence = Eqn(FENCE, tied, tuple(new.values()), {}, loop.where, loop.backward)
    later = [eqn.reading(new) for eqn in program.eqns[place:]]
    outs = tuple(new.get(v, v) for v in program.outs)
    return program.replace(eqns=(*program.eqns[:place], fence, *later), outs=outs)


def _delayed(program: Program, place: int) -> list[Var]:
    """Results of products before a loop that are summed over devices, or combined with what depends on the loop."""
    readers, dependent = program.readers, computed_from(program.eqns, program.eqns[place].outs)
    products = filter(is_matmul, program.eqns[:place])
    return [eqn.outs[0] for eqn in products if _waits(eqn.outs[0], readers, dependent, program.outs)]


def _waits(v: Var, readers: Mapping[Var, Sequence[Eqn]], dependent: set[Var], outs: Collection[Var]) -> bool:
    while v not in outs and len(readers.get(v, ())) == 1:
        (reader,) = readers[v]
        if reader.sends or kind(reader) not in (Fuses.MAP, Fuses.VIEW):
            return reader.effect.reduces
        if not dependent.isdisjoint(reader.ins):
            return True
        match reader.outs:
            case (out,):
                v = out
            case _:
                return False
    return False


def _frees(program: Program, place: int, v: Var) -> bool:
    """True if a product takes less memory than the values that, from the loop on, only it reads."""
    order, source = steps(program, softmaxes), holders(program)
    begin = next(i for i, step in enumerate(order) if program.eqns[place] in _eqns(step))
    product = next(step for step in order if any(v in eqn.outs for eqn in _eqns(step)))
    needed = {source.get(v, v) for v in program.outs}
    needed.update(read for step in order[begin:] if step is not product for read in step.reads)
    computed = {v for step in order[:begin] for v in step.writes}
    freed = computed.intersection(product.reads) - needed
    return sum(map(program.local_bytes, freed)) > program.local_bytes(v)


def _eqns(step: Step) -> Sequence[Eqn]:
    return step.eqns if isinstance(step, Kernel) else (step.eqn,)
