"""The operators and methods of tensors: `x + y`, `x < y`, `-x`, `x.sum("batch")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..errors import ShapeError, at, caller
from ..trace import Tensor
from . import elementwise as ops
from . import reductions
from .dtypes import cast


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
    raise at(
        ShapeError(
            "x @ y does not say which dim is summed\n  name it with md.dot(x, y, over=dim), or name what stays with "
            "md.einsum(x, y, out=dims)"
        ),
        caller(),
    )


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
}  # fmt: skip

_METHODS: dict[str, Callable[..., Tensor]] = {
    "all": reductions.all, "any": reductions.any, "astype": cast, "max": reductions.max, "mean": reductions.mean,
    "min": reductions.min, "prod": reductions.prod, "sum": reductions.sum, "var": reductions.var,
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
Tensor.__hash__ = object.__hash__
