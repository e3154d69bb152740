"""LARS and LAMB: a step along each weight's direction whose length is in proportion to the weight's own norm.

The trust ratio of a weight is |p| over the size of its update; it is 1 where either of the two is zero. Weights whose
path `adapts` refuses (biases and scales of norms, as a rule) have the ratio 1.
"""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md

from .optimizers import LearningRate, Optimizer, fitting, moments, rate_of, subtract, zero, zeros_like
from .per_tensor import Chosen, every, norm, own_dims, path_of

__all__ = ["lamb", "lars"]

_DENOMINATORS = ("sum_of_norms", "norm_of_sum")


def lars(
    learning_rate: LearningRate,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    *,
    trust: float = 0.001,
    denominator: str = "sum_of_norms",
    eps: float = 0.0,
    nesterov: bool = False,
    decays: Chosen = every,
    adapts: Chosen = every,
    stacked: str = "layer*",
) -> Optimizer:
    """LARS (You et al., 2017, algorithm 1): momentum whose learning rate is scaled for each weight::

        ratio = trust |p| / (denominator + eps);   u = learning_rate ratio (g + weight_decay p)
        m = momentum m + u;   p = p - m, or with `nesterov` p - (u + momentum m)

    Two denominators are in use. "sum_of_norms" is `|g| + weight_decay |p|`, the paper's and MLPerf's; "norm_of_sum" is
    `|g + weight_decay p|`, optax's. They differ by how far g and p point the same way.

    >>> import meshdsl as md
    >>> params, grads = {"w": md.tensor([0.0, 2.0], "io")}, {"w": md.tensor([4.0, 0.0], "io")}
    >>> for denominator in ("sum_of_norms", "norm_of_sum"):
    ...     optimizer = md.optim.lars(1.0, weight_decay=1.5, trust=1.0, denominator=denominator)
    ...     print(optimizer.update(grads, optimizer.init(params), params)[0]["w"])
    tensor(float32[io=2], [-1.1429  1.1429])
    tensor(float32[io=2], [-1.6  0.8])

    The `stacked` dims hold weights of their own: see `meshdsl.optim.per_tensor`. Raises `MeshdslError` for another
    denominator.
    """
    if denominator not in _DENOMINATORS:
        raise md.MeshdslError(
            f"LARS has no denominator {denominator!r}; there are: {', '.join(_DENOMINATORS)}\n"
            "  sum_of_norms is |g| + weight_decay |p| (the paper, MLPerf), norm_of_sum is |g + weight_decay p| (optax)"
        )

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        fitting(params, grads, state, "m")
        rate = rate_of(learning_rate, state["step"])

        def change(keys: Any, p: md.Tensor, g: md.Tensor) -> md.Tensor:
            path, over = path_of(keys), own_dims(p, stacked)
            decay = weight_decay if decays(path) else 0.0
            u = g + decay * p if decay else g
            if not adapts(path):
                return rate * u
            size = norm(g, over) + decay * norm(p, over) if denominator == "sum_of_norms" else norm(u, over)
            return rate * _ratio(trust * norm(p, over), size, eps) * u

        changes = jax.tree_util.tree_map_with_path(change, params, grads)
        m = jax.tree.map(lambda m, u: md.cast(momentum * m + u, m.dtype), state["m"], changes)
        along = jax.tree.map(lambda u, m: u + momentum * m, changes, m) if nesterov else m
        return subtract(params, along), {"step": state["step"] + 1, "m": m}

    return Optimizer(init, update)


def lamb(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    decays: Chosen = every,
    adapts: Chosen = every,
    stacked: str = "layer*",
) -> Optimizer:
    """LAMB (You et al., 2020, algorithm 2, with phi the identity): Adam's direction, as long as the weight allows::

        u = (m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps) + weight_decay p
        p = p - learning_rate |p| / |u| u

    >>> import meshdsl as md
    >>> optimizer = md.optim.lamb(0.1, weight_decay=0.0)
    >>> params = {"w": md.tensor([3.0, 4.0], "io")}
    >>> optimizer.update({"w": md.tensor([1.0, -1.0], "io")}, optimizer.init(params), params)[0]["w"]
    tensor(float32[io=2], [2.6464 4.3536])

    The `stacked` dims hold weights of their own: see `meshdsl.optim.per_tensor`.
    """

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params), "v": zeros_like(params)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        fitting(params, grads, state, "m", "v")
        rate = rate_of(learning_rate, state["step"])
        state, correction_1, correction_2 = moments(grads, state, b1, b2)

        def move(keys: Any, p: md.Tensor, m: md.Tensor, v: md.Tensor) -> md.Tensor:
            path, over = path_of(keys), own_dims(p, stacked)
            u = (m / correction_1) / (md.sqrt(v / correction_2) + eps)
            if weight_decay and decays(path):
                u = u + weight_decay * p
            scale = rate * _ratio(norm(p, over), norm(u, over), 0.0) if adapts(path) else rate
            return md.cast(p - scale * u, p.dtype)

        return jax.tree_util.tree_map_with_path(move, params, state["m"], state["v"]), state

    return Optimizer(init, update)


def _ratio(numerator: md.Tensor, denominator: md.Tensor, eps: float) -> md.Tensor:
    """numerator / (denominator + eps), and 1 where either is zero."""
    none = (numerator == 0) | (denominator == 0)
    return md.where(none, 1.0, numerator / md.where(none, 1.0, denominator + eps))
