"""Learning-rate schedules: functions from the number of updates done (an int32 tensor, initially 0) to the rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec

import meshdsl as md

Schedule = Callable[[md.Tensor], md.Tensor]
P = ParamSpec("P")


@dataclass(frozen=True)
class _Made:
    """A schedule with the call that made it, by which it is pickled and copied."""

    rate: Schedule
    call: Callable[[], Schedule]

    def __call__(self, step: md.Tensor) -> md.Tensor:
        return self.rate(step)

    def __reduce__(self) -> Any:
        return self.call, ()


def _recorded(make: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """The same function; its schedules can be pickled."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        return _Made(make(*args, **kwargs), partial(call, *args, **kwargs))

    return call


def _check_steps(name: str, steps: int) -> None:
    if steps < 1:
        raise md.ShapeError(f"md.optim.{name} takes at least 1 step, got {steps}")


@_recorded
def constant(value: float) -> Schedule:
    """The same rate at every step.

    >>> import meshdsl as md
    >>> md.optim.constant(0.1)(md.tensor(7))
    tensor(float32[], 0.1)
    """
    return lambda step: md.cast(value, "float32")


@_recorded
def linear(start: float, end: float, steps: int) -> Schedule:
    """Linear from `start` to `end` over `steps` updates, then constant.

    >>> import meshdsl as md
    >>> md.optim.linear(1.0, 0.0, steps=4)(md.tensor(1))
    tensor(float32[], 0.75)
    """
    _check_steps("linear", steps)
    return lambda step: start + (end - start) * md.minimum(md.cast(step, "float32") / steps, 1.0)


@_recorded
def warmup_cosine(peak: float, warmup_steps: int, steps: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """Linear from `start` to `peak` over `warmup_steps`, then a half cosine down to `end` at step `steps`.

    (Loshchilov and Hutter, 2017, equation 5, one period.) Requires steps > warmup_steps.

    >>> import meshdsl as md
    >>> rate = md.optim.warmup_cosine(1.0, warmup_steps=10, steps=30)
    >>> [round(rate(md.tensor(step)).item(), 3) for step in (0, 5, 10, 20, 30)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    if not steps > warmup_steps >= 0:
        raise md.ShapeError(
            f"md.optim.warmup_cosine needs steps > warmup_steps >= 0; got steps={steps}, warmup_steps={warmup_steps}"
        )

    def rate(step: md.Tensor) -> md.Tensor:
        count = md.cast(step, "float32")
        warmup = start + (peak - start) * (count / max(1, warmup_steps))
        progress = md.minimum((count - warmup_steps) / (steps - warmup_steps), 1.0)
        decay = end + (peak - end) * (0.5 * (1 + md.cos(math.pi * progress)))
        return md.where(count < warmup_steps, warmup, decay)

    return rate


@_recorded
def rsqrt(peak: float, warmup_steps: int) -> Schedule:
    """Linear to `peak` over `warmup_steps`, then proportional to 1 / sqrt(step).

    (Vaswani et al., 2017, equation 3, with peak = (d_model * warmup_steps) ** -0.5; the paper counts steps from 1.)

    >>> import meshdsl as md
    >>> rate = md.optim.rsqrt(1.0, warmup_steps=4)
    >>> [rate(md.tensor(step)).item() for step in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """

    _check_steps("rsqrt", warmup_steps)

    def rate(step: md.Tensor) -> md.Tensor:
        count = md.cast(step + 1, "float32")
        return peak * md.minimum(count / warmup_steps, md.rsqrt(count / warmup_steps))

    return rate


@_recorded
def inverse_sqrt(scale: float, hold: int) -> Schedule:
    """scale / sqrt(max(t, hold)), with t = 1 at the first update: constant for `hold` updates, then decreasing.

    (Shazeer and Stern, 2018, section 8, use scale 1 and hold 10,000, so the relative step is 0.01 at first.)

    >>> import meshdsl as md
    >>> [inverse_sqrt(1.0, hold=4)(md.tensor(step)).item() for step in (0, 3, 15)]
    [0.5, 0.5, 0.25]
    """
    _check_steps("inverse_sqrt", hold)
    return lambda step: scale * md.rsqrt(md.maximum(md.cast(step + 1, "float32"), float(hold)))
