"""Gradient clipping by global norm: the norm over all elements of all gradients, under every layout."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md

from .optimizers import Optimizer, of_trained, recorded
from .per_tensor import root_of_squares, squares, wide


def global_norm(tree: Any) -> md.Tensor:
    """The square root of the sum of squares of all elements of all tensors, in at least float32.

    >>> import meshdsl as md
    >>> md.optim.global_norm({"w": md.tensor([3.0], "a"), "v": md.tensor([4.0], "b")})
    tensor(float32[], 5.)
    """
    tensors = jax.tree.leaves(tree)
    if not tensors or not all(isinstance(x, md.Tensor) for x in tensors):
        raise md.ShapeError(f"a norm needs a pytree of tensors, at least one; got {type(tree).__name__}")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in tensors):
        raise md.ShapeError(f"a norm needs floats; got {', '.join(sorted({x.dtype.name for x in tensors}))}")
    leaves = [wide(x) for x in tensors]
    dtype = jnp.result_type(*(x.dtype for x in leaves))
    return root_of_squares(functools.reduce(operator.add, (squares(md.cast(x, dtype), x.dims) for x in leaves)))


def clip_by_global_norm(grads: Any, max_norm: float) -> tuple[Any, md.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`; returns them and the norm.

    >>> import meshdsl as md
    >>> grads, norm = md.optim.clip_by_global_norm({"w": md.tensor([3.0, 4.0], "a")}, 1.0)
    >>> grads["w"], norm
    (tensor(float32[a=2], [0.6 0.8]), tensor(float32[], 5.))

    (Pascanu et al., 2013, algorithm 1.) Squares do not overflow: a float32 gradient with an element of 1e20 is clipped
    correctly. If the norm is infinite or NaN, all returned gradients are NaN.
    """
    _check_norm("clip_by_global_norm", max_norm)
    norm = global_norm(grads)
    scale = md.where(md.isfinite(norm), md.minimum(max_norm / norm, 1.0), float("nan"))
    return jax.tree.map(lambda g: md.cast(g * scale, g.dtype), grads), norm


def _check_norm(name: str, max_norm: float) -> None:
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise md.ShapeError(f"md.optim.{name} needs a max_norm above 0, got {max_norm}")


@recorded
def with_clipping(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """An optimizer that clips gradients by their global norm before each update; see `clip_by_global_norm`.

    >>> import meshdsl as md
    >>> optimizer = md.optim.with_clipping(md.optim.sgd(1.0), max_norm=1.0)
    >>> params = {"w": md.tensor([0.0, 0.0], "io")}
    >>> optimizer.update({"w": md.tensor([3.0, 4.0], "io")}, optimizer.init(params), params)[0]["w"]
    tensor(float32[io=2], [-0.6 -0.8])

    Gradients of parameters that the optimizer freezes do not count (`with_frozen`).
    """

    _check_norm("with_clipping", max_norm)

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        return optimizer.update(clip_by_global_norm(grads, max_norm)[0], state, params)

    return of_trained(Optimizer(optimizer.init, update), optimizer.frozen)
