"""The sharding of a value that is followed without computing, and what a primitive makes of it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ...errors import Where
from ..table import FIRST, PRODUCTS, TABLE, equation
from .collectives import CASTS, KINDS, Axes
from .explain import PARTIAL, REPLICATED
from .findings import Finding
from .simulate import lines_of

UNKNOWN = "unknown"
Names = tuple[str, ...]  # a dim for each axis of a value, "" where none is known
LINEAR = FIRST | CASTS | {"transpose", "squeeze", "reduce_window_sum"}
# The scale of a result, from those of its operands and the parameters of the primitive.
SCALED: dict[str, Callable[[Sequence[float], Mapping[str, Any]], float]] = {
    **dict.fromkeys([*LINEAR, "reduce_max"], lambda scales, params: scales[0]),
    **dict.fromkeys(["integer_pow", "square"], lambda scales, params: scales[0] ** params.get("y", 2)),
    **dict.fromkeys(PRODUCTS, lambda scales, params: scales[0] * scales[1]),
    "div": lambda scales, params: scales[0] / scales[1],
}


@dataclass(frozen=True)
class Followed:
    """The sharding of a value along each mesh axis; along an axis that is not named, it is replicated.

    `scale`: times what one device computes, None if unknown. `zero`: made of zeros alone. `assumed`: something behind
    it is not decided, and is taken to be right to go on. `source`: the equation that made it partial, or scaled it.
    `inside` and `spec`: what a result of `shard_map` is in there; `joined`: the finding, if `spec` is wrong about it.
    """

    over: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    scale: float | None = 1.0
    zero: bool = False
    assumed: bool = False
    source: Any = None
    names: Names = ()
    inside: Followed | None = None
    spec: Any = None
    joined: Finding | None = None

    def along(self, axis: str) -> str | int:
        return self.over.get(axis, REPLICATED)

    @property
    def is_known(self) -> bool:
        return self.scale is not None and UNKNOWN not in self.over.values()

    @property
    def what(self) -> tuple[Any, ...]:
        """The fields in which two states are compared."""
        over = {a: how for a, how in self.over.items() if how != REPLICATED}
        return over, self.scale, self.zero, self.assumed

    @property
    def lines(self) -> tuple[Where, ...]:
        return () if self.source is None else lines_of(self.source)


def moved(eqn: Any, how: str | int) -> str | int:
    """The state of a value along a mesh axis after a collective over this axis."""
    p, kind = eqn.params, KINDS[eqn.primitive.name]
    if how == UNKNOWN or (not p.get("tiled", True) and kind != "all_to_all"):
        return UNKNOWN
    match kind:
        case "all_reduce":
            return UNKNOWN if isinstance(how, int) else REPLICATED
        case "reduce_scatter":
            return UNKNOWN if isinstance(how, int) else p["scatter_dimension"]
        case "all_gather":
            return REPLICATED if how == p["all_gather_dimension"] else UNKNOWN
        case "all_to_all":
            return p["split_axis"] if how == p["concat_axis"] else UNKNOWN
        case _:
            return UNKNOWN


def number_of(v: Any, twin: Any) -> Followed:
    """A number in the program; its scale is that over the number of the program on one device."""
    x = np.asarray(v.val)
    zero = bool(np.all(x == 0))
    if not isinstance(twin, Literal):
        return Followed(zero=zero, assumed=True)
    y = np.asarray(twin.val)
    ratio = 1.0 if x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind == "f") else None
    if ratio is None and x.ndim == y.ndim == 0 and y != 0 and x.dtype.kind in "fiu":
        ratio = float(x) / float(y)
    return Followed({}, ratio, zero)


def reshaped(e: Any, axis: int) -> str | int:
    """The axis of the result that begins where a split axis begins, if whole blocks stay together."""
    before, size = math.prod(e.ins[0][:axis]), e.ins[0][axis]
    for k, n in enumerate(e.outs[0]):
        if math.prod(e.outs[0][:k]) == before and n and (n % size == 0 or size % n == 0) and (n > 1 or size == 1):
            return k
    return UNKNOWN


def names_of(eqn: Any, ins: Sequence[Followed]) -> Names:
    """The dims of a result, from those of the operands."""
    rank = len(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    rule, out = TABLE.get(eqn.primitive.name), [""] * rank
    if not any(any(s.names) for s in ins) or rule is None or eqn.primitive.name == "reshape":
        return tuple(out)
    for state, targets in zip(ins, rule(equation(eqn)), strict=False):
        for dim, to in zip(state.names, targets, strict=False):
            if isinstance(to, int) and dim and not out[to]:
                out[to] = dim
    return tuple(out)


def unknown(mesh: Axes) -> Followed:
    return Followed(dict.fromkeys(mesh, UNKNOWN), None)


def shifted(state: Followed, by: int) -> Followed:
    """The state of the rows of a value, or of the value that rows are stacked to."""
    moved = {a: UNKNOWN if d + by < 0 else d + by for a, d in state.over.items() if isinstance(d, int)}
    names = ("", *state.names) if by > 0 and state.names else state.names[1:]
    return replace(state, over={**state.over, **moved}, names=names, inside=None, joined=None)


def either(states: Sequence[Followed]) -> Followed:
    """One state for a value that may be any of these; zeros are like any other."""
    states = [s for s in states if not s.zero] or list(states)
    first, axes = states[0], {a for s in states for a in s.over}
    over = {a: first.along(a) if all(s.along(a) == first.along(a) for s in states) else UNKNOWN for a in axes}
    scale = first.scale if all(s.scale == first.scale for s in states) and UNKNOWN not in over.values() else None
    made = next((s.source for s in states if s.source is not None), None)
    return Followed(over, scale, all(s.zero for s in states), any(s.assumed for s in states), made, first.names)


def how_of(how: str | int) -> str:
    return (
        f"the blocks of axis {how}" if isinstance(how, int) else f"a partial {'sum' if how == PARTIAL else 'maximum'}"
    )
