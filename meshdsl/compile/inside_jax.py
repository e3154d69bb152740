"""A compiled function inside JAX: a plain function of `jax.Array`s, with a gradient, for `jax.jit` and `jax.grad`.

The gradient is a program of its own: the pullback of the traced function, compiled for the same mesh and layout. So no
collective needs a transpose rule of JAX.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's signatures are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from ..errors import TraceError
from ..ir import Graph, Var
from ..ops.creation import zeros_like
from ..trace import Tensor
from ..transforms.autodiff import pullback
from .signature import Stages

__all__ = ["array_function", "traced_by_jax"]


def traced_by_jax(leaves: Sequence[Any]) -> bool:
    """True if an argument is an array, or a tensor of one, that a transformation of JAX traces."""
    return any(isinstance(x._array if type(x) is Tensor else x, Tracer) for x in leaves)


def array_function(stages: Stages, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """The program of one signature as a function of arrays, one for each leaf; it returns a list of arrays.

    `compiled` compiles a function of tensors for the same mesh and layout; it is called when a gradient is asked for.
    """
    graph = stages.graph
    run = _unbatched(lambda *arrays: _run(stages, arrays))

    def forward(*arrays: Any) -> Any:
        return run(*arrays), arrays

    pulled: list[Callable[..., Any]] = []

    def backward(arrays: Sequence[Any], cts: Sequence[Any]) -> tuple[Any, ...]:
        if not pulled:
            pulled.append(compiled(_pullback(graph)))
        floats = [i for i, v in enumerate(graph.outs) if _floating(v)]
        xs = [Tensor(v.shape, v.dtype, array=x) for v, x in zip(graph.ins, arrays, strict=True)]
        given = [Tensor(graph.outs[i].shape, graph.outs[i].dtype, array=cts[i]) for i in floats]
        found = iter(pulled[0](xs, given))
        return tuple(
            next(found).array if _floating(v) else np.zeros(np.shape(x), jax.dtypes.float0)
            for v, x in zip(graph.ins, arrays, strict=True)
        )

    differentiable = jax.custom_vjp(run)
    differentiable.defvjp(forward, backward)
    return differentiable


def _floating(v: Var) -> bool:
    return bool(jnp.issubdtype(v.dtype, np.inexact))


def _pullback(graph: Graph) -> Callable[..., Any]:
    """The function of arguments and cotangents that returns the cotangents of floating arguments."""

    def pulled(xs: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
        given = iter(cts)
        _, backward = pullback(graph, xs, [True] * len(xs))
        found = backward([next(given) if _floating(v) else None for v in graph.outs])
        return [
            zeros_like(x) if ct is None else ct for x, v, ct in zip(xs, graph.ins, found, strict=True) if _floating(v)
        ]

    return pulled


def _run(stages: Stages, arrays: Sequence[Any]) -> list[Any]:
    """Run the program on arrays without padding; returns arrays without padding."""
    given = []
    for x, (sizes, sharding), v in zip(arrays, stages.expected, stages.graph.ins, strict=True):
        x = jnp.asarray(x, v.dtype)
        pads = [(0, size - n) for size, n in zip(sizes, x.shape, strict=True)]
        x = jnp.pad(x, pads) if any(high for _, high in pads) else x
        given.append(x if isinstance(x, Tracer) else jax.device_put(x, sharding))
    results = stages.executable(*given)
    return [
        y if y.shape == tuple(d.size for d in v.shape) else y[tuple(slice(d.size) for d in v.shape)]
        for v, y in zip(stages.graph.outs, results, strict=True)
    ]


def _unbatched(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with an error of ours under `jax.vmap`."""
    guarded = custom_vmap(run)

    @guarded.def_vmap
    def refuse(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise TraceError(
            f"jax.vmap over {axis_size} places of a compiled function: its program has only named dims\n"
            "  give the tensors one more dim, for example 'member', and call the function on them: operations map "
            "over a dim that they do not name, and a layout can shard it"
        )

    return guarded
