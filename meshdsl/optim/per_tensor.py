"""What an optimizer computes over a whole weight: its norm, its root mean square, and which dims those run over.

A norm is a sum over all elements, a mean divides by the real number of elements; both are sums by name, so they are
those of the unsplit weight under every layout, padded ones included. They are taken in float32 at least.

A parameter of `md.layers` is many weights in one tensor: the same weight of every layer, stacked along the dim of the
layers. A paper's "per tensor" means one of them, and two layers of a scan must train as two layers written out would.
The tensor does not say so itself (a checkpoint or a plain dict of tensors has only dims), so the optimizers take the
names of such dims as patterns, by default `stacked="layer*"`: name the dim of md.layers so, or give its name. With
`stacked="layer* expert"` each expert is a weight too. Each index of those dims has a norm of its own, and they are
never factored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

import meshdsl as md

__all__ = ["Chosen", "every", "norm", "own_dims", "path_of", "rms", "root_of_squares", "squares", "wide"]

Chosen = Callable[[str], bool]  # whether something applies to the parameter of this path


def every(path: str) -> bool:
    """Accepts every path.

    >>> every("layer/bias")
    True
    """
    return True


def path_of(keys: Any) -> str:
    """The path of a leaf as layouts and checkpoints write it: `layer/w`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def own_dims(x: md.Tensor, stacked: str) -> tuple[md.Dim, ...]:
    """The dims of one weight: those whose names match none of the stacked patterns.

    >>> import meshdsl as md
    >>> own_dims(md.tensor([[[1.0, 2.0]]], "layer3 io hidden"), "layer* expert")
    (io=1, hidden=2)
    """
    return tuple(d for d in x.dims if not any(fnmatchcase(d.name, pattern) for pattern in stacked.split()))


def norm(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """The square root of the sum of squares over these dims; the other dims stay.

    >>> import meshdsl as md
    >>> x = md.tensor([[3.0, 4.0], [0.0, 2.0]], "layer io")
    >>> norm(x, own_dims(x, "layer"))
    tensor(float32[layer=2], [5. 2.])
    """
    return root_of_squares(squares(wide(x), over))


def rms(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """The square root of the mean of squares over these dims.

    >>> import meshdsl as md
    >>> x = md.tensor([1.0, 7.0], "io")
    >>> rms(x, x.dims)
    tensor(float32[], 5.)
    """
    return root_of_squares(squares(wide(x), over), math.prod(d.size for d in over))


_KINDS = md.Dim("magnitude", 2)


def squares(x: md.Tensor, over: tuple[md.Dim, ...]) -> md.Tensor:
    """Two sums of squares over these dims: of the large elements, scaled down, and of all others.

    >>> import meshdsl as md
    >>> squares(md.tensor([3.0, 4.0], "io"), (md.Dim("io", 2),))
    tensor(float32[magnitude=2], [ 0. 25.])

    The square of 1e20 overflows float32, a norm of 1e20 does not (Blue, A Portable Fortran Program to Find the
    Euclidean Norm of a Vector, 1978). Both sums are in one tensor, so that devices add them in one collective.
    """
    limit, down = _limits(x.dtype)
    large = md.abs(x) > limit
    return md.stack(
        [
            md.sum(md.square(md.where(large, x * down, 0)), over),
            md.sum(md.square(md.where(large, 0, x)), over),
        ],
        _KINDS,
    )


def root_of_squares(parts: md.Tensor, count: int = 1) -> md.Tensor:
    """The root of what `squares` gives, or of several of them added up, divided by a count.

    >>> import meshdsl as md
    >>> root_of_squares(squares(md.tensor([3e20, 4e20], "io"), (md.Dim("io", 2),)))
    tensor(float32[], 5.e+20)
    """
    _, down = _limits(parts.dtype)
    large, rest = md.unstack(parts, _KINDS)
    some = large > 0
    up = md.where(some, md.cast(1 / down, parts.dtype), 1.0)
    return md.sqrt(md.where(some, large + rest * down * down, rest) / count) * up


def _limits(dtype: Any) -> tuple[float, float]:
    """The largest number that is squared as it is, and the power of two that larger ones are multiplied by.

    Up to 2 ** 42 squares of either kind add up to a finite number in float32.
    """
    exponent = int(np.finfo(dtype).maxexp)
    return 2.0 ** (exponent // 3), 2.0 ** -(exponent * 2 // 3)


def wide(x: md.Tensor) -> md.Tensor:
    """The tensor in float32, or as it is when that is wide enough already."""
    return md.cast(x, "float32") if x.dtype.itemsize < 4 else x
