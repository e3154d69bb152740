"""Parameter initialisers: functions `(key, dims, dtype) -> tensor`, with the same values under every layout.

They draw each element independently, so stacked layers are initialised like separate layers. Fan dims are given by
name, as in `md.init.he(fan_in="io")`; other dims, such as heads, experts and stacked layers, do not count.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...dims import DimsLike, Shape, pick, show, size_of
from ...errors import MeshdslError, ShapeError
from ...ops import random
from ...ops.dtypes import cast
from ...ops.reductions import broadcast
from ...trace import Tensor, as_tensor

__all__ = [
    "constant", "glorot", "he", "lecun", "normal", "ones", "truncated_normal", "uniform", "variance_scaling", "zeros",
]  # fmt: skip

Init = Callable[[Tensor, Shape, Any], Tensor]


def constant(value: float) -> Init:
    """Every element is `value`.

    >>> import meshdsl as md
    >>> md.init.constant(2.0)(md.random.key(0), md.dims("a:2"), "float32")
    tensor(float32[a=2], [2. 2.])
    """

    def draw(key: Tensor, dims: Shape, dtype: Any) -> Tensor:
        return broadcast(as_tensor(value, np.dtype(jnp.dtype(dtype))), dims)

    return draw


def zeros() -> Init:
    """Every element is 0.

    >>> import meshdsl as md
    >>> md.init.zeros()(md.random.key(0), md.dims("a:2"), "float32")
    tensor(float32[a=2], [0. 0.])
    """
    return constant(0)


def ones() -> Init:
    """Every element is 1.

    >>> import meshdsl as md
    >>> md.init.ones()(md.random.key(0), md.dims("a:2"), "float32")
    tensor(float32[a=2], [1. 1.])
    """
    return constant(1)


def _check_std(std: float) -> None:
    if isinstance(std, int | float) and not std >= 0:
        raise ShapeError(f"a standard deviation is at least 0, got {std}")


def normal(std: float = 1.0, mean: float = 0.0) -> Init:
    """Normal distribution with standard deviation `std` and mean `mean`.

    >>> import meshdsl as md
    >>> w = md.init.normal(0.02)(md.random.key(0), md.dims("io:400 hidden:400"), "float32")
    >>> f"{md.var(w).item() ** 0.5:.4f}"
    '0.0200'
    """

    _check_std(std)

    def draw(key: Tensor, dims: Shape, dtype: Any) -> Tensor:
        x = random.normal(key, dims, _drawn(dtype)) * std
        return cast(x + mean if mean else x, dtype)

    return draw


def truncated_normal(std: float = 1.0, mean: float = 0.0, bound: float = 2.0) -> Init:
    """Normal distribution truncated at `bound` times `std` from the mean; `std` is the value before truncation.

    >>> import meshdsl as md
    >>> drawn = md.init.truncated_normal(0.1)(md.random.key(0), md.dims("io:400 hidden:400"), "float32")
    >>> (md.max(md.abs(drawn)) <= 0.2).item()
    True

    With `bound` 2, the standard deviation after truncation is 0.8796 `std`.
    """

    _check_std(std)

    def draw(key: Tensor, dims: Shape, dtype: Any) -> Tensor:
        x = random.truncated_normal(key, -bound, bound, dims, _drawn(dtype)) * std
        return cast(x + mean if mean else x, dtype)

    return draw


def uniform(low: float = -1.0, high: float = 1.0) -> Init:
    """Uniform distribution over [low, high).

    >>> import meshdsl as md
    >>> drawn = md.init.uniform(0.0, 0.1)(md.random.key(0), md.dims("io:400 hidden:400"), "float32")
    >>> (md.min(drawn) >= 0).item(), (md.max(drawn) < 0.1).item()
    (True, True)
    """

    if low > high:
        raise ShapeError(f"md.init.uniform draws from low to high; got low={low} and high={high}")

    def draw(key: Tensor, dims: Shape, dtype: Any) -> Tensor:
        return cast(random.uniform(key, dims, low, high, dtype=_drawn(dtype)), dtype)

    return draw


def variance_scaling(
    scale: float = 1.0, *, fan_in: DimsLike = (), fan_out: DimsLike = (), distribution: str = "normal"
) -> Init:
    """Variance `scale / fan`, where the fan is the product of the sizes of the dims `fan_in` or `fan_out`.

    >>> import meshdsl as md
    >>> draw = md.init.variance_scaling(fan_in="heads head")
    >>> draw(md.random.key(0), md.dims("heads:4 head:8 model:32"), "float32").dims
    (heads=4, head=8, model=32)

    If both fans are given, their mean is used (Glorot and Bengio, 2010, section 4.2.1). `distribution` is "normal",
    "uniform" or "truncated_normal" (at two standard deviations; the variance is after truncation). Raises `ShapeError`
    if the parameter lacks a dim, if no fan is given, and for an unknown distribution.
    """
    kinds: dict[str, Callable[[float], Init]] = {
        "normal": normal,
        "uniform": lambda std: uniform(-math.sqrt(3) * std, math.sqrt(3) * std),
        "truncated_normal": lambda std: truncated_normal(std / 0.87962566103423978),
    }
    if distribution not in kinds:
        raise ShapeError(f"unknown distribution {distribution!r}; known: {', '.join(kinds)}")
    if not fan_in and not fan_out:
        raise ShapeError(
            "a fan-scaled init needs fan_in= or fan_out=\n"
            "  name the dims that the product contracts, for example md.init.he(fan_in='io')"
        )

    def draw(key: Tensor, dims: Shape, dtype: Any) -> Tensor:
        def fan(names: DimsLike) -> int:
            try:
                return size_of(pick(names, dims, what="fan dim"))
            except MeshdslError as error:
                error.args = (f"{error.args[0]}\n  the parameter has the dims {show(dims)}",)
                raise error from None

        fans = [fan(names) for names in (fan_in, fan_out) if names]
        return kinds[distribution](math.sqrt(scale * len(fans) / builtins.max(1, builtins.sum(fans))))(key, dims, dtype)

    return draw


def lecun(fan_in: DimsLike, distribution: str = "normal") -> Init:
    """Variance 1 / fan_in, which preserves the variance in a linear layer (LeCun et al., 1998, section 4.6).

    >>> import meshdsl as md
    >>> w = md.init.lecun(fan_in="io")(md.random.key(0), md.dims("io:400 hidden:400"), "float32")
    >>> f"{400 * md.var(w).item():.2f}"
    '1.00'

    See `variance_scaling` for `distribution` and for the errors raised.
    """
    return variance_scaling(1.0, fan_in=fan_in, distribution=distribution)


def he(fan_in: DimsLike, distribution: str = "normal") -> Init:
    """Variance 2 / fan_in, which preserves the variance in a layer with relu (He et al., 2015, section 2.2).

    >>> import meshdsl as md
    >>> w = md.init.he(fan_in="io")(md.random.key(0), md.dims("io:400 hidden:400"), "float32")
    >>> f"{400 * md.var(w).item():.2f}"
    '2.00'

    See `variance_scaling` for `distribution` and for the errors raised.
    """
    return variance_scaling(2.0, fan_in=fan_in, distribution=distribution)


def glorot(fan_in: DimsLike, fan_out: DimsLike, distribution: str = "uniform") -> Init:
    """Variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010, equation 16).

    >>> import meshdsl as md
    >>> w = md.init.glorot(fan_in="io", fan_out="hidden")(md.random.key(0), md.dims("io:100 hidden:300"), "float32")
    >>> f"{(100 + 300) * md.var(w).item():.2f}"
    '2.01'

    See `variance_scaling` for `distribution` and for the errors raised.
    """
    return variance_scaling(1.0, fan_in=fan_in, fan_out=fan_out, distribution=distribution)


def _drawn(dtype: Any) -> np.dtype:
    """The dtype in which numbers are drawn: at least float32, which is then rounded to narrower floats."""
    return np.dtype(dtype if np.dtype(dtype).itemsize > 4 else np.float32)  # JAX promotes no 8-bit floats
