"""Accumulate over parts of a batch, one at a time. It needs less memory and sends no more than the full batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dims import Dim, DimLike, find
from ..errors import ShapeError
from ..ops.creation import zeros_like
from ..ops.dtypes import cast
from ..ops.elementwise import add
from ..ops.indexing import iota
from ..ops.reshape import unflatten
from ..trace import Tensor, evaluate, trace, tree
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
    part. `f` returns a pytree of tensors; for a mean, divide the result by `steps`. With `numbered`, f also gets the
    number of the part, from 0: `f(part, number)`. One step is `f(xs)`, without a loop. Raises `ShapeError` if a tensor
    lacks the dim or its size is not a multiple of `steps`.
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

    def add_part(total: list[Any], part: list[Any]) -> tuple[list[Any], None]:
        return [add(a, b) for a, b in zip(total, evaluate(graph, [*captures, *part]), strict=True)], None

    total, _ = scan(add_part, [zeros_like(v.type) for v in graph.outs], parts, over=step)
    return tree.tree_unflatten(out, total)


def _parts(leaves: Sequence[Tensor], steps: int, over: DimLike) -> tuple[Dim, list[Tensor]]:
    """The dim of the parts, and the tensors with it."""
    if not leaves:
        raise ShapeError("md.accumulate needs a tensor to take parts of; xs has none")
    dim = find(over, leaves[0].dims)
    if steps < 1 or dim.size % steps:
        raise ShapeError(
            f"md.accumulate cannot cut {dim} into {steps} equal parts\n  give a number of steps that divides {dim.size}"
        )
    names = {d.name for x in leaves for d in x.dims}
    step = Dim(next(n for k in range(len(names) + 1) if (n := f"micro{k or ''}") not in names), steps)
    return step, [unflatten(x, find(dim, x.dims), [Dim(dim.name, dim.size // steps), step]) for x in leaves]
