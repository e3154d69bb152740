"""Drop barriers on rows of loops: nothing can merge there, and compilers copy a row that has a barrier.

A rematerialised layer reads its inputs behind barriers, so that compilers do not merge the recomputation with the
forward pass. If the layer is the body of a loop, its forward pass is in another loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...control import BARRIER
from ...ir import Eqn, Graph, Scan, Var
from ...lowering.program import Program

__all__ = ["drop_row_barriers"]


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
        eqn = eqn.map_graphs(_inside)
        loop = eqn.control
        if not isinstance(loop, Scan) or loop.trips < 2:
            return eqn
        return eqn.map_graphs(lambda body: _without_barriers(body, loop.inputs(body.ins)[2]))

    def _inside(graph: Graph) -> Graph:
        return drop_row_barriers(graph) if isinstance(graph, Program) else graph

    eqns = tuple(map(inside, program.eqns))
    changed = any(after is not before for after, before in zip(eqns, program.eqns, strict=True))
    return program.replace(eqns=eqns) if changed else program


def _without_barriers(body: Graph, rows: Sequence[Var]) -> Graph:
    readers = Counter(v for eqn in body.eqns for v in set(eqn.ins)) + Counter(set(body.outs))
    replaced = {
        eqn.outs[0]: eqn.ins[0]
        for eqn in body.eqns
        if eqn.op is BARRIER and eqn.ins[0] in rows and readers[eqn.ins[0]] == 1
    }
    if not replaced:
        return body
    kept = [eqn for eqn in body.eqns if eqn.outs[0] not in replaced]
    eqns = tuple(eqn.replace(ins=tuple(replaced.get(v, v) for v in eqn.ins)) for eqn in kept)
    return body.replace(eqns=eqns, outs=tuple(replaced.get(v, v) for v in body.outs))
