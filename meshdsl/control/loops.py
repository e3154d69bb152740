"""`scan` over a stacked dim. It is one equation, forward and backward, so a program does not grow with depth.

The gradient is a second scan, in reverse, over the residuals that the first one saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..dims import Dim, DimLike, Shape, find, fresh_dim, pick
from ..errors import ShapeError
from ..ir import Graph, Op, Scan, Type
from ..ops.creation import zeros_like
from ..ops.dtypes import cast, cast_parts, wide_dtype
from ..ops.joining import stack, unstack
from ..ops.reshape import rename, transpose
from ..trace import Tensor, bind, evaluate, trace, tree
from .autodiff import floating_among, values_behind
from .carry import carried, leaves_of
from .cotangents import cotangent_dtype
from .residuals import split
from .vmapped import scan_rule

MOST_TRIPS = 2**31 - 1  # the counter of a loop is int32, unless JAX has 64-bit types


def _scan_type(*ins: Type, control: Scan) -> tuple[Type, ...]:
    carries, rows = control.results(control.body.outs)
    return (*(v.type for v in carries), *(Type((control.dim, *v.dims), v.dtype) for v in rows))


def _scan_eager(run: Any, *ins: Tensor, control: Scan) -> list[Tensor]:
    dim = control.dim
    consts, carry, xs = control.inputs(ins)
    slices = list(zip(*(unstack(x, dim) for x in xs), strict=True)) or [()] * dim.size
    rows: list[Sequence[Tensor]] = []
    for x in reversed(slices) if control.reverse else slices:
        carry, row = control.results(run(control.body, [*consts, *carry, *x]))
        rows.append(row)
    rows = rows[::-1] if control.reverse else rows
    empty = [zeros_like(Type((dim, *v.dims), v.dtype)) for v in control.results(control.body.outs)[1]]
    return [*carry, *([stack(y, dim) for y in zip(*rows, strict=True)] if rows else empty)]


def _read_in_any_trip(loop: Scan, read: Sequence[bool]) -> list[bool]:
    """The results of the body that may get a cotangent: those that are read, and carries that lead to them later."""
    read = list(read)
    while True:
        behind = values_behind(loop.body, read)
        carries = loop.body.ins[loop.consts : loop.consts + loop.carries]
        more = [i for i, v in enumerate(carries) if v in behind and not read[i]]
        if not more:
            return read
        for i in more:
            read[i] = True


def _scan_fwd(*ins: Tensor, active: Sequence[bool], read: Sequence[bool], control: Scan) -> Any:
    """Run the loop that also stacks the residuals of its gradient; see `residuals.split`."""
    consts, carries = control.consts, control.carries
    on = list(active)
    on[consts : consts + carries] = [True] * carries
    read = _read_in_any_trip(control, read)
    forward, backward, primal_inputs, wrt = split(control.body, consts, carries, on, read)
    sums = {i: cotangent_dtype(control.body.ins[i], on[i]) for i in wrt if i < consts}
    n = len(control.body.outs)
    outs = bind(SCAN, *ins, control=dataclasses.replace(control, body=_stackable(forward, n, control.dim)))
    held = [ins[i] for i in primal_inputs if i < consts]
    rows = [ins[i] for i in primal_inputs if i >= consts]
    return outs[:n], (backward, read, wrt, sums, held, rows, list(outs[n:]))


def _stackable(forward: Graph, n: int, dim: Dim) -> Graph:
    """The graph with residuals that can be stacked along `dim`: an inner loop's dim of that name gets another one."""
    if not any(d.name == dim.name for v in forward.outs[n:] for d in v.dims):
        return forward

    def renamed(*ins: Tensor) -> list[Tensor]:
        outs = evaluate(forward, ins)
        return [*outs[:n], *(_renamed(x, _other_name(x, dim, forward.known_dim_names)) for x in outs[n:])]

    return trace(renamed, [v.type for v in forward.ins])[0]


def _other_name(x: Tensor, dim: Dim, taken: Iterable[str]) -> Shape:
    return tuple(fresh_dim(Dim(f"{dim.name}__inner", d.size), taken) if d.name == dim.name else d for d in x.dims)


def _renamed(x: Tensor, dims: Shape) -> Tensor:
    """x with these names; the sizes are equal."""
    return rename(x, **{d.name: e.name for d, e in zip(x.dims, dims, strict=True) if d != e})


def _scan_vjp(cts: Sequence[Tensor | None], residuals: Any, *, control: Scan) -> list[Tensor | None]:
    """Cotangents are numbered as the body's results and inputs are.

    Those of constants, which are added up over the trips, are float32 if they are narrower, and cast at the end.
    """
    body, consts, carries = control.body, control.consts, control.carries
    backward, read, wrt, sum_dtypes, held, rows, saved = residuals
    types = _scan_type(control=control)
    floating = floating_among(body.outs, read)
    out_cts = {i: zeros_like(types[i]) if cts[i] is None else cts[i] for i in floating}
    n = len(held) + len(rows)
    named = backward.ins[n : n + len(saved)]

    def step(carry: tuple[dict[int, Tensor], dict[int, Tensor]], xs: tuple[list[Tensor], list[Tensor], Any]) -> Any:
        (later_cts, sums), (row, saved_row, own_cts) = carry, xs
        values = [_renamed(x, v.dims) for x, v in zip(saved_row, named, strict=True)]
        body_cts = later_cts | own_cts
        in_cts = evaluate(backward, [*held, *row, *values, *(body_cts[i] for i in floating)])
        by_in = dict(zip(wrt, in_cts, strict=True))
        first_cts = {i: by_in[consts + i] for i in later_cts}
        sums = {i: total + cast(by_in[i], total.dtype) for i, total in sums.items()}
        return (first_cts, sums), {i: ct for i, ct in by_in.items() if i >= consts + carries}

    last_cts = {i: ct for i, ct in out_cts.items() if i < carries}
    row_cts = {i: ct for i, ct in out_cts.items() if i >= carries}
    zeros = {i: zeros_like(Type(body.ins[i].dims, wide_dtype(dtype))) for i, dtype in sum_dtypes.items()}
    stacks = (rows, saved, row_cts)
    (first_cts, sums), x_cts = scan(step, (last_cts, zeros), stacks, over=control.dim, reverse=not control.reverse)
    sums = {i: cast_parts(total, sum_dtypes[i]) for i, total in sums.items()}
    by_input = {consts + i: ct for i, ct in first_cts.items()} | sums | x_cts
    return [by_input.get(i) for i in range(len(body.ins))]


SCAN = Op(
    "scan",
    type=_scan_type,
    kernel=_scan_eager,
    fwd=_scan_fwd,
    vjp=_scan_vjp,
    vmap=lambda *ins, new, control: scan_rule(SCAN, *ins, new=new, control=control),
)


def scan(f: Callable[..., Any], carry: Any, xs: Any, over: DimLike, *, reverse: bool = False) -> tuple[Any, Any]:
    """Run `f(carry, x) -> (carry, y)` over the slices of `xs` along a dim, in order (backwards when `reverse`).

    >>> import meshdsl as md
    >>> md.scan(lambda total, x: (total + x, total + x), 0.0, md.tensor([1.0, 2.0, 3.0], "t"), over="t")[1]
    tensor(float32[t=3], [1. 3. 6.])

    `carry` and `xs` are pytrees; every tensor of `xs` has the dim `over`. The results `y` are stacked along `over`,
    which becomes their first dim. Raises `ShapeError` if the carry changes structure, dims or dtype, and for a dim of
    2**31 or more.
    """
    first, structure = leaves_of(carry)
    rows, row_structure = leaves_of(xs)

    dim = find(over, rows[0].dims) if rows else pick(over, (), new=True)[0]
    if dim.size > MOST_TRIPS:
        raise ShapeError(f"md.scan runs at most {MOST_TRIPS:,} times, and dim {dim.name!r} has {dim.size:,}")
    rows = [transpose(x, [find(dim, x.dims), *(d for d in x.dims if d != dim)]) for x in rows]
    n = len(first)

    def body(*args: Tensor) -> Any:
        result = f(tree.tree_unflatten(structure, args[:n]), tree.tree_unflatten(row_structure, args[n:]))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ShapeError("the function of md.scan returns a pair (carry, y)")
        return carried(result[0], first, structure, "md.scan"), result[1]

    specs = [*(x.type for x in first), *(Type(x.dims[1:], x.dtype) for x in rows)]
    graph, captures, out = trace(body, specs)
    results = bind(SCAN, *captures, *first, *rows, control=Scan(graph, len(captures), n, dim, reverse))
    last, ys = tree.tree_unflatten(out, results)
    return tree.tree_unflatten(structure, last), ys
