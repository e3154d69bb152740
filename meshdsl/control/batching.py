"""Run a graph on tensors some of which have one more dim: each operation computes all places of the dim at once.

Dims match by name, so most operations need no rule: the same operation on operands with the extra dim is right, and
the dim passes through. An operation that lists the dims of its result, or that takes an operand without dims where
now there is one number per place, has a rule, `Op.vmap`. A value that has the extra dim has it first, followed by the
dims it had; a value that does not depend on such an operand is computed once, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dims import Dim, show
from ..errors import InternalError, ShapeError, at, caller
from ..ir import Call, Eqn, Graph, Type, Var, walk
from ..ops.reductions import broadcast, spread
from ..ops.reshape import transpose
from ..trace import Tensor, as_tensor, bind, flatten, location, trace, tree


def batched(
    graph: Graph, ins: Sequence[Tensor], new: Dim, place: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Tensor]:
    """The graph's results. Operands and results may have the extra dim `new`, which is then first.

    `place` is applied to every value, for example to say which of its dims a layout splits.
    """
    env: dict[Var, Tensor] = dict(zip(graph.ins, ins, strict=True))
    for eqn in graph.eqns:
        with location(eqn.where, eqn.backward or None):
            results = _apply(eqn, [env[v] for v in eqn.ins], new)
            env.update((v, place(_ordered(x, v, new))) for v, x in zip(eqn.outs, results, strict=True))
    return [env[v] for v in graph.outs]


def _apply(eqn: Eqn, xs: Sequence[Tensor], new: Dim) -> Sequence[Tensor]:
    op = eqn.operation
    if not any(new in x.dims for x in xs):
        return bind(op, *xs, **eqn.params)
    if op.vmap is not None:
        results = op.vmap(*xs, new=new, **eqn.params)
        return [results] if isinstance(results, Tensor) else results
    if isinstance(eqn.control, Call):
        graph = batched_graph(eqn.control.graph, [new in x.dims for x in xs], new)
        return bind(op, *xs, **{**eqn.params, "control": Call(graph)})
    return bind(op, *_joined(xs, new), **eqn.params)


def _joined(xs: Sequence[Tensor], new: Dim) -> Sequence[Tensor]:
    """The operands, so that one that has `new` has all dims; others are repeated along `new` only if none has."""
    dims = {d for x in xs for d in x.dims}
    if any(new in x.dims and len(x.dims) == len(dims) for x in xs):
        return xs
    return [spread([x], new)[0] if x.dims else x for x in xs]


def _ordered(x: Tensor, v: Var, new: Dim) -> Tensor:
    """A result with the dims of the original value in their order, after the dim `new` if it has it."""
    dims = (new, *v.dims) if new in x.dims else v.dims
    if set(x.dims) != set(dims) or x.dtype != v.dtype:
        raise InternalError(f"vectorised over {new}, {v.type} became {x.type}")
    return transpose(x, dims)


def batched_graph(graph: Graph, mapped: Sequence[bool], new: Dim, results: Sequence[bool] | None = None) -> Graph:
    """The graph whose inputs have the dim `new` first where `mapped`; so have the `results` that are named."""

    def run(*xs: Tensor) -> list[Tensor]:
        outs = batched(graph, xs, new)
        has_new = results or [False] * len(outs)
        return [broadcast(y, (new, *y.dims)) if on and new not in y.dims else y
                for y, on in zip(outs, has_new, strict=True)]  # fmt: skip

    types = [Type((new, *v.dims), v.dtype) if on else v.type for v, on in zip(graph.ins, mapped, strict=True)]
    traced, captures, _ = trace(run, types, [v.name for v in graph.ins])
    if captures:
        raise InternalError("a rule of vmap used a tensor from outside its operation")
    return traced


def batched_function(f: Callable[..., Any], new: Dim) -> Callable[..., Any]:
    """`f`, which sees the tensors among its arguments without the dim `new`, on all its places at once.

    Results that depend on an argument with `new` have it first. Raises `ShapeError` if f uses a dim of that name.
    """

    def run(*args: Any) -> Any:
        leaves, structure = flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        types = [Type(tuple(d for d in x.dims if d != new), x.dtype) for x in tensors]

        def flat(*xs: Tensor) -> Any:
            rest = iter(xs)
            full = [next(rest) if isinstance(x, Tensor) else x for x in leaves]
            return f(*tree.tree_unflatten(structure, full))

        graph, captures, out = trace(flat, types)
        _check_name(graph, new, len(captures))
        ins = [transpose(x, (new, *t.dims)) if new in x.dims else x for x, t in zip(tensors, types, strict=True)]
        return tree.tree_unflatten(out, batched(graph, [*captures, *ins], new))

    return run


def at_all_places(f: Callable[..., Any], new: Dim) -> Callable[..., Any]:
    """`batched_function` whose results all have the dim `new`, first."""

    def with_dim(y: Any) -> Tensor:
        return spread([as_tensor(y)], new)[0]

    return lambda *args: tree.tree_map(with_dim, batched_function(f, new)(*args))


def _check_name(graph: Graph, new: Dim, captures: int) -> None:
    inside = [(v, eqn.where) for eqn, _ in walk(graph) for v in eqn.outs]
    inside += [(v, caller()) for v in graph.ins[:captures]]
    clash = next(((v, where) for v, where in inside if any(d.name == new.name for d in v.dims)), None)
    if clash is not None:
        v, where = clash
        problem = ShapeError(
            f"md.vmap over {new.name!r}: inside the function, a tensor has a dim of that name, {show(v.dims)}\n"
            "  a name appears once in a shape, and the function maps over this one\n"
            f"  pass the tensor as an argument if it is to be mapped, or md.rename its dim {new.name!r}"
        )
        raise at(problem, where)
