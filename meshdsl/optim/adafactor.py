"""Adafactor (Shazeer and Stern, 2018), with the order of steps of GShard (Lepikhin et al., 2020, appendix A.2).

    second moment -> divide -> clip by the update's RMS -> learning rate -> scale by the parameter's RMS -> momentum

The second moment of a large weight is stored as two means, one over each of its two largest dims. The state of a weight
[m, n] therefore has m + n elements.
"""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md

from .checks import LearningRate, check_update, checked_decays, checked_rate
from .optimizers import Optimizer, count_of, rate_of, recorded, subtract, zero
from .per_tensor import own_dims, rms, wide


@recorded
def adafactor(
    learning_rate: LearningRate,
    *,
    decay_exponent: float = 0.8,
    max_b2: float = 1.0,
    clip_threshold: float = 1.0,
    scale_by_parameter: bool = True,
    momentum: float = 0.0,
    min_dim_to_factor: int = 128,
    eps: float = 1e-30,
    min_scale: float = 1e-3,
    stacked: str = "layer*",
) -> Optimizer:
    """Adafactor: steps of relative size `learning_rate`, with second moments stored as row and column means.

        b2 = min(max_b2, 1 - t ** -decay_exponent), t = 1, 2, ...; so the first step has b2 = 0
        s = g ** 2 + eps; row = b2 row + (1 - b2) mean(s, over=largest); col the same, over=second largest
        u = g / sqrt(row col / mean(row));   for an unfactored weight v = b2 v + (1 - b2) s, u = g / sqrt(v)
        u = u / max(1, RMS(u) / clip_threshold);   u = learning_rate u;   u = u max(min_scale, RMS(p))
        m = momentum m + (1 - momentum) u;   p = p - m

    >>> import meshdsl as md
    >>> optimizer = md.optim.adafactor(0.01, min_dim_to_factor=2)
    >>> params = {"w": md.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], "io hidden"), "b": md.tensor([0.0], "hidden1")}
    >>> state = optimizer.init(params)
    >>> {name: x.dims for name, x in state["v"]["w"].items()}, state["v"]["b"].dims
    ({'row': (io=2,), 'col': (hidden=3,)}, (hidden1=1,))
    >>> optimizer.update(params, state, params)[0]["w"]
    tensor(float32[io=2 hidden=3], [[0.99 0.99 0.99]
     [0.99 0.99 0.99]])

    `decay_exponent` sets how fast the decay of second moments nears one. A weight is factored if its two largest dims
    have size at least `min_dim_to_factor` (see `factored_dims`). `clip_threshold=0` turns clipping off,
    `scale_by_parameter=False` omits the factor RMS(p), and `momentum=0` stores no m. Each index of the `stacked` dims
    is a separate weight: see `meshdsl.optim.per_tensor`. For GShard's appendix A.2, use the defaults with
    `inverse_sqrt(1.0, hold=10_000)` as the learning rate; its decay of 0.99 is `max_b2=0.99`.
    """
    checked_rate(learning_rate)
    checked_decays(momentum=momentum)

    def factored(p: md.Tensor) -> tuple[md.Dim, md.Dim] | None:
        return factored_dims(own_dims(p, stacked), min_dim_to_factor)

    def init(params: Any) -> dict[str, Any]:
        state = {"step": zero(), "v": jax.tree.map(lambda p: _no_moment(p, factored(p)), params)}
        return {**state, "m": jax.tree.map(_zeros, params)} if momentum else state

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        check_update(params, grads, state, init)
        leaves, structure = jax.tree.flatten(params)
        step = state["step"] + 1
        rate = rate_of(learning_rate, state["step"])
        b2 = md.minimum(1 - count_of(step, leaves) ** -decay_exponent, max_b2)

        def change(p: md.Tensor, u: md.Tensor) -> md.Tensor:
            over = own_dims(p, stacked)
            if clip_threshold:
                u = u / md.maximum(rms(u, over) / clip_threshold, 1.0)
            u = rate * u
            return u * md.maximum(rms(p, over), min_scale) if scale_by_parameter else u

        changes: list[md.Tensor] = []
        moments: list[Any] = []
        for p, g, v in zip(leaves, *map(structure.flatten_up_to, (grads, state["v"])), strict=True):
            u, v = _divided(wide(g), v, b2, eps, factored(p))
            changes.append(change(p, u))
            moments.append(v)
        state = {**state, "step": step, "v": structure.unflatten(moments)}
        if momentum:
            m = structure.flatten_up_to(state["m"])
            changes = [md.cast(momentum * m + (1 - momentum) * u, m.dtype) for m, u in zip(m, changes, strict=True)]
            state["m"] = structure.unflatten(changes)
        return subtract(params, structure.unflatten(changes)), state

    return Optimizer(init, update)


def factored_dims(dims: tuple[md.Dim, ...], min_size: int) -> tuple[md.Dim, md.Dim] | None:
    """The second largest and the largest dim of a weight, or None if either is smaller than `min_size`.

    Among dims of equal size, the later in storage order counts as larger: [height=3 width=3 in=64 out=64] gives in and
    out.

    >>> import meshdsl as md
    >>> factored_dims(md.dims("heads:8 model:512 head:256"), 128)
    (head=256, model=512)
    >>> factored_dims(md.dims("a:200 b:200 c:200"), 128)
    (b=200, c=200)
    >>> factored_dims(md.dims("heads:8 model:512"), 128) is None
    True
    """
    order = sorted(dims, key=lambda d: d.size)  # stable
    return (order[-2], order[-1]) if len(order) > 1 and order[-2].size >= min_size else None


def _divided(
    g: md.Tensor, v: Any, b2: md.Tensor, eps: float, factored: tuple[md.Dim, md.Dim] | None
) -> tuple[md.Tensor, Any]:
    """The gradient divided by the square root of its second moment, and the updated moment."""
    square = md.square(g) + eps

    def blend(old: md.Tensor, new: md.Tensor) -> md.Tensor:
        return md.cast(b2 * old + (1 - b2) * new, old.dtype)

    if factored is None:
        v = blend(v, square)
        return g * md.rsqrt(v), v
    second, largest = factored
    row, col = blend(v["row"], md.mean(square, largest)), blend(v["col"], md.mean(square, second))
    return g * md.rsqrt(row / md.mean(row, second)) * md.rsqrt(col), {"row": row, "col": col}


def _no_moment(p: md.Tensor, factored: tuple[md.Dim, md.Dim] | None) -> Any:
    if factored is None:
        return _zeros(p)
    second, largest = factored
    return {"row": _zeros(p, largest), "col": _zeros(p, second)}


def _zeros(p: md.Tensor, without: md.Dim | None = None) -> md.Tensor:
    return md.broadcast(md.cast(0, wide(p).dtype), [d for d in p.dims if d != without])
