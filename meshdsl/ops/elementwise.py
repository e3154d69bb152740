"""Elementwise operations. One operand has all dims of the others; the result has that operand's dims.

A gradient rule contains only the mathematics; `autodiff` sums its result over the dims that a smaller operand lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backend import Local
from ..dims import merge, names, show
from ..errors import ShapeError, at, caller, located
from ..ir import Fuses, Linear, Op, Type
from ..primitives import mixing
from ..trace import as_tensor, bind1
from ..values import Tensor

__all__ = [
    "abs", "add", "cast", "ceil", "cos", "divide", "elu", "equal", "erf", "exp", "expm1", "floor", "floor_divide",
    "gelu", "greater", "greater_equal", "isfinite", "isnan", "leaky_relu", "less", "less_equal", "log", "log1p",
    "logical_not", "map", "maximum", "minimum", "multiply", "negative", "not_equal", "power", "reciprocal", "relu",
    "remainder", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square",
    "stop_gradient", "subtract", "tanh", "where",
]  # fmt: skip


def broadcast_shape(*types: Type):
    """The dims of the operand that has all dims of the others; raises `ShapeError` if there is none."""
    table = merge(t.shape for t in types)
    for t in types:
        if len(t.shape) == len(table):
            return t.shape
    first = max(types, key=lambda t: len(t.shape))
    lacking = [d for d in table.values() if d not in first.shape]
    raise ShapeError(
        f"broadcasting {' with '.join(show(t.shape) for t in types)} would be an outer product\n"
        f"  the dims of one operand must contain the dims of the others; {show(first.shape)} lacks {show(lacking)}\n"
        f"  if it is meant, say so: md.broadcast(x, {[d.name for d in table.values()]}), or use md.einsum"
    )


def _same_dtype(*types: Type, dtype: Any = None) -> Type:
    kinds = {t.dtype for t in types}
    if len(kinds) > 1:
        raise ShapeError(f"operands have different dtypes {sorted(k.name for k in kinds)}; use md.cast(x, dtype)")
    return Type(broadcast_shape(*types), dtype or types[0].dtype)


def _aligned(function: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A kernel that aligns its operands by dim name, then applies `function(xp)` to them."""

    def kernel(c: Local, *xs: Any) -> Any:
        xs = tuple(c.align(x, block, c.outs[0]) for x, block in zip(xs, c.ins, strict=True))
        return function(c.xp)(*xs)

    return kernel


def _unary(
    name: str,
    function: Callable[[Any], Callable[..., Any]],
    vjp: Callable[..., Any] | None,
    *,
    kinds: str = "fc",
    dtype: Any = None,
    linear: Linear = Linear.NONE,
    flops: int = 1,
    cheap: bool = False,
    slow: bool = False,
    stops_gradient: bool = False,
    shown: bool = True,  # public in the package
) -> Callable[[Any], Tensor]:
    """Make the function of an elementwise operation with one operand."""

    def infer(x: Type) -> Type:
        _check_kind(name, x.dtype, kinds)
        return Type(x.shape, dtype or x.dtype)

    def cost(ins: Any, outs: Any) -> float:
        return flops * math.prod(outs[0])

    op = Op(
        name,
        infer,
        _aligned(function),
        vjp,
        linear=linear,
        flops=cost,
        fuses=Fuses.MAP,
        cheap=cheap,
        transcendental=slow,
        stops_gradient=stops_gradient,
    )
    widens = "f" in kinds and "i" not in kinds

    def public(x: Any) -> Tensor:
        x = as_tensor(x)
        if widens and kind(x.dtype) in "ib":
            x = cast(x, _inexact(x.dtype))
        return bind1(op, x)

    public.__name__ = public.__qualname__ = name
    example = {"f": "[0.5]", "b": "[True]"}["f" if "f" in kinds else "b"]
    public.__doc__ = f"`jnp.{name}` of every element; same dims."
    if not shown:
        return public
    public.__doc__ += f"""

    >>> import meshdsl as md
    >>> md.{name}(md.tensor({example}, "a")).dims
    (a=1,)

    {_takes(kinds + "ib" * widens)}{" Integers and booleans are taken as floats." if widens else ""}
    """
    return public


_KINDS = {"f": "floating", "c": "complex", "i": "integer", "b": "boolean"}


def _takes(kinds: str) -> str:
    """The docstring sentence about dtypes."""
    others = [name for kind, name in _KINDS.items() if kind not in kinds]
    return f"Raises `ShapeError` for {' and '.join(others)} tensors." if others else "Takes every dtype."


_WAY_OUT = {"b": "compare first, for example x > 0", "i": "use md.cast(x, 'int32')", "f": "use md.cast(x, 'float32')"}


def _check_kind(name: str, dtype: np.dtype, kinds: str) -> None:
    if kind(dtype) not in kinds:
        way_out = "it is for real numbers; keep the real and the imaginary parts apart, as two tensors"
        if kind(dtype) != "c":
            way_out = _WAY_OUT[min(kinds, key="fibc".find)]
        raise ShapeError(f"md.{name} does not take {dtype.name}; {way_out}")


def check_ordered(name: str, dtype: np.dtype) -> None:
    """Raise `ShapeError` for complex dtypes, which have no order."""
    _check_kind(name, dtype, "fib")


def kind(dtype: Any) -> str:
    """The kind of a dtype: "f" for floats (including 8- and 16-bit ones), "c" complex, "i" integers, "b" booleans."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "f"
    return {"u": "i"}.get(np.dtype(dtype).kind, np.dtype(dtype).kind)


def _inexact(dtype: np.dtype) -> str:
    """The float dtype to which integers are promoted for a noninteger result; JAX's rule."""
    return "float64" if dtype.itemsize == 8 else "float32"


CAST = Op(
    "cast",
    type=lambda x, *, dtype: Type(x.shape, dtype),
    kernel=lambda c, x, *, dtype: (x.real if kind(x.dtype) == "c" and kind(dtype) in "fi" else x).astype(dtype),
    vjp=lambda ct, x: (_cast_back(ct, x.dtype) if kind(x.dtype) in "fc" else None,),
    linear=Linear.WIDENING,
    fuses=Fuses.MAP,
    cheap=True,
)


def _cast_back(ct: Tensor, dtype: np.dtype) -> Tensor:
    """Cast a cotangent; a complex cotangent of a real operand gives its real part."""
    return ct if ct.dtype == dtype else bind1(CAST, ct, dtype=dtype)


def as_dtype(dtype: Any) -> np.dtype:
    """Convert to a NumPy dtype; raise `ShapeError` if JAX lacks it or it needs the disabled 64-bit types."""
    try:
        dtype = np.dtype(jnp.dtype(dtype))
    except TypeError:
        raise ShapeError(f"{dtype!r} is no dtype; for example 'float32', 'bfloat16' or 'int32'") from None
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise ShapeError(
            f"{dtype.name} was asked for, and JAX runs without 64-bit types\n"
            "  ask for 32 bits, or switch them on with jax.config.update('jax_enable_x64', True)"
        )
    return dtype


def cast(x: Any, dtype: Any) -> Tensor:
    """The same values in another dtype.

    >>> import meshdsl as md
    >>> md.cast(md.tensor([1.5], "a"), "int32")
    tensor(int32[a=1], [1])

    Raises `ShapeError` for a cast from complex to real numbers, and for a dtype that JAX lacks or has disabled.
    """
    x, dtype = as_tensor(x), located(lambda: as_dtype(dtype))
    if kind(x.dtype) == "c" and kind(dtype) in "fi":
        raise at(ShapeError(f"md.cast from {x.dtype.name} to {dtype.name} would lose the imaginary part"), caller())
    return x if x.dtype == dtype else bind1(CAST, x, dtype=dtype)


def _bitcast_type(x: Type, *, dtype: np.dtype) -> Type:
    if x.dtype.itemsize != dtype.itemsize:
        raise ShapeError(f"the bits of {x.dtype.name} cannot be read as {dtype.name}: they differ in number")
    return Type(x.shape, dtype)


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


exp = _unary("exp", lambda xp: xp.exp, lambda ct, x, out: (ct * out,), slow=True)
log = _unary("log", lambda xp: xp.log, lambda ct, x: (ct / x,), slow=True)
log1p = _unary("log1p", lambda xp: xp.log1p, lambda ct, x: (ct / (1 + x),), slow=True)
expm1 = _unary("expm1", lambda xp: xp.expm1, lambda ct, x, out: (ct * (out + 1),), slow=True)
sqrt = _unary("sqrt", lambda xp: xp.sqrt, lambda ct, x, out: (ct * (0.5 / out),))
rsqrt = _unary("rsqrt", lambda xp: xp.rsqrt, lambda ct, x, out: (ct * (-0.5 * out / x),))
square = _unary("square", lambda xp: xp.square, lambda ct, x: (ct * (2 * x),), kinds="fci", cheap=True)
negative = _unary(
    "negative", lambda xp: xp.negative, lambda ct, x: (-ct,), kinds="fci", linear=Linear.JOINT, shown=False, cheap=True
)
abs = _unary("abs", lambda xp: xp.abs, lambda ct, x: (where(x >= 0, ct, -ct),), kinds="fi")
sign = _unary("sign", lambda xp: xp.sign, lambda ct, x: (None,), kinds="fi")
reciprocal = _unary("reciprocal", lambda xp: xp.reciprocal, lambda ct, x, out: (-ct * square(out),))
sin = _unary("sin", lambda xp: xp.sin, lambda ct, x: (ct * cos(x),), slow=True)
cos = _unary("cos", lambda xp: xp.cos, lambda ct, x: (-ct * sin(x),), slow=True)
tanh = _unary("tanh", lambda xp: xp.tanh, lambda ct, x, out: (ct * (1 - out * out),), slow=True)
erf = _unary(
    "erf", lambda xp: xp.erf, lambda ct, x: (ct * (2 / math.sqrt(math.pi)) * exp(-square(x)),), kinds="f", slow=True
)
erf_inv = _unary(
    "erf_inv",
    lambda xp: xp.erf_inv,
    lambda ct, x, out: (ct * (math.sqrt(math.pi) / 2) * exp(square(out)),),
    kinds="f",
    slow=True,
    shown=False,
)
sigmoid = _unary("sigmoid", lambda xp: xp.logistic, lambda ct, x, out: (ct * out * (1 - out),), kinds="f", slow=True)
relu = _unary("relu", lambda xp: lambda x: xp.maximum(x, 0), lambda ct, x, out: (where(out > 0, ct, 0),), kinds="fi")
floor = _unary("floor", lambda xp: xp.floor, lambda ct, x: (None,), kinds="f")
ceil = _unary("ceil", lambda xp: xp.ceil, lambda ct, x: (None,), kinds="f")
round = _unary("round", lambda xp: xp.round, lambda ct, x: (None,), kinds="f")
isnan = _unary("isnan", lambda xp: xp.isnan, None, kinds="fc", dtype=np.dtype(bool))
isfinite = _unary("isfinite", lambda xp: xp.isfinite, None, kinds="fc", dtype=np.dtype(bool))
logical_not = _unary("logical_not", lambda xp: xp.logical_not, None, kinds="b", cheap=True)
invert = _unary("invert", lambda xp: xp.invert, None, kinds="ib", shown=False)
stop_gradient = _unary(
    "stop_gradient",
    lambda xp: lambda x: x,
    lambda ct, x: (None,),
    kinds="fcib",
    linear=Linear.JOINT,
    flops=0,
    cheap=True,
    stops_gradient=True,
)


def gelu(x: Any, approximate: bool = True) -> Tensor:
    """Gaussian error linear unit; the tanh form by default, as in `jax.nn.gelu`.

    >>> import meshdsl as md
    >>> md.gelu(md.tensor([0.0, 1.0], "a"))
    tensor(float32[a=2], [0.     0.8412])
    """
    x = as_tensor(x)
    if approximate:
        return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * square(x)))))
    return 0.5 * x * (1 + erf(x * (1 / math.sqrt(2))))


def silu(x: Any) -> Tensor:
    """x * sigmoid(x).

    >>> import meshdsl as md
    >>> md.silu(md.tensor([0.0, 1.0], "a"))
    tensor(float32[a=2], [0.     0.7311])
    """
    x = as_tensor(x)
    return x * sigmoid(x)


def softplus(x: Any) -> Tensor:
    """log(1 + exp(x)) per element, without overflow.

    >>> import meshdsl as md
    >>> md.softplus(md.tensor([0.0], "a"))
    tensor(float32[a=1], [0.6931])
    """
    x = as_tensor(x)
    return where(x >= 0, x, 0) + log1p(exp(-abs(x)))  # at 0 both terms use the slope from the right; the sum is 1/2


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha * (exp(x) - 1).

    >>> import meshdsl as md
    >>> md.elu(md.tensor([-1.0, 1.0], "a"))
    tensor(float32[a=2], [-0.6321  1.    ])
    """
    x = as_tensor(x)
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))


def selu(x: Any) -> Tensor:
    """The self-normalising `elu` (Klambauer et al., 2017).

    >>> import meshdsl as md
    >>> md.selu(md.tensor([1.0], "a"))
    tensor(float32[a=1], [1.0507])
    """
    return 1.0507009873554804934193349852946 * elu(x, 1.6732632423543772848170429916717)


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where x >= 0, else slope * x.

    >>> import meshdsl as md
    >>> md.leaky_relu(md.tensor([-1.0, 1.0], "a"))
    tensor(float32[a=2], [-0.01  1.  ])
    """
    x = as_tensor(x)
    return where(x >= 0, x, slope * x)


def promote(*xs: Any) -> tuple[Tensor, ...]:
    """Cast operands to their common dtype by JAX's promotion rules; Python numbers adopt the tensors' dtype."""
    for x in xs:
        if not isinstance(x, Tensor | bool | int | float | complex | np.generic):
            as_tensor(x)  # raises an error that explains how to name dims
    dtype = np.dtype(jnp.result_type(*(x.dtype if isinstance(x, Tensor) else x for x in xs)))
    return tuple(cast(x, dtype) if isinstance(x, Tensor) else as_tensor(x, dtype) for x in xs)


_RECORDS: dict[str, Op] = {}


def _binary(
    name: str,
    function: Callable[[Any], Callable[..., Any]],
    vjp: Callable[..., Any] | None,
    *,
    dtype: Any = None,
    linear: Linear = Linear.NONE,
    inexact: bool = False,
    cheap: bool = False,
    slow: bool = False,
    kinds: str = "fcib",
    shown: bool = False,  # public in the package
) -> Callable[[Any, Any], Tensor]:
    """Make the function of an elementwise operation with two operands."""

    def infer(x: Type, y: Type) -> Type:
        _check_kind(name, x.dtype, kinds)
        return _same_dtype(x, y, dtype=dtype)

    op = _RECORDS[name] = Op(
        name, infer, _aligned(function), vjp, linear=linear, fuses=Fuses.MAP, cheap=cheap, transcendental=slow
    )

    def public(x: Any, y: Any) -> Tensor:
        x, y = promote(x, y)
        if inexact and kind(x.dtype) in "ib":
            x, y = (cast(z, _inexact(z.dtype)) for z in (x, y))
        return bind1(op, x, y)

    public.__name__ = public.__qualname__ = name
    public.__doc__ = f"`jnp.{name}` element by element; one operand's dims contain the other's."
    if not shown:
        return public
    public.__doc__ += f"""

    >>> import meshdsl as md
    >>> md.{name}(md.tensor([[1.0, 5.0]], "batch io"), md.tensor([2.0, 4.0], "io")).dims
    (batch=1, io=2)

    {_takes(kinds)} So it does where neither operand has all dims of the other.
    """
    return public


_BOOL = np.dtype(bool)
add = _binary("add", lambda xp: xp.add, lambda ct, x, y: (ct, ct), linear=Linear.JOINT, cheap=True)
subtract = _binary(
    "subtract", lambda xp: xp.subtract, lambda ct, x, y: (ct, -ct), linear=Linear.JOINT, kinds="fci", cheap=True
)
multiply = _binary(
    "multiply", lambda xp: xp.multiply, lambda ct, x, y: (ct * y, ct * x), linear=Linear.EACH, cheap=True
)
divide = _binary(
    "divide", lambda xp: xp.divide, lambda ct, x, y, out: (ct / y, -ct * out / y), linear=Linear.FIRST, inexact=True
)
floor_divide = _binary("floor_divide", lambda xp: xp.floor_divide, lambda ct, x, y: (None, None), kinds="fi")
remainder = _binary("remainder", lambda xp: xp.remainder, lambda ct, x, y: (ct, -ct * floor_divide(x, y)), kinds="fi")
maximum = _binary(
    "maximum", lambda xp: xp.maximum, lambda ct, x, y: (ct * _wins(x, y), ct * _wins(y, x)), kinds="fib", shown=True
)
minimum = _binary(
    "minimum", lambda xp: xp.minimum, lambda ct, x, y: (ct * _wins(y, x), ct * _wins(x, y)), kinds="fib", shown=True
)
_power = _binary(
    "power",
    lambda xp: xp.power,
    lambda ct, x, y, out: (_power_dx(ct, x, y), _power_dy(ct, x, y, out)),
    kinds="fci",
    slow=True,
)
equal = _binary("equal", lambda xp: xp.equal, None, dtype=_BOOL, cheap=True)
not_equal = _binary("not_equal", lambda xp: xp.not_equal, None, dtype=_BOOL, cheap=True)
less = _binary("less", lambda xp: xp.less, None, dtype=_BOOL, kinds="fib", cheap=True)
less_equal = _binary("less_equal", lambda xp: xp.less_equal, None, dtype=_BOOL, kinds="fib", cheap=True)
greater = _binary("greater", lambda xp: xp.greater, None, dtype=_BOOL, kinds="fib", cheap=True)
greater_equal = _binary("greater_equal", lambda xp: xp.greater_equal, None, dtype=_BOOL, kinds="fib", cheap=True)
bitwise_and = _binary("bitwise_and", lambda xp: xp.bitwise_and, None, kinds="ib")
bitwise_or = _binary("bitwise_or", lambda xp: xp.bitwise_or, None, kinds="ib")
bitwise_xor = _binary("bitwise_xor", lambda xp: xp.bitwise_xor, None, kinds="ib")
left_shift = _binary("left_shift", lambda xp: xp.left_shift, None, kinds="i")
right_shift = _binary("right_shift", lambda xp: xp.right_shift, None, kinds="i")

ADD, SUBTRACT = _RECORDS["add"], _RECORDS["subtract"]  # passes match these records


def _wins(x: Tensor, y: Tensor) -> Tensor:
    """1 where x > y, 0.5 where x == y, else 0."""
    return where(x > y, 1.0, where(equal(x, y), 0.5, cast(0.0, x.dtype)))


def _power_dx(ct: Tensor, x: Tensor, y: Tensor) -> Tensor:
    none = equal(y, 0)
    return ct * where(none, 0, y * power(x, where(none, 1, y - 1)))


def _power_dy(ct: Tensor, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return ct * (out * log(where(equal(x, 0), 1, x)))


def power(x: Any, y: Any) -> Tensor:
    """`jnp.power` element by element: 0 ** 0 is 1; a negative base with a fractional exponent is NaN.

    Raises `ShapeError` for an integer tensor and a negative Python integer.
    """
    floating = isinstance(x, Tensor) and kind(x.dtype) in "fc"
    if isinstance(x, Tensor) and isinstance(y, int if not floating else int | float) and y == 2:
        return square(x)
    if isinstance(y, int) and floating:
        return _integer_power(x, y)
    if isinstance(x, Tensor) and kind(x.dtype) in "ib" and isinstance(y, int) and y < 0:
        raise at(ShapeError(f"{x.dtype.name} to the power {y} is not whole; use md.cast(x, 'float32') first"), caller())
    return _power(x, y)


_INTEGER_POWER = Op(
    "integer_power",
    type=lambda x, *, n: x,
    kernel=lambda c, x, *, n: x**n,
    vjp=lambda ct, x, n: (ct * (n * _integer_power(x, n - 1)) if n else None,),
    fuses=Fuses.MAP,
)


def _integer_power(x: Tensor, n: int) -> Tensor:
    return bind1(_INTEGER_POWER, x, n=n)


def _where_type(c: Type, a: Type, b: Type) -> Type:
    if c.dtype != _BOOL:
        raise ShapeError(f"md.where needs a boolean condition, got {c.dtype.name}; compare first, for example c != 0")
    return Type(broadcast_shape(c, a, b), _same_kind(a, b))


def _same_kind(a: Type, b: Type) -> np.dtype:
    if a.dtype != b.dtype:
        raise ShapeError(f"the branches have different dtypes, {a.dtype.name} and {b.dtype.name}")
    return a.dtype


WHERE = Op(
    "where",
    type=_where_type,
    kernel=_aligned(lambda xp: xp.where),
    vjp=lambda ct, c, a, b: (None, where(c, ct, 0), where(c, 0, ct)),
    linear=Linear.BRANCHES,
    fuses=Fuses.MAP,
    cheap=True,
)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """`a` where the condition is true, else `b`. NaN in the operand that is not selected does not propagate.

    >>> import meshdsl as md
    >>> md.where(md.tensor([True, False], "a"), 1.0, md.tensor([5.0, 6.0], "a"))
    tensor(float32[a=2], [1. 6.])

    Raises `ShapeError` if the condition is not boolean, or if no operand has all dims of the others.
    """
    a, b = promote(a, b)
    return bind1(WHERE, as_tensor(condition), a, b)


def _map_type(*types: Type, f: Callable[..., Any]) -> Type:
    shape = broadcast_shape(*types)
    out = jax.eval_shape(f, *(jax.ShapeDtypeStruct(tuple(d.size for d in shape), t.dtype) for t in types))
    if getattr(out, "shape", None) != tuple(d.size for d in shape):
        raise ShapeError(
            f"md.map needs an elementwise function; {getattr(f, '__name__', f)} turned an array of shape "
            f"{tuple(d.size for d in shape)} into {out}"
        )
    return Type(shape, out.dtype)


def _map_kernel(c: Local, *xs: Any, f: Callable[..., Any]) -> Any:
    xs = tuple(c.align(x, block, c.outs[0]) for x, block in zip(xs, c.ins, strict=True))
    return c.xp.elementwise(f, *(c.xp.broadcast_to(x, c.outs[0].sizes) for x in xs))


def _map_vjp(ct: Tensor, *xs: Tensor, f: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    def slope(i: int) -> Callable[..., Any]:
        def derivative(ct: Any, *xs: Any) -> Any:
            return jax.vjp(f, *xs)[1](ct)[i]

        derivative.__name__ = f"d_{getattr(f, '__name__', 'f')}_{i}"
        return derivative

    # the derivative of an elementwise function is elementwise
    return tuple(bind1(_MAP, ct, *xs, f=slope(i)) if kind(x.dtype) in "fc" else None for i, x in enumerate(xs))


_MAP = Op("map", type=_map_type, kernel=_map_kernel, vjp=_map_vjp, fuses=Fuses.MAP)


# The operation to use outside md.map instead of a primitive inside it.
_INSTEAD_OF = {
    "argmax": "md.argmax", "argmin": "md.argmin", "concatenate": "md.concat", "conv_general_dilated": "md.conv",
    "cumsum": "md.cumsum", "dot_general": "md.einsum", "dynamic_slice": "md.dynamic_slice", "gather": "md.take",
    "iota": "md.iota", "random_bits": "md.random", "reduce_and": "md.all", "reduce_max": "md.max",
    "reduce_min": "md.min", "reduce_or": "md.any", "reduce_prod": "md.prod", "reduce_sum": "md.sum",
    "reshape": "md.reshape", "rev": "md.reverse", "slice": "md.slice", "sort": "md.sort", "top_k": "md.top_k",
    "transpose": "md.transpose",
}  # fmt: skip


def _check_elementwise(f: Callable[..., Any], types: Sequence[Type]) -> None:
    """Raise `ShapeError` if f is not elementwise: on a part of an array it must return that part of its result."""
    shape = broadcast_shape(*types)
    sizes = tuple(d.size for d in shape)
    jax.eval_shape(f, *(jax.ShapeDtypeStruct(sizes, t.dtype) for t in types))  # raises f's own errors first
    found = mixing(f, names(shape), [t.dtype for t in types])
    if found is None:
        return
    if found.primitive in _INSTEAD_OF:
        instead = f"use {_INSTEAD_OF[found.primitive]} outside the function"
    elif found.primitive in ("", "dim_as_value"):
        instead = "pass arrays as tensors, md.map(f, x, md.tensor(array, dims)), and sizes as numbers, x.dims[0].size"
    else:
        instead = "write it with md operations"
    line = f" ({found.where})" if found.where else ""
    raise ShapeError(
        f"md.map needs an elementwise function; {getattr(f, '__name__', f)} {found.what}{line}\n"
        f"  x is {show(shape)}, and a device would compute it from its own block alone\n"
        f"  {instead}"
    )


def map(f: Callable[..., Any], *xs: Any) -> Tensor:
    """Apply any elementwise `jnp` function to one or more tensors. JAX differentiates it.

    >>> import meshdsl as md
    >>> md.map(lambda x: x * x, md.tensor([-1.0, 2.0], "a"))
    tensor(float32[a=2], [1. 4.])

    The function is checked: every primitive in it must be elementwise for every shape.

    Raises `ShapeError` if the function is not elementwise, reads the shape of its arguments or combines them with an
    array, and if no operand has all dims of the others.
    """
    if not xs:
        raise at(ShapeError("md.map needs at least one tensor"), caller())
    tensors = [as_tensor(x) for x in xs]
    located(lambda: _check_elementwise(f, [x.type for x in tensors]))
    return bind1(_MAP, *tensors, f=f)


def _operand(x: Any) -> bool:
    """Whether an operator accepts x. Arrays are accepted so that the error explains how to name their dims."""
    return isinstance(x, Tensor | bool | int | float | complex | np.generic | np.ndarray | jax.Array)


def _operator(function: Callable[..., Tensor], swap: bool = False) -> Callable[..., Any]:
    def method(x: Tensor, y: Any) -> Any:
        if not _operand(y):
            return NotImplemented
        return function(y, x) if swap else function(x, y)

    return method


def _no_matmul(x: Tensor, y: Any) -> Any:
    raise at(
        ShapeError(
            "x @ y does not say which dim is summed\n  name it with md.dot(x, y, over=dim), or name what stays with "
            "md.einsum(x, y, out=dims)"
        ),
        caller(),
    )


for _name, _function in {
    "add": add, "sub": subtract, "mul": multiply, "truediv": divide, "floordiv": floor_divide, "mod": remainder,
    "pow": power, "and": bitwise_and, "or": bitwise_or, "xor": bitwise_xor, "lshift": left_shift, "rshift": right_shift,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(_function))
    setattr(Tensor, f"__r{_name}__", _operator(_function, swap=True))
for _name, _function in {
    "eq": equal, "ne": not_equal, "lt": less, "le": less_equal, "gt": greater, "ge": greater_equal,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(_function))
for _name, _function in {
    "neg": negative, "abs": abs, "invert": invert, "matmul": _no_matmul, "rmatmul": _no_matmul,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _function)
Tensor.__hash__ = object.__hash__
