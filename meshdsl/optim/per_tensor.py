"""Norms and root mean squares of whole weights, for optimizers with per-tensor scaling.

They are computed in at least float32, and are equal under every layout, including layouts with padding.

A parameter of `md.layers` stores the same weight of all layers in one tensor, stacked along the layer dim. Per-tensor
scaling must treat each layer's slice as one weight, so that scanned layers train like unrolled layers. The tensor does
not record which dim is the layer dim, so the optimizers take patterns for dim names: the default is
`stacked="layer*"`. Name the dim of md.layers accordingly, or pass its name. With `stacked="layer* expert"`, each expert
is a separate weight too. Each index of a stacked dim has its own norm, and stacked dims are never factored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

import meshdsl as md

Chosen = Callable[[str], bool]  # a predicate on parameter paths


def every(path: str) -> bool:
    """Accepts every path.

    >>> every("layer/bias")
    True
    """
    return True


def none(path: str) -> bool:
    """Accepts no path.

    >>> none("layer/bias")
    False
    """
    return False


def path_of(keys: Any) -> str:
    """The path of a leaf as in layouts and checkpoints: `layer/w`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def own_dims(x: md.Tensor, stacked: str) -> tuple[md.Dim, ...]:
    """The dims of one weight: the dims whose names match no pattern in `stacked`.

    >>> import meshdsl as md
    >>> own_dims(md.tensor([[[1.0, 2.0]]], "layer3 io hidden"), "layer* expert")
    (io=1, hidden=2)
    """
    return tuple(d for d in x.dims if not any(fnmatchcase(d.name, pattern) for pattern in stacked.split()))


def norm(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """The square root of the sum of squares over `over`; the other dims are kept.

    >>> import meshdsl as md
    >>> x = md.tensor([[3.0, 4.0], [0.0, 2.0]], "layer io")
    >>> norm(x, own_dims(x, "layer"))
    tensor(float32[layer=2], [5. 2.])
    """
    return root_of_squares(squares(wide(x), over))


def rms(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """The square root of the mean of squares over `over`; the other dims are kept.

    >>> import meshdsl as md
    >>> x = md.tensor([1.0, 7.0], "io")
    >>> rms(x, x.dims)
    tensor(float32[], 5.)
    """
    return root_of_squares(squares(wide(x), over), math.prod(d.size for d in over))


def squares(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """Two sums of squares over `over`, as a private dim: of the large elements, scaled down, and of all others.

    >>> import meshdsl as md
    >>> squares(md.tensor([3.0, 4.0], "io"), (md.Dim("io", 2),))
    tensor(float32[magnitude__parts=2], [ 0. 25.])

    The square of 1e20 overflows float32, but a norm of 1e20 does not (Blue, A Portable Fortran Program to Find the
    Euclidean Norm of a Vector, 1978). One tensor holds both sums, so one collective reduces both.
    """
    limit, down = _limits(x.dtype)
    large = md.abs(x) > limit
    return md.stack(
        [
            md.sum(md.square(md.where(large, x * down, 0)), over),
            md.sum(md.square(md.where(large, 0, x)), over),
        ],
        md.fresh_dim("magnitude__parts:2", [d for d in x.dims if d not in over]),
    )


def root_of_squares(parts: md.Tensor, count: int = 1) -> md.Tensor:
    """The square root of the total of `squares(...)`, divided by `count`; results of `squares` may be added first.

    >>> import meshdsl as md
    >>> root_of_squares(squares(md.tensor([3e20, 4e20], "io"), (md.Dim("io", 2),)))
    tensor(float32[], 5.e+20)
    """
    _, down = _limits(parts.dtype)
    large, others = md.unstack(parts, parts.dims[0])
    has_large = large > 0
    up = md.where(has_large, md.cast(1 / down, parts.dtype), 1.0)
    return md.sqrt(md.where(has_large, large + others * down * down, others) / count) * up


def _limits(dtype: Any) -> tuple[float, float]:
    """The largest number that is squared unscaled, and the power of two by which larger numbers are multiplied.

    In float32, up to 2 ** 42 squares of either kind have a finite sum.
    """
    exponent = int(np.finfo(dtype).maxexp)
    return 2.0 ** (exponent // 3), 2.0 ** -(exponent * 2 // 3)


def wide(x: md.Tensor) -> md.Tensor:
    """The tensor cast to float32 if its dtype is narrower."""
    return md.cast(x, "float32") if x.dtype.itemsize < 4 else x
