"""`while_loop`, `cond` and `switch`. All devices compute the same predicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..dims import Dim, fresh_dim
from ..errors import ShapeError, TraceError
from ..ir import Cond, Graph, Op, Type, While, silent
from ..trace import Tensor, as_tensor, bind, trace, tree
from .autodiff import pullback
from .carry import arrays_of, carried, leaves_of, tensors_of, with_captures_of_both
from .cotangents import zero_cotangent
from .loops import MOST_TRIPS, scan
from .vmapped import cond_rule, while_rule


def _check_predicate(name: str, p: Type) -> None:
    if p.dims or p.dtype.kind != "b":
        raise ShapeError(
            f"the predicate of {name} is one boolean without dims, got {p}; compare, or reduce with md.any or md.all"
        )


def _while_type(*ins: Type, control: While) -> tuple[Type, ...]:
    _check_predicate("md.while_loop", control.test.outs[0].type)
    return tuple(v.type for v in control.body.outs)


def _while_eager(run: Any, *ins: Tensor, control: While) -> Sequence[Tensor]:
    consts, carry = control.inputs(ins)
    while True:
        running = run(control.test, [*consts, *carry])[0]
        if isinstance(running.stored, Tracer):
            return _while_in_jax(run, control, consts, carry)
        if not running:
            return carry
        carry = run(control.body, [*consts, *carry])


def _while_in_jax(run: Any, control: While, consts: Sequence[Tensor], carry: Sequence[Tensor]) -> list[Tensor]:
    """The loop inside a JAX transformation that traces its predicate."""
    kinds = [x.type for x in carry]
    results = jax.lax.while_loop(
        lambda arrays: run(control.test, [*consts, *tensors_of(arrays, kinds)])[0].array,
        lambda arrays: arrays_of(run(control.body, [*consts, *tensors_of(arrays, kinds)])),
        arrays_of(carry),
    )
    return tensors_of(results, kinds)


def _while_vjp(*_: Any, **__: Any) -> Any:
    raise TraceError(
        "md.while_loop has no gradient: its number of steps is unknown, so its residuals cannot be stored\n"
        "  give a bound, max_trips=, or use md.stop_gradient of the operands"
    )


_WHILE = Op(
    "while_loop",
    type=_while_type,
    kernel=_while_eager,
    vjp=_while_vjp,
    vmap=lambda *ins, new, control: while_rule(_WHILE, *ins, new=new, control=control),
)


def while_loop(
    cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, *, max_trips: int | None = None
) -> Any:
    """Run `carry = body(carry)` while `cond(carry)` is true; return the last carry.

    >>> import meshdsl as md
    >>> md.while_loop(lambda x: md.sum(x) < 100, lambda x: 2 * x, md.tensor([1.0, 2.0], "a"))
    tensor(float32[a=2], [ 64. 128.])

    The carry is a pytree; `cond` returns one boolean without dims. All devices compute the same predicate, so the
    predicate of a sharded carry needs a reduction. With `max_trips`, the loop ends after so many trips at the latest,
    and has a gradient, which stores the carry of each trip and computes the rest again; trips after the end cost
    little, because they run neither `body` nor its gradient.

    >>> def halved(x):
    ...     return md.while_loop(lambda x: x > 1, lambda x: x * x / 4, x, max_trips=8)
    >>> md.grad(halved)(md.tensor(3.0))
    tensor(float32[], 1.0679)

    Raises `ShapeError` if the carry changes structure, dims or dtype, and `TraceError` for a gradient through a loop
    without a bound.
    """
    if max_trips is not None:
        return _bounded(cond, body, init, max_trips)
    first, structure = leaves_of(init)
    specs = [x.type for x in first]

    def step(*carry: Tensor) -> Any:
        return carried(body(tree.tree_unflatten(structure, carry)), first, structure, "md.while_loop")

    test, test_captures, out = trace(lambda *carry: cond(tree.tree_unflatten(structure, carry)), specs)
    if len(test.outs) != 1:
        raise ShapeError(f"the predicate of md.while_loop is one boolean, got {out}")
    body_graph, body_captures, _ = trace(step, specs)
    test, body_graph = with_captures_of_both(test, test_captures, body_graph, body_captures)
    captures = [*test_captures, *body_captures]
    results = bind(_WHILE, *captures, *first, control=While(test, body_graph, len(captures)))
    return tree.tree_unflatten(structure, results)


def _bounded(test: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, max_trips: int) -> Any:
    """A scan over the trips that can be; the trips after the end pass the carry on."""
    if isinstance(max_trips, bool) or not 0 <= max_trips <= MOST_TRIPS:
        raise ShapeError(f"max_trips of md.while_loop is a number of trips, at most {MOST_TRIPS:,}; got {max_trips!r}")
    first, structure = leaves_of(init)

    def step(carry: list[Tensor], _: None) -> Any:
        def trip(*xs: Tensor) -> list[Tensor]:
            return carried(body(tree.tree_unflatten(structure, xs)), first, structure, "md.while_loop")

        running = test(tree.tree_unflatten(structure, carry))
        return cond(running, trip, lambda *xs: list(xs), *carry), None

    trips = fresh_dim(Dim("trip", max_trips), *(x.dims for x in first))
    return tree.tree_unflatten(structure, scan(step, first, None, over=trips)[0])


def _cond_type(p: Type, *ins: Type, control: Cond) -> tuple[Type, ...]:
    _check_predicate("md.cond", p)
    return tuple(v.type for v in control.yes.outs)


def _cond_vjp(cts: Sequence[Tensor | None], residuals: Any, *, control: Cond) -> list[Tensor | None]:
    (p, *ins), (_, *active) = residuals
    read = [ct is not None for ct in cts]
    out_cts = [ct for ct in cts if ct is not None]
    wrt = [i for i, on in enumerate(active) if on and ins[i].dtype.kind in "fVc"]

    def branch(graph: Graph) -> Callable[..., Any]:
        def run(*args: Tensor) -> list[Tensor]:
            given = iter(args[len(ins) :])
            _, backward = pullback(silent(graph), args[: len(ins)], active, read=read)
            in_cts = backward([next(given) if on else None for on in read])
            return [zero_cotangent(ins[i], active[i]) if in_cts[i] is None else in_cts[i] for i in wrt]

        return run

    in_cts = cond(p, branch(control.yes), branch(control.no), *ins, *out_cts, frequency=control.frequency)
    by_input = dict(zip(wrt, in_cts, strict=True))
    return [None, *(by_input.get(i) for i in range(len(ins)))]


def _cond_eager(run: Any, p: Tensor, *ins: Tensor, control: Cond) -> Sequence[Tensor]:
    if not isinstance(p.stored, Tracer):
        return run(control.yes if p else control.no, ins)
    yes, no = (lambda graph=graph: arrays_of(run(graph, ins)) for graph in (control.yes, control.no))
    return tensors_of(jax.lax.cond(p.array, yes, no), [v.type for v in control.yes.outs])


_COND = Op(
    "cond",
    type=_cond_type,
    kernel=_cond_eager,
    fwd=lambda *ins, active, read, control: (bind(_COND, *ins, control=control), (ins, active)),
    vjp=_cond_vjp,
    vmap=lambda p, *ins, new, control: cond_rule(_COND, p, *ins, new=new, control=control),
)


def cond(p: Any, f: Callable[..., Any], g: Callable[..., Any], *xs: Any, frequency: float | None = None) -> Any:
    """`f(*xs)` if the predicate is true, else `g(*xs)`; only the selected branch runs.

    >>> import meshdsl as md
    >>> md.cond(md.tensor(True), lambda x: x + 1, lambda x: x - 1, md.tensor(1.0))
    tensor(float32[], 2.)

    `frequency` is the fraction of runs in which the predicate is true. It changes no result: costs count each branch as
    often as it runs, and a shard that only rare branches read whole is gathered inside them (`docs/weight_update.md`).
    If the predicate is `i % n == k` for an integer tensor i and Python integers, `frequency` defaults to 1 / n.

    Raises `ShapeError` if the branches return different structures, dims or dtypes, and for a frequency outside 0 to 1.
    """
    if frequency is not None and not 0 <= frequency <= 1:
        raise ShapeError(f"the frequency of md.cond is a fraction of runs from 0 to 1, got {frequency!r}")
    ins, structure = leaves_of(tuple(xs))
    traced = [trace(lambda *a, b=b: b(*tree.tree_unflatten(structure, a)), [x.type for x in ins]) for b in (f, g)]
    (yes, held_yes, out), (no, held_no, out_no) = traced
    kinds = [[v.type for v in graph.outs] for graph in (yes, no)]
    if out != out_no or kinds[0] != kinds[1]:
        raise ShapeError(
            f"the branches of md.cond differ: {kinds[0]} and {kinds[1]}\n"
            "  give both the same structure, dims, order and dtype, with md.broadcast, md.transpose or md.cast"
        )
    yes, no = with_captures_of_both(yes, held_yes, no, held_no)
    control = Cond(yes, no, frequency)
    return tree.tree_unflatten(out, bind(_COND, as_tensor(p), *held_yes, *held_no, *ins, control=control))


def switch(i: Any, fs: Sequence[Callable[..., Any]], *xs: Any) -> Any:
    """`fs[i](*xs)` for an integer tensor i without dims, clipped to the number of functions; only that function runs.

    >>> import meshdsl as md
    >>> md.switch(md.tensor(1), [lambda x: x, lambda x: -x, lambda x: 2 * x], md.tensor(3.0))
    tensor(float32[], -3.)

    It is a tree of `md.cond`, so it compares i with a logarithmic number of constants. Raises `ShapeError` without
    functions, for an i that is not one integer, and if the functions return different structures, dims or dtypes.
    """
    i = as_tensor(i)
    if not fs:
        raise ShapeError("md.switch needs at least one function")
    if i.dims or i.dtype.kind not in "iu":
        raise ShapeError(f"md.switch selects by one integer without dims, got {i.type}")

    def among(first: int, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        if len(functions) == 1:
            return functions[0]
        half = len(functions) // 2
        if first + half > np.iinfo(i.dtype).max:  # i cannot be so large
            return among(first, functions[:half])
        low, high = among(first, functions[:half]), among(first + half, functions[half:])
        return lambda *xs: cond(i < first + half, low, high, *xs)

    return among(0, list(fs))(*xs)
