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
from ...dims import Shape
from ...ir import Eqn, Fuses, Op, Reduce, Type, Var, dce
from ...lowering.program import Program
from ...ops.elementwise import EQUAL, WHERE
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
    eqns = [
        (_in_one(eqn, program.producers) or eqn) if isinstance(eqn.op, Op) and eqn.op.reduce is Reduce.MIN else eqn
        for eqn in program.eqns
    ]
    inner = tuple(eqn.map_graphs(lambda body: one_reduction(body)) for eqn in eqns)  # pyright: ignore[reportArgumentType]
    changed = any(new is not old for new, old in zip(inner, program.eqns, strict=True))
    return dce(program.replace(eqns=inner)) if changed else program


def _in_one(least: Eqn, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The least of the indices of equal elements as one reduction, if it is one along a dim that a device has whole."""
    chosen = _made(least.ins[0], makers)
    if chosen is None or chosen.op is not WHERE:
        return None
    same, numbers = _comparison(chosen.ins[0], makers), _made(chosen.ins[1], makers)
    extreme = _made(same.ins[1], makers) if same is not None else None
    if same is None or extreme is None or extreme.ins != same.ins[:1] or numbers is None or numbers.op is not IOTA:
        return None
    over, (x,), kind = (numbers.params["dim"],), extreme.ins, extreme.operation.reduce
    alike = least.params["over"] == over == extreme.params.get("over") and kind in (Reduce.MAX, Reduce.MIN)
    if not alike or x.sharding.axes(over[0]):
        return None
    params = {"over": over, "largest": kind is Reduce.MAX}
    return Eqn(INDEX_OF_EXTREME, (x,), least.outs, params, least.where, least.backward)


def _comparison(mask: Var, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The comparison of elements with their extreme, alone or beside one that finds NaNs."""
    eqn = _made(mask, makers)
    if eqn is not None and eqn.op is not EQUAL and len(eqn.ins) == 2:
        eqn, nan = (_made(v, makers) for v in eqn.ins)
        eqn = eqn if eqn is not None and nan is not None and nan.ins == eqn.ins[:1] * 2 else None
    return eqn if eqn is not None and eqn.op is EQUAL else None


def _made(v: Var, makers: Mapping[Var, Eqn]) -> Eqn | None:
    """The equation of an operation that computes v."""
    eqn = makers.get(v)
    return eqn if eqn is not None and isinstance(eqn.op, Op) else None
