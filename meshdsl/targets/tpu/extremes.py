"""Find the index of the largest element in one reduction, on TPUs.

`md.argmax` takes a maximum, and then the least index of the elements that equal it, because a dim that is sharded needs
both. The TPU compiler runs the two reductions one after the other; where the dim is whole, one of pairs of an element
and its index is faster. On CPUs it is slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...backend import Local
from ...dims import Dim, Shape
from ...ir import Eqn, Fuses, Op, Reduce, Type, Var, dce
from ...lowering.program import Program
from ...ops.elementwise import EQUAL, NOT_EQUAL, WHERE
from ...ops.indexing import IOTA


def _kernel(c: Local, x: Any, *, over: Shape, largest: bool) -> Any:
    find = c.xp.argmax if largest else c.xp.argmin
    return find(x, axis=c.ins[0].position(over[0])).astype(np.int32)


INDEX_OF_EXTREME = Op(
    "index_of_extreme",
    type=lambda x, *, over, largest: Type(tuple(d for d in x.dims if d not in over), np.dtype(np.int32)),
    kernel=_kernel,
    flops=lambda ins, outs, **_: float(np.prod(ins[0])),
    blocked=lambda x, *, over, largest: tuple(d.name for d in over),
    fuses=Fuses.REDUCE,
)


def one_reduction(program: Program) -> Program:
    """The program, and its loops, with one reduction for the index of an extreme along a dim that is not sharded.

    >>> import meshdsl as md
    >>> program = md.compile(lambda x: md.argmax(x, "a"), "rows:2", "b:rows").program(md.spec("b:4 a:8"))
    >>> [str(eqn.op) for eqn in one_reduction(program).eqns]
    ['stop_gradient', 'index_of_extreme']
    """
    makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
    eqns = [
        (_in_one(eqn, makers) or eqn) if isinstance(eqn.op, Op) and eqn.op.reduce is Reduce.MIN else eqn
        for eqn in program.eqns
    ]
    inner = tuple(eqn.map_graphs(lambda body: one_reduction(body)) for eqn in eqns)  # pyright: ignore[reportArgumentType]
    changed = any(new is not old for new, old in zip(inner, program.eqns, strict=True))
    return dce(program.replace(eqns=inner)) if changed else program


def _in_one(least: Eqn, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The least of the indices of equal elements as one reduction, if it is one along a dim that a device has whole."""
    over, chosen = least.params["over"], makers.get(least.ins[0])
    if len(over) > 1 or chosen is None or chosen.op is not WHERE:
        return None
    (dim,), (mask, index, _) = over, chosen.ins
    numbered = makers.get(index)
    found = _compared(makers.get(mask), makers) if _numbers(numbered, dim) else None
    if found is None or found.ins[0].sharding.axes(dim):
        return None
    extreme = makers.get(found.ins[1])
    if extreme is None or not isinstance(extreme.op, Op) or extreme.ins != (found.ins[0],):
        return None
    if extreme.op.reduce not in (Reduce.MAX, Reduce.MIN) or extreme.params["over"] != over:
        return None
    params = {"over": over, "largest": extreme.op.reduce is Reduce.MAX}
    return Eqn(INDEX_OF_EXTREME, (found.ins[0],), least.outs, params, least.where, least.backward)


def _numbers(eqn: Eqn | None, dim: Dim) -> bool:
    return eqn is not None and eqn.op is IOTA and eqn.params["dim"] == dim


def _compared(mask: Eqn | None, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The comparison of elements with their extreme, alone or beside one of NaNs."""
    if mask is None or mask.op is EQUAL:
        return mask
    sides = [makers[v] for v in mask.ins if v in makers]
    match [side.op for side in sides]:
        case [one, other] if one is EQUAL and other is NOT_EQUAL and sides[1].ins == (sides[0].ins[0],) * 2:
            return sides[0]
        case _:
            return None
