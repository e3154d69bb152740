"""Read a loop's large rows from where the loop stores them, on TPUs, so that they are computed once.

A loop that stacks a row and also multiplies it has two readers of the row. If it does not fit into a TPU's vector
memory, the compiler computes it once for the stack and again for the product, from a larger value that it stores before
both: for attention weights in bfloat16, their float32 exponentials. A barrier on a row that is stacked is emitted as a
write into the stack, and a read of what was written (`lowering/emit.py`).

Drop barriers on rows of loops: nothing can merge there, and compilers copy a row that has a barrier.

A rematerialised layer reads its inputs behind barriers, so that compilers do not merge the recomputation with the
forward pass. If the layer is the body of a loop, its forward pass is in another loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ...control import BARRIER
from ...control.host import host_values
from ...ir import Eqn, Fuses, Graph, Op, Product, Scan, Var, without
from ...lowering.asynchrony import Start
from ...lowering.program import Program
from ...ops.dtypes import CAST

LARGE = 2**24  # bytes of a row on one device; the vector memory of a TPU is 64 or 128 MiB, and has other values too


def read_stored_rows(program: Program, large: float = LARGE) -> Program:
    """The program with a barrier between large rows that a loop stacks and their readers in the loop.

    Only elementwise results are computed twice, so others keep their readers, and so do loops with a planned overlap.

    >>> import meshdsl as md
    >>> def f(x, w):
    ...     def trip(h, row):
    ...         p = md.softmax(md.dot(h, row, "io"), "out")
    ...         return md.dot(p, row, "out"), p
    ...     return md.scan(trip, x, w, over="layer")
    >>> program = md.compile(f, "rows:2", "batch:rows").program(md.spec("batch:4 io:8"), md.spec("layer:3 io:8 out:8"))
    >>> [str(one).count(" = barrier ") for one in (program, read_stored_rows(program, large=0))]
    [0, 1]
    """

    def read(eqn: Eqn) -> Eqn:
        eqn, loop = eqn.map_graphs(lambda body: read_stored_rows(body, large)), eqn.scan
        if loop is None or loop.trips < 2:
            return eqn
        return eqn.map_graphs(lambda body: _with_barriers(program, body, loop, large))

    return program.replace(eqns=tuple(map(read, program.eqns)))


def _with_barriers(program: Program, body: Graph, loop: Scan, large: float) -> Graph:
    """The body with a barrier behind each row that its other equations should read from the stack."""
    if any(isinstance(eqn.op, Start) for eqn in body.eqns):
        return body
    stored = {v: dataclasses.replace(v) for v in _read_again(body, loop) if program.local_bytes(v) >= large}
    if not stored:
        return body
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        eqns.append(eqn.reading(stored))
        eqns += [Eqn(BARRIER, (v,), (stored[v],), {}, eqn.where, eqn.backward) for v in eqn.outs if v in stored]
    return body.replace(eqns=tuple(eqns))


def _read_again(body: Graph, loop: Scan) -> list[Var]:
    """The rows that a loop stacks and its other equations read, and that compilers would compute twice."""
    carried, rows = loop.results(body.outs)
    read = {v for eqn in body.eqns if eqn.op is not BARRIER for v in eqn.ins}
    on_host = host_values(body)
    again = [v for v in rows if v in read and v not in carried and v not in on_host]
    return [v for v in again if _elementwise(v, body.producers)]


def _elementwise(v: Var, makers: Mapping[Var, Eqn]) -> bool:
    """True if an elementwise operation computes v; a cast of a product is computed with the product, once."""
    eqn = makers.get(v)
    while eqn is not None and isinstance(eqn.op, Op) and (eqn.op is CAST or eqn.op.fuses is Fuses.VIEW):
        eqn = makers.get(eqn.ins[0])
    return eqn is not None and isinstance(eqn.op, Op) and eqn.op.fuses is Fuses.MAP and eqn.op.product is Product.NONE


def drop_row_barriers(program: Program) -> Program:
    """The program without barriers on the rows of its loops; itself if it has none.

    A barrier stays if another equation of the loop's body reads the row, and in a loop of one trip, because compilers
    inline it beside the forward pass.

    >>> import meshdsl as md
    >>> def loss(x, w):
    ...     layer = md.checkpoint(lambda h, row: md.tanh(h * row))
    ...     return md.sum(md.scan(lambda h, row: (layer(h, row), None), x, w, over="layer")[0])
    >>> step = md.compile(md.grad(loss), "rows:2", "batch:rows")
    >>> program = step.program(md.spec("batch:4"), md.spec("layer:3 batch:4"))
    >>> [str(one).count(" = barrier ") for one in (program, drop_row_barriers(program))]
    [2, 0]
    """

    def inside(eqn: Eqn) -> Eqn:
        eqn = eqn.map_graphs(drop_row_barriers)
        loop = eqn.scan
        if loop is None or loop.trips < 2:
            return eqn
        return eqn.map_graphs(lambda body: _without_barriers(body, loop.inputs(body.ins)[2]))

    return program.replace(eqns=tuple(map(inside, program.eqns)))


def _without_barriers(body: Graph, rows: Sequence[Var]) -> Graph:
    once = {v for v in rows if len(body.readers.get(v, ())) == 1 and v not in body.outs}
    return without(body, lambda eqn: eqn.op is BARRIER and eqn.ins[0] in once)
