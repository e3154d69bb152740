"""Scatters that set, multiply or take the extreme, and gathers and scatters along several dims at once.

A device reads and writes the rows of its own block. Partial tables are combined over the devices that hold parts of
the updates; for a product, the updates are gathered. An out-of-range index writes nothing, as in `indexing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..backend import Local
from ..dims import Dim, DimsLike, Shape, pick
from ..errors import ShapeError
from ..ir import Fuses, Labels, Linear, Op, Reduce, Type, named
from ..trace import Tensor, as_tensor, bind1
from .dtypes import cast, check_ordered, kind
from .elementwise import equal, where
from .indexing import (
    check_can_add,
    check_updates,
    checked_indices,
    gather,
    index_label,
    iota,
    put_add,
    scatter_add_kernel,
    scatter_operands,
    take_kernel,
)
from .reductions import broadcast, spread
from .reshape import transpose


def _table_labels(dims: Shape, over: Shape, i: Type) -> dict[str, str | None]:
    return {d.name: index_label(d, i) if d in over else d.name for d in dims}


def _points_type(x: Type, *indices: Type, over: Shape) -> Type:
    i = indices[0].dims
    return Type((*i, *(d for d in x.dims if d not in over and d not in i)), x.dtype)


TAKE_POINTS = Op(
    "take_points",
    type=_points_type,
    kernel=take_kernel,
    vjp=lambda ct, x, *indices, over, to_dtypes: (
        transpose(_added(indices, cast(ct, to_dtypes[0]), over, x.dims), x.dims),
        *(None for _ in indices),
    ),
    vmap=lambda x, *indices, new, over: bind1(TAKE_POINTS, x, *_spread(indices, new), over=over),
    linear=Linear.FIRST,
    reduce=Reduce.SUM,
    rule=lambda x, *indices, over: Labels(
        (_table_labels(x.dims, over, indices[0]), *(named(i.dims) for i in indices)),
        (named(_points_type(x, *indices, over=over).dims),),
    ),
    fuses=Fuses.PICK,
)


def _spread(indices: Sequence[Tensor], new: Dim) -> Sequence[Tensor]:
    return spread(indices, new) if any(new in i.dims for i in indices) else indices


def take_points(x: Tensor, indices: Sequence[Tensor], over: Shape) -> Tensor:
    """The elements at the points that equal places of the indices name; all indices have the same dims."""
    if len(over) == 1:
        return gather(x, indices[0], over[0])
    return bind1(TAKE_POINTS, x, *indices, over=over)


def _scatter(name: str, function: str, vjp: Any, *, table: bool, mask: Any, reduce: Reduce, **record: Any) -> Op:
    """An operation that combines updates with the elements of a table at the points of its indices, or with zeros."""

    def infer(*ins: Type, over: Shape, paired: Shape) -> Type:
        *_, i, updates = ins
        if not table:
            check_can_add(updates)
        return Type((*paired, *over, *(d for d in updates.dims if d not in i.dims)), updates.dtype)

    def run(c: Local, *ins: Any, over: Shape, paired: Shape) -> Any:
        if not table:
            return scatter_add_kernel(c, *ins, over=over, paired=paired)
        total, index, updates = scatter_operands(c, *ins[1:], over=over, paired=paired)
        out = c.outs[0].sizes
        rest = out[len(paired) + len(over) :]
        return c.xp.scatter(function, ins[0].reshape((total, *rest)), index, updates).reshape(out)

    def rule(*ins: Type, over: Shape, paired: Shape) -> Labels:
        i = ins[-2]
        whole = [d.name for d in i.dims if d not in paired] if reduce is Reduce.NONE else ()
        shown = _table_labels(infer(*ins, over=over, paired=paired).dims, over, i)
        indices = tuple(named(x.dims, whole) for x in ins[table:])
        return Labels((shown, *indices) if table else indices, (shown,))

    def vmap(*ins: Tensor, new: Dim, over: Shape, paired: Shape) -> Tensor:
        return bind1(op, *spread(ins, new), over=over, paired=(new, *paired))

    def flops(ins: Any, outs: Any, **_: Any) -> float:
        return float(math.prod(ins[-1]))

    op = Op(name, infer, run, vjp, vmap=vmap, flops=flops, reduce=reduce, mask=mask, rule=rule, **record)
    return op


def _extreme_vjp(ct: Tensor, x: Tensor, *ins: Tensor, out: Tensor, over: Shape, paired: Shape) -> tuple[Any, ...]:
    """Divide ct equally among the elements and updates that are the extreme; for NaN that is 0 / 0."""
    *indices, updates = ins
    kept = cast(equal(x, out), ct.dtype)
    won = transpose(cast(equal(updates, take_points(out, indices, over)), ct.dtype), updates.dims)
    share = ct / (kept + _added(indices, won, over, x.dims))
    return (share * kept, *(None for _ in indices), take_points(share, indices, over) * won)


def _mul_vjp(ct: Tensor, x: Tensor, *ins: Tensor, over: Shape, paired: Shape) -> tuple[Any, ...]:
    """The gradient is the product of the other factors. Zeros are counted, so it is correct for exact zeros too."""
    *indices, updates = ins
    zero, x_zero = equal(updates, 0), equal(x, 0)
    zeros = _added(indices, cast(zero, ct.dtype), over, x.dims)
    rest = bind1(SCATTER_MUL, x * 0 + 1, *indices, where(zero, 1, updates), over=over, paired=paired)
    every, one = (ct * where(x_zero, 1, x) * where(zeros + cast(x_zero, ct.dtype) == n, rest, 0) for n in (0, 1))
    others = where(zero, *(take_points(y, indices, over) for y in (one, every))) / where(zero, 1, updates)
    return (ct * where(zeros == 0, rest, 0), *(None for _ in indices), transpose(others, updates.dims))


SCATTER_ADD_POINTS = _scatter(
    "scatter_add_points",
    "add",
    lambda ct, *ins, over, paired: (
        *(None for _ in ins[:-1]),
        transpose(take_points(ct, ins[:-1], over), ins[-1].dims),
    ),
    table=False,
    mask=0,
    reduce=Reduce.SUM,
)
SCATTER_MAX = _scatter("scatter_max", "max", _extreme_vjp, table=True, mask="low", reduce=Reduce.MAX)
SCATTER_MIN = _scatter("scatter_min", "min", _extreme_vjp, table=True, mask="high", reduce=Reduce.MIN)
SCATTER_MUL = _scatter("scatter_mul", "multiply", _mul_vjp, table=True, mask=1, reduce=Reduce.NONE)


def _added(indices: Sequence[Tensor], updates: Tensor, over: Shape, into: Shape) -> Tensor:
    """Zeros plus the updates, with the dims `into`."""
    paired = tuple(d for d in into if d not in over and d in indices[0].dims)
    return transpose(bind1(SCATTER_ADD_POINTS, *indices, updates, over=over, paired=paired), into)


Scatter = Callable[[Tensor, Sequence[Tensor], Tensor, Shape], Tensor]


def _into(op: Op) -> Scatter:
    def scatter(x: Tensor, indices: Sequence[Tensor], updates: Tensor, over: Shape) -> Tensor:
        if op.reduce is not Reduce.NONE:
            check_ordered(op.name, x.dtype)
        paired = tuple(d for d in x.dims if d not in over and d in indices[0].dims)
        rest = [d for d in updates.dims if d not in indices[0].dims]
        table = transpose(x, (*paired, *over, *rest))
        return transpose(bind1(op, table, *indices, updates, over=over, paired=paired), x.dims)

    return scatter


def _set(x: Tensor, indices: Sequence[Tensor], updates: Tensor, over: Shape) -> Tensor:
    """Of the updates of one element, the one at the highest position wins: only it is added, to zeros."""
    i = indices[0].dims
    position = broadcast(as_tensor(0, "int32"), i)
    for k, d in enumerate(i):
        position = position + iota(d) * math.prod(e.size for e in i[k + 1 :])
    paired = tuple(d for d in x.dims if d not in over and d in i)
    table = broadcast(as_tensor(-1, "int32"), (*paired, *over))
    winner = bind1(SCATTER_MAX, table, *indices, position, over=over, paired=paired)
    wins = equal(take_points(winner, indices, over), position)
    number = cast(updates, "int8") if kind(x.dtype) == "b" else updates
    written = cast(_added(indices, where(wins, number, 0), over, x.dims), x.dtype)
    return where(winner >= 0, written, x)


SCATTERS: dict[str, Scatter] = {
    "set": _set,
    "add": lambda x, indices, updates, over: x + _added(indices, updates, over, x.dims),
    "max": _into(SCATTER_MAX),
    "min": _into(SCATTER_MIN),
    "mul": _into(SCATTER_MUL),
}


def scattered(how: str, x: Tensor, indices: Sequence[Any], updates: Any, over: Shape, drop: bool = False) -> Tensor:
    """x with the updates at the points of its indices; indices without a dim of another are repeated along it."""
    if how == "add" and len(over) == 1:
        return put_add(x, indices[0], updates, over[0], drop=drop)
    name, points = f"scatter_{how}", points_of(f"scatter_{how}", indices, over, drop)
    updates = cast(as_tensor(updates), x.dtype)
    rest = tuple(d for d in x.dims if d not in over)
    check_updates(name, x.type, points[0].type, updates.type, rest)
    missing = [d for d in dict.fromkeys((*points[0].dims, *rest)) if d not in updates.dims]
    return SCATTERS[how](x, points, broadcast(updates, (*missing, *updates.dims)) if missing else updates, over)


def points_of(name: str, indices: Sequence[Any], over: Shape, drop: bool) -> list[Tensor]:
    """The indices, checked as those of `md.take`, each with the dims of all."""
    checked = [checked_indices(name, i, d, drop) for i, d in zip(indices, over, strict=True)]
    for i in checked:
        if i.dtype.kind not in "iu":
            raise ShapeError(f"md.{name} needs integer indices, got {i.dtype.name}")
    shape = tuple(dict.fromkeys(d for i in checked for d in i.dims))
    return [transpose(broadcast(i, shape), shape) for i in checked]


def _public(how: str, combined: str, example: str, more: str) -> Callable[..., Tensor]:
    def scatter(x: Any, i: Any, updates: Any, over: DimsLike, *, drop: bool = False) -> Tensor:
        x = as_tensor(x)
        dims = pick(over, x.dims)
        indices = list(i) if isinstance(i, tuple | list) else [i]
        if len(indices) != len(dims):
            raise ShapeError(f"md.scatter_{how} along {len(dims)} dims takes an index for each, got {len(indices)}")
        return scattered(how, x, indices, updates, dims, drop)

    scatter.__name__ = scatter.__qualname__ = f"scatter_{how}"
    scatter.__doc__ = f"""`x` with its elements at indices `i` along `over` {combined} `updates`. {more}

    >>> import meshdsl as md
    >>> row, i = md.tensor([1.0, 5.0], "row"), md.tensor([1, 1], "n")
    >>> md.scatter_{how}(row, i, md.tensor([4.0, 3.0], "n"), "row")
    tensor(float32[row=2], {example})

    Dims are paired, and indices are counted and checked, also with `drop`, as in `md.put_add`. Along several dims, `i`
    is a tuple with an index for each: equal places of the indices name a point.

    Raises `ShapeError` for a dim that x lacks, and for updates with a dim that neither x nor the indices have.
    """
    return scatter


scatter_set = _public(
    "set", "replaced by", "[1. 3.]", "Of equal indices, the last in row-major order of the dims of `i` wins."
)
scatter_max = _public(
    "max", "replaced by their maximum with", "[1. 5.]", "NaN propagates; ties share the gradient equally."
)
scatter_min = _public(
    "min", "replaced by their minimum with", "[1. 3.]", "NaN propagates; ties share the gradient equally."
)
scatter_mul = _public(
    "mul", "multiplied by", "[ 1. 60.]", "Updates along a split dim are gathered; the gradient is right for zeros too."
)
