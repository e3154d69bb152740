"""Reverse-mode differentiation of graphs, before a layout is applied: a gradient is a graph of ordinary operations.

Therefore collectives need no transpose rules, passes can read and move gradients, and a second derivative is the
gradient of the gradient's graph. A rule contains only the mathematics. This module reverses broadcasting: it sums a
cotangent over the dims that its operand lacks, and broadcasts it over the operand's dims that it lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError, TraceError, at, expect
from ..ir import Eqn, Graph, Var, read_by, sources_of
from ..ops.creation import zeros_like
from ..ops.dtypes import CAST, REDUCED_IN, kind
from ..ops.elementwise import add
from ..trace import Tensor, as_tensor, bind, location, trace, tree
from .carry import leaves_of
from .cotangents import Active, Weight, copies, cotangent_dtype, fit, zero_cotangent


def is_floating(x: Any) -> bool:
    """True for a tensor or value that has a gradient: of floats or complex numbers."""
    return kind(x.dtype) in "fc"


def floating_among(values: Sequence[Var], wanted: Sequence[Active]) -> list[int]:
    """The indices of the floating values that are wanted."""
    return [i for i, (v, on) in enumerate(zip(values, wanted, strict=True)) if on and is_floating(v)]


def pullback(
    graph: Graph,
    ins: Sequence[Tensor],
    active: Sequence[Active],
    substitute: Callable[[Var, Tensor], Tensor] = lambda v, x: x,
    read: Sequence[bool] | None = None,
) -> tuple[list[Tensor], Callable[..., Any]]:
    """Returns the graph's results, and a function from result cotangents (None for zero) to input cotangents.

    Operations go through `bind`: on concrete tensors they run immediately, inside a trace they add equations.
    Inputs that are not active get the cotangent None. `substitute(v, x)` may replace the computed value x of v by an
    equal value. `read` says which results may get a cotangent (default: all); nothing is saved for the others.
    """
    tape = _Tape(graph, active, ins, read)
    for eqn in graph.eqns:
        tape.run(eqn, substitute)
    return [tape.env[v] for v in graph.outs], tape.backward


class _Tape:
    """The forward values of a graph, and the equations that depend on active inputs and lead to a read result."""

    def __init__(self, graph: Graph, active: Sequence[Active], ins: Sequence[Tensor], read: Sequence[bool] | None):
        self.graph, self.active = graph, active
        self.env: dict[Var, Tensor] = dict(zip(graph.ins, ins, strict=True))
        self.moving: set[Var] = {graph.ins[i] for i in floating_among(graph.ins, active)}
        given = zip(graph.ins, active, strict=True)
        self.weights: dict[Var, Weight] = {v: on for v, on in given if isinstance(on, Weight) and v in self.moving}
        self.entries: list[tuple[Eqn, Any]] = []
        self.read = values_behind(graph, [True] * len(graph.outs) if read is None else read)

    def run(self, eqn: Eqn, substitute: Callable[[Var, Tensor], Tensor]) -> None:
        """Compute the results of one equation, and its residuals if it has an active input and a `fwd` rule."""
        op, xs = eqn.operation, [self.env[v] for v in eqn.ins]
        read = [v in self.read for v in eqn.outs]
        depends = True in read and not self.moving.isdisjoint(eqn.ins) and not op.stops_gradient
        residuals = None
        with location(eqn.where, eqn.backward or None):
            active = [self.weights.get(v, v in self.moving) for v in eqn.ins]
            if depends and op.fwd is not None:
                outs, residuals = op.fwd(*xs, active=active, read=read, **eqn.params)
            elif depends and op.plain is not None:
                outs, residuals = pullback(_plain(eqn), xs, active)
            else:
                outs = bind(op, *xs, **eqn.params)
        self.env.update((v, substitute(v, x)) for v, x in zip(eqn.outs, outs, strict=True))
        if depends:
            self.entries.append((eqn, residuals))
            self.moving.update(v for v in eqn.outs if is_floating(v))
            self._note_copy(eqn)

    def _note_copy(self, eqn: Eqn) -> None:
        """Keep the weight, if the result of an equation is a copy of one."""
        moving = [v for v in dict.fromkeys(eqn.ins) if v in self.moving]
        weights = [self.weights[v] for v in moving if v in self.weights]
        real = all(kind(v.dtype) == "f" for v in (*moving, *eqn.outs))
        if len(weights) < len(moving) or not real or not copies(eqn, moving):
            return
        dtype = max((each.dtype for each in (*weights, *eqn.outs)), key=lambda dtype: dtype.itemsize)
        self.weights[eqn.outs[0]] = weight = Weight(dtype, tuple(weights))
        if eqn.op is REDUCED_IN:
            weight.reduce_in(eqn.params["dtype"])

    def _cotangent_dtype(self, v: Var) -> np.dtype:
        return cotangent_dtype(v, self.weights.get(v, True))

    def backward(self, cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the cotangents of the inputs from those of the results; None for zero."""
        pending: dict[Var, Tensor] = {}
        self._add(pending, self.graph.outs, cts)
        for eqn, residuals in reversed(self.entries):
            if not any(v in pending for v in eqn.outs):
                continue
            with location(eqn.where, backward=True):
                try:
                    in_cts = self._apply(eqn, pending, residuals)
                except TraceError as error:
                    raise at(error, eqn.where) from None
                self._add(pending, eqn.ins, in_cts)
        return [pending.get(v) if on else None for v, on in zip(self.graph.ins, self.active, strict=True)]

    def _add(self, pending: dict[Var, Tensor], vars: Sequence[Var], cts: Sequence[Tensor | None]) -> None:
        for var, ct in zip(vars, cts, strict=True):
            if ct is not None and var in self.moving:
                ct = fit(ct, self.env[var], self._cotangent_dtype(var), var in self.weights)
                pending[var] = add(pending[var], ct) if var in pending else ct

    def _apply(self, eqn: Eqn, pending: dict[Var, Tensor], residuals: Any) -> Any:
        op, env = eqn.operation, self.env
        cts = [pending.pop(v, None) for v in eqn.outs]
        if op.fwd is not None and op.vjp is not None:
            return op.vjp(cts, residuals, **eqn.params)
        if op.plain is not None:
            return residuals(cts)
        if op.vjp is None:
            raise TraceError(
                f"{op.name} has no gradient\n"
                f"  it is applied to {env[eqn.ins[0]].type}, through which a gradient was asked for\n"
                "  wrap its operand in md.stop_gradient(x) if it should count as a constant"
            )
        if op in (CAST, REDUCED_IN) and eqn.outs[0] in self.weights:
            return cts  # `fit` casts it, and `Weight.reduced` the whole gradient
        outs = [env[v] for v in eqn.outs]
        to_dtypes = [self._cotangent_dtype(v) for v in eqn.ins]
        available = {**eqn.params, "out": outs[0], "outs": outs, "to_dtypes": to_dtypes}
        if len(outs) > 1:
            cts = [zeros_like(v.type) if ct is None else ct for v, ct in zip(eqn.outs, cts, strict=True)]
        else:
            (cts,) = cts
        return op.vjp(cts, *(env[v] for v in eqn.ins), **op.keywords(op.vjp, available))


def _plain(eqn: Eqn) -> Graph:
    """An operation written with others."""
    plain, params = eqn.operation.plain, eqn.params
    assert plain is not None
    return trace(lambda *xs: list(plain(*xs, **params)), [v.type for v in eqn.ins])[0]


def values_behind(graph: Graph, read: Sequence[bool]) -> set[Var]:
    """The values from which a graph computes the results that are `read`, and these results."""
    outs = [v for v, on in zip(graph.outs, read, strict=True) if on]
    return read_by(sources_of(graph.eqns, outs), outs)


def vjp_of_graph(graph: Graph, active: Sequence[Active], read: Sequence[bool]) -> tuple[Graph, set[Var], list[int]]:
    """Returns the graph and its pullback as one graph, the forward values, and the indices of inputs with a cotangent.

    The inputs of the joint graph are the graph's inputs, then a cotangent for each floating result that is `read`. Its
    results are the graph's results, then a cotangent for each active floating input (possibly zeros). The forward
    values are those that the forward half computes.
    """
    n, floating, wrt = len(graph.ins), floating_among(graph.outs, read), floating_among(graph.ins, active)
    cts = [graph.outs[i].type for i in floating]
    forward: set[Var] = set()

    def joint(*args: Tensor) -> list[Tensor]:
        outs, backward = pullback(graph, args[:n], active, read=read)
        forward.update(v for eqn in args[0]._trace.eqns for v in eqn.outs)
        out_cts = dict(zip(floating, args[n:], strict=True))
        with location(None, backward=True):
            ins = backward([out_cts.get(i) for i in range(len(graph.outs))])
            zeros = (zero_cotangent(graph.ins[i], active[i]) if ins[i] is None else ins[i] for i in wrt)
            return [*outs, *zeros]

    names = [v.name for v in graph.ins] + [""] * len(cts)
    joined, captures, _ = trace(joint, [*(v.type for v in graph.ins), *cts], names)
    if captures:
        raise TraceError("a gradient rule used a tensor from outside its operation")
    return joined, forward, wrt


def _flat_args(args: Sequence[Any], argnums: Sequence[int]) -> tuple[list[Tensor], Any, list[Weight | None]]:
    tensors, structure = leaves_of(tuple(args))
    active = [i in argnums for i, arg in enumerate(args) for _ in tree.tree_leaves(arg)]
    return tensors, structure, [Weight(x.dtype) if on else None for x, on in zip(tensors, active, strict=True)]


def _positions(argnums: Sequence[int], args: Sequence[Any]) -> list[int]:
    """`argnums` with negative numbers counted from the end; raises `ShapeError` if the call has fewer arguments."""
    positions = [i + len(args) if i < 0 else i for i in argnums]
    if any(not 0 <= i < len(args) for i in positions):
        raise ShapeError(f"argnums {argnums} of a call with {len(args)} arguments")
    return positions


def _check_floating(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if not is_floating(x):
            raise ShapeError(
                f"a gradient with respect to {x.type} was asked for, and {x.dtype.name} has none\n"
                "  pass what is not floating through another argument, or md.cast it"
            )


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns f's value and its gradient with respect to one or several arguments.

    >>> import meshdsl as md
    >>> md.value_and_grad(lambda x: md.sum(x * x))(md.tensor([3.0], "a"))
    (tensor(float32[], 9.), tensor(float32[a=1], [6.]))

    `argnums` numbers the arguments from 0; for several, the gradient is a tuple.
    f must return a floating tensor without dims; with `has_aux`, a pair of such a tensor and any pytree. Raises
    `ShapeError` if f returns something else, or if an argument to differentiate is not floating.
    """
    expect("f", f, Callable)
    single = isinstance(argnums, int)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)  # keeps the argument names in programs and layouts
    def with_grad(*args: Any) -> Any:
        positions = _positions(numbers, args)
        tensors, structure, weights = _flat_args(args, positions)
        _check_floating([x for x, weight in zip(tensors, weights, strict=True) if weight])

        def flat(*xs: Tensor) -> Any:
            return f(*tree.tree_unflatten(structure, xs))

        graph, captures, out_structure = trace(flat, [x.type for x in tensors])
        value = _loss_position(graph, out_structure, has_aux)
        active = [False] * len(captures) + [weight or False for weight in weights]
        is_loss = [i == value for i in range(len(graph.outs))]
        outs, backward = pullback(graph, [*captures, *tensors], active, read=is_loss)
        with location(None, backward=True):
            cts = backward([as_tensor(1, x.dtype) if on else None for x, on in zip(outs, is_loss, strict=True)])
            leaves = zip(tensors, cts[len(captures) :], weights, strict=True)
            grads = [weight and (zeros_like(x) if ct is None else weight.reduced(ct)) for x, ct, weight in leaves]
        per_argument = tree.tree_unflatten(structure, grads)
        result = per_argument[positions[0]] if single else tuple(per_argument[i] for i in positions)
        return tree.tree_unflatten(out_structure, outs), result

    return with_grad


def _loss_position(graph: Graph, structure: Any, has_aux: bool) -> int:
    indices = tree.tree_unflatten(structure, range(len(graph.outs)))
    if has_aux and not (isinstance(indices, tuple) and len(indices) == 2):
        raise ShapeError("with has_aux=True the function returns a pair (loss, aux)")
    loss = indices[0] if has_aux else indices
    if not isinstance(loss, int) or graph.outs[loss].dims or not is_floating(graph.outs[loss]):
        returned = repr(graph.outs[loss].type) if isinstance(loss, int) else f"a {type(loss).__name__}"
        way_out = "reduce it with md.mean or md.sum"
        if not isinstance(loss, int) and not has_aux:
            way_out = "if it is (loss, aux): md.value_and_grad(f, has_aux=True)"
        raise ShapeError(
            f"a gradient is taken of one floating tensor without dims; the function returned {returned}\n  {way_out}"
        )
    return loss


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """A function that returns only the gradient of f; see `value_and_grad` for `argnums`.

    >>> import meshdsl as md
    >>> md.grad(md.grad(lambda x: x * x * x))(md.tensor(2.0))
    tensor(float32[], 12.)
    """
    with_value = value_and_grad(f, argnums)

    @functools.wraps(f)
    def gradient(*args: Any) -> Any:
        return with_value(*args)[1]

    return gradient
