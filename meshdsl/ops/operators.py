"""The operators and methods of tensors: `x + y`, `x < y`, `-x`, `x.sum("batch")`.

NumPy computes `array + x` as `np.add(array, x)`, which calls the tensor's reflected operator. Every other elementwise
function of NumPy (`np.exp(x)`) is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..errors import ShapeError, TraceError
from ..trace import Tensor
from ..trace.tensors import is_public
from . import elementwise as ops
from . import reductions
from .dtypes import cast
from .named_index import at, named_index
from .statistics import std


def _operand(x: Any) -> bool:
    """True if an operator accepts x. Arrays are accepted so that the error explains how to name their dims."""
    return isinstance(x, Tensor | bool | int | float | complex | np.generic | np.ndarray | jax.Array)


def _operator(function: Callable[..., Tensor], swap: bool = False) -> Callable[..., Any]:
    def method(x: Tensor, y: Any) -> Any:
        if not _operand(y):
            return NotImplemented
        return function(y, x) if swap else function(x, y)

    return method


def _no_matmul(x: Tensor, y: Any) -> Any:
    raise ShapeError(
        "x @ y does not say which dim is summed\n  name it with md.dot(x, y, over=dim), or name what stays with "
        "md.einsum(x, y, out=dims)"
    )


def _numpy_function(x: Tensor, function: np.ufunc, method: str, *args: Any, **options: Any) -> Any:
    """`array + x`, for an array or a NumPy scalar; raises `TraceError` for all other uses of a ufunc."""
    name, left = function.__name__, args[0]
    reflected = _REFLECTED.get(name)
    if reflected and method == "__call__" and not options and _operand(left) and not isinstance(left, Tensor):
        return getattr(Tensor, reflected[0])(x, left)
    if options.get("out"):
        use = "name the array's dims first: md.tensor(array, dims)"
    elif method != "__call__":
        name, use = f"{name}.{method}", "use md's own function"
    elif reflected:
        use = f"use the operator {reflected[1]}"
    else:
        own = "abs" if name == "absolute" else name
        use = f"use md.{own}" if is_public(own) else f"use md.map(jnp.{name}, ...)"
    raise TraceError(
        f"np.{name} takes arrays, and this is {x.type}, whose dims have names\n"
        f"  {use}, or pass x.numpy() outside a trace"
    )


_REFLECTED = {
    "add": ("__radd__", "+"), "subtract": ("__rsub__", "-"), "multiply": ("__rmul__", "*"),
    "divide": ("__rtruediv__", "/"), "floor_divide": ("__rfloordiv__", "//"), "remainder": ("__rmod__", "%"),
    "power": ("__rpow__", "**"), "bitwise_and": ("__rand__", "&"), "bitwise_or": ("__ror__", "|"),
    "bitwise_xor": ("__rxor__", "^"), "left_shift": ("__rlshift__", "<<"), "right_shift": ("__rrshift__", ">>"),
    "equal": ("__eq__", "=="), "not_equal": ("__ne__", "!="), "less": ("__gt__", "<"), "less_equal": ("__ge__", "<="),
    "greater": ("__lt__", ">"), "greater_equal": ("__le__", ">="), "matmul": ("__rmatmul__", "@"),
    "negative": ("__neg__", "-"), "invert": ("__invert__", "~"),
}  # fmt: skip
_ARITHMETIC = {
    "add": ops.add, "sub": ops.subtract, "mul": ops.multiply, "truediv": ops.divide, "floordiv": ops.floor_divide,
    "mod": ops.remainder, "pow": ops.power, "and": ops.bitwise_and, "or": ops.bitwise_or, "xor": ops.bitwise_xor,
    "lshift": ops.left_shift, "rshift": ops.right_shift,
}  # fmt: skip
_COMPARISONS = {
    "eq": ops.equal, "ne": ops.not_equal, "lt": ops.less, "le": ops.less_equal, "gt": ops.greater,
    "ge": ops.greater_equal,
}  # fmt: skip
_OTHERS = {
    "neg": ops.negative, "abs": ops.abs, "invert": ops.invert, "matmul": _no_matmul, "rmatmul": _no_matmul,
    "array_ufunc": _numpy_function, "getitem": named_index,
}  # fmt: skip

_METHODS: dict[str, Callable[..., Tensor]] = {
    "all": reductions.all, "any": reductions.any, "astype": cast, "max": reductions.max, "mean": reductions.mean,
    "min": reductions.min, "prod": reductions.prod, "std": std, "sum": reductions.sum, "var": reductions.var,
}  # fmt: skip

for _name, _function in _ARITHMETIC.items():
    setattr(Tensor, f"__{_name}__", _operator(_function))
    setattr(Tensor, f"__r{_name}__", _operator(_function, swap=True))
for _name, _function in _COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _operator(_function))
for _name, _function in _METHODS.items():
    setattr(Tensor, _name, _function)
for _name, _function in _OTHERS.items():
    setattr(Tensor, f"__{_name}__", _function)
Tensor.at = at  # pyright: ignore[reportAttributeAccessIssue] - a property of every tensor
Tensor.__hash__ = object.__hash__
