"""Pooling: sums, means and maxima of windows of one tensor.

The gradient of a maximum needs two operations more: `COUNT_EQUAL`, the number of ties, and `SUM_EQUAL`, which adds the
shares of the windows that read an element. `SUM_EQUAL` over the transposed windows is its own gradient.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import ByDim, Dim, Shape, find, show
from ..errors import ShapeError
from ..ir import Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1, tensor
from .dtypes import cast, in_wide, kind, mean_dtype, sum_dtype
from .masking import identity
from .reductions import spread
from .window import Window, by_name, numbers, numeric, padded, pads_of, pairs, touched, transposed


def _slid_type(x: Type, *, window: tuple[Window, ...]) -> Type:
    """The type of x with the dims of its windows replaced by their output dims."""
    sizes = {v.dim: Dim(v.out_dim, v.out_size(d.size)) for v, d in pairs(window, x.dims)}
    return Type(tuple(sizes.get(d.name, d) for d in x.dims), x.dtype)


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
    kernel=_pool_kernel("add"),
    vjp=lambda ct, x, window: (bind1(SUM_POOL, ct, window=_transposed_windows(window, x.dims, ct.dims)),),
    flops=_pool_flops,
    fuses=Fuses.REDUCE,
    linear=Linear.JOINT,
    mask=0,
    blocked=lambda x, *, window: touched(window),
)


def _max_pool_vjp(ct: Tensor, x: Tensor, out: Tensor, window: tuple[Window, ...]) -> tuple[Tensor]:
    """Divide ct equally among ties in each window, one dim after the other.

    An element equals the maximum of its window over two dims if it equals the maximum over the first, and this equals
    the maximum over both. So the maxima over the first dims are computed again, and each step reads the window of one
    dim. If a maximum is NaN, nothing equals it, and dividing by 0 ties makes the gradient of its window NaN.
    """
    maxima = [x]
    for v in window[:-1]:
        maxima.append(bind1(MAX_POOL, maxima[-1], window=(v,)))
    steps = list(zip(window, maxima, [*maxima[1:], out], strict=True))
    (first, before, after), *rest = steps
    dtype = np.dtype(np.float32 if x.dtype.itemsize < 4 else x.dtype)  # bfloat16 cannot count beyond 256
    ties = bind1(COUNT_EQUAL, before, after, window=(first,), dtype=dtype)
    for v, before, after in rest:
        ties = bind1(SUM_EQUAL, ties, before, after, window=(v,))
    share = cast(ct / ties, ct.dtype)
    for v, before, after in reversed(steps):
        share = bind1(SUM_EQUAL, share, after, before, window=_transposed_windows((v,), before.dims, after.dims))
    return (share,)


MAX_POOL = Op(
    "max_pool",
    type=_slid_type,
    kernel=_pool_kernel("max"),
    vjp=_max_pool_vjp,
    flops=_pool_flops,
    fuses=Fuses.REDUCE,
    mask="low",
    blocked=lambda x, *, window: touched(window),
)


def _compared(kinds: str, window: tuple[Window, ...], read: Type, *others: Type) -> Shape:
    """The dims of a result with one target per window; raises ShapeError if the operands have other dims or kinds."""
    if kind(read.dtype) not in kinds:
        raise ShapeError(f"windows over {read} cannot be compared and counted or summed: its dtype does not allow it")
    shape = _slid_type(read, window=window).dims
    *also_read, targets = others
    if targets.dims != shape or any(x.dims != read.dims for x in also_read):
        raise ShapeError(
            f"windows over {read} are compared with targets {show(shape)}, got {', '.join(map(str, others))}"
        )
    return shape


def _elements(c: Local, window: tuple[Window, ...], *filled: tuple[Any, Any]) -> Iterator[list[Any]]:
    """For each position of a window, the elements there of each array for all windows; arrays come with their fill."""
    along = [(c.ins[0].position(v.dim), numeric(v)) for v in window]
    for position in itertools.product(*(range(v.size) for v in window)):
        elements = []
        for x, fill in filled:
            for (axis, v), k in zip(along, position, strict=True):
                x = c.xp.window_slice(x, axis, k, v, fill)
            elements.append(x)
        yield elements


def _count_equal_kernel(c: Local, keys: Any, targets: Any, *, window: tuple[Window, ...], dtype: np.dtype) -> Any:
    """Outside the input, the key is NaN, which equals nothing."""
    counts = ((key == targets).astype(dtype) for (key,) in _elements(c, window, (keys, math.nan)))
    return functools.reduce(operator.add, counts)


def _sum_equal_kernel(c: Local, values: Any, keys: Any, targets: Any, *, window: tuple[Window, ...]) -> Any:
    """A factor 0 keeps NaN; XLA would rewrite a product with the comparison to a choice between the value and 0."""
    parts = _elements(c, window, (values, 0), (keys, 0))
    return functools.reduce(operator.add, (c.xp.where(key == targets, value, value * 0) for value, key in parts))


def _sum_equal_vjp(ct: Tensor, values: Tensor, keys: Tensor, targets: Tensor, window: tuple[Window, ...]) -> Any:
    back = _transposed_windows(window, values.dims, ct.dims)
    return bind1(SUM_EQUAL, ct, targets, keys, window=back), None, None


COUNT_EQUAL = Op(  # the number of elements of each window that equal its target
    "count_equal",
    type=lambda keys, targets, *, window, dtype: Type(_compared("f", window, keys, targets), dtype),
    kernel=_count_equal_kernel,
    vjp=lambda ct, keys, targets: (None, None),
    vmap=lambda *xs, new, **params: bind1(COUNT_EQUAL, *spread(xs, new), **params),
    flops=_pool_flops,
    fuses=Fuses.REDUCE,
    mask=math.nan,
    blocked=lambda *_, window, **__: touched(window),
)
SUM_EQUAL = Op(  # the sum of the values in each window whose keys equal its target
    "sum_equal",
    type=lambda values, keys, targets, *, window: Type(_compared("fci", window, values, keys, targets), values.dtype),
    kernel=_sum_equal_kernel,
    vjp=_sum_equal_vjp,
    vmap=lambda *xs, new, **params: bind1(SUM_EQUAL, *spread(xs, new), **params),
    flops=_pool_flops,
    fuses=Fuses.REDUCE,
    linear=Linear.FIRST,
    mask=0,
    blocked=lambda *_, window: touched(window),
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

    if kind(x.dtype) not in "fi":
        raise ShapeError(f"md.max_pool needs numbers that have an order, got {x.dtype.name}")
    windows = _pool_windows("max_pool", x, window, stride, padding)
    return bind1(MAX_POOL, x, window=windows) if windows else x


def sum_pool(x: Any, window: ByDim[int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The sum of each window over one or several dims, in the dtype of `md.sum`. Padding is 0; see `max_pool`."""
    x = as_tensor(x)
    windows = _pool_windows("sum_pool", x, window, stride, padding)
    return in_wide(lambda wide: bind1(SUM_POOL, wide, window=windows) if windows else wide, x, sum_dtype(x.dtype))


def avg_pool(x: Any, window: ByDim[int], stride: Any = None, padding: Any = "valid") -> Tensor:
    """The mean of x's elements in each window; see `max_pool` for `window`, `stride` and `padding`.

    Padding is neither summed nor counted.

    >>> import meshdsl as md
    >>> md.avg_pool(md.tensor([1.0, 3.0, 2.0, 4.0, 6.0], "length"), window={"length": 2}, padding="same")
    tensor(float32[length=3], [2. 3. 6.])

    The result of a window that contains only padding is NaN. The dtype and the accuracy are those of `md.mean`.
    """
    x = as_tensor(x)
    windows = _pool_windows("avg_pool", x, window, stride, padding)
    counts = [(Dim(v.out_dim, v.out_size(d.size)), _real_counts(v, d.size)) for v, d in pairs(windows, x.dims)]
    same = math.prod(int(n[0]) for _, n in counts if len(n) and (n == n[0]).all())

    def wide_mean(x: Tensor) -> Tensor:
        total = sum_pool(x, window, stride, padding)
        total = total / same if same != 1 else total
        for dim, n in counts:
            if len(n) and (n != n[0]).any():
                total = total / cast(tensor(n, [dim]), total.dtype)
        return total

    return in_wide(wide_mean, x, mean_dtype(x.dtype))


def _real_counts(v: Window, n: int) -> np.ndarray:
    """The number of input elements in each window, for an input of n elements."""
    p = np.arange(v.out_size(n))[:, None] * v.stride - v.low + np.arange(v.size) * v.dilation
    return ((p >= 0) & (p < v.span(n)) & (p % v.base_dilation == 0)).sum(1).astype(np.int32)
