"""Dtypes: their kinds, casts, and the promotion of operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError
from ..ir import Bounded, Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1, dtype_of

_KINDS = {"f": "floating", "c": "complex", "i": "integer", "b": "boolean"}


def takes(kinds: str) -> str:
    """The docstring sentence about dtypes."""
    others = [name for kind, name in _KINDS.items() if kind not in kinds]
    return f"Raises `ShapeError` for {' and '.join(others)} tensors." if others else "Takes every dtype."


_WAY_OUT = {"b": "compare first, for example x > 0", "i": "use md.cast(x, 'int32')", "f": "use md.cast(x, 'float32')"}


def check_kind(name: str, dtype: np.dtype, kinds: str) -> None:
    if kind(dtype) not in kinds:
        way_out = "it is for real numbers; keep the real and the imaginary parts apart, as two tensors"
        if kind(dtype) != "c":
            way_out = _WAY_OUT[min(kinds, key="fibc".find)]
        raise ShapeError(f"md.{name} does not take {dtype.name}; {way_out}")


def check_ordered(name: str, dtype: np.dtype) -> None:
    """Raise `ShapeError` for complex dtypes, which have no order."""
    check_kind(name, dtype, "fib")


@cache
def kind(dtype: Any) -> str:
    """The kind of a dtype: "f" for floats (including 8- and 16-bit ones), "c" complex, "i" integers, "b" booleans."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "f"
    return {"u": "i"}.get(np.dtype(dtype).kind, np.dtype(dtype).kind)


@cache
def widens(narrow: np.dtype, wide: np.dtype) -> bool:
    """True if a cast between these floats is exact for every number."""
    if not kind(narrow) == kind(wide) == "f":
        return False
    few, many = jnp.finfo(narrow), jnp.finfo(wide)  # JAX promotes no 8-bit floats
    return few.nmant <= many.nmant and few.maxexp <= many.maxexp and few.minexp >= many.minexp


@cache
def largest(dtype: np.dtype) -> float:
    """The largest magnitude of a finite number of a dtype."""
    if kind(dtype) == "b":
        return 1.0
    return float(jnp.iinfo(dtype).max + 1 if kind(dtype) == "i" else jnp.finfo(dtype).max)


def float_for(dtype: np.dtype) -> str:
    """The float dtype to which integers are promoted for a noninteger result; JAX's rule."""
    return "float64" if dtype.itemsize == 8 else "float32"


def mean_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of a mean: that of the operand, or a float for integers and booleans; the rule of `jnp.mean`."""
    return np.dtype(float_for(dtype)) if kind(dtype) in "ib" else dtype


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of a sum or product: integers and booleans take JAX's default integer; the rule of `jnp.sum`."""
    if kind(dtype) not in "ib":
        return dtype
    default = jax.dtypes.canonicalize_dtype("uint64" if dtype.kind == "u" else "int64")
    return max(default, dtype, key=lambda each: each.itemsize)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums and products are computed: float32 for floats of 8 and 16 bits."""
    return np.dtype(np.float32) if kind(dtype) == "f" and dtype.itemsize < 4 else dtype


CAST = Op(
    "cast",
    type=lambda x, *, dtype: Type(x.dims, dtype),
    kernel=lambda c, x, *, dtype: c.xp.astype(x.real if kind(x.dtype) == "c" and kind(dtype) in "fi" else x, dtype),
    vjp=lambda ct, x, to_dtypes: (_cast_back(ct, to_dtypes[0]) if kind(x.dtype) in "fc" else None,),
    linear=Linear.WIDENING,
    fuses=Fuses.MAP,
    by_name=True,
    bounded=Bounded.BY_OPERANDS,
)


CAST_PARTS = Op(  # a cast of a value, or of each device's part of a pending sum
    "cast_parts",
    type=lambda x, *, dtype: Type(x.dims, dtype),
    kernel=lambda c, x, *, dtype: c.xp.astype(x, dtype),
    vjp=lambda ct, x: (ct,),  # differentiation casts it
    linear=Linear.JOINT,
    fuses=Fuses.MAP,
    by_name=True,
    bounded=Bounded.BY_OPERANDS,
)
REDUCED_IN = Op(  # the value; devices add up its cotangent in `dtype`
    "reduced_in",
    type=lambda x, *, dtype: x,
    kernel=lambda c, x, *, dtype: x,
    vjp=lambda ct, x, dtype: (cast_parts(ct, dtype),),
    linear=Linear.JOINT,
    flops=lambda *_, **__: 0,
    fuses=Fuses.VIEW,
    again=True,
)


def _cast_back(ct: Tensor, dtype: np.dtype) -> Tensor:
    """Cast a cotangent; a complex cotangent of a real operand gives its real part."""
    return ct if ct.dtype == dtype else bind1(CAST, ct, dtype=dtype)


def as_dtype(dtype: Any) -> np.dtype:
    """Convert to a NumPy dtype; raise `ShapeError` if JAX lacks it or it needs the disabled 64-bit types."""
    dtype = dtype_of(dtype)
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise ShapeError(
            f"{dtype.name} was asked for, and JAX runs without 64-bit types\n"
            "  ask for 32 bits, or switch them on with jax.config.update('jax_enable_x64', True)"
        )
    return dtype


def cast(x: Any, dtype: Any, *, reduce: Any = None) -> Tensor:
    """The same values in another dtype.

    >>> import meshdsl as md
    >>> md.cast(md.tensor([1.5], "a"), "int32")
    tensor(int32[a=1], [1])

    The gradient of a weight has the weight's dtype, also where products read a copy in a narrower one: each device adds
    it up in that dtype, devices add it up in that dtype, and so do loops. `reduce` is the dtype in which devices add up
    the gradient of x, if that is narrower: "bfloat16" sends half the bytes of a float32 gradient, and each device
    rounds its part. It changes no value of the result.

    Raises `ShapeError` for a cast from complex to real numbers, for a dtype that JAX lacks or has disabled, and for a
    `reduce` that is not floating.
    """
    x, dtype = as_tensor(x), as_dtype(dtype)
    if kind(x.dtype) == "c" and kind(dtype) in "fi":
        raise ShapeError(f"md.cast from {x.dtype.name} to {dtype.name} would lose the imaginary part")
    y = x if x.dtype == dtype else bind1(CAST, x, dtype=dtype)
    if reduce is None:
        return y
    if kind(reduce := as_dtype(reduce)) != "f":
        raise ShapeError(f"md.cast(reduce=) is the floating dtype of a sum over devices, got {reduce.name}")
    narrower = kind(x.dtype) == "f" and reduce.itemsize < x.dtype.itemsize
    return bind1(REDUCED_IN, y, dtype=reduce) if narrower else y


def cast_parts(x: Tensor, dtype: Any) -> Tensor:
    """The same values in another dtype. Of a pending sum, each device casts its part: the sum is in the new dtype."""
    return x if x.dtype == dtype else bind1(CAST_PARTS, x, dtype=np.dtype(dtype))


def in_wide(f: Callable[[Tensor], Tensor], x: Tensor, dtype: np.dtype) -> Tensor:
    """f(x) in `dtype`, computed in the dtype of its sums and rounded once, also if devices add partial results."""
    return cast(f(cast(x, wide_dtype(dtype))), dtype)


def countable(x: Any) -> Tensor:
    """A tensor whose elements can be added up: booleans are counted in JAX's default integer."""
    x = as_tensor(x)
    return cast(x, sum_dtype(x.dtype)) if kind(x.dtype) == "b" else x


def is_float8(dtype: np.dtype) -> bool:
    """True for floats of 8 bits or fewer."""
    return kind(dtype) == "f" and dtype.itemsize == 1


def _bitcast_type(x: Type, *, dtype: np.dtype) -> Type:
    if x.dtype.itemsize != dtype.itemsize:
        raise ShapeError(f"the bits of {x.dtype.name} cannot be read as {dtype.name}: they differ in number")
    return Type(x.dims, dtype)


_BITCAST = Op(
    "bitcast",
    type=_bitcast_type,
    kernel=lambda c, x, *, dtype: c.xp.bitcast(x, dtype),
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
)


def bitcast(x: Tensor, dtype: Any) -> Tensor:
    """The same bits as another dtype of the same width; raises `ShapeError` if the widths differ."""
    return bind1(_BITCAST, x, dtype=np.dtype(jnp.dtype(dtype)))


def promote(*xs: Any) -> tuple[Tensor, ...]:
    """Cast operands to their common dtype by JAX's promotion rules; Python numbers adopt the tensors' dtype.

    Floats of 8 bits beside wider ones are cast to these, which changes no value; JAX refuses that. Raises `ShapeError`
    for 8-bit floats of two formats, and for others that JAX does not promote.
    """
    for x in xs:
        if not isinstance(x, Tensor | bool | int | float | complex | np.generic):
            as_tensor(x)  # raises an error that explains how to name dims
    dtypes = list(dict.fromkeys(x.dtype for x in xs if isinstance(x, Tensor)))
    numbers = [x for x in xs if not isinstance(x, Tensor)]
    if not numbers and len(dtypes) < 2:
        return xs
    wide = [each for each in dtypes if not is_float8(each)]
    floats = any(kind(each) in "fc" for each in wide)
    try:
        dtype = np.dtype(jnp.result_type(*(wide if floats else dtypes), *numbers))
    except ValueError:  # jax.dtypes.TypePromotionError
        listed = " and ".join(each.name for each in dtypes)
        raise ShapeError(f"{listed} have no common dtype\n  cast one of them with md.cast") from None
    return tuple(cast(x, dtype) if isinstance(x, Tensor) else as_tensor(x, dtype) for x in xs)
