"""`md.vjp` and `md.jvp`: products of a function's derivative with vectors, from the left and from the right.

There are no forward rules. The product from the left is linear in its vector, so its own reverse derivative is the
product from the right (Radul et al., "You only linearize once", 2023, run the other way). The middle pass depends on
no result, and dead code elimination removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ShapeError
from ..ir import Graph
from ..ops.creation import zeros_like
from ..ops.reshape import transpose
from ..trace import Tensor, as_tensor, evaluate, location, trace, tree
from .autodiff import is_floating, pullback
from .carry import leaves_of


def vjp(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """f's result, and the function from a cotangent of the result to the cotangents of the arguments.

    >>> import meshdsl as md
    >>> y, pull = md.vjp(lambda x, w: x * w, md.tensor([1.0, 2.0], "a"), md.tensor([3.0, 4.0], "a"))
    >>> pull(md.tensor([1.0, 10.0], "a"))
    (tensor(float32[a=2], [ 3. 40.]), tensor(float32[a=2], [ 1. 20.]))

    The cotangent has the structure and dims of the result (entries for integers are ignored); what it returns has the
    structure of the arguments, with None for integers. `md.vmap(pull, over="row")` multiplies by many vectors. Raises
    `ShapeError` for a cotangent of another structure or other dims.
    """
    xs, structure = leaves_of(tuple(primals))
    graph, captures, out = trace(lambda *xs: f(*tree.tree_unflatten(structure, xs)), [x.type for x in xs])
    active = [False] * len(captures) + [is_floating(x) for x in xs]
    ys, backward = pullback(graph, [*captures, *xs], active)

    def pull(ct: Any) -> tuple[Any, ...]:
        cts = _like(ct, ys, out, "cotangent", "md.vjp")
        with location(None, backward=True):
            grads = backward([ct if is_floating(y) else None for ct, y in zip(cts, ys, strict=True)])[len(captures) :]
            cotangents = [zeros_like(x) if g is None and is_floating(x) else g for x, g in zip(xs, grads, strict=True)]
        return tree.tree_unflatten(structure, cotangents)

    return tree.tree_unflatten(out, ys), pull


def _like(values: Any, types: Sequence[Tensor], structure: Any, what: str, name: str) -> list[Tensor]:
    """The tensors of a tangent or cotangent, in the dim order of the values; raises `ShapeError` if they do not fit."""
    leaves, given_structure = tree.tree_flatten(values, is_leaf=lambda x: x is None)
    if given_structure != structure:
        problem = f"a {what} of {name} has the structure {structure}, got {given_structure}"
        raise ShapeError(problem)
    tensors: list[Tensor] = []
    for x, like in zip(leaves, types, strict=True):
        if x is None or not is_floating(like):
            tensors.append(zeros_like(like))
            continue
        x = x if isinstance(x, Tensor) else as_tensor(x, like.dtype)
        if set(x.dims) != set(like.dims) or x.dtype != like.dtype:
            raise ShapeError(f"a {what} of {name} has the type of its value, {like.type}; got {x.type}")
        tensors.append(transpose(x, like.dims))
    return tensors


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """f's result, and its derivative at `primals` in the direction `tangents`.

    >>> import meshdsl as md
    >>> md.jvp(lambda x: x * x * x, (md.tensor(2.0),), (md.tensor(1.0),))
    (tensor(float32[], 8.), tensor(float32[], 12.))

    `primals` and `tangents` are tuples of equal structure and dims; tangents of integers are ignored and may be None.
    The tangent of an integer result is zero. `md.jvp(md.grad(loss), (x,), (v,))` is a product with the Hessian. Raises
    `ShapeError` for a tangent of another structure or other dims, and `TraceError` for an operation without a gradient.
    """
    xs, structure = leaves_of(tuple(primals))
    vs = _like(tuple(tangents), xs, structure, "tangent", "md.jvp")
    graph, captures, out = trace(lambda *xs: f(*tree.tree_unflatten(structure, xs)), [x.type for x in xs])
    n = len(captures)
    active = [False] * n + [is_floating(x) for x in xs]

    def pushed(*ins: Tensor) -> list[Tensor]:
        values, directions = ins[: n + len(xs)], ins[n + len(xs) :]
        ys, backward = pullback(graph, values, active)
        floating = [is_floating(y) for y in ys]
        rows = _transposed(graph, backward, n, floating, active[n:])
        moved = iter(rows([v for v, on in zip(directions, active[n:], strict=True) if on]))
        return [*ys, *(next(moved) if on else zeros_like(y) for y, on in zip(ys, floating, strict=True))]

    joined, more, _ = trace(pushed, [x.type for x in (*captures, *xs, *vs)])
    results = evaluate(joined, [*more, *captures, *xs, *vs])
    ys, moved = results[: len(graph.outs)], results[len(graph.outs) :]
    return tree.tree_unflatten(out, ys), tree.tree_unflatten(out, moved)


def _transposed(
    graph: Graph, backward: Callable[..., Any], captures: int, floating: Sequence[bool], active: Sequence[bool]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The transpose of a pullback: from tangents of the active inputs to those of the floating results."""
    types = [v.type for v, on in zip(graph.outs, floating, strict=True) if on]

    def pull(*cts: Tensor) -> list[Tensor]:
        rest = iter(cts)
        grads = backward([next(rest) if on else None for on in floating])[captures:]
        ins = graph.ins[captures:]
        return [zeros_like(v.type) if g is None else g for v, g, on in zip(ins, grads, active, strict=True) if on]

    linear, held, _ = trace(pull, types)
    at_zero = [*held, *(zeros_like(t) for t in types)]
    _, back = pullback(linear, at_zero, [False] * len(held) + [True] * len(types))

    def push(tangents: Sequence[Tensor]) -> list[Tensor]:
        cotangents = back(list(tangents))[len(held) :]
        return [zeros_like(t) if x is None else x for t, x in zip(types, cotangents, strict=True)]

    return push
