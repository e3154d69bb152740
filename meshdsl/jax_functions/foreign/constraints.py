"""Shardings that a program asks for under `jax.jit`: `with_sharding_constraint` and `reshard`, and what each moves."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from ...dims import Dim
from ...errors import Where
from ...errors.units import show_bytes
from ...layouts import Extents, Mesh, Sharding
from ...lowering.partition.planner import Reshard
from .collectives import Axes, split_over

Over = Mapping[str, str | int]
PARAMETERS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


@dataclass(frozen=True)
class Constraint:
    """A sharding that is asked for: the value's own, if it can be followed, and what takes one to the other.

    `steps` and `bytes` are those of the cheapest plan for one device; a compiler may send more. None: not followed.
    """

    where: Where
    before: str | None
    after: str
    steps: str
    bytes: int | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.where}: to {self.after}, from a sharding that is not followed"
        if self.before == self.after:
            return f"{self.where}: to {self.after}, which it has already"
        sent = "nothing is sent" if not self.bytes else f"{self.steps}, {show_bytes(self.bytes)}"
        return f"{self.where}: from {self.before} to {self.after}: {sent}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "where": str(self.where)}


def target(eqn: Any) -> NamedSharding | None:
    """The sharding that an equation asks for, where it is one of named axes."""
    own = eqn.params.get(PARAMETERS.get(eqn.primitive.name, ""))
    return own if isinstance(own, NamedSharding) else None


def over_of(sharding: NamedSharding, rank: int) -> dict[str, str | int]:
    return {a: d for d, axes in enumerate(split_over(sharding.spec, rank)) for a in axes}


def constraint(eqn: Any, over: Over | None, where: Where, sharding: NamedSharding) -> Constraint:
    """What an equation asks for, of a value that lies so; None if that is not known."""
    aval, sizes = eqn.invars[0].aval, dict(sharding.mesh.shape)
    wanted = over_of(sharding, aval.ndim)
    if over is None:
        return Constraint(where, None, _text(wanted, sizes), "", None)
    dims = tuple(Dim(f"axis_{i}", n) for i, n in enumerate(aval.shape))
    before, after = (_sharding(own, sizes) for own in (over, wanted))
    if any(
        n % math.prod(sizes[a] for a in s.axes(d))
        for s in (before, after)
        for d, n in zip(dims, aval.shape, strict=True)
    ):
        return Constraint(where, _text(over, sizes), _text(wanted, sizes), "parts that are not equal", None)
    mesh = Mesh({a: n for a, n in sizes.items() if n > 1})
    move = Reshard(before, after, dims, mesh, Extents(), np.dtype(aval.dtype).itemsize)
    return Constraint(where, _text(over, sizes), _text(wanted, sizes), "; ".join(map(str, move.steps)), move.cost)


def _sharding(over: Over, sizes: Axes) -> Sharding:
    dims = dict[str, tuple[str, ...]]()
    for a, how in over.items():
        if isinstance(how, int) and sizes[a] > 1:
            dims[f"axis_{how}"] = (*dims.get(f"axis_{how}", ()), a)
    return Sharding.of(dims, partial=tuple(a for a, how in over.items() if how == "partial" and sizes[a] > 1))


def _text(over: Over, sizes: Axes) -> str:
    split = [(a, how) for a, how in over.items() if how != "replicated" and sizes[a] > 1]
    parts = (f"{f'axis {how}' if isinstance(how, int) else 'a partial sum'} over {a!r}" for a, how in split)
    return ", ".join(parts) or "whole on every device"
