"""The functions of kernels in NumPy, for the simulator: they share the mathematics with JAX, and no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .formulas import Numbers, widens, window_count
from .jaxprs import compiled


def _wide(x: Any) -> Any:
    # NumPy's reductions and products of 16- and 8-bit floats are slow and inaccurate
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "V" or (x.dtype.kind == "f" and x.dtype.itemsize < 4) else x


def _factors(dtype: Any, *xs: Any) -> list[Any]:
    """Operands of a product in the dtype in which it is added: that of the sum, if it is at least as wide."""
    wide = all(widens(x.dtype, dtype) for x in xs)
    return [_wide(x.astype(dtype) if wide else x) for x in xs]


def _total_order(x: Any) -> Any:
    """Map to integers with the order of `top_k`: -inf < ... < -0 < 0 < ... < inf < NaN of either sign."""
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return x
    x = np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)
    bits = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & np.iinfo(bits.dtype).max)


SMALL = 64  # elements


class _NumPy:
    """numpy, plus functions that it lacks; narrow floats are accumulated in float32."""

    barrier = to_host = to_device = outline = staticmethod(lambda x: x)  # there is one memory, and nothing is compiled

    def __getattr__(self, name: str) -> Any:
        value = vars(self)[name] = getattr(np, name)  # found there from now on
        return value

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Any:
        """NaN, where a device has what its memory has; zeros for dtypes without NaN."""
        return np.full(shape, np.nan if np.dtype(dtype).kind in "fVc" else 0, dtype)

    @staticmethod
    def astype(x: Any, dtype: Any) -> Any:
        """Like XLA: integers take the nearest value that they hold, and 0 for NaN, where NumPy's wrap."""
        if x.dtype.kind not in "fV" or np.dtype(dtype).kind not in "iu":
            return x.astype(dtype)
        limits, y = np.iinfo(dtype), np.nan_to_num(x.astype(np.float64), nan=0.0)
        low, high = y <= float(limits.min), y >= float(limits.max)
        return np.where(low, limits.min, np.where(high, limits.max, np.where(low | high, 0, y).astype(dtype)))

    @staticmethod
    def erf(x: Any) -> Any:
        from scipy.special import erf  # on first use: importing it takes a sixth of the time of importing meshdsl

        return erf(_wide(x)).astype(x.dtype)

    @staticmethod
    def erf_inv(x: Any) -> Any:
        from scipy.special import erfinv

        return erfinv(_wide(x)).astype(x.dtype)

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
        large = any(x.size > SMALL for x in xs)  # of small operands, finding the order of products takes the time
        return NumPy.astype(np.asarray(np.einsum(formula, *_factors(dtype, *xs), optimize=large)), dtype)

    @staticmethod
    def grouped_dot(x: Any, w: Any, group: Any, dtype: Any, few: bool = False) -> Any:
        out = np.zeros((len(x), w.shape[2]), dtype)
        for g in range(len(w)):
            out[group == g] = NumPy.einsum("ab,bc->ac", x[group == g], w[g], dtype=_wide(out).dtype)
        return out

    @staticmethod
    def grouped_outer(x: Any, y: Any, group: Any, groups: int, dtype: Any, few: bool = False) -> Any:
        wide = _wide(np.zeros((), dtype)).dtype
        sums = [NumPy.einsum("ab,ac->bc", x[group == g], y[group == g], dtype=wide) for g in range(groups)]
        return np.asarray(sums, dtype).reshape(groups, x.shape[1], y.shape[1])

    @staticmethod
    def bitcast(x: Any, dtype: Any) -> Any:
        return np.ascontiguousarray(x).view(dtype).reshape(np.shape(x))

    @staticmethod
    def rows(x: Any, index: Any) -> Any:
        return x[index]

    @staticmethod
    def scatter_add(rows: int, index: Any, updates: Any) -> Any:
        out = np.zeros((rows, *updates.shape[1:]), _wide(updates).dtype)
        inside = (index >= 0) & (index < rows)
        np.add.at(out, index[inside], _wide(updates)[inside])
        return out.astype(updates.dtype)

    @staticmethod
    def scatter(how: str, x: Any, index: Any, updates: Any) -> Any:
        out, inside = np.array(_wide(x)), (index >= 0) & (index < len(x))
        function = {"max": np.maximum, "min": np.minimum, "multiply": np.multiply}[how]
        function.at(out, index[inside], _wide(updates)[inside])
        return out.astype(x.dtype)

    @staticmethod
    def scatter_along(rows: int, index: Any, updates: Any) -> Any:
        out = np.zeros((*updates.shape[:-1], rows), _wide(updates).dtype)
        inside = (index >= 0) & (index < rows)
        indices = [*np.indices(index.shape, sparse=True)[:-1], index]
        np.add.at(out, tuple(np.broadcast_to(p, index.shape)[inside] for p in indices), _wide(updates)[inside])
        return out.astype(updates.dtype)

    @staticmethod
    def tell_host(function: Callable[..., Any], *xs: Any) -> Any:
        return function(*xs)

    @staticmethod
    def power(x: Any, y: Any) -> Any:
        """Like jax.numpy, which reads six bits of an integer exponent; for a negative one NumPy raises."""
        if x.dtype.kind not in "iu":
            return np.power(x, y)
        return np.where((x == 0) & (y != 0), 0, np.power(x, y & 63)).astype(x.dtype)

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
    def top_k(x: Any, k: int) -> Any:
        index = np.argsort(~_total_order(x), axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(x, index, axis=-1), index.astype(np.int32)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int, axis: int) -> Any:
        start = int(np.clip(start, 0, x.shape[axis] - size))
        return np.take(x, range(start, start + size), axis=axis)

    @staticmethod
    def keep(x: Any, axis: int, first: Any, last: Any, fill: Any) -> Any:
        y = np.full_like(x, fill)
        inside = (slice(None),) * axis + (slice(int(first), max(int(last), 0)),)
        y[inside] = x[inside]
        return y

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
        x, w = _factors(dtype, x, w)
        x = x.transpose([lhs.index(d) for d in ("N", *places, "C")])
        w = w.transpose([rhs.index(d) for d in (*places, "I", "O")])
        for i, window in enumerate(windows):
            x = np.stack([_NumPy.window_slice(x, 1 + i, k, window, 0) for k in range(window[0])], -1)
        x, w = np.moveaxis(x, 1 + len(places), -1), w.reshape(-1, w.shape[-1])
        y = []
        for part, kernel in zip(np.split(x, groups, -1), np.split(w, groups, -1), strict=True):
            y.append(part.reshape(-1, len(kernel)) @ kernel)
        y = np.concatenate(y, -1).reshape(*x.shape[: 1 + len(places)], -1)
        return NumPy.astype(y.transpose([["N", *places, "C"].index(d) for d in out]), dtype)

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
    def switch(index: Any, branches: Sequence[Callable[..., Any]], *xs: Any) -> Any:
        return branches[int(index)](*xs)


NumPy = _NumPy()
