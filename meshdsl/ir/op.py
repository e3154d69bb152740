"""One record per operation: its type rule, kernel, gradient and cost, and where it departs from the sharding rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np

from ..dims import Shape, check_shape, show
from ..layouts import Sharding

__all__ = ["Fuses", "Labels", "Linear", "Op", "Params", "Product", "Reduce", "Type"]


@dataclass(frozen=True)
class Type:
    """What is known of a value before it exists: its dims in storage order and its dtype."""

    shape: Shape
    dtype: np.dtype

    def __post_init__(self):
        object.__setattr__(self, "shape", check_shape(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __repr__(self) -> str:
        return f"{self.dtype.name}{show(self.shape)}"


Params = Mapping[str, Any]
Names = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Labels:
    """Which dims of the operands and results of one operation are split together: those with equal labels.

    A dim whose label is None must be replicated. A label in `must_divide` can be split only where every dim that has it
    divides without padding. A label in `from_layout` takes the layout's axes whatever the operand brings, where the
    dims that have it are padded alike; a label in `from_layout_if_ruled` does so when the layout has a rule for it.
    """

    ins: tuple[Names, ...]
    outs: tuple[Names, ...]
    must_divide: frozenset[str] = frozenset()
    from_layout: frozenset[str] = frozenset()
    from_layout_if_ruled: frozenset[str] = frozenset()


class Linear(StrEnum):
    """The operands through which a pending sum may pass."""

    NONE = ""
    JOINT = "joint"  # all together
    EACH = "each"  # any one of them
    FIRST = "first"  # only that one
    SECOND = "second"
    BRANCHES = "branches"  # all but the first, together
    PADDED = "padded"  # all together, when the fill is zero
    WIDENING = "widening"  # the only one, where the result's dtype holds every value of it


class Fuses(StrEnum):
    """What a compiler makes of an operation."""

    KERNEL = ""  # a kernel of its own
    VIEW = "view"  # costs nothing
    MAP = "map"  # computed inside the kernel that reads it
    PICK = "pick"  # the same, and reads no more than it writes
    REDUCE = "reduce"  # computes its operands inside


class Product(StrEnum):
    """The product of tensors that an operation computes, for which machines have units of their own."""

    NONE = ""
    MATMUL = "matmul"  # of its first two operands
    CONV = "conv"


class Reduce(StrEnum):
    """How the parts of a dim that vanishes are combined over devices."""

    NONE = ""
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, eq=False)
class Op:
    """One record per operation: its type rule, kernel, gradient, cost, and where it departs from the sharding rule.

    The sharding rule: a name in inputs and output passes through; a name that vanishes leaves the output partial
    (`reduce`); a name that appears is born in its layout. The fields below `reduce` are the exceptions.
    """

    name: str
    type: Callable[..., Type | tuple[Type, ...]]  # (*input types, **params); raises ShapeError
    kernel: Callable[..., Any]  # (local: backend.Local, *arrays, **params) on one device's blocks
    vjp: Callable[..., Any] | None = (
        None  # (ct, *ins[, out][, params by name]) -> one ct per input, None for no gradient
    )
    fwd: Callable[..., Any] | None = None  # (*ins, **params) -> (outs, residuals), then vjp(cts, residuals, **params)
    flops: Callable[..., float] | None = (
        None  # (input sizes, output sizes[, shapes, dtypes of inputs], **params) on one
    )
    # device; default: one for each element of the outputs; see `operations`
    fuses: Fuses = Fuses.KERNEL
    linear: Linear = Linear.NONE
    reduce: Reduce = Reduce.NONE
    blocked: Callable[..., tuple[str, ...]] | None = None  # (*input types, **params) -> dims that must be whole
    mask: Any = None  # identity that replaces padding of dims that vanish: a number, or "low"/"high" of the dtype
    moves: Callable[..., Any] | None = None  # (*input types, **params) -> ops.moves.Moves along one dim, or None
    rule: Callable[..., Labels] | None = None  # (*input types, **params) when equal names are not the rule
    inside_blocks: bool = False  # mixes elements inside each device's block of a dim that it passes; lowering makes it
    shardings: Callable[..., Sequence[Sharding]] | None = None  # (equation) -> of its results, where no labels say it
    product: Product = Product.NONE
    transcendental: bool = False  # some machines compute it slower than other elementwise operations
    cheap: bool = False  # costs less to compute again in a backward loop than to keep for every trip
    literal: bool = False  # every element of the result is the parameter `value`
    stops_gradient: bool = False  # its results count as constants
    effects: bool = False  # never merged with an equal equation

    def __post_init__(self):
        for field, kind in (("fuses", Fuses), ("linear", Linear), ("reduce", Reduce), ("product", Product)):
            kind(getattr(self, field))  # raises ValueError, naming what is not a member

    def __repr__(self) -> str:
        return self.name

    def keywords(self, function: Callable[..., Any], available: Params) -> dict[str, Any]:
        """The part of `available` that a rule asks for by parameter name (all of it when it takes `**`)."""
        names = _parameters(function)
        return dict(available) if names is None else {name: available[name] for name in names if name in available}

    def infer(self, ins: Sequence[Type], params: Params) -> tuple[Type, ...]:
        """Types of the results; raises ShapeError for operands that do not fit."""
        outs = self.type(*ins, **params)
        return (outs,) if isinstance(outs, Type) else tuple(outs)


@lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's parameters; None when it takes any (`**`)."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(p.name for p in parameters)
