"""The functions of kernels in JAX: `jax.numpy`, plus functions that it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from . import direct, grouped
from .formulas import Numbers, widens, window_count
from .jaxprs import call_on_blocks
from .varying import alike


def _wide(x: Any) -> Any:
    """x in float32 if it is a narrower float: the dtype in which its elements are added up."""
    return x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def _at_least(dtype: Any, *xs: Any) -> Any:
    """`dtype`, if it is at least as wide as the operands' dtypes, else None. lax never narrows."""
    return dtype if all(widens(x.dtype, dtype) for x in xs) else None


class JaxFunctions:
    """jax.numpy, plus functions that it lacks."""

    empty = staticmethod(lax.empty)
    erf = staticmethod(lax.erf)
    erf_inv = staticmethod(lax.erf_inv)
    rsqrt = staticmethod(lax.rsqrt)
    logistic = staticmethod(lax.logistic)
    bitcast = staticmethod(lax.bitcast_convert_type)
    barrier = staticmethod(lax.optimization_barrier)
    blocks = staticmethod(call_on_blocks)
    switch = staticmethod(lax.switch)
    outline = staticmethod(jax.jit)  # a long array function as a StableHLO function, traced once per shape

    def __getattr__(self, name: str) -> Any:
        """Functions of `jax.numpy`; an instance already has those of `direct`."""
        return getattr(jnp, name)

    def __init__(self) -> None:
        vars(self).update(direct.UNARY | direct.BINARY | direct.REDUCTIONS | direct.OTHERS)

    @staticmethod
    def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
        return direct.einsum(formula, *xs, dtype=_at_least(dtype, *xs))

    grouped_dot = staticmethod(grouped.grouped_dot)
    grouped_outer = staticmethod(grouped.grouped_outer)

    @staticmethod
    def scatter_add(rows: int, index: Any, updates: Any) -> Any:
        """An array of `rows` rows with row j of `updates` added to row index[j]; out-of-range indices are dropped."""
        values = _wide(updates)
        total = jnp.zeros((rows, *updates.shape[1:]), values.dtype).at[index].add(values, mode="drop")
        return total.astype(updates.dtype)

    @staticmethod
    def scatter(how: str, x: Any, index: Any, updates: Any) -> Any:
        """x with row index[j] replaced by its "max", "min" or "multiply" with row j of `updates`, in any order."""
        return getattr(_wide(x).at[index], how)(_wide(updates), mode="drop").astype(x.dtype)

    @staticmethod
    def scatter_along(rows: int, index: Any, updates: Any) -> Any:
        """Like `scatter_add` along the last axis, with one row of `index` for each row of `updates`."""
        *rest, n = index.shape
        flat = index.reshape(math.prod(rest), n)
        row = np.arange(flat.shape[0], dtype=np.int32)[:, None]
        values = _wide(updates).reshape(flat.shape)
        total = jnp.zeros((flat.shape[0], rows), values.dtype).at[row, flat].add(values, mode="drop")
        return total.astype(updates.dtype).reshape(*rest, rows)

    @staticmethod
    def to_host(x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Host)

    @staticmethod
    def to_device(x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Device)

    @staticmethod
    def tell_host(function: Callable[..., Any], *xs: Any) -> Any:
        """The boolean that `function(*xs)` returns, which the host runs when the device gets here."""
        return io_callback(function, jax.ShapeDtypeStruct((), np.bool_), *jax.tree.map(lax.stop_gradient, xs))

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        """The k largest elements along the last axis and their indices; NaN first, ties in index order."""
        if jnp.issubdtype(x.dtype, jnp.floating):  # lax.top_k orders negative NaN below -inf
            x = jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)
        return lax.top_k(x, k)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int, axis: int) -> Any:
        return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)

    @staticmethod
    def keep(x: Any, axis: int, first: Any, last: Any, fill: Any) -> Any:
        """x where `first <= index < last` along an axis, else `fill`."""
        index = lax.broadcasted_iota(np.int32, x.shape, axis)
        inside = (index >= first) & (index < last)
        return lax.select(inside, x, lax.full(x.shape, fill, x.dtype))

    @staticmethod
    def dynamic_update(x: Any, update: Any, start: Any, axis: int) -> Any:
        x, update, start, zero = alike((x, update, jnp.asarray(start, np.int32), jnp.zeros((), np.int32)))
        starts = [start if i == axis else zero for i in range(x.ndim)]
        return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)

    @staticmethod
    def elementwise(f: Callable[..., Any], *xs: Any) -> Any:
        """Apply f to blocks after casting all to the same varying mesh axes, as `jax.vjp` inside f requires."""
        return f(*alike(xs))

    @staticmethod
    def conv(x: Any, w: Any, dims: tuple[str, str, str], windows: Sequence[Numbers], groups: int, dtype: Any) -> Any:
        """The convolution of x and w; `dims` are lax's dimension numbers of x, w and the result."""
        slid = [d for d in dims[1] if d.isdigit()]  # lax takes the windows in the order in which the kernel has them
        _, stride, dilation, base, low, high = zip(*(windows[int(d)] for d in slid), strict=True)
        spatial = [x.shape[dims[0].index(d)] for d in slid]
        spans = [(n - 1) * b + 1 for n, b in zip(spatial, base, strict=True)]
        if any(-n > span for n, span in zip((*low, *high), (*spans, *spans), strict=True)):
            by_dim = dict(zip(slid, zip(low, high, (b - 1 for b in base), strict=True), strict=True))
            x = lax.pad(x, np.zeros((), x.dtype), [by_dim.get(d, (0, 0, 0)) for d in dims[0]])
            low = high = (0,) * len(slid)  # lax.conv rejects negative padding larger than the input
            base = (1,) * len(slid)
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


Jax = JaxFunctions()
