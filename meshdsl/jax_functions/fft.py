"""Discrete Fourier transforms along named dims: those of `jax.numpy.fft`, on each device's blocks.

The dim that is transformed is gathered; the others may be sharded, also unevenly. JAX differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dims import DimLike, DimsLike, find, fresh_dim, pick
from ..ops.dtypes import as_dtype
from ..ops.indexing import new_dim
from ..ops.reshape import rename
from ..ops.slicing import roll
from ..trace import Tensor, as_tensor, tensor
from .local import local

__all__ = ["fft", "fftfreq", "fftshift", "ifft", "ifftshift", "irfft", "rfft", "rfftfreq"]


def _along(x: Any, over: DimLike, f: Callable[[Any, int], Any]) -> Tensor:
    """f of arrays and an axis, whose result may have another size along the dim."""
    x = as_tensor(x)
    dim = find(over, x.dims)
    axis, made = x.dims.index(dim), fresh_dim(f"{dim.name}_:1", x.dims).name
    kept = [d.name for d in x.dims if d != dim]
    out = [made if d == dim else d.name for d in x.dims]
    return rename(local(lambda a: f(a, axis), x, out=" ".join(out), split=kept), **{made: dim.name})


def _complex(name: str) -> Callable[..., Tensor]:
    def transform(x: Any, over: DimsLike, norm: str | None = None) -> Tensor:
        x = as_tensor(x)
        for d in pick(over, x.dims):
            x = _along(x, d, lambda a, axis: getattr(jnp.fft, name)(a, axis=axis, norm=norm))
        return x

    transform.__name__ = transform.__qualname__ = name
    transform.__doc__ = f"""`jnp.fft.{name}` along one or several dims; the result is complex.

    >>> import meshdsl as md
    >>> md.fft.{name}(md.tensor([1.0, 1.0], "time"), "time").dtype
    dtype('complex64')

    `norm` is "backward" (default), "ortho" or "forward". Raises `ShapeError` for a dim that x lacks.
    """
    return transform


fft, ifft = _complex("fft"), _complex("ifft")


def rfft(x: Any, over: DimLike, norm: str | None = None) -> Tensor:
    """`jnp.fft.rfft` along a dim: the first n // 2 + 1 frequencies of real numbers, which determine the others.

    >>> import meshdsl as md
    >>> md.fft.rfft(md.tensor([3.0, 4.0], "time"), "time")
    tensor(complex64[time=2], [ 7.+0.j -1.+0.j])

    `norm` is "backward" (default), "ortho" or "forward". Raises `ShapeError` for a dim that x lacks.
    """
    return _along(x, over, lambda a, axis: jnp.fft.rfft(a, axis=axis, norm=norm))


def irfft(x: Any, over: DimLike, size: int | None = None, norm: str | None = None) -> Tensor:
    """`jnp.fft.irfft` along a dim: the inverse of `md.fft.rfft`, with `size` elements (default: 2 * (n - 1)).

    >>> import meshdsl as md
    >>> md.fft.irfft(md.fft.rfft(md.tensor([3.0, 4.0], "time"), "time"), "time")
    tensor(float32[time=2], [3. 4.])

    `norm` is "backward" (default), "ortho" or "forward". Raises `ShapeError` for a dim that x lacks.
    """
    return _along(x, over, lambda a, axis: jnp.fft.irfft(a, size, axis=axis, norm=norm))


def _frequencies(name: str) -> Callable[..., Tensor]:
    def frequencies(dim: DimLike, spacing: float = 1.0, dtype: Any = "float32") -> Tensor:
        d = new_dim(dim)
        values = getattr(np.fft, name)(d.size, spacing).astype(as_dtype(dtype))
        return tensor(values, f"{d.name}:{values.size}")

    frequencies.__name__ = frequencies.__qualname__ = name
    frequencies.__doc__ = f"""The frequencies of `md.fft.{name.replace("freq", "")}`, for samples `spacing` apart.

    >>> import meshdsl as md
    >>> md.fft.{name}("time:2")
    tensor(float32[time=2], {"[ 0.  -0.5]" if name == "fftfreq" else "[0.  0.5]"})

    `dim` is that of the samples, with its size; `dtype` that of the result.
    """
    return frequencies


fftfreq, rfftfreq = _frequencies("fftfreq"), _frequencies("rfftfreq")


def _shift(name: str) -> Callable[..., Tensor]:
    def shifted(x: Any, over: DimLike) -> Tensor:
        dim = find(over, as_tensor(x).dims)
        return roll(x, dim, dim.size // 2 if name == "fftshift" else -(dim.size // 2))

    shifted.__name__ = shifted.__qualname__ = name
    where = "to the middle" if name == "fftshift" else "back to the start"
    shifted.__doc__ = f"""`jnp.fft.{name}` along a dim: moves frequency 0 {where}.

    >>> import meshdsl as md
    >>> md.fft.{name}(md.iota("n:3"), "n")
    tensor(int32[n=3], {"[2 0 1]" if name == "fftshift" else "[1 2 0]"})
    """
    return shifted


fftshift, ifftshift = _shift("fftshift"), _shift("ifftshift")
