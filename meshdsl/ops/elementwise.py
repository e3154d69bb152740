"""Elementwise operations. One operand has all dims of the others; the result has that operand's dims.

A gradient rule contains only the mathematics; `autodiff` sums its result over the dims that a smaller operand lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Local
from ..dims import merge, show
from ..errors import ShapeError
from ..ir import Bounded, Fuses, Linear, Op, Type
from ..trace import Tensor, as_tensor, bind1
from .dtypes import CAST, cast, check_kind, float_for, kind, promote, takes


def broadcast_shape(*types: Type):
    """The dims of the operand that has all dims of the others; raises `ShapeError` if there is none."""
    shapes = [t.dims for t in types if t.dims] or [()]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    table = merge(t.dims for t in types)
    for t in types:
        if len(t.dims) == len(table):
            return t.dims
    first = max(types, key=lambda t: len(t.dims))
    missing = [d for d in table.values() if d not in first.dims]
    raise ShapeError(
        f"broadcasting {' with '.join(show(t.dims) for t in types)} would be an outer product\n"
        f"  the dims of one operand must contain the dims of the others; {show(first.dims)} lacks {show(missing)}\n"
        f"  if it is meant, say so: md.broadcast(x, {[d.name for d in table.values()]}), or use md.einsum"
    )


def _same_dtype(*types: Type, dtype: Any = None) -> Type:
    kinds = {t.dtype for t in types}
    if len(kinds) > 1:
        raise ShapeError(f"operands have different dtypes {sorted(k.name for k in kinds)}; use md.cast(x, dtype)")
    return Type(broadcast_shape(*types), dtype or types[0].dtype)


def _aligned(function: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A kernel that aligns its operands by dim name, then applies `function(xp)` to them. Numbers fit as they are."""

    def kernel(c: Local, *xs: Any) -> Any:
        xs = tuple(c.align(x, block, c.outs[0]) if block.dims else x for x, block in zip(xs, c.ins, strict=True))
        return function(c.xp)(*xs)

    return kernel


_RECORDS: dict[str, Op] = {}  # of functions with one or two operands, by name


def _unary(
    name: str,
    function: Callable[[Any], Callable[..., Any]],
    vjp: Callable[..., Any] | None,
    *,
    kinds: str = "fc",
    dtype: Any = None,
    flops: int = 1,
    shown: bool = True,  # public in the package
    like: str = "",  # JAX's function, where jax.numpy has none of this name
    **record: Any,
) -> Callable[[Any], Tensor]:
    """Make the function of an elementwise operation with one operand; `record` are further fields of its `Op`."""

    def infer(x: Type) -> Type:
        check_kind(name, x.dtype, kinds)
        return Type(x.dims, dtype or x.dtype)

    def cost(ins: Any, outs: Any) -> float:
        return flops * math.prod(outs[0])

    op = _RECORDS[name] = Op(name, infer, _aligned(function), vjp, flops=cost, fuses=Fuses.MAP, by_name=True, **record)
    widens = "f" in kinds and "i" not in kinds

    def public(x: Any) -> Tensor:
        x = as_tensor(x)
        if widens and kind(x.dtype) in "ib":
            x = cast(x, float_for(x.dtype))
        return bind1(op, x)

    public.__name__ = public.__qualname__ = name
    example = {"f": "[0.5]", "b": "[True]"}["f" if "f" in kinds else "b"]
    public.__doc__ = f"Elementwise `{like or f'jnp.{name}'}`. The result has the dims of the operand."
    if not shown:
        return public
    public.__doc__ += f"""

    >>> import meshdsl as md
    >>> md.{name}(md.tensor({example}, "a")).dims
    (a=1,)

    {takes(kinds + "ib" * widens)}{" Integers and booleans are cast to floats." if widens else ""}
    """
    return public


exp = _unary("exp", lambda xp: xp.exp, lambda ct, x, out: (ct * out,), transcendental=True)
log = _unary("log", lambda xp: xp.log, lambda ct, x: (ct / x,), transcendental=True)
log1p = _unary("log1p", lambda xp: xp.log1p, lambda ct, x: (ct / (1 + x),), transcendental=True)
expm1 = _unary("expm1", lambda xp: xp.expm1, lambda ct, x, out: (ct * (out + 1),), transcendental=True)
sqrt = _unary("sqrt", lambda xp: xp.sqrt, lambda ct, x, out: (ct * (0.5 / out),))
rsqrt = _unary("rsqrt", lambda xp: xp.rsqrt, lambda ct, x, out: (ct * (-0.5 * out / x),), like="jax.lax.rsqrt")
square = _unary("square", lambda xp: xp.square, lambda ct, x: (ct * (2 * x),), kinds="fci")
negative = _unary(
    "negative",
    lambda xp: xp.negative,
    lambda ct, x: (-ct,),
    kinds="fci",
    linear=Linear.JOINT,
    shown=False,
    bounded=Bounded.BY_OPERANDS,
)
abs = _unary("abs", lambda xp: xp.abs, lambda ct, x: (where(x >= 0, ct, -ct),), kinds="fi", bounded=Bounded.BY_OPERANDS)
sign = _unary("sign", lambda xp: xp.sign, lambda ct, x: (None,), kinds="fi", bounded=Bounded.BY_ONE)
reciprocal = _unary("reciprocal", lambda xp: xp.reciprocal, lambda ct, x, out: (-ct * square(out),))
sin = _unary("sin", lambda xp: xp.sin, lambda ct, x: (ct * cos(x),), transcendental=True, bounded=Bounded.BY_ONE)
cos = _unary("cos", lambda xp: xp.cos, lambda ct, x: (-ct * sin(x),), transcendental=True, bounded=Bounded.BY_ONE)
tanh = _unary(
    "tanh", lambda xp: xp.tanh, lambda ct, x, out: (ct * (1 - out * out),), transcendental=True, bounded=Bounded.BY_ONE
)
erf = _unary(
    "erf",
    lambda xp: xp.erf,
    lambda ct, x: (ct * (2 / math.sqrt(math.pi)) * exp(-square(x)),),
    kinds="f",
    transcendental=True,
    bounded=Bounded.BY_ONE,
    like="jax.scipy.special.erf",
)
erf_inv = _unary(
    "erf_inv",
    lambda xp: xp.erf_inv,
    lambda ct, x, out: (ct * (math.sqrt(math.pi) / 2) * exp(square(out)),),
    kinds="f",
    transcendental=True,
    shown=False,
    like="jax.lax.erf_inv",
)
sigmoid = _unary(
    "sigmoid",
    lambda xp: xp.logistic,
    lambda ct, x, out: (ct * out * (1 - out),),
    kinds="f",
    transcendental=True,
    bounded=Bounded.BY_ONE,
    like="jax.nn.sigmoid",
)
relu = _unary(
    "relu",
    lambda xp: lambda x: xp.maximum(x, 0),
    lambda ct, x, out: (where(out > 0, ct, 0),),
    kinds="fi",
    bounded=Bounded.BY_OPERANDS,
    like="jax.nn.relu",
)
_SLOPES: dict[str, tuple[str, Callable[..., Tensor]]] = {  # dtypes, and the derivative from the operand and the result
    "tan": ("fc", lambda x, out: 1 + square(out)),
    "sinh": ("fc", lambda x, out: cosh(x)),
    "cosh": ("fc", lambda x, out: sinh(x)),
    "asin": ("f", lambda x, out: rsqrt(1 - square(x))),
    "acos": ("f", lambda x, out: -rsqrt(1 - square(x))),
    "atan": ("f", lambda x, out: 1 / (1 + square(x))),
    "asinh": ("f", lambda x, out: rsqrt(square(x) + 1)),
    "acosh": ("f", lambda x, out: rsqrt((x - 1) * (x + 1))),
    "atanh": ("f", lambda x, out: 1 / (1 - square(x))),
    "log2": ("f", lambda x, out: 1 / (x * math.log(2))),
    "log10": ("f", lambda x, out: 1 / (x * math.log(10))),
    "exp2": ("f", lambda x, out: out * math.log(2)),
    "cbrt": ("f", lambda x, out: out / (3 * x)),
}


def _transcendental(name: str) -> Callable[[Any], Tensor]:
    kinds, slope = _SLOPES[name]
    return _unary(
        name, lambda xp: getattr(xp, name), lambda ct, x, out: (ct * slope(x, out),), kinds=kinds, transcendental=True
    )


tan, sinh, cosh, asin, acos, atan, asinh, acosh, atanh, log2, log10, exp2, cbrt = map(_transcendental, _SLOPES)
floor = _unary("floor", lambda xp: xp.floor, lambda ct, x: (None,), kinds="f")
ceil = _unary("ceil", lambda xp: xp.ceil, lambda ct, x: (None,), kinds="f")
round = _unary("round", lambda xp: xp.round, lambda ct, x: (None,), kinds="f")
isnan = _unary("isnan", lambda xp: xp.isnan, None, kinds="fc", dtype=np.dtype(bool))
isinf = _unary("isinf", lambda xp: xp.isinf, None, kinds="fc", dtype=np.dtype(bool))
isfinite = _unary("isfinite", lambda xp: xp.isfinite, None, kinds="fc", dtype=np.dtype(bool))
logical_not = _unary("logical_not", lambda xp: xp.logical_not, None, kinds="b")
invert = _unary("invert", lambda xp: xp.invert, None, kinds="ib", shown=False)
stop_gradient = _unary(
    "stop_gradient",
    lambda xp: lambda x: x,
    lambda ct, x: (None,),
    kinds="fcib",
    linear=Linear.JOINT,
    flops=0,
    stops_gradient=True,
    bounded=Bounded.BY_OPERANDS,
    like="jax.lax.stop_gradient",
)


def _binary(
    name: str,
    function: Callable[[Any], Callable[..., Any]],
    vjp: Callable[..., Any] | None,
    *,
    dtype: Any = None,
    inexact: bool = False,
    kinds: str = "fcib",
    shown: bool = False,  # public in the package
    **record: Any,
) -> Callable[[Any, Any], Tensor]:
    """Make the function of an elementwise operation with two operands; `record` are further fields of its `Op`."""

    def infer(x: Type, y: Type) -> Type:
        check_kind(name, x.dtype, kinds)
        return _same_dtype(x, y, dtype=dtype)

    op = _RECORDS[name] = Op(name, infer, _aligned(function), vjp, fuses=Fuses.MAP, by_name=True, **record)

    def public(x: Any, y: Any) -> Tensor:
        x, y = promote(x, y)
        if inexact and kind(x.dtype) in "ib":
            x, y = (cast(z, float_for(z.dtype)) for z in (x, y))
        return bind1(op, x, y)

    public.__name__ = public.__qualname__ = name
    public.__doc__ = f"Elementwise `jnp.{name}`. The dims of one operand must contain the dims of the other."
    if not shown:
        return public
    public.__doc__ += f"""

    >>> import meshdsl as md
    >>> md.{name}(md.tensor([[1.0, 5.0]], "batch io"), md.tensor([2.0, 4.0], "io")).dims
    (batch=1, io=2)

    {takes(kinds)} Also raises it if neither operand has all dims of the other.
    """
    return public


_BOOL = np.dtype(bool)
add = _binary("add", lambda xp: xp.add, lambda ct, x, y: (ct, ct), linear=Linear.JOINT)
subtract = _binary("subtract", lambda xp: xp.subtract, lambda ct, x, y: (ct, -ct), linear=Linear.JOINT, kinds="fci")
multiply = _binary("multiply", lambda xp: xp.multiply, lambda ct, x, y: (ct * y, ct * x), linear=Linear.EACH)
divide = _binary(
    "divide", lambda xp: xp.divide, lambda ct, x, y, out: (ct / y, -ct * out / y), linear=Linear.RATIO, inexact=True
)
floor_divide = _binary("floor_divide", lambda xp: xp.floor_divide, lambda ct, x, y: (None, None), kinds="fi")
remainder = _binary("remainder", lambda xp: xp.remainder, lambda ct, x, y: (ct, -ct * floor_divide(x, y)), kinds="fi")
maximum = _binary(
    "maximum",
    lambda xp: xp.maximum,
    lambda ct, x, y: (ct * _wins(x, y), ct * _wins(y, x)),
    kinds="fib",
    shown=True,
    bounded=Bounded.BY_OPERANDS,
)
minimum = _binary(
    "minimum",
    lambda xp: xp.minimum,
    lambda ct, x, y: (ct * _wins(y, x), ct * _wins(x, y)),
    kinds="fib",
    shown=True,
    bounded=Bounded.BY_OPERANDS,
)
_FLOATS: dict[str, Any] = {"kinds": "f", "inexact": True, "shown": True, "transcendental": True}
atan2 = _binary(
    "atan2", lambda xp: xp.atan2, lambda ct, x, y: tuple(ct / (x * x + y * y) * z for z in (y, -x)), **_FLOATS
)
hypot = _binary(
    "hypot", lambda xp: xp.hypot, lambda ct, x, y, out: tuple(ct * _share(z, out) for z in (x, y)), **_FLOATS
)
logaddexp = _binary(
    "logaddexp",
    lambda xp: xp.logaddexp,
    lambda ct, x, y: tuple(ct * where(equal(x, y), 0.5, sigmoid(z)) for z in (x - y, y - x)),
    **_FLOATS,
)
_power = _binary(
    "power",
    lambda xp: xp.power,
    lambda ct, x, y, out: (_power_dx(ct, x, y), _power_dy(ct, x, y, out)),
    kinds="fci",
    transcendental=True,
)
equal = _binary("equal", lambda xp: xp.equal, None, dtype=_BOOL)
not_equal = _binary("not_equal", lambda xp: xp.not_equal, None, dtype=_BOOL)
less = _binary("less", lambda xp: xp.less, None, dtype=_BOOL, kinds="fib")
less_equal = _binary("less_equal", lambda xp: xp.less_equal, None, dtype=_BOOL, kinds="fib")
greater = _binary("greater", lambda xp: xp.greater, None, dtype=_BOOL, kinds="fib")
greater_equal = _binary("greater_equal", lambda xp: xp.greater_equal, None, dtype=_BOOL, kinds="fib")
bitwise_and = _binary("bitwise_and", lambda xp: xp.bitwise_and, None, kinds="ib")
bitwise_or = _binary("bitwise_or", lambda xp: xp.bitwise_or, None, kinds="ib")
bitwise_xor = _binary("bitwise_xor", lambda xp: xp.bitwise_xor, None, kinds="ib")
left_shift = _binary("left_shift", lambda xp: xp.left_shift, None, kinds="i")
right_shift = _binary("right_shift", lambda xp: xp.right_shift, None, kinds="i")

ADD, SUBTRACT = _RECORDS["add"], _RECORDS["subtract"]  # passes match these records
EQUAL, NOT_EQUAL, REMAINDER = _RECORDS["equal"], _RECORDS["not_equal"], _RECORDS["remainder"]
MULTIPLY, DIVIDE, MAXIMUM = _RECORDS["multiply"], _RECORDS["divide"], _RECORDS["maximum"]
ISFINITE, EXP, STOP_GRADIENT = _RECORDS["isfinite"], _RECORDS["exp"], _RECORDS["stop_gradient"]


def absolute_square(x: Tensor) -> Tensor:
    """The square of the absolute value, elementwise: real, also of complex numbers."""
    if kind(x.dtype) != "c":
        return square(x)
    part = np.finfo(x.dtype).dtype
    return square(bind1(CAST, x, dtype=part)) + square(bind1(CAST, x * -1j, dtype=part))  # a cast takes the real part


def _share(x: Tensor, out: Tensor) -> Tensor:
    """x / out, and 0 where both are 0."""
    return where(equal(out, 0), 0, x / where(equal(out, 0), 1, out))


def _wins(x: Tensor, y: Tensor) -> Tensor:
    """1 where x > y, 0.5 where x == y, else 0."""
    return where(x > y, 1.0, where(equal(x, y), 0.5, cast(0.0, x.dtype)))


def _power_dx(ct: Tensor, x: Tensor, y: Tensor) -> Tensor:
    none = equal(y, 0)
    return ct * where(none, 0, y * power(x, where(none, 1, y - 1)))


def _power_dy(ct: Tensor, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return ct * (out * log(where(equal(x, 0), 1, x)))


def power(x: Any, y: Any) -> Tensor:
    """Elementwise `jnp.power`: 0 ** 0 is 1; a negative base with a fractional exponent is NaN.

    Raises `ShapeError` for an integer tensor and a negative Python integer.
    """
    floating = isinstance(x, Tensor) and kind(x.dtype) in "fc"
    if isinstance(x, Tensor) and isinstance(y, int if not floating else int | float) and y == 2:
        return square(x)
    if isinstance(y, int) and floating:
        return _integer_power(x, y)
    if isinstance(x, Tensor) and kind(x.dtype) in "ib" and isinstance(y, int) and y < 0:
        raise ShapeError(f"{x.dtype.name} to the power {y} is not whole; use md.cast(x, 'float32') first")
    return _power(x, y)


_INTEGER_POWER = Op(
    "integer_power",
    type=lambda x, *, n: x,
    kernel=lambda c, x, *, n: x**n,
    vjp=lambda ct, x, n: (ct * (n * _integer_power(x, n - 1)) if n else None,),
    fuses=Fuses.MAP,
    by_name=True,
)


def _integer_power(x: Tensor, n: int) -> Tensor:
    return bind1(_INTEGER_POWER, x, n=n)


def _where_type(c: Type, a: Type, b: Type) -> Type:
    if c.dtype != _BOOL:
        raise ShapeError(f"md.where needs a boolean condition, got {c.dtype.name}; compare first, for example c != 0")
    shape = broadcast_shape(c, a, b)
    if a.dtype != b.dtype:
        raise ShapeError(f"the branches have different dtypes, {a.dtype.name} and {b.dtype.name}")
    return Type(shape, a.dtype)


WHERE = Op(
    "where",
    type=_where_type,
    kernel=_aligned(lambda xp: xp.where),
    vjp=lambda ct, c, a, b: (None, where(c, ct, 0), where(c, 0, ct)),
    linear=Linear.BRANCHES,
    fuses=Fuses.MAP,
    by_name=True,
    bounded=Bounded.BY_OPERANDS,
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
