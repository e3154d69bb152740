"""Numbers summed in the weight update travel together: norms of many tensors are one all_reduce, not one each.

Only the update is touched, what comes after the last operation of the backward pass: there nothing waits for a norm
but the step's end. An equation that needs one of the sums is moved behind them; the others keep their order.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..backend import Local
from ..dims import Dim, Shape
from ..ir import Eqn, Labels, Op, Type, Var
from ..layouts import Sharding
from .collectives import AllReduce
from .program import Program

__all__ = ["batch_scalar_sums"]


def _size(shape: Shape) -> int:
    return math.prod(d.size for d in shape)


def _whole(ins: Sequence[Type], outs: Sequence[Type]) -> Labels:
    """No dim of operands or results is split."""

    def labels(types: Sequence[Type]) -> tuple[dict[str, str | None], ...]:
        return tuple({d.name: None for d in t.shape} for t in types)

    return Labels(labels(ins), labels(outs))


def _pack_rule(*xs: Type, shape: Shape) -> Labels:
    return _whole(xs, [Type(shape, xs[0].dtype)])


def _pack(c: Local, *xs: Any, shape: Shape) -> Any:
    return c.xp.concatenate([c.xp.reshape(x, (-1,)) for x in xs], 0)


def _unpack_type(x: Type, *, shapes: Sequence[Shape]) -> tuple[Type, ...]:
    return tuple(Type(shape, x.dtype) for shape in shapes)


def _unpack_rule(x: Type, *, shapes: Sequence[Shape]) -> Labels:
    return _whole([x], _unpack_type(x, shapes=shapes))


def _unpack(c: Local, x: Any, *, shapes: Sequence[Shape]) -> list[Any]:
    ends = list(accumulate(map(_size, shapes)))
    starts = [0, *ends]
    return [
        c.xp.reshape(x[a:b], tuple(d.size for d in shape)) for a, b, shape in zip(starts, ends, shapes, strict=False)
    ]


def _pack_type(*xs: Type, shape: Shape) -> Type:
    return Type(shape, xs[0].dtype)


def _no_flops(ins: Any, outs: Any) -> float:
    return 0


PACK = Op("pack", type=_pack_type, kernel=_pack, linear="joint", flops=_no_flops, fuses="map", rule=_pack_rule)
UNPACK = Op("unpack", type=_unpack_type, kernel=_unpack, linear="joint", flops=_no_flops, rule=_unpack_rule)


def batch_scalar_sums(program: Program) -> Program:
    """The program with the all_reduces of single numbers in its update joined, those over the same axes in one."""
    made = [i for i, eqn in enumerate(program.eqns) if eqn.backward and isinstance(eqn.op, Op)]
    start = made[-1] + 1 if made else len(program.eqns)
    eqns, rest = list(program.eqns[:start]), list(program.eqns[start:])
    while rest:
        waiting: dict[Any, list[Eqn]] = defaultdict(list)
        blocked: set[Var] = set()
        later: list[Eqn] = []
        for eqn in rest:
            if not blocked.isdisjoint(eqn.ins):
                later.append(eqn)
            elif _is_number(eqn):
                waiting[eqn.op.axes, eqn.ins[0].dtype, eqn.ins[0].sharding].append(eqn)
            else:
                eqns.append(eqn)
                continue
            blocked.update(eqn.outs)
        for sums in waiting.values():
            eqns += _together(sums)
        rest = later
    joined = any(eqn.op is PACK for eqn in eqns)
    return program.replace(eqns=tuple(eqns)) if joined else program  # in its own order where nothing was to join


def _is_number(eqn: Eqn) -> bool:
    if not isinstance(eqn.op, AllReduce) or eqn.op.kind != "sum":
        return False
    return not eqn.ins[0].shape and eqn.ins[0].dtype.kind in "fV"


def _together(sums: Sequence[Eqn]) -> list[Eqn]:
    if len(sums) == 1:
        return list(sums)
    first = sums[0]
    shapes = tuple(eqn.ins[0].shape for eqn in sums)
    packed = (Dim("packed", sum(map(_size, shapes))),)
    pending = first.ins[0].sharding
    before = Var(packed, first.ins[0].dtype, "", pending)
    after = Var(packed, before.dtype, "", Sharding.of({}, set(pending.partial) - set(first.op.axes), pending.kind))
    causes = dict.fromkeys(eqn.cause for eqn in sums)
    cause = f"{len(sums)} numbers together: {next(iter(causes))}" + (", ..." if len(causes) > 1 else "")
    return [
        Eqn(PACK, tuple(eqn.ins[0] for eqn in sums), (before,), {"shape": packed}, first.where, first.backward),
        dataclasses.replace(first, ins=(before,), outs=(after,), cause=cause),
        Eqn(UNPACK, (after,), tuple(eqn.outs[0] for eqn in sums), {"shapes": shapes}, first.where, first.backward),
    ]
