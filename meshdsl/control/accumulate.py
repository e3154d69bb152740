"""Accumulate over parts of a batch, one at a time. It needs less memory and sends no more than the full batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dims import Dim, DimLike, find, fresh_dim
from ..errors import ShapeError
from ..ir import Eqn, Graph, Type, dce
from ..ops.creation import zeros_like
from ..ops.dtypes import CAST, CAST_PARTS, cast, cast_parts, kind, wide_dtype
from ..ops.elementwise import add
from ..ops.indexing import iota
from ..ops.reshape import unflatten
from ..trace import Tensor, bind1, evaluate, trace, tree
from .carry import leaves_of
from .loops import scan


def accumulate(f: Callable[..., Any], xs: Any, steps: int, over: DimLike = "batch", *, numbered: bool = False) -> Any:
    """The sum of `f(part)` over `steps` equal parts of `xs` along a dim, computed one part at a time.

    >>> import meshdsl as md
    >>> def loss(w, x):
    ...     return md.mean(md.square(md.einsum(x, w, out="batch")))
    >>> w, x = md.tensor([1.0, 2.0], "io"), md.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], "batch io")
    >>> value, grad = md.accumulate(lambda part: md.value_and_grad(loss)(w, part), x, steps=2)
    >>> value / 2, grad / 2
    (tensor(float32[], 7.5), tensor(float32[io=2], [6.  4.5]))

    `xs` is a pytree of tensors that all have the dim `over`; in a part, the dim has `size / steps` elements. Part i
    contains every `steps`-th element, starting with element i. Thus each device slices its own block of a sharded dim,
    and no data is sent, if the size of a part is a multiple of the number of devices along the dim. Parts of
    consecutive elements would gather the batch. Gradients are summed on each device and reduced once, after the last
    part. Totals of floats narrower than 32 bits are float32, and cast at the end. `f` returns a pytree of tensors; for
    a mean, divide the result by `steps`. With `numbered`, f also gets the number of the part, from 0: `f(part,
    number)`. One step is `f(xs)`, without a loop. Raises `ShapeError` if a tensor lacks the dim or its size is not a
    multiple of `steps`.
    """
    leaves, structure = leaves_of(xs)
    step, parts = _parts(leaves, steps, over)
    if numbered:
        leaves, parts = [*leaves, cast(0, "int32")], [*parts, iota(step, "int32")]
    types = [type(x.type)(tuple(d for d in x.dims if d != step), x.dtype) for x in parts]
    n = structure.num_leaves
    graph, captures, out = trace(lambda *part: f(tree.tree_unflatten(structure, part[:n]), *part[n:]), types)
    if any(v.dtype.kind == "b" for v in graph.outs):
        raise ShapeError("md.accumulate adds up what its function returns, and booleans have no sum")
    if steps == 1:  # nothing is added up: no loop keeps a sharded update from the gradient
        return tree.tree_unflatten(out, evaluate(graph, [*captures, *leaves]))

    summed, casts = _without_last_casts(graph)

    def add_part(total: list[Any], part: list[Any]) -> tuple[list[Any], None]:
        results = evaluate(summed, [*captures, *part])
        return [add(a, cast(b, a.dtype)) for a, b in zip(total, results, strict=True)], None

    zeros = [zeros_like(Type(v.dims, wide_dtype(v.dtype))) for v in summed.outs]
    totals, _ = scan(add_part, zeros, parts, over=step)
    ends = zip(totals, summed.outs, casts, strict=True)
    return tree.tree_unflatten(out, [_cast_as(cast_parts(x, v.dtype), each) for x, v, each in ends])


def _without_last_casts(graph: Graph) -> tuple[Graph, list[list[Eqn]]]:
    """The graph that returns its results before their last casts, and these casts: they follow the sum of all parts.

    A cast to a wider dtype is only last after one to a narrower dtype. It then undoes a rounding for the sum over
    devices, as that of a gradient that is reduced in a narrow dtype.
    """
    producers = {eqn.outs[0]: eqn for eqn in graph.eqns if eqn.op in (CAST, CAST_PARTS)}
    outs, casts = list(graph.outs), [list[Eqn]() for _ in graph.outs]
    for i, v in enumerate(graph.outs):
        eqn = producers.get(v)
        inner = producers.get(eqn.ins[0]) if eqn is not None else None
        ending = [inner, eqn] if inner is not None and inner.op is CAST_PARTS else [eqn]
        first = ending[0]
        if first is not None and kind(v.dtype) == kind(first.ins[0].dtype) == "f" and _narrows(first):
            outs[i], casts[i] = first.ins[0], [each for each in ending if each is not None]
    return dce(graph.replace(outs=tuple(outs))), casts


def _narrows(eqn: Eqn) -> bool:
    return eqn.outs[0].dtype.itemsize < eqn.ins[0].dtype.itemsize


def _cast_as(x: Tensor, eqns: Sequence[Eqn]) -> Tensor:
    for eqn in eqns:
        x = bind1(eqn.operation, x, **eqn.params)
    return x


def _parts(leaves: Sequence[Tensor], steps: int, over: DimLike) -> tuple[Dim, list[Tensor]]:
    """The dim of the parts, and the tensors with it."""
    if not leaves:
        raise ShapeError("md.accumulate needs a tensor to take parts of; xs has none")
    dim = find(over, leaves[0].dims)
    if steps < 1 or dim.size % steps:
        raise ShapeError(
            f"md.accumulate cannot cut {dim} into {steps} equal parts\n  give a number of steps that divides {dim.size}"
        )
    step = fresh_dim(Dim("micro", steps), *(x.dims for x in leaves))
    return step, [unflatten(x, find(dim, x.dims), [Dim(dim.name, dim.size // steps), step]) for x in leaves]
