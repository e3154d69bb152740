"""Clipping by the true global norm: a sum of squares over all elements of all gradients, under every layout."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md

from .optimizers import Optimizer
from .per_tensor import root_of_squares, squares, wide

__all__ = ["clip_by_global_norm", "global_norm", "with_clipping"]


def global_norm(tree: Any) -> md.Tensor:
    """The square root of the sum of squares of all elements of all tensors, in float32 at least.

    >>> import meshdsl as md
    >>> md.optim.global_norm({"w": md.tensor([3.0], "a"), "v": md.tensor([4.0], "b")})
    tensor(float32[], 5.)
    """
    leaves = [wide(x) for x in jax.tree.leaves(tree)]
    dtype = jnp.result_type(*(x.dtype for x in leaves))
    return root_of_squares(functools.reduce(operator.add, (squares(md.cast(x, dtype), x.dims) for x in leaves)))


def clip_by_global_norm(grads: Any, max_norm: float) -> tuple[Any, md.Tensor]:
    """The gradients, scaled down together where their global norm is larger than `max_norm`; and that norm.

    >>> import meshdsl as md
    >>> grads, norm = md.optim.clip_by_global_norm({"w": md.tensor([3.0, 4.0], "a")}, 1.0)
    >>> grads["w"], norm
    (tensor(float32[a=2], [0.6 0.8]), tensor(float32[], 5.))

    (Pascanu et al., 2013, algorithm 1.) Squares do not overflow: a gradient of 1e20 in float32 is clipped like any
    other. Where the norm is infinite or NaN, every gradient is NaN, so that it shows.
    """
    norm = global_norm(grads)
    scale = md.where(md.isfinite(norm), md.minimum(max_norm / norm, 1.0), float("nan"))
    return jax.tree.map(lambda g: md.cast(g * scale, g.dtype), grads), norm


def with_clipping(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """The optimizer on gradients clipped by their global norm; see `clip_by_global_norm`.

    >>> import meshdsl as md
    >>> optimizer = md.optim.with_clipping(md.optim.sgd(1.0), max_norm=1.0)
    >>> params = {"w": md.tensor([0.0, 0.0], "io")}
    >>> optimizer.update({"w": md.tensor([3.0, 4.0], "io")}, optimizer.init(params), params)[0]["w"]
    tensor(float32[io=2], [-0.6 -0.8])
    """

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        return optimizer.update(clip_by_global_norm(grads, max_norm)[0], state, params)

    return Optimizer(optimizer.init, update)
