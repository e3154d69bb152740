"""Rows of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.ops import pooling
from meshdsl.ops.window import Window, transposed
from meshdsl.trace import bind1

from .operands import INTS, REAL, V, X
from .row import In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def _conv_of(spec: tuple[str, str, str], stride: Any, pads: Any, base: Any = None, dilation: Any = None) -> Callable[..., Any]:
    """lax's convolution; spec letters after a dot are dims that the operand lacks, added with size 1."""

    def reference(x: Any, w: Any) -> Any:
        lhs, rhs, out = (s.partition(".") for s in spec)
        x, w = (np.asarray(v).reshape(v.shape + (1,) * len(s[2])) for v, s in ((x, lhs), (w, rhs)))
        numbers = (lhs[0] + lhs[2], rhs[0] + rhs[2], out[0] + out[2])
        y = jax.lax.conv_general_dilated(x, w, stride, pads, base, dilation, numbers)
        return y.reshape(y.shape[: y.ndim - len(out[2])])

    return reference


def windows() -> Iterator[Row]:
    sums = (*REAL, "int32")
    line, kernel = In("a b c"), In("k=3 c d")
    conv = lambda x, w: md.conv(x, w, window={"b": "k"}, out="a b d")
    yield Row("conv", conv, (line, kernel), _conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 1)]), sums)
    strided = lambda x, w: md.conv(x, w, {"b": "k"}, "b d a", stride=2, dilation=2, padding={"b": (3, 4)})
    yield Row("conv_stride", strided, (In("c b a"), In("d c k=3")), _conv_of(("C0N", "OI0", "0CN"), (2,), [(3, 4)], None, (2,)), sums)
    based = lambda x, w: md.conv(x, w, {"b": "k"}, "a d b", base_dilation=3, stride=2, padding={"b": (-1, 4)})
    yield Row("conv_base", based, (line, In("k=4 d c")), _conv_of(("N0C", "0OI", "NC0"), (2,), [(-1, 4)], (3,)), REAL)
    plane = lambda x, w: md.conv(x, w, {"c": "l", "b": "k"}, "a b c t", stride={"c": 2}, padding={"b": (2, 0), "c": (1, 2)})
    yield Row("conv_two", plane, (In("a b c d"), In("k=3 l=2 d t")), _conv_of(("N01C", "01IO", "N01C"), (1, 2), [(2, 0), (1, 2)]), REAL)
    cube = lambda x, w: md.conv(x, w, {"b": "k", "c": "l", "d": "m"}, "a b c d t", padding=dict.fromkeys("bcd", (1, 1)), stride={"d": 2})
    yield Row("conv_three", cube, (In("a b c d e=2"), In("k=2 l=3 m=1 e=2 t")), _conv_of(("N012C", "012IO", "N012C"), (1, 1, 2), [(1, 1)] * 3), ("float32",))
    apart = lambda x, w: md.conv(x, w, {"b": "k"}, "a b e d", padding={"b": (1, 2)})

    def grouped(x: Any, w: Any) -> Any:
        parts = [_conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 2)])(x[..., i, :], w[i]) for i in range(2)]
        return np.stack(parts, 2)

    yield Row("conv_group", apart, (In("a b e=2 c"), In("e=2 k=3 c d")), grouped, REAL)
    depth = lambda x, w: md.conv(x, w, {"b": "k"}, "a b c", padding={"b": (0, 2)})
    each = lambda x, w: np.stack([_conv_of(("N0.C", "0.IO", "N0.C"), (1,), [(0, 2)])(x[..., i], w[:, i]) for i in range(x.shape[-1])], -1)
    yield Row("conv_depthwise", depth, (line, In("k=3 c")), each, ("float32",))
    bare = lambda x, w: md.conv(x, w, {"b": "k"}, "b", padding={"b": (1, 1)})
    yield Row("conv_bare", bare, (V, In("k=2")), _conv_of(("0.NC", "0.IO", "0.NC"), (1,), [(1, 1)]), REAL)
    slid = lambda x, w: md.conv(x, w, {"b": ("b", "lag")}, "lag a d", padding={"b": (1, 1)})
    yield Row("conv_lag", slid, (In("c b a"), In("b c d")), _conv_of(("C0N", "0IO", "0NC"), (1,), [(1, 1)]), ("float32",))
    wide = lambda x, w: md.conv(x, w, {"b": "k"}, "a b d", dtype="float32")
    wider = lambda x, w: _conv_of(("N0C", "0IO", "N0C"), (1,), [(1, 1)])(x.astype(np.float32), w.astype(np.float32))
    yield Row("conv_dtype", wide, (line, kernel), wider, ("bfloat16",))

    def pooled(reduce: Any, start: Any, size: tuple[int, ...], stride: tuple[int, ...], pads: Any) -> Callable[..., Any]:
        return lambda x: jax.lax.reduce_window(jnp.asarray(x), np.asarray(start, x.dtype), reduce, size, stride, pads)

    lowest = lambda x: -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    best = lambda x: pooled(jax.lax.max, lowest(x), (1, 2), (1, 2), [(0, 0), (0, 0)])(x)
    yield Row("max_pool", lambda x: md.max_pool(x, {"b": 2}), (X,), best, (*REAL, *INTS), smooth=False)
    best_two = lambda x: pooled(jax.lax.max, lowest(x), (3, 1, 2), (2, 1, 1), [(1, 2), (0, 0), (3, 1)])(x)
    two = lambda x: md.max_pool(x, {"a": 3, "c": 2}, stride={"a": 2}, padding={"a": (1, 2), "c": (3, 1)})
    yield Row("max_pool_two", two, (In("a b c"),), best_two, sums, smooth=False)
    total = pooled(jax.lax.add, 0, (3, 1), (2, 1), [(1, 1), (0, 0)])
    yield Row("sum_pool", lambda x: pooling.sum_pool(x, {"a": 3}, 2, {"a": (1, 1)}), (X,), total, sums)
    mean = lambda x: total(x) / total(np.ones_like(x))
    yield Row("avg_pool", lambda x: md.avg_pool(x, {"a": 3}, 2, {"a": (1, 1)}), (X,), mean, REAL, exact=False)
    mean_two = lambda x: pooled(jax.lax.add, 0, (2, 3), (2, 3), [(0, 0), (0, 0)])(x) / 6
    yield Row("avg_pool_two", lambda x: md.avg_pool(x, {"a": 2, "b": 3}), (X,), mean_two, ("float32",), exact=False)
    halved, spaced = Window("b", "c", 3, stride=2, low=1), Window("b", "b", 3, dilation=2, low=2, high=2)

    def read(x: Any, v: Window, fill: float) -> np.ndarray:
        """The element that each window over b reads at each of its positions, by the definition of a window."""
        elements = np.full((v.size, x.shape[0], v.out_size(x.shape[1])), fill, x.dtype)
        for k, o in np.ndindex(v.size, elements.shape[2]):
            at, hole = divmod(o * v.stride - v.low + k * v.dilation, v.base_dilation)
            if not hole and 0 <= at < x.shape[1]:
                elements[k, :, o] = x[:, at]
        return elements

    def matched(values: Any, keys: Any, targets: Any, v: Window) -> np.ndarray:
        shares = read(values, v, 0)
        return np.where(read(keys, v, 0) == targets, shares, shares * 0).sum(0, dtype=values.dtype)

    def counted(keys: Any, targets: Any) -> np.ndarray:
        return (read(keys, halved, np.nan) == targets).sum(0).astype(np.float32)

    count = lambda x, y: bind1(pooling.COUNT_EQUAL, x, y, window=(halved,), dtype=np.dtype("float32"))
    yield Row("count_equal", count, (In("a b=2*c"), In("a c")), counted, REAL, differentiable=False)
    ties = lambda v, x, y: bind1(pooling.SUM_EQUAL, v, x, y, window=(halved,))
    yield Row("sum_equal", ties, (In("a b=2*c"), In("a b=2*c"), In("a c")), lambda v, x, y: matched(v, x, y, halved), REAL)
    gaps = lambda v, x, y: bind1(pooling.SUM_EQUAL, v, x, y, window=(spaced,))
    yield Row("sum_equal_apart", gaps, (X, X, X), lambda v, x, y: matched(v, x, y, spaced), REAL)
    back = lambda n: transposed(halved, 2 * n, n)
    shared = lambda v, x, y: bind1(pooling.SUM_EQUAL, v, x, y, window=(back(v.dims[1].size),))
    yield Row("sum_equal_back", shared, (In("a c"), In("a c"), In("a b=2*c")), lambda v, x, y: matched(v, x, y, back(v.shape[1])), REAL)
