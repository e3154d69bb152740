"""Two array libraries with the same interface, and the device information that a kernel receives.

Kernels are written once against `local.xp`. `emit` and eager evaluation pass `Jax`; `simulate` passes `NumPy`, so
the simulator shares the kernels' mathematics but not JAX's tracing, sharding or collectives.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax
from jax.experimental import io_callback

from .attend import Arrays, blockwise, plain
from .dims import Dim, Shape
from .jax_call import call_on_blocks, compiled

__all__ = ["Block", "Jax", "Local", "NumPy", "whole"]


@dataclass(frozen=True)
class Block:
    """The part of a value that one device stores: dims, stored local sizes, and the mesh axes that shard each dim."""

    shape: Shape
    sizes: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    def position(self, dim: Dim | str) -> int:
        """The index of a dim in storage order."""
        name = dim if isinstance(dim, str) else dim.name
        return next(i for i, d in enumerate(self.shape) if d.name == name)

    def size(self, dim: Dim | str) -> int:
        """The stored local size of a dim."""
        return self.sizes[self.position(dim)]


def whole(shape: Shape) -> Block:
    """The block of an unsharded value."""
    return Block(shape, tuple(d.size for d in shape), ((),) * len(shape))


@dataclass(frozen=True)
class Local:
    """The device a kernel runs on: array library, blocks of operands and results, and index along mesh axes."""

    xp: Any
    ins: tuple[Block, ...]
    outs: tuple[Block, ...]
    index: Callable[[tuple[str, ...]], Any] = lambda axes: 0  # row-major index along these axes
    count: Callable[[tuple[str, ...]], int] = lambda axes: 1  # number of devices along these axes

    def start(self, block: Block, dim: Dim | str) -> Any:
        """The global index, along a dim, of the block's first element."""
        i = block.position(dim)
        return self.index(block.axes[i]) * block.sizes[i] if block.axes[i] else 0

    def positions(self, block: Block, dim: Dim | str) -> Any:
        """The global indices (int32) of the block's elements along a dim, shaped to broadcast against the block."""
        i = block.position(dim)
        along = self.xp.arange(block.sizes[i], dtype=np.int32) + self.xp.asarray(self.start(block, dim), np.int32)
        return along.reshape((-1,) + (1,) * (len(block.sizes) - i - 1))

    def align(self, x: Any, source: Block, target: Block) -> Any:
        """Transpose and reshape an array with the source's dims so that it broadcasts against the target's dims."""
        if source.shape == target.shape:
            return x
        order = [source.position(d) for d in target.shape if d in source.shape]
        sizes = [source.size(d) if d in source.shape else 1 for d in target.shape]
        if order != list(range(len(order))):
            x = self.xp.transpose(x, order)
        return x if x.shape == tuple(sizes) else self.xp.reshape(x, sizes)


def letters(shapes: Sequence[Shape], out: Shape) -> str:
    """The einsum formula for operands and a result with named dims, such as "ab,bc->ac"."""
    table: dict[str, str] = {}
    for shape in (*shapes, out):
        for dim in shape:
            table.setdefault(dim.name, string.ascii_letters[len(table)])
    side = ["".join(table[d.name] for d in shape) for shape in (*shapes, out)]
    return f"{','.join(side[:-1])}->{side[-1]}"


Numbers = tuple[int, ...]  # one window: size, stride, dilation, base dilation, low and high padding


def window_count(n: int, window: Numbers) -> int:
    """The number of windows that fit into n elements plus padding."""
    size, stride, dilation, base, low, high = window
    span, extent = ((m - 1) * apart + 1 if m else 0 for m, apart in ((n, base), (size, dilation)))
    return max(0, (low + span + high - extent) // stride + 1)


def _at_least(dtype: Any, *xs: Any) -> Any:
    """`dtype`, if it is at least as wide as the operands' dtypes, else None. lax never narrows."""
    return dtype if all(_widens(x.dtype, dtype) for x in xs) else None


def _widens(of: Any, dtype: Any) -> bool:
    if np.dtype(of).itemsize == 1 and jnp.issubdtype(of, jnp.floating):  # JAX does not promote 8-bit floats implicitly
        return jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(of, dtype) == dtype and np.dtype(dtype).itemsize >= np.dtype(of).itemsize


class _Jax:
    """jax.numpy, plus functions that it lacks."""

    erf = staticmethod(lax.erf)
    erf_inv = staticmethod(lax.erf_inv)
    rsqrt = staticmethod(lax.rsqrt)
    logistic = staticmethod(lax.logistic)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
        return jnp.einsum(formula, *xs, preferred_element_type=_at_least(dtype, *xs))

    @staticmethod
    def bitcast(x: Any, dtype: Any) -> Any:
        return lax.bitcast_convert_type(x, dtype)

    @staticmethod
    def scatter_add(rows: int, index: Any, updates: Any) -> Any:
        """An array of `rows` rows with row j of `updates` added to row index[j]; out-of-range indices are dropped."""
        return jnp.zeros((rows, *updates.shape[1:]), updates.dtype).at[index].add(updates, mode="drop")

    @staticmethod
    def scatter_along(rows: int, index: Any, updates: Any) -> Any:
        """Like `scatter_add` along the last axis, with one row of `index` for each row of `updates`."""
        *rest, n = index.shape
        flat = index.reshape(math.prod(rest), n)
        row = np.arange(flat.shape[0], dtype=np.int32)[:, None]
        zeros = jnp.zeros((flat.shape[0], rows), updates.dtype)
        return zeros.at[row, flat].add(updates.reshape(flat.shape), mode="drop").reshape(*rest, rows)

    @staticmethod
    def barrier(x: Any) -> Any:
        return lax.optimization_barrier(x)

    @staticmethod
    def tell_host(function: Callable[..., Any], *xs: Any) -> Any:
        """The boolean that `function(*xs)` returns, which the host runs when the device gets here."""
        return io_callback(function, jax.ShapeDtypeStruct((), np.bool_), *jax.tree.map(lax.stop_gradient, xs))

    @staticmethod
    def sort_by(keys: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
        """Sort all keys in ascending order of the first, then the second, ...; NaN last, -0 equal to 0. Not stable."""
        return tuple(lax.sort(keys, dimension=axis, is_stable=False, num_keys=len(keys)))

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        """The k largest elements along the last axis and their indices; NaN first, ties in index order."""
        if jnp.issubdtype(x.dtype, jnp.floating):  # lax.top_k orders negative NaN below -inf
            x = jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)
        return lax.top_k(x, k)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int, axis: int) -> Any:
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    @staticmethod
    def dynamic_update(x: Any, update: Any, start: Any, axis: int) -> Any:
        return lax.dynamic_update_slice_in_dim(x, update, start, axis)

    @staticmethod
    def elementwise(f: Callable[..., Any], *xs: Any) -> Any:
        """Apply f to blocks after casting all to the same varying mesh axes, as `jax.vjp` inside f requires."""
        axes = [frozenset(jax.typeof(x).mat.varying) for x in xs]
        missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
        return f(*(lax.pcast(x, more, to="varying") if more else x for x, more in zip(xs, missing, strict=True)))

    @staticmethod
    def blocks(jaxpr: Any, xs: Sequence[Any], varying: tuple[tuple[str, ...], ...]) -> list[Any]:
        """The results of a jaxpr that was traced on arrays of this shape; they vary over these mesh axes."""
        return call_on_blocks(jaxpr, xs, varying)

    @staticmethod
    def conv(x: Any, w: Any, dims: tuple[str, str, str], windows: Sequence[Numbers], groups: int, dtype: Any) -> Any:
        """The convolution of x and w; `dims` are lax's dimension numbers of x, w and the result."""
        _, stride, dilation, base, low, high = zip(*windows, strict=True)
        spatial = [x.shape[dims[0].index(str(i))] for i in range(len(windows))]
        spans = [(n - 1) * b + 1 for n, b in zip(spatial, base, strict=True)]
        if any(-n > span for n, span in zip((*low, *high), (*spans, *spans), strict=True)):
            by_dim = {str(i): pad for i, pad in enumerate(zip(low, high, (b - 1 for b in base), strict=True))}
            x = lax.pad(x, np.zeros((), x.dtype), [by_dim.get(d, (0, 0, 0)) for d in dims[0]])
            low = high = (0,) * len(windows)  # lax.conv rejects negative padding larger than the input
            base = (1,) * len(windows)
        return lax.conv_general_dilated(
            x, w, stride, list(zip(low, high, strict=True)), base, dilation, dims,
            feature_group_count=groups,
            preferred_element_type=_at_least(dtype, x),
        )  # fmt: skip

    @staticmethod
    def pool(x: Any, reduce: str, fill: Any, along: Mapping[int, Numbers]) -> Any:
        """The sum or maximum of each window along these axes; NaN propagates."""
        every = [along.get(axis, (1, 1, 1, 1, 0, 0)) for axis in range(x.ndim)]
        size, stride, dilation, base, low, high = zip(*every, strict=True)
        pads = list(zip(low, high, strict=True))
        return lax.reduce_window(x, np.asarray(fill, x.dtype), getattr(lax, reduce), size, stride, pads, base, dilation)

    @staticmethod
    def window_slice(x: Any, axis: int, k: int, window: Numbers, fill: Any) -> Any:
        """The element that each window along an axis reads at its position k; `fill` outside the input."""
        _, stride, dilation, base, low, high = window
        n = window_count(x.shape[axis], window)
        if not n:
            return jnp.zeros(tuple(0 if i == axis else m for i, m in enumerate(x.shape)), x.dtype)
        pads = [(low, high, base - 1) if i == axis else (0, 0, 0) for i in range(x.ndim)]
        x, first = lax.pad(x, np.asarray(fill, x.dtype), pads), k * dilation
        return lax.slice_in_dim(x, first, first + (n - 1) * stride + 1, stride, axis)

    @staticmethod
    def attention(x: Arrays) -> Any:
        """The result of attention, and the logarithm of the sum of exponentials of each query's scores."""
        return blockwise.forward(Jax, x)

    @staticmethod
    def attention_grad(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> Any:
        """The cotangents of queries, keys, values and bias."""
        return blockwise.backward(Jax, x, out, lse, ct, lse_ct)

    @staticmethod
    def switch(index: Any, branches: Sequence[Callable[..., Any]], *xs: Any) -> Any:
        """Apply branch number `index` to the operands; all branches return the same shape."""
        return lax.switch(index, branches, *xs)

    @staticmethod
    def outline(f: Callable[..., Any]) -> Callable[..., Any]:
        """Make a long array function a separate StableHLO function, traced once per shape."""
        return jax.jit(f)


def _wide(x: Any) -> Any:
    # NumPy's reductions and products of 16- and 8-bit floats are slow and inaccurate
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "V" or (x.dtype.kind == "f" and x.dtype.itemsize < 4) else x


def _total_order(x: Any) -> Any:
    """Map to integers with the order of `top_k`: -inf < ... < -0 < 0 < ... < inf < NaN of either sign."""
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return x
    x = np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)
    bits = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & np.iinfo(bits.dtype).max)


class _NumPy:
    """numpy, plus functions that it lacks; narrow floats are accumulated in float32."""

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
    def scatter_along(rows: int, index: Any, updates: Any) -> Any:
        out = np.zeros((*updates.shape[:-1], rows), _wide(updates).dtype)
        inside = (index >= 0) & (index < rows)
        indices = [*np.indices(index.shape, sparse=True)[:-1], index]
        np.add.at(out, tuple(np.broadcast_to(p, index.shape)[inside] for p in indices), _wide(updates)[inside])
        return out.astype(updates.dtype)

    @staticmethod
    def barrier(x: Any) -> Any:
        return x

    @staticmethod
    def tell_host(function: Callable[..., Any], *xs: Any) -> Any:
        return function(*xs)

    @staticmethod
    def power(x: Any, y: Any) -> Any:
        """Like jax.numpy, including negative powers of integers, for which NumPy raises."""
        if x.dtype.kind != "i":
            return np.power(x, y)
        inverse = np.where(np.abs(x) == 1, np.where(y % 2 == 0, 1, x), 0).astype(x.dtype)
        return np.where(y < 0, inverse, np.power(x, np.maximum(y, 0)))

    @staticmethod
    def floor_divide(x: Any, y: Any) -> Any:
        """Like XLA, including division of integers by zero, for which NumPy returns 0."""
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
    def sort_by(keys: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
        order = np.lexsort(tuple(_wide(key) for key in reversed(keys)), axis=axis)
        return tuple(np.take_along_axis(key, order, axis) for key in keys)

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
    def blocks(jaxpr: Any, xs: Sequence[Any], varying: Any) -> list[Any]:
        return [np.asarray(y) for y in compiled(jaxpr)(*xs)]

    @staticmethod
    def conv(x: Any, w: Any, dims: tuple[str, str, str], windows: Sequence[Numbers], groups: int, dtype: Any) -> Any:
        """Gather every window of x, then compute one matrix product per group."""
        lhs, rhs, out = dims
        places = [str(i) for i in range(len(windows))]
        x = _wide(x).transpose([lhs.index(d) for d in ("N", *places, "C")])
        w = _wide(w).transpose([rhs.index(d) for d in (*places, "I", "O")])
        for i, window in enumerate(windows):
            x = np.stack([_NumPy.window_slice(x, 1 + i, k, window, 0) for k in range(window[0])], -1)
        x, w = np.moveaxis(x, 1 + len(places), -1), w.reshape(-1, w.shape[-1])
        y = []
        for part, kernel in zip(np.split(x, groups, -1), np.split(w, groups, -1), strict=True):
            y.append(part.reshape(-1, len(kernel)) @ kernel)
        y = np.concatenate(y, -1).reshape(*x.shape[: 1 + len(places)], -1)
        return y.transpose([["N", *places, "C"].index(d) for d in out]).astype(dtype)

    @staticmethod
    def pool(x: Any, reduce: str, fill: Any, along: Mapping[int, Numbers]) -> Any:
        y = _wide(x)
        for axis, window in along.items():
            parts = [_NumPy.window_slice(y, axis, k, window, fill) for k in range(window[0])]
            y = np.sum(parts, 0, dtype=y.dtype) if reduce == "add" else np.max(parts, 0)
        return y.astype(x.dtype)

    @staticmethod
    def window_slice(x: Any, axis: int, k: int, window: Numbers, fill: Any) -> Any:
        _, stride, dilation, base, low, _ = window
        n = x.shape[axis]
        positions = np.arange(window_count(n, window)) * stride - low + k * dilation
        inside = (positions >= 0) & (positions % base == 0) & (positions // base < n)
        y = np.full([len(positions) if i == axis else m for i, m in enumerate(x.shape)], fill, x.dtype)
        np.moveaxis(y, axis, 0)[inside] = np.moveaxis(x, axis, 0)[positions[inside] // base]
        return y

    @staticmethod
    def attention(x: Arrays) -> Any:
        return plain.forward(NumPy, x)

    @staticmethod
    def attention_grad(x: Arrays, out: Any, lse: Any, ct: Any, lse_ct: Any) -> Any:
        return plain.backward(NumPy, x, out, lse, ct, lse_ct)

    @staticmethod
    def switch(index: Any, branches: Sequence[Callable[..., Any]], *xs: Any) -> Any:
        return branches[int(index)](*xs)

    @staticmethod
    def outline(f: Callable[..., Any]) -> Callable[..., Any]:
        return f


Jax = _Jax()
NumPy = _NumPy()
