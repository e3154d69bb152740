"""Pooling: sums, means and maxima of windows of one tensor, and `UNFOLD`, which the gradient of the maximum needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import ByDim, Dim, Shape, find
from ..errors import ShapeError, located
from ..ir import Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1, tensor
from .dtypes import cast, kind
from .elementwise import equal
from .masking import identity
from .reductions import broadcast, sum
from .reshape import blocked_kernel, transpose
from .window import Window, by_name, numbers, numeric, padded, pads_of, pairs, touched, transposed

__all__ = ["FOLD", "UNFOLD", "avg_pool", "max_pool", "sum_pool"]


def _slid_type(x: Type, *, window: tuple[Window, ...]) -> Type:
    """The type of x with the dims of its windows replaced by their output dims."""
    sizes = {v.dim: Dim(v.out_dim, v.out_size(d.size)) for v, d in pairs(window, x.shape)}
    return Type(tuple(sizes.get(d.name, d) for d in x.shape), x.dtype)


def _pool_kernel(reduce: str) -> Callable[..., Any]:
    def run(c: Local, x: Any, *, window: tuple[Window, ...]) -> Any:
        fill = identity({"max": "low", "add": 0}[reduce], np.dtype(x.dtype))
        along = {c.ins[0].position(v.dim): numeric(v) for v in window}
        return c.xp.pool(x, reduce, fill, along)

    return run


def _pool_flops(ins: Any, outs: Any, *, window: tuple[Window, ...], **_: Any) -> float:
    return float(math.prod(outs[0]) * math.prod(v.size for v in window))


def _transposed_windows(window: tuple[Window, ...], x: Shape, out: Shape) -> tuple[Window, ...]:
    return tuple(transposed(v, d.size, find(v.out_dim, out).size) for v, d in pairs(window, x))


SUM_POOL = Op(
    "sum_pool",
    type=_slid_type,
    kernel=blocked_kernel(_pool_kernel("add")),
    vjp=lambda ct, x, window: (bind1(SUM_POOL, ct, window=_transposed_windows(window, x.dims, ct.dims)),),
    flops=_pool_flops,
    linear=Linear.JOINT,
    mask=0,
    blocked=lambda x, *, window: touched(window),
)


def _max_pool_vjp(ct: Tensor, x: Tensor, out: Tensor, window: tuple[Window, ...]) -> tuple[Tensor]:
    """Divide ct equally among ties in each window. Padding is NaN, so it never equals the maximum."""
    places = tuple(Dim(f"{v.dim}_place", v.size) for v in window)
    unfolded = bind1(UNFOLD, x, window=window, places=places, value=math.nan)
    ties = cast(equal(unfolded, broadcast(out, unfolded.dims)), ct.dtype)
    shares = ties * broadcast(ct, ties.dims) / broadcast(sum(ties, places), ties.dims)  # NaN if the maximum is NaN
    return (bind1(FOLD, shares, window=_transposed_windows(window, x.dims, ct.dims), places=places),)


MAX_POOL = Op(
    "max_pool",
    type=_slid_type,
    kernel=blocked_kernel(_pool_kernel("max")),
    vjp=_max_pool_vjp,
    flops=_pool_flops,
    mask="low",
    blocked=lambda x, *, window: touched(window),
)


def _unfold_type(x: Type, *, window: tuple[Window, ...], places: Shape, value: Any) -> Type:
    pooled = _slid_type(x, window=window)
    return Type((*pooled.shape, *places), x.dtype)


def _unfold_kernel(c: Local, x: Any, *, window: tuple[Window, ...], places: Shape, value: Any) -> Any:
    for v in window:
        axis = c.ins[0].position(v.dim)
        x = c.xp.stack([c.xp.window_slice(x, axis, k, numeric(v), value) for k in range(v.size)], -1)
    return x


UNFOLD = Op(
    "unfold",
    type=_unfold_type,
    kernel=blocked_kernel(_unfold_kernel),
    vjp=lambda ct, x, window, places: (
        bind1(FOLD, ct, window=_transposed_windows(window, x.dims, ct.dims), places=places),
    ),
    flops=lambda *_, **__: 0,
    linear=Linear.PADDED,
    blocked=lambda x, *, window, places, value: (*touched(window), *(d.name for d in places)),
)


def _fold_type(x: Type, *, window: tuple[Window, ...], places: Shape) -> Type:
    pooled = _slid_type(x, window=window)
    return Type(tuple(d for d in pooled.shape if d not in places), x.dtype)


def _fold_kernel(c: Local, x: Any, *, window: tuple[Window, ...], places: Shape) -> Any:
    order = [c.ins[0].position(d) for d in (*(d for d in c.ins[0].shape if d not in places), *places)]
    names = [d.name for d in c.ins[0].shape if d not in places]
    x = x if order == sorted(order) else c.xp.transpose(x, order)
    for v in reversed(window):
        axis = names.index(v.dim)
        total = None
        for k in range(v.size):
            part = c.xp.window_slice(x[..., v.size - 1 - k], axis, k, numeric(v), 0)
            total = part if total is None else total + part
        x = total
    return x


def _fold_vjp(ct: Tensor, x: Tensor, window: tuple[Window, ...], places: Shape) -> tuple[Tensor]:
    back = _transposed_windows(window, x.dims, ct.dims)
    return (transpose(bind1(UNFOLD, ct, window=back, places=places, value=0), x.dims),)


FOLD = Op(
    "fold",
    type=_fold_type,
    kernel=blocked_kernel(_fold_kernel),
    vjp=_fold_vjp,
    flops=lambda ins, outs, **_: float(math.prod(ins[0])),
    linear=Linear.JOINT,
    mask=0,
    blocked=lambda x, *, window, places: (*touched(window), *(d.name for d in places)),
)


def _pool_windows(name: str, x: Tensor, window: ByDim[int], stride: Any, padding: Any) -> tuple[Window, ...]:
    sizes = by_name(name, window, "{'height': 2}")
    over = tuple(sizes)
    sizes = numbers(name, "window", sizes, over)
    strides = sizes if stride is None else numbers(name, "stride", stride, over)
    pads = pads_of(name, padding, "valid", over)
    return tuple(
        padded(Window(d, d, sizes[d], strides[d]), find(d, x.dims, "dim to slide a window over").size, pads[d])
        for d in over
    )


def max_pool(x: Any, window: ByDim[int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The maximum of each window over one or several dims, `{dim: size}`; the dims keep their names.

    >>> import meshdsl as md
    >>> md.max_pool(md.tensor([1.0, 3.0, 2.0, 4.0, 0.0], "length"), window={"length": 2})
    tensor(float32[length=2], [3. 4.])

    `stride` is one number for all dims, or numbers by dim name (default: the window size, so windows do not overlap).
    `padding` is "valid", "same" or `{dim: (low, high)}`, as in `md.conv`; its value is -inf (or the lowest integer),
    which is also the result of a window that contains only padding. NaN propagates; ties share the gradient equally.
    Raises `ShapeError` for a dim that x lacks, and for booleans and complex numbers.
    """
    x = as_tensor(x)

    def resolve() -> tuple[Window, ...]:
        if kind(x.dtype) not in "fi":
            raise ShapeError(f"md.max_pool needs numbers that have an order, got {x.dtype.name}")
        return _pool_windows("max_pool", x, window, stride, padding)

    windows = located(resolve)
    return bind1(MAX_POOL, x, window=windows) if windows else x


def sum_pool(x: Any, window: ByDim[int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The sum of each window over one or several dims. Padding is 0; booleans are counted in int32; see `max_pool`."""
    x = as_tensor(x)
    x = cast(x, "int32") if kind(x.dtype) == "b" else x
    windows = located(lambda: _pool_windows("sum_pool", x, window, stride, padding))
    return bind1(SUM_POOL, x, window=windows) if windows else x


def avg_pool(x: Any, window: ByDim[int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The mean of x's elements in each window; see `max_pool`. Padding is neither summed nor counted.

    >>> import meshdsl as md
    >>> md.avg_pool(md.tensor([1.0, 3.0, 2.0, 4.0, 6.0], "length"), window={"length": 2}, padding="same")
    tensor(float32[length=3], [2. 3. 6.])

    The result of a window that contains only padding is NaN.
    """
    x = as_tensor(x)
    windows = located(lambda: _pool_windows("avg_pool", x, window, stride, padding))
    total = sum_pool(x, window, stride, padding)
    counts = [(Dim(v.out_dim, v.out_size(d.size)), _real_counts(v, d.size)) for v, d in pairs(windows, x.dims)]
    same = math.prod(int(n[0]) for _, n in counts if len(n) and (n == n[0]).all())
    total = total / same if same != 1 or kind(total.dtype) == "i" else total
    for dim, n in counts:
        if len(n) and (n != n[0]).any():
            total = total / cast(tensor(n, [dim]), total.dtype)
    return total


def _real_counts(v: Window, n: int) -> np.ndarray:
    """The number of input elements in each window, for an input of n elements."""
    p = np.arange(v.out_size(n))[:, None] * v.stride - v.low + np.arange(v.size) * v.dilation
    return ((p >= 0) & (p < v.span(n)) & (p % v.base_dilation == 0)).sum(1).astype(np.int32)
