"""Dtypes and dims of cotangents.

A cotangent has the dtype of its value, except those of copies of a weight: a weight that products read in a narrower
dtype has a gradient in its own dtype from the products on, so it is added up in that dtype on each device, between
devices and over the trips of loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import Eqn, Fuses, Linear, Type, Var
from ..ops.creation import zeros_like
from ..ops.dtypes import CAST, cast, cast_parts, kind, wide_dtype
from ..ops.reductions import broadcast, total
from ..ops.reshape import transpose
from ..trace import Tensor


@dataclass(eq=False)
class Weight:
    """An input to differentiate, or a copy of one in another dtype or shape. Its gradient is added up in `dtype`.

    `reduce` is the dtype in which devices add up the gradient, if a copy names one (`md.cast(..., reduce=)`). `parts`
    are the weights that a copy is made from.
    """

    dtype: np.dtype
    parts: tuple[Weight, ...] = ()
    reduce: np.dtype | None = None

    def reduce_in(self, dtype: np.dtype) -> None:
        """Devices add up the gradients of all inputs that this is a copy of in `dtype`."""
        self.reduce = dtype
        for part in self.parts:
            part.reduce_in(dtype)

    def reduced(self, gradient: Tensor) -> Tensor:
        """The gradient of an input; devices add it up in the narrower dtype, if a copy names one."""
        if self.reduce is None or self.reduce.itemsize >= gradient.dtype.itemsize:
            return gradient
        return cast(cast_parts(gradient, self.reduce), gradient.dtype)


Active = bool | Weight  # true: the input has a cotangent


def cotangent_dtype(x: Any, active: Active) -> np.dtype:
    """The dtype of the cotangent of an input."""
    return active.dtype if isinstance(active, Weight) else x.dtype


def zero_cotangent(x: Any, active: Active) -> Tensor:
    """Zeros as the cotangent of an input."""
    return zeros_like(Type(x.dims, cotangent_dtype(x, active)))


def fit(ct: Tensor, primal: Tensor, dtype: np.dtype, parts: bool = False) -> Tensor:
    """Sum, broadcast, transpose and cast a cotangent to the dims and order of its primal, and to a dtype.

    With `parts`, devices add up a gradient in that dtype.
    """
    if extra := [d for d in ct.dims if d not in primal.dims]:
        ct = cast_parts(total(cast(ct, wide_dtype(ct.dtype)), extra), dtype)
    ct = broadcast(ct, primal.dims) if len(ct.dims) < len(primal.dims) else transpose(ct, primal.dims)
    narrows = kind(ct.dtype) == kind(dtype) == "f" and dtype.itemsize < ct.dtype.itemsize
    return cast_parts(ct, dtype) if parts and narrows else cast(ct, dtype)


def copies(eqn: Eqn, moving: Sequence[Var]) -> bool:
    """True if an equation casts, moves, joins or scales these operands: all that it reads of the weights."""
    op = eqn.operation
    if op.reduce or op.product or eqn.control is not None or len(eqn.outs) != 1:
        return False
    if _elements(eqn.outs[0]) > math.fsum(map(_elements, moving)):
        return False
    if op is CAST or op.linear in (Linear.JOINT, Linear.PADDED):
        return True
    if op.fuses is not Fuses.MAP or len(moving) > 1 or eqn.ins.count(moving[0]) > 1:
        return False
    return op.linear is Linear.EACH or (op.linear is Linear.RATIO and eqn.ins[0] is moving[0])


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
