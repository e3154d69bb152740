"""`scan` over a stacked dim. It is one equation, forward and backward, so a program does not grow with depth.

The gradient is a second scan, in reverse, over the residuals that the first one saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..dims import Dim, DimLike, Shape, find, pick
from ..errors import ShapeError
from ..ir import Graph, Op, Scan, Type
from ..ops.creation import zeros_like
from ..ops.joining import stack, unstack
from ..ops.reshape import rename, transpose
from ..trace import Tensor, bind, evaluate, trace, tree
from .carry import carried, leaves_of
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


def _scan_fwd(*ins: Tensor, active: Sequence[bool], control: Scan) -> Any:
    """Run the loop that also stacks the residuals of its gradient; see `residuals.split`."""
    consts, carries = control.consts, control.carries
    on = list(active)
    on[consts : consts + carries] = [True] * carries
    forward, backward, primal_inputs, wrt = split(control.body, consts, carries, on)
    n = len(control.body.outs)
    outs = bind(SCAN, *ins, control=dataclasses.replace(control, body=_stackable(forward, n, control.dim)))
    xs = ins[consts + carries :]
    primals = [ins[i] for i in primal_inputs if i < consts] + [
        xs[i - consts - carries] for i in primal_inputs if i >= consts
    ]
    return outs[:n], (backward, primal_inputs, wrt, primals, outs[n:])


def _stackable(forward: Graph, n: int, dim: Dim) -> Graph:
    """The graph with residuals that can be stacked along `dim`: an inner loop's dim of that name gets another one."""
    if not any(d.name == dim.name for v in forward.outs[n:] for d in v.dims):
        return forward

    def renamed(*ins: Tensor) -> list[Tensor]:
        outs = evaluate(forward, ins)
        return [*outs[:n], *(_renamed(x, _other_name(x, dim)) for x in outs[n:])]

    return trace(renamed, [v.type for v in forward.ins])[0]


def _other_name(x: Tensor, dim: Dim) -> Shape:
    taken, name = {d.name for d in x.dims}, f"{dim.name}__inner"
    while name in taken:
        name += "_"
    return tuple(Dim(name, d.size) if d.name == dim.name else d for d in x.dims)


def _renamed(x: Tensor, dims: Shape) -> Tensor:
    """x with these names; the sizes are equal."""
    return rename(x, **{d.name: e.name for d, e in zip(x.dims, dims, strict=True) if d != e})


def _scan_vjp(cts: Sequence[Tensor | None], residuals: Any, *, control: Scan) -> list[Tensor | None]:
    body, consts, carries = control.body, control.consts, control.carries
    backward, primal_inputs, wrt, primals, saved = residuals
    floating = [i for i, v in enumerate(body.outs) if v.dtype.kind in "fVc"]
    types = _scan_type(control=control)
    out_cts = {i: zeros_like(types[i]) if cts[i] is None else cts[i] for i in floating}
    n_const_primals = sum(i < consts for i in primal_inputs)
    const_wrt = [i for i in wrt if i < consts]
    carry_wrt = [i for i in wrt if consts <= i < consts + carries]
    carry_cts = [i for i in floating if i < carries]
    y_cts = [i for i in floating if i >= carries]
    n_xs = len(primal_inputs) - n_const_primals

    def step(carry: tuple[list[Tensor], list[Tensor]], xs: list[Tensor]) -> Any:
        carried_cts, sums = carry
        by_out = dict(zip(carry_cts, carried_cts, strict=True)) | dict(zip(y_cts, xs[n_xs + len(saved) :], strict=True))
        step_cts = [by_out[i] for i in floating]
        named = backward.ins[len(primal_inputs) : len(primal_inputs) + len(saved)]
        values = [_renamed(x, v.dims) for x, v in zip(xs[n_xs : n_xs + len(saved)], named, strict=True)]
        outs = evaluate(backward, [*primals[:n_const_primals], *xs[:n_xs], *values, *step_cts])
        by_in = dict(zip(wrt, outs, strict=True))
        return (
            [by_in[consts + i] for i in carry_cts],
            [total + by_in[i] for total, i in zip(sums, const_wrt, strict=True)],
        ), [by_in[i] for i in wrt if i >= consts + carries]

    init = ([out_cts[i] for i in carry_cts], [zeros_like(body.ins[i].type) for i in const_wrt])
    (carried_cts, sums), x_cts = scan(
        step,
        init,
        [*primals[n_const_primals:], *saved, *(out_cts[i] for i in y_cts)],
        over=control.dim,
        reverse=not control.reverse,
    )
    by_input = dict(zip(carry_wrt, carried_cts, strict=True)) | dict(zip(const_wrt, sums, strict=True))
    by_input |= dict(zip([i for i in wrt if i >= consts + carries], x_cts, strict=True))
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
