"""Two array libraries with one vocabulary, and what a kernel may know about the device it runs on.

Kernels are written once against `local.xp`. `emit` and eager evaluation pass `Jax`; `simulate` passes `NumPy`, so
the oracle shares the kernels' mathematics but none of JAX's tracing, sharding or collectives.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from .dims import Dim, Shape

__all__ = ["Block", "Jax", "Local", "NumPy", "whole"]


@dataclass(frozen=True)
class Block:
    """The part of a value that one device stores: its dims, stored local sizes, and the axes that cut each dim."""

    shape: Shape
    sizes: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    def position(self, dim: Dim | str) -> int:
        """Where a dim is in storage order."""
        name = dim if isinstance(dim, str) else dim.name
        return next(i for i, d in enumerate(self.shape) if d.name == name)

    def size(self, dim: Dim | str) -> int:
        """The stored local size of a dim."""
        return self.sizes[self.position(dim)]


def whole(shape: Shape) -> Block:
    """The block of an undivided value."""
    return Block(shape, tuple(d.size for d in shape), ((),) * len(shape))


@dataclass(frozen=True)
class Local:
    """The device a kernel runs on: its array library, its blocks, and its place along mesh axes."""

    xp: Any
    ins: tuple[Block, ...]
    outs: tuple[Block, ...]
    index: Callable[[tuple[str, ...]], Any] = lambda axes: 0  # row-major place along these axes
    count: Callable[[tuple[str, ...]], int] = lambda axes: 1  # how many devices lie along these axes

    def start(self, block: Block, dim: Dim | str) -> Any:
        """The global index of the first element of a dim in a block."""
        i = block.position(dim)
        return self.index(block.axes[i]) * block.sizes[i] if block.axes[i] else 0

    def positions(self, block: Block, dim: Dim | str) -> Any:
        """Global indices (int32) along a dim, shaped to broadcast against the block."""
        i = block.position(dim)
        along = self.xp.arange(block.sizes[i], dtype=np.int32) + self.xp.asarray(self.start(block, dim), np.int32)
        return along.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))

    def align(self, x: Any, source: Block, target: Block) -> Any:
        """An array of the source's dims transposed and reshaped to broadcast against the target's."""
        order = [source.position(d) for d in target.shape if d in source.shape]
        sizes = [source.size(d) if d in source.shape else 1 for d in target.shape]
        if order != list(range(len(order))):
            x = self.xp.transpose(x, order)
        return x if x.shape == tuple(sizes) else self.xp.reshape(x, sizes)


def letters(shapes: Sequence[Shape], out: Shape) -> str:
    """Named dims as an einsum formula."""
    table: dict[str, str] = {}
    for shape in (*shapes, out):
        for dim in shape:
            table.setdefault(dim.name, string.ascii_letters[len(table)])
    side = ["".join(table[d.name] for d in shape) for shape in (*shapes, out)]
    return f"{','.join(side[:-1])}->{side[-1]}"


class _Jax:
    """jax.numpy with the few names it lacks."""

    erf = staticmethod(lax.erf)
    erf_inv = staticmethod(lax.erf_inv)
    rsqrt = staticmethod(lax.rsqrt)
    logistic = staticmethod(lax.logistic)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
        return jnp.einsum(formula, *xs, preferred_element_type=dtype)

    @staticmethod
    def bitcast(x: Any, dtype: Any) -> Any:
        return lax.bitcast_convert_type(x, dtype)

    @staticmethod
    def scatter_add(rows: int, index: Any, updates: Any) -> Any:
        """Zeros with `rows` rows, plus row j of `updates` at row index[j]; indices outside are dropped."""
        return jnp.zeros((rows, *updates.shape[1:]), updates.dtype).at[index].add(updates, mode="drop")

    @staticmethod
    def barrier(x: Any) -> Any:
        return lax.optimization_barrier(x)

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        """The k largest along the last axis with their indices; ties to the lowest index."""
        return lax.top_k(x, k)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int, axis: int) -> Any:
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    @staticmethod
    def dynamic_update(x: Any, update: Any, start: Any, axis: int) -> Any:
        return lax.dynamic_update_slice_in_dim(x, update, start, axis)

    @staticmethod
    def elementwise(f: Callable[..., Any], *xs: Any) -> Any:
        return f(*xs)

    @staticmethod
    def outline(f: Callable[..., Any]) -> Callable[..., Any]:
        """A long function of arrays, traced once for each shape and a function of its own in StableHLO."""
        return jax.jit(f)


def _wide(x: Any) -> Any:
    # NumPy has no fast (or accurate) reductions and products for the 16- and 8-bit floats
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "V" or (x.dtype.kind == "f" and x.dtype.itemsize < 4) else x


def _total_order(x: Any) -> Any:
    """Integers that compare as XLA's top_k compares: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return x
    bits = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & np.iinfo(bits.dtype).max)


class _NumPy:
    """numpy with the few names it lacks and float32 accumulation of narrow floats."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def erf(x: Any) -> Any:
        return scipy.special.erf(_wide(x)).astype(x.dtype)

    @staticmethod
    def erf_inv(x: Any) -> Any:
        return scipy.special.erfinv(_wide(x)).astype(x.dtype)

    @staticmethod
    def rsqrt(x: Any) -> Any:
        return (1 / np.sqrt(_wide(x))).astype(x.dtype)

    @staticmethod
    def logistic(x: Any) -> Any:
        return (1 / (1 + np.exp(-_wide(x)))).astype(x.dtype)

    @staticmethod
    def sum(x: Any, axis: Any, dtype: Any = None) -> Any:
        return np.sum(_wide(x), axis=axis, dtype=None if dtype is None or _wide(x) is not x else dtype).astype(x.dtype)

    @staticmethod
    def prod(x: Any, axis: Any, dtype: Any = None) -> Any:
        return np.prod(_wide(x), axis=axis).astype(x.dtype)

    @staticmethod
    def cumsum(x: Any, axis: int) -> Any:
        return np.cumsum(_wide(x), axis=axis).astype(x.dtype)

    @staticmethod
    def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
        return np.asarray(np.einsum(formula, *(_wide(x) for x in xs), optimize=True)).astype(dtype)

    @staticmethod
    def bitcast(x: Any, dtype: Any) -> Any:
        return np.ascontiguousarray(x).view(dtype).reshape(np.shape(x))

    @staticmethod
    def scatter_add(rows: int, index: Any, updates: Any) -> Any:
        out = np.zeros((rows, *updates.shape[1:]), _wide(updates).dtype)
        inside = (index >= 0) & (index < rows)
        np.add.at(out, index[inside], _wide(updates)[inside])
        return out.astype(updates.dtype)

    @staticmethod
    def barrier(x: Any) -> Any:
        return x

    @staticmethod
    def floor_divide(x: Any, y: Any) -> Any:
        """As XLA also for a zero integer divisor, where NumPy says 0."""
        if x.dtype.kind == "i":
            by_zero = -1 - (x != 0).astype(x.dtype)
            return np.where(y == 0, by_zero, np.floor_divide(x, np.where(y == 0, 1, y).astype(x.dtype)))
        if x.dtype.kind == "u":
            return np.where(y == 0, np.iinfo(x.dtype).max, np.floor_divide(x, np.where(y == 0, 1, y).astype(x.dtype)))
        return np.floor_divide(x, y)

    @staticmethod
    def argsort(x: Any, axis: int, stable: bool) -> Any:
        return np.argsort(_wide(x), axis=axis, kind="stable")

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        index = np.argsort(~_total_order(x), axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(x, index, axis=-1), index.astype(np.int32)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int, axis: int) -> Any:
        start = int(np.clip(start, 0, x.shape[axis] - size))
        return np.take(x, range(start, start + size), axis=axis)

    @staticmethod
    def dynamic_update(x: Any, update: Any, start: Any, axis: int) -> Any:
        start = int(np.clip(start, 0, x.shape[axis] - update.shape[axis]))
        out = np.array(x)
        np.moveaxis(out, axis, 0)[start : start + update.shape[axis]] = np.moveaxis(update, axis, 0)
        return out

    @staticmethod
    def elementwise(f: Callable[..., Any], *xs: Any) -> Any:
        return np.asarray(jax.jit(f)(*xs))

    @staticmethod
    def outline(f: Callable[..., Any]) -> Callable[..., Any]:
        return f


Jax = _Jax()
NumPy = _NumPy()
