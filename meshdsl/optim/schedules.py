"""A schedule is a function from the number of updates done (an int32 tensor, 0 at first) to the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import meshdsl as md

__all__ = ["Schedule", "constant", "inverse_sqrt", "linear", "rsqrt", "warmup_cosine"]

Schedule = Callable[[md.Tensor], md.Tensor]


def constant(value: float) -> Schedule:
    """The same rate at every step.

    >>> import meshdsl as md
    >>> md.optim.constant(0.1)(md.tensor(7))
    tensor(float32[], 0.1)
    """
    return lambda step: md.cast(value, "float32")


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in `steps` steps, and `end` ever after.

    >>> import meshdsl as md
    >>> md.optim.linear(1.0, 0.0, steps=4)(md.tensor(1))
    tensor(float32[], 0.75)
    """
    return lambda step: start + (end - start) * md.minimum(md.cast(step, "float32") / steps, 1.0)


def warmup_cosine(peak: float, warmup_steps: int, steps: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """Linear from `start` to `peak` in `warmup_steps`, then half a cosine down to `end` at step `steps`.

    (Loshchilov and Hutter, 2017, equation 5, one period.) Requires steps > warmup_steps.

    >>> import meshdsl as md
    >>> rate = md.optim.warmup_cosine(1.0, warmup_steps=10, steps=30)
    >>> [round(rate(md.tensor(step)).item(), 3) for step in (0, 5, 10, 20, 30)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def rate(step: md.Tensor) -> md.Tensor:
        count = md.cast(step, "float32")
        rising = start + (peak - start) * (count / max(1, warmup_steps))
        done = md.minimum((count - warmup_steps) / (steps - warmup_steps), 1.0)
        falling = end + (peak - end) * (0.5 * (1 + md.cos(math.pi * done)))
        return md.where(count < warmup_steps, rising, falling)

    return rate


def rsqrt(peak: float, warmup_steps: int) -> Schedule:
    """Linear to `peak` in `warmup_steps`, then as one over the square root of the step.

    (Vaswani et al., 2017, equation 3, with peak = (d_model * warmup_steps) ** -0.5; the paper counts steps from 1.)

    >>> import meshdsl as md
    >>> rate = md.optim.rsqrt(1.0, warmup_steps=4)
    >>> [rate(md.tensor(step)).item() for step in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """

    def rate(step: md.Tensor) -> md.Tensor:
        count = md.cast(step + 1, "float32")
        return peak * md.minimum(count / warmup_steps, md.rsqrt(count / warmup_steps))

    return rate


def inverse_sqrt(scale: float, hold: int) -> Schedule:
    """scale / sqrt(max(t, hold)), t = 1 at the first update: level for `hold` updates, then falling.

    (Shazeer and Stern, 2018, section 8, have scale 1 and hold 10,000: a relative step of 0.01 at first.)

    >>> import meshdsl as md
    >>> [inverse_sqrt(1.0, hold=4)(md.tensor(step)).item() for step in (0, 3, 15)]
    [0.5, 0.5, 0.25]
    """
    return lambda step: scale * md.rsqrt(md.maximum(md.cast(step + 1, "float32"), float(hold)))
