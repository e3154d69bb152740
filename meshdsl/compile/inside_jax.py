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

__all__ = ["array_function", "run", "traced_by_jax"]


def traced_by_jax(leaves: Sequence[Any]) -> bool:
    """True if an argument is an array, or a tensor of one, that a transformation of JAX traces."""
    return any(isinstance(x._array if type(x) is Tensor else x, Tracer) for x in leaves)


def array_function(stages: Stages, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """The program of one signature as a function of arrays, one for each leaf; it returns a list of arrays.

    `compiled` compiles a function of tensors for the same mesh and layout; it is called when a gradient is asked for.
    """
    graph = stages.graph
    unbatched = _unbatched(lambda *arrays: run(stages, arrays))

    def forward(*arrays: Any) -> Any:
        return unbatched(*arrays), arrays

    pulled: list[Callable[..., Any]] = []

    def backward(arrays: Sequence[Any], cts: Sequence[Any]) -> tuple[Any, ...]:
        if not pulled:
            pulled.append(compiled(_pullback(graph)))
        floats = [i for i, v in enumerate(graph.outs) if _floating(v)]
        xs = [Tensor(v.shape, v.dtype, array=x) for v, x in zip(graph.ins, arrays, strict=True)]
        float_cts = [Tensor(graph.outs[i].shape, graph.outs[i].dtype, array=cts[i]) for i in floats]
        gradients = iter(pulled[0](xs, float_cts))
        return tuple(
            next(gradients).array if _floating(v) else np.zeros(np.shape(x), jax.dtypes.float0)
            for v, x in zip(graph.ins, arrays, strict=True)
        )

    differentiable = jax.custom_vjp(unbatched)
    differentiable.defvjp(forward, backward)
    return differentiable


def _floating(v: Var) -> bool:
    return bool(jnp.issubdtype(v.dtype, np.inexact))


def _pullback(graph: Graph) -> Callable[..., Any]:
    """The function of arguments and cotangents that returns the cotangents of floating arguments."""

    def pulled(xs: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
        float_cts = iter(cts)
        _, backward = pullback(graph, xs, [True] * len(xs))
        gradients = backward([next(float_cts) if _floating(v) else None for v in graph.outs])
        return [
            zeros_like(x) if g is None else g for x, v, g in zip(xs, graph.ins, gradients, strict=True) if _floating(v)
        ]

    return pulled


def run(stages: Stages, arrays: Sequence[Any]) -> list[Any]:
    """Run the program on arrays without padding; returns arrays without padding.

    Raises `ShapeError` for an array that was donated to an earlier call.
    """
    results = stages.executable(*(_stored(stages, i, x) for i, x in enumerate(arrays)))
    return [
        y if y.shape == tuple(d.size for d in v.shape) else y[tuple(slice(d.size) for d in v.shape)]
        for v, y in zip(stages.graph.outs, results, strict=True)
    ]


def _stored(stages: Stages, i: int, x: Any) -> Any:
    """An argument in the dtype, with the padding and in the sharding that the program takes."""
    (sizes, sharding), v = stages.expected[i], stages.graph.ins[i]
    concrete = not isinstance(x, Tracer)
    if concrete and isinstance(x, jax.Array):
        if x.is_deleted():
            raise stages.deleted(i)
        same_type = x.shape == sizes and x.dtype == v.dtype and not x.weak_type
        if same_type and x.sharding.is_equivalent_to(sharding, len(sizes)):
            return x
    x = jnp.asarray(x, v.dtype)
    pads = [(0, size - n) for size, n in zip(sizes, x.shape, strict=True)]
    x = jnp.pad(x, pads) if any(high for _, high in pads) else x
    return jax.device_put(x, sharding) if concrete else x


def _unbatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with an error of ours under `jax.vmap`."""
    guarded = custom_vmap(function)

    @guarded.def_vmap
    def refuse(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise TraceError(
            f"jax.vmap over {axis_size} places of a compiled function: its program has only named dims\n"
            "  give the tensors one more dim, for example 'member', and call the function on them: operations map "
            "over a dim that they do not name, and a layout can shard it"
        )

    return guarded
