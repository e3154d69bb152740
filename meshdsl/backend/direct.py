"""Functions of `jax.numpy` as the one operation of `lax` that each of them becomes, where it does.

`jax.numpy` traces a function of its own for every new shape before it gets there: 0.4 ms for a sum, 1.6 ms for a
`where`, of which `lax` takes a tenth. What needs promotion, another rank or a special case stays with `jax.numpy`, and
results are equal bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .varying import alike

Function = Callable[..., Any]


@lru_cache(maxsize=64)
def _kind(dtype: Any) -> str:
    """ "f", "i" (signed), "u", "b" or "c"; "" for other dtypes, such as keys."""
    kinds = {"f": np.floating, "i": np.signedinteger, "u": np.unsignedinteger, "b": np.bool_, "c": np.complexfloating}
    return next((kind for kind, parent in kinds.items() if jnp.issubdtype(dtype, parent)), "")


def _unary(general: Function, direct: Function, kinds: str) -> Function:
    def function(x: Any) -> Any:
        return direct(x) if isinstance(x, jax.Array) and _kind(x.dtype) in kinds else general(x)

    return function


def _alike(x: Any, y: Any) -> bool:
    """True for arrays of one dtype and one rank, whose axes are equal or 1; or if one of the two is a number."""
    arrays = isinstance(x, jax.Array) and isinstance(y, jax.Array | np.ndarray)
    return arrays and x.dtype == y.dtype and (x.ndim == y.ndim or not x.ndim or not y.ndim)


def _binary(general: Function, direct: Function, kinds: str) -> Function:
    def function(x: Any, y: Any) -> Any:
        return direct(x, y) if _alike(x, y) and _kind(x.dtype) in kinds else general(x, y)

    return function


def _reduction(general: Function, direct: Function, kinds: str) -> Function:
    def function(x: Any, axis: Any) -> Any:
        simple = isinstance(x, jax.Array) and isinstance(axis, tuple) and x.size and _kind(x.dtype) in kinds
        if simple and x.dtype.itemsize >= 4 and all(isinstance(i, int) and i >= 0 for i in axis):
            return direct(x, axis)
        return general(x, axis=axis)

    return function


UNARY = {
    name: _unary(getattr(jnp, name), direct, kinds)
    for name, direct, kinds in [
        ("exp", lax.exp, "f"), ("log", lax.log, "f"), ("log1p", lax.log1p, "f"), ("expm1", lax.expm1, "f"),
        ("sqrt", lax.sqrt, "f"), ("sin", lax.sin, "f"), ("cos", lax.cos, "f"), ("tanh", lax.tanh, "f"),
        ("floor", lax.floor, "f"), ("ceil", lax.ceil, "f"), ("square", lax.square, "fiu"), ("sign", lax.sign, "fi"),
        ("abs", lax.abs, "fi"), ("negative", lax.neg, "fiu"), ("isfinite", lax.is_finite, "f"),
        ("logical_not", lax.bitwise_not, "b"), ("invert", lax.bitwise_not, "iub"),
    ]
}  # fmt: skip

BINARY = {
    name: _binary(getattr(jnp, name), direct, kinds)
    for name, direct, kinds in [
        ("add", lax.add, "fiu"), ("subtract", lax.sub, "fiu"), ("multiply", lax.mul, "fiu"), ("divide", lax.div, "f"),
        ("maximum", lax.max, "fiu"), ("minimum", lax.min, "fiu"), ("equal", lax.eq, "fiub"),
        ("not_equal", lax.ne, "fiub"), ("less", lax.lt, "fiu"), ("less_equal", lax.le, "fiu"),
        ("greater", lax.gt, "fiu"), ("greater_equal", lax.ge, "fiu"), ("bitwise_and", lax.bitwise_and, "iub"),
        ("bitwise_or", lax.bitwise_or, "iub"), ("bitwise_xor", lax.bitwise_xor, "iub"),
        ("left_shift", lax.shift_left, "iu"),
    ]
}  # fmt: skip

REDUCTIONS = {
    name: _reduction(getattr(jnp, name), direct, kinds)
    for name, direct, kinds in [
        ("sum", lax.reduce_sum, "f"),
        ("max", lax.reduce_max, "fiu"),
        ("min", lax.reduce_min, "fiu"),
        ("prod", lax.reduce_prod, "f"),
    ]
}


def where(condition: Any, x: Any, y: Any) -> Any:
    """`jnp.where` of three operands."""
    simple = _alike(x, y) and isinstance(condition, jax.Array) and condition.dtype == np.bool_
    shape = np.broadcast_shapes(condition.shape, x.shape, y.shape) if simple else ()
    if not shape or condition.ndim not in (0, len(shape)):
        return jnp.where(condition, x, y)
    condition = _expanded(condition, shape) if condition.ndim else condition
    return lax.select(condition, _expanded(x, shape), _expanded(y, shape))


def clip(x: Any, low: int, high: int) -> Any:
    """`jnp.clip`, of int32 as one operation."""
    if isinstance(x, jax.Array) and x.dtype == np.int32:
        return lax.clamp(np.int32(low), x, np.int32(high))
    return jnp.clip(x, low, high)


def moveaxis(x: Any, source: Any, destination: Any) -> Any:
    """`jnp.moveaxis`; the array itself if no axis moves."""
    axes = np.empty(range(x.ndim))  # the size of each axis is its number
    return lax.transpose(x, np.moveaxis(axes, source, destination).shape)


def _expanded(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def einsum(formula: str, *xs: Any, dtype: Any) -> Any:
    """`jnp.einsum`; the product of two arrays as one operation, and a transpose if neither order is that of `out`."""
    *letters, out = re.split(",|->", formula)
    if not _is_product(letters, out, xs):
        return jnp.einsum(formula, *xs, preferred_element_type=dtype)
    (a, x), (b, y) = zip(letters, xs, strict=True)
    both = {*a} & {*b}
    batch, summed = [n for n in out if n in both], sorted(both - {*out})
    if [*batch, *(n for n in a + b if n not in both)] != [*out]:
        (a, x), (b, y) = (b, y), (a, x)
    axes: Any = [tuple(tuple(map(each.index, names)) for each in (a, b)) for names in (summed, batch)]
    product = lax.dot_general(x, y, axes, preferred_element_type=dtype or x.dtype)
    order = [*batch, *(n for n in a + b if n not in both)]
    return lax.transpose(product, [order.index(n) for n in out])


def _is_product(letters: Sequence[str], out: str, xs: Sequence[Any]) -> bool:
    """True for two arrays of one dtype that agree in sizes; only letters of both may be missing in the result."""
    if len(xs) != 2 or xs[0].dtype != xs[1].dtype or not {*letters[0]} ^ {*letters[1]} <= {*out}:
        return False
    sizes = [pair for each, x in zip(letters, xs, strict=True) for pair in zip(each, x.shape, strict=True)]
    return len(dict(sizes)) == len({*sizes})


def reshape(x: Any, shape: Any) -> Any:
    """`jnp.reshape`; a size of -1 follows from the others."""
    known = isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
    return lax.reshape(x, tuple(shape)) if known and isinstance(x, jax.Array) else jnp.reshape(x, shape)


def pad(x: Any, pads: Sequence[tuple[int, int]], constant_values: Any = 0) -> Any:
    """`jnp.pad` with one constant."""
    if not (isinstance(x, jax.Array) and np.isscalar(constant_values)):
        return jnp.pad(x, pads, constant_values=constant_values)
    return lax.pad(x, jnp.asarray(constant_values).astype(x.dtype), [(low, high, 0) for low, high in pads])


def rows(x: Any, index: Any) -> Any:
    """x[index] where all indices are inside: without what `jnp` adds for negative ones and those past the end."""
    x, index = jnp.asarray(x), jnp.asarray(index)
    x, index = alike((x, lax.expand_dims(index, (index.ndim,))))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim - 1, index.ndim + x.ndim - 2)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return lax.gather(x, index, numbers, (1, *x.shape[1:]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


OTHERS = {function.__name__: function for function in (where, clip, moveaxis, reshape, pad, rows)}
