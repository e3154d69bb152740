"""Arguments of functions from the user's values: tensors of arrays, specs (dims and dtype only), dtypes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..dims import Dim, DimsLike, Shape, pick, show, split_items
from ..errors import ShapeError, short, shown
from ..ir import Type
from .tensors import Tensor

KEY_WORD = Dim("key_word", 2)  # of random keys


def tensor(array: Any, dims: DimsLike = ()) -> Tensor:
    """Create a concrete tensor from an array and names for its axes.

    >>> import meshdsl as md
    >>> md.tensor([[1.0, 2.0]], "batch:1 io:2").dims
    (batch=1, io=2)

    Sizes in `dims` are optional. A random key of JAX, `jax.random.key(0)`, becomes the equal key of `md.random`. An
    array that `jax.jit` or `jax.grad` traces becomes a tensor of it.

    Raises `ShapeError` if the dims do not fit the array's shape, if `array` is not an array of numbers, and if an
    integer in it does not fit into the 32 bits that JAX uses by default.
    """
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        dims, array = (*split_items(dims), KEY_WORD), key_words(array)
    values = array if isinstance(array, Tracer) else array_of(array)
    if not isinstance(values, Tracer):
        _check_width(values)
    shape = _dims_for(dims, values.shape)
    values = values if isinstance(values, jax.Array) else on_device(values)
    return Tensor(shape, values.dtype, array=values)


def on_device(array: np.ndarray) -> jax.Array:
    """A copy on the default device, of known values also inside `jax.jit`."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.array(array))  # `jnp.asarray` would compile a program for each shape


def key_words(key: jax.Array) -> jax.Array:
    """The words of a JAX random key; raises `ShapeError` if its implementation is not that of `md.random`."""
    if key.dtype != jax.random.key(0, impl="threefry2x32").dtype:
        raise ShapeError(
            f"got a JAX random key, {key.dtype.name}; md.random has the numbers of threefry2x32\n"
            "  make one with md.random.key(seed), or jax.random.key(seed, impl='threefry2x32')"
        )
    return jax.random.key_data(key)


def array_of(x: Any) -> np.ndarray | jax.Array:
    """An array of numbers or booleans; raises `ShapeError` for anything that would not become one unchanged."""
    if isinstance(x, Tensor | Type):
        raise ShapeError(f"an array or a number is needed, got {x!r}, which already has named dims")
    if isinstance(x, Tracer):
        raise ShapeError(
            f"a JAX transformation (jit, grad, vmap) is running: got a traced {x.aval.str_short()}\n"
            "  name its dims, md.tensor(x, dims), or transform with md.grad and md.compile instead"
        )
    if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
        raise ShapeError(
            f"one tensor is needed, got a {type(x).__name__} of tensors\n"
            "  pass them one by one, or join them with md.stack(xs, dim) or md.concat(xs, over)"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise ShapeError(
            "a masked array would lose its mask\n  fill it, x.filled(0), and pass the mask as a tensor of booleans"
        )
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ShapeError(f"got a JAX random key, {x.dtype.name}\n  make it a tensor: md.tensor(key)")
        return x
    try:
        values = np.asarray(x)
    except ValueError:
        raise ShapeError(f"the rows of {short(x)} have different lengths or types") from None
    if values.dtype.kind not in "biufcV" or values.dtype.names is not None:
        raise ShapeError(
            f"expected a tensor, or numbers or booleans; got {shown(x)}\n"
            "  give an array's dims names with md.tensor(array, dims)"
        )
    return values


def _check_width(values: np.ndarray | jax.Array) -> None:
    """Raise `ShapeError` if an integer does not fit into the narrower type that JAX stores without 64-bit types."""
    kind = jax.dtypes.canonicalize_dtype(values.dtype)
    if kind != values.dtype and kind.kind in "iu" and values.size:
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        if values.min() < low or values.max() > high:
            raise ShapeError(
                f"{values.min()} to {values.max()} does not fit into {kind.name}, which holds {low} to {high}\n"
                "  switch 64-bit types on with jax.config.update('jax_enable_x64', True), or use smaller integers"
            )


def check_dtypes(dtypes: Iterable[np.dtype]) -> None:
    """Raise `ShapeError` for a dtype of 64 bits while JAX runs without them: it would compute in 32, without a word."""
    for dtype in dtypes:
        if dtype.itemsize >= 8 and dtype != jax.dtypes.canonicalize_dtype(dtype):
            raise ShapeError(
                f"a tensor is {dtype.name}, and JAX runs without 64-bit types now\n"
                "  use md.cast where they are on, or switch them on with jax.config.update('jax_enable_x64', True)"
            )


def _dims_for(dims: DimsLike, sizes: tuple[int, ...]) -> Shape:
    items = split_items(dims)
    if len(items) != len(sizes):
        raise ShapeError(f"{len(items)} dims given ({items}) for an array of shape {sizes}; name every axis once")
    sized = [
        Dim(item, size) if isinstance(item, str) and ":" not in item else item
        for item, size in zip(items, sizes, strict=True)
    ]
    shape = pick(sized, (), new=True)
    if tuple(d.size for d in shape) != sizes:
        raise ShapeError(f"dims {show(shape)} do not fit an array of shape {sizes}; the order is the storage order")
    return shape


def spec(dims: DimsLike = (), dtype: Any = "float32") -> Type:
    """The dims and dtype of a tensor, without values. Accepted wherever example arguments are.

    >>> spec("batch:8 io:4", "int32")
    int32[batch=8 io=4]

    Raises `ShapeError` for a dim without a size, a dim named twice, or an invalid dtype.
    """
    return Type(pick(dims, (), new=True), dtype_of(dtype))


def dtype_of(dtype: Any) -> np.dtype:
    """The NumPy dtype of a name, a type or a dtype; raises `ShapeError` unless it is one of numbers or booleans."""
    try:
        wrong = dtype is None or isinstance(dtype, Tensor | np.ndarray | jax.Array)
        known = None if wrong else np.dtype(jnp.dtype(dtype))
    except (TypeError, ValueError):
        known = None
    if known is None or not (jnp.issubdtype(known, np.number) or known.kind == "b"):
        close = difflib.get_close_matches(str(dtype), ("bfloat16", "float16", "float32", "float64", "int32"), n=1)
        example = f"did you mean {close[0]!r}?" if close else "for example 'float32', 'bfloat16' or 'int32'"
        raise ShapeError(f"{short(dtype)} is no dtype; {example}")
    return known


def spec_of(x: Any) -> Type:
    """The type of an argument, which is a tensor, a spec or a number; raises `ShapeError` for anything else."""
    if isinstance(x, Type):
        return x
    if isinstance(x, Tensor):
        return x.type
    if isinstance(x, bool | int | float | complex | np.generic) or (hasattr(x, "shape") and x.shape == ()):
        return Type((), np.dtype(jnp.result_type(x)))
    raise ShapeError(
        f"an argument is a tensor, md.spec or number, got {type(x).__name__}; name its dims with md.tensor(array, dims)"
    )
