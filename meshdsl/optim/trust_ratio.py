"""LARS and LAMB: optimizers that scale the update of each weight by a trust ratio.

The trust ratio of a weight is its norm |p| divided by the norm of its update; it is 1 if either norm is zero. It is
also 1 for weights for which `adapts(path)` is false, usually biases and the scales of normalisations.
"""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md

from .checks import LearningRate, check_state_dtype, check_update, checked_decays, checked_rate
from .optimizers import Optimizer, cast_as, moments, rate_of, recorded, subtract, zero, zeros_like
from .per_tensor import Chosen, every, norm, own_dims, path_of, wide

_DENOMINATORS = ("sum_of_norms", "norm_of_sum")


@recorded
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
    state_dtype: Any = None,
) -> Optimizer:
    """LARS (You et al., 2017, algorithm 1): momentum with a learning rate scaled per weight::

        ratio = trust |p| / (denominator + eps);   u = learning_rate ratio (g + weight_decay p)
        m = momentum m + u;   p = p - m, or with `nesterov` p - (u + momentum m)

    `denominator` is "sum_of_norms" for `|g| + weight_decay |p|`, as in the paper and MLPerf, or "norm_of_sum" for
    `|g + weight_decay p|`, as in optax.

    >>> import meshdsl as md
    >>> params, grads = {"w": md.tensor([0.0, 2.0], "io")}, {"w": md.tensor([4.0, 0.0], "io")}
    >>> for denominator in ("sum_of_norms", "norm_of_sum"):
    ...     optimizer = md.optim.lars(1.0, weight_decay=1.5, trust=1.0, denominator=denominator)
    ...     print(optimizer.update(grads, optimizer.init(params), params)[0]["w"])
    tensor(float32[io=2], [-1.1429  1.1429])
    tensor(float32[io=2], [-1.6  0.8])

    Each index of the `stacked` dims is a separate weight: see `meshdsl.optim.per_tensor`. m has `state_dtype`; see
    `adamw`. Raises `MeshdslError` for an unknown denominator.
    """
    checked_rate(learning_rate)
    checked_decays(momentum=momentum)
    check_state_dtype(state_dtype)
    if denominator not in _DENOMINATORS:
        raise md.MeshdslError(
            f"unknown denominator of LARS {denominator!r}; known: {', '.join(_DENOMINATORS)}\n"
            "  sum_of_norms is |g| + weight_decay |p| (the paper, MLPerf), norm_of_sum is |g + weight_decay p| (optax)"
        )

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params, state_dtype)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        rate = rate_of(learning_rate, state["step"])

        def change(keys: Any, p: md.Tensor, g: md.Tensor) -> md.Tensor:
            path, over, g = path_of(keys), own_dims(p, stacked), wide(g)
            decay = weight_decay if decays(path) else 0.0
            u = g + decay * wide(p) if decay else g
            if not adapts(path):
                return rate * u
            size = norm(g, over) + decay * norm(p, over) if denominator == "sum_of_norms" else norm(u, over)
            return rate * _ratio(trust * norm(p, over), size, eps) * u

        changes = jax.tree_util.tree_map_with_path(change, params, grads)
        m = jax.tree.map(lambda m, u: momentum * wide(m) + u, state["m"], changes)
        direction = jax.tree.map(lambda u, m: u + momentum * m, changes, m) if nesterov else m
        return subtract(params, direction), {"step": state["step"] + 1, "m": cast_as(m, state["m"])}

    return Optimizer(init, update)


@recorded
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
    state_dtype: Any = None,
) -> Optimizer:
    """LAMB (You et al., 2020, algorithm 2, with phi the identity): Adam's update scaled by the trust ratio::

        u = (m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps) + weight_decay p
        p = p - learning_rate |p| / |u| u

    >>> import meshdsl as md
    >>> optimizer = md.optim.lamb(0.1, weight_decay=0.0)
    >>> params = {"w": md.tensor([3.0, 4.0], "io")}
    >>> optimizer.update({"w": md.tensor([1.0, -1.0], "io")}, optimizer.init(params), params)[0]["w"]
    tensor(float32[io=2], [2.6464 4.3536])

    Each index of the `stacked` dims is a separate weight: see `meshdsl.optim.per_tensor`. m and v have `state_dtype`;
    see `adamw`.
    """
    checked_rate(learning_rate)
    checked_decays(b1=b1, b2=b2)
    check_state_dtype(state_dtype)

    def init(params: Any) -> dict[str, Any]:
        return {"step": zero(), "m": zeros_like(params, state_dtype), "v": zeros_like(params, state_dtype)}

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        rate = rate_of(learning_rate, state["step"])
        state, (m, v), (correction_1, correction_2) = moments(grads, state, b1, b2)

        def move(keys: Any, p: md.Tensor, m: md.Tensor, v: md.Tensor) -> md.Tensor:
            path, over = path_of(keys), own_dims(p, stacked)
            u = (m / correction_1) / (md.sqrt(v / correction_2) + eps)
            if weight_decay and decays(path):
                u = u + weight_decay * wide(p)
            scale = rate * _ratio(norm(p, over), norm(u, over), 0.0) if adapts(path) else rate
            return md.cast(p - scale * u, p.dtype)

        return jax.tree_util.tree_map_with_path(move, params, m, v), state

    return Optimizer(init, update)


def _ratio(numerator: md.Tensor, denominator: md.Tensor, eps: float) -> md.Tensor:
    """numerator / (denominator + eps), or 1 if either is zero."""
    is_zero = (numerator == 0) | (denominator == 0)
    return md.where(is_zero, 1.0, numerator / md.where(is_zero, 1.0, denominator + eps))
