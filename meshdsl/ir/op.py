"""The record of an operation: type rule, kernel, gradient, cost, and exceptions to the default sharding rule."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np

from ..dims import Shape, check_shape, show
from ..errors import TraceError
from ..layouts import Sharding


@dataclass(frozen=True)
class Type:
    """The abstract form of a value: `.dims` in storage order, their sizes as `.shape`, and `.dtype`."""

    dims: Shape
    dtype: np.dtype

    def __post_init__(self):
        object.__setattr__(self, "dims", check_shape(self.dims))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(dim.size for dim in self.dims)

    def __repr__(self) -> str:
        return f"{self.dtype.name}{show(self.dims)}"


Params = Mapping[str, Any]
Names = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Labels:
    """A label for each dim of an operation's operands and results. Dims with equal labels are sharded alike.

    A dim with label None must be replicated. A label in `must_divide` is sharded only if every dim with that label
    divides without padding. A label in `from_layout` takes the layout's axes, not the operand's, if all dims with that
    label have equal padding. A label in `from_layout_if_ruled` does the same if the layout has a rule for it.
    """

    ins: tuple[Names, ...]
    outs: tuple[Names, ...]
    must_divide: frozenset[str] = frozenset()
    from_layout: frozenset[str] = frozenset()
    from_layout_if_ruled: frozenset[str] = frozenset()

    @cached_property
    def vanishing(self) -> tuple[str, ...]:
        """The labels of operands that no result has, in order."""
        kept = {label for names in self.outs for label in names.values()}
        gone = (label for names in self.ins for label in names.values() if label is not None and label not in kept)
        return tuple(dict.fromkeys(gone))


def named(shape: Shape, whole: Collection[str] = ()) -> dict[str, str | None]:
    """The name of each dim as its label; None for the dims in `whole`."""
    return {d.name: None if d.name in whole else d.name for d in shape}


def only_named(shape: Shape, split: Collection[str] = ()) -> dict[str, str | None]:
    """The name as label of the dims in `split`; None for the others."""
    return {d.name: d.name if d.name in split else None for d in shape}


def no_flops(*_: Any, **__: Any) -> float:
    """The FLOPs of an operation that computes nothing: it moves, cuts or joins data."""
    return 0.0


class Linear(StrEnum):
    """The operands that may be partial sums, so that the result is a partial sum too."""

    NONE = ""
    JOINT = "joint"  # all operands together
    EACH = "each"  # any single operand, as a factor of a product
    FIRST = "first"  # only the first operand
    RATIO = "ratio"  # only the first operand, which is divided by the second
    SECOND = "second"  # only the second operand
    UPDATE = "update"  # the first two operands together
    BRANCHES = "branches"  # all operands but the first, together
    PADDED = "padded"  # all operands together, if the fill value is zero
    WIDENING = "widening"  # the only operand, if the result's dtype represents all its values exactly


class Fuses(StrEnum):
    """The way in which XLA fuses an operation; the cost model uses it."""

    KERNEL = ""  # runs as its own kernel
    VIEW = "view"  # free
    MAP = "map"  # fused into the kernel that reads its result
    PICK = "pick"  # like MAP, and reads no more elements than it writes
    UPDATE = "update"  # ends a kernel: writes its second operand over a part of the first, in place
    REDUCE = "reduce"  # fuses the producers of its operands


class Product(StrEnum):
    """The kind of tensor product an operation computes; machines have dedicated units for these."""

    NONE = ""
    MATMUL = "matmul"  # product of the first two operands
    CONV = "conv"
    ATTENTION = "attention"  # products of queries with keys, and of weights with values, in one kernel


class Bounded(StrEnum):
    """A bound on the magnitude of a floating-point result's elements, NaN aside."""

    NO = ""
    BY_ONE = "one"  # at most 1
    BY_OPERANDS = "operands"  # no larger than an element of an operand


class Reduce(StrEnum):
    """The reduction that combines the devices' partial results when an operation removes a sharded dim."""

    NONE = ""
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, eq=False)
class Op:
    """The record of an operation: type rule, kernel, gradient, cost, and exceptions to the default sharding rule.

    The default rule: a dim of both inputs and output keeps its sharding; a sharded dim that only inputs have makes the
    output partial (`reduce`); a dim that only the output has follows the layout's rule. The fields below `reduce` are
    the exceptions.
    """

    name: str
    type: Callable[..., Type | tuple[Type, ...]]  # (*input types, **params); raises ShapeError
    kernel: Callable[..., Any]  # (local: backend.Local, *arrays, **params) on one device's blocks
    # (ct, *ins[, out][, params by name]) -> one ct per input, None for no gradient
    vjp: Callable[..., Any] | None = None
    # (*ins, active, read, **params) -> (outs, residuals), then vjp(cts, residuals, **params); `active` operands get a
    # cotangent, and only results that are `read` have one
    fwd: Callable[..., Any] | None = None
    # (*ins, **params) -> results, written with other operations: the gradient of an operation without a rule is theirs
    plain: Callable[..., Any] | None = None
    # (*ins, new, **params) -> results, if some operands have the extra dim `new`, first; default: see `batching`
    vmap: Callable[..., Any] | None = None
    # (input sizes, output sizes[, shapes, dtypes of inputs], **params) -> floating-point operations on one device;
    # default: none for a view, else one per element of the outputs; see `operations`
    flops: Callable[..., float] | None = None
    # as `flops` -> bytes on one device that the kernel needs besides its operands and results
    scratch: Callable[..., float] | None = None
    fuses: Fuses = Fuses.KERNEL
    linear: Linear = Linear.NONE
    reduce: Reduce = Reduce.NONE
    blocked: Callable[..., tuple[str, ...]] | None = None  # (*input types, **params) -> dims that must be replicated
    mask: Any = None  # written over the padding of removed dims: a number, or "low"/"high" of the dtype
    moves: Callable[..., Any] | None = None  # (*input types, **params) -> ops.index_map.IndexMap along one dim, or None
    rule: Callable[..., Labels] | None = None  # (*input types, **params), if sharding does not follow equal names
    inside_blocks: bool = False  # mixes elements within a device's block of a dim it keeps; only lowering makes it
    shardings: Callable[..., Sequence[Sharding]] | None = None  # (equation) -> result shardings, if labels cannot
    product: Product = Product.NONE
    transcendental: bool = False  # slower than other elementwise operations on some machines
    again: bool = False  # a view that a backward loop may compute again, as it may all elementwise operations
    bounded: Bounded = Bounded.NO
    literal: bool = False  # every element of the result equals the parameter `value`
    stops_gradient: bool = False  # differentiation treats its results as constants
    by_name: bool = False  # the kernel knows dims by their names only: its blocks may lack dims of local size 1
    effects: bool = False  # `cse` never merges it with an equal equation
    acts: bool = False  # does something besides computing its result: `dce` keeps it, and its order is kept

    def __post_init__(self):
        kinds = {"fuses": Fuses, "linear": Linear, "reduce": Reduce, "product": Product, "bounded": Bounded}
        for field, kind in kinds.items():
            kind(getattr(self, field))  # raises ValueError for a non-member

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def __reduce__(self) -> Any:
        """For `pickle`: the place of the record, because its rules are functions without names."""
        return _record, _place_of(self)

    def keywords(self, function: Callable[..., Any], available: Params) -> dict[str, Any]:
        """The entries of `available` that `function` has parameters for (all entries if it takes `**`)."""
        names = _parameters(function)
        return dict(available) if names is None else {name: available[name] for name in names if name in available}

    def infer(self, ins: Sequence[Type], params: Params) -> tuple[Type, ...]:
        """The types of the results; raises `ShapeError` if the operands do not fit."""
        outs = self.type(*ins, **params)
        return (outs,) if isinstance(outs, Type) else tuple(outs)


def _place_of(op: Op) -> tuple[str, str, Any]:
    """A record's module, variable and, if that is a dict, its key; raises `TraceError` if no variable holds it."""
    package = f"{__name__.partition('.')[0]}."
    for module in [value for name, value in sys.modules.items() if name.startswith(package)]:
        for name, value in vars(module).items():
            if value is op:
                return module.__name__, name, None
            table: dict[Any, Any] = cast(Any, value) if isinstance(value, dict) else {}
            for key, record in table.items():
                if record is op:
                    return module.__name__, name, key
    raise TraceError(
        f"a graph with the operation {op.name} cannot be pickled: its rules are functions of this process\n"
        "  pickle its text, str(program), or the plan, and compile again"
    )


def _record(module: str, name: str, key: Any) -> Op:
    value = getattr(importlib.import_module(module), name)
    return value if key is None else value[key]


@lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's parameters; None if it takes `**`."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(p.name for p in parameters)
