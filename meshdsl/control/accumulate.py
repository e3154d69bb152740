"""Sums over parts of a batch, one part at a time: less memory, and nothing more is sent than for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autodiff import zeros
from ..dims import Dim, DimLike, find
from ..errors import ShapeError, at, caller, located
from ..ops.elementwise import add
from ..ops.reshape import unflatten
from ..trace import evaluate, trace, tree
from .carry import leaves_of
from .loops import scan

__all__ = ["accumulate"]


def accumulate(f: Callable[[Any], Any], xs: Any, steps: int, over: DimLike = "batch") -> Any:
    """The sum of `f(part)` over `steps` equal parts of `xs` along a dim, computed one after the other.

    >>> import meshdsl as md
    >>> def loss(w, x):
    ...     return md.mean(md.square(md.einsum(x, w, out="batch")))
    >>> w, x = md.tensor([1.0, 2.0], "io"), md.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], "batch io")
    >>> value, grad = md.accumulate(lambda part: md.value_and_grad(loss)(w, part), x, steps=2)
    >>> value / 2, grad / 2
    (tensor(float32[], 7.5), tensor(float32[io=2], [6.  4.5]))

    `xs` is a pytree of tensors that all have the dim; a part has it too, with `size / steps` elements. Part i has every
    `steps`-th element from the i-th on. So each device cuts its own block of a split dim into parts, where the size of
    a part divides by its devices, and nothing is sent; parts of consecutive elements would gather the batch. Gradients
    are summed on each device and reduced once, after the last part. `f` returns a pytree of tensors; for a mean divide
    the result by `steps`. Raises `ShapeError` where a tensor lacks the dim, or its size is no multiple of `steps`.
    """
    leaves, structure = leaves_of(xs)

    def split() -> tuple[Dim, list[Any]]:
        if not leaves:
            raise ShapeError("md.accumulate needs a tensor to take parts of; xs has none")
        dim = find(over, leaves[0].dims)
        if steps < 1 or dim.size % steps:
            raise ShapeError(
                f"md.accumulate cannot cut {dim} into {steps} equal parts\n"
                f"  give a number of steps that divides {dim.size}"
            )
        names = {d.name for x in leaves for d in x.dims}
        step = Dim(next(n for k in range(len(names) + 1) if (n := f"micro{k or ''}") not in names), steps)
        return step, [unflatten(x, find(dim, x.dims), [Dim(dim.name, dim.size // steps), step]) for x in leaves]

    step, parts = located(split)
    types = [type(x.type)(tuple(d for d in x.dims if d != step), x.dtype) for x in parts]
    graph, captures, out = trace(lambda *part: f(tree.tree_unflatten(structure, part)), types)
    if any(v.dtype.kind == "b" for v in graph.outs):
        raise at(ShapeError("md.accumulate adds up what its function returns, and booleans have no sum"), caller())

    def one(total: list[Any], part: list[Any]) -> tuple[list[Any], None]:
        return [add(a, b) for a, b in zip(total, evaluate(graph, [*captures, *part]), strict=True)], None

    total, _ = scan(one, [zeros(v.type) for v in graph.outs], parts, over=step)
    return tree.tree_unflatten(out, total)
