"""`md.custom_vjp`: a function with a gradient of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..dims import Dim
from ..errors import ShapeError, TraceError
from ..ir import Call, Op, Var
from ..ops.creation import zeros_like
from ..ops.reductions import broadcast
from ..trace import Tensor, as_tensor, bind, trace, tree
from .autodiff import is_floating
from .batching import batched_function, batched_graph
from .carry import leaves_of


def custom_vjp(f: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with a custom gradient: `fwd(*xs) -> (f's result, residuals)`, `bwd(residuals, ct) -> cts of xs`.

    >>> import meshdsl as md
    >>> rounded = md.custom_vjp(md.round, lambda x: (md.round(x), None), lambda _, ct: (ct,))  # straight through
    >>> md.value_and_grad(lambda x: 3 * rounded(x))(md.tensor(1.7))
    (tensor(float32[], 6.), tensor(float32[], 3.))

    Arguments, results and residuals are pytrees of tensors. `ct` has the structure of the result; `bwd` returns a
    tuple with one entry per argument (None for no gradient, a number for the same everywhere). Raises `ShapeError` for
    cotangents that do not fit. `md.check_gradients` finds a rule that is wrong, for example one that forgets `ct`.
    """

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        xs, structure = leaves_of(tuple(args))

        def flat(*xs: Tensor) -> Any:
            return f(*tree.tree_unflatten(structure, xs))

        graph, captures, out = trace(flat, [x.type for x in xs])
        n_captures = len(captures)

        def forward(*ins: Tensor, active: Any, read: Any, control: Call) -> Any:
            if any(active[:n_captures]):
                raise TraceError(
                    "the function of a md.custom_vjp uses a tensor from outside that a gradient was asked for\n"
                    "  its bwd says nothing about that tensor; pass it as an argument, or md.stop_gradient of it"
                )
            result, residuals = _pair(fwd(*tree.tree_unflatten(structure, ins[n_captures:])))
            return tree.tree_leaves(result), residuals

        def backward(cts: Sequence[Tensor | None], residuals: Any, control: Call) -> list[Tensor | None]:
            full = [zeros_like(v.type) if ct is None else ct for ct, v in zip(cts, control.graph.outs, strict=True)]
            arg_cts = bwd(residuals, tree.tree_unflatten(out, full))
            flat_cts = _cotangents(arg_cts, args, control.graph.ins[n_captures:])
            return [None] * n_captures + flat_cts

        op = _call(forward, backward)
        return tree.tree_unflatten(out, bind(op, *captures, *xs, control=Call(graph)))

    return wrapped


def _call(forward: Callable[..., Any], backward: Callable[..., Any]) -> Op:
    """The operation that runs a graph and has this gradient."""

    def vectorised(*ins: Tensor, new: Dim, control: Call) -> Any:
        def fwd(*xs: Tensor, active: Any, read: Any, control: Call) -> Any:
            return batched_function(lambda *xs: forward(*xs, active=active, read=read, control=original), new)(*xs)

        def bwd(cts: Any, residuals: Any, control: Call) -> Any:
            return batched_function(lambda cts, residuals: backward(cts, residuals, original), new)(cts, residuals)

        original = control
        graph = batched_graph(control.graph, [new in x.dims for x in ins], new)
        return bind(_call(fwd, bwd), *ins, control=Call(graph))

    return Op(
        "call",
        type=lambda *_, control: tuple(v.type for v in control.graph.outs),
        kernel=lambda run, *ins, control: run(control.graph, ins),
        fwd=forward,
        vjp=backward,
        vmap=vectorised,
    )


def _pair(returned: Any) -> tuple[Any, Any]:
    """The result and the residuals that `fwd` returned."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        problem = f"fwd of a md.custom_vjp returns a pair (result, residuals); got {type(returned).__name__}"
        raise ShapeError(f"{problem}\n  where bwd needs nothing: return result, None")
    return returned[0], returned[1]


def _cotangents(returned: Any, args: Sequence[Any], ins: Sequence[Var]) -> list[Tensor | None]:
    """The cotangents that `bwd` returned, one for each leaf of the arguments."""
    if not isinstance(returned, tuple | list) or len(returned) != len(args):
        count = len(returned) if isinstance(returned, tuple | list) else "no tuple of"
        raise ShapeError(f"bwd of a md.custom_vjp returned {count} cotangents for {len(args)} arguments")
    cts: list[Any] = []
    for arg, ct in zip(args, returned, strict=True):
        n = len(tree.tree_leaves(arg))
        same = ct is None or isinstance(ct, int | float | complex | np.generic)
        leaves = [ct] * n if same else tree.tree_leaves(ct, is_leaf=lambda x: x is None)
        if len(leaves) != n:
            raise ShapeError(f"bwd of a md.custom_vjp returned {len(leaves)} cotangents for an argument of {n} tensors")
        cts += leaves
    return [None if ct is None or not is_floating(v) else _cotangent(ct, v) for v, ct in zip(ins, cts, strict=True)]


def _cotangent(ct: Any, v: Var) -> Tensor:
    """The cotangent of one argument; a number is that of every element."""
    if not isinstance(ct, Tensor):
        ct = as_tensor(ct, v.dtype)
        ct = ct if ct.dims else broadcast(ct, v.dims)
    if set(ct.dims) != set(v.dims):
        raise ShapeError(f"bwd of a md.custom_vjp returned the cotangent {ct.type} for {v.type}; dims must agree")
    return ct
