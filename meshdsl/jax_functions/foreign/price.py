"""What a sharded JAX program sends, by line: read from its jaxpr, for any number of devices, without running it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import jax_functions
from ...cost.machine import Machine
from ...cost.network import place
from ...errors import NOWHERE, Where
from ...layouts import Mesh
from .collectives import KINDS, axes_of
from .simulate import is_library, lines_of


@dataclass(frozen=True)
class Sent:
    """One collective of a program, per device and run of the program.

    `bytes` is the larger of operand and result, as in the ledger of a meshdsl program; `trips` counts the loops around
    it, and is 1 for each trip of a while loop (`unbounded`). `dims` are those of the operand's axes, "" where none is
    known. `seconds` is the time of all trips on the machine that `verify_jax` was given, else None.
    """

    where: Where
    primitive: str
    kind: str
    axes: tuple[str, ...]
    mesh: Mapping[str, int]
    dtype: str
    bytes: int
    trips: int
    unbounded: bool = False
    dims: tuple[str, ...] = ()
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        lists = {"axes": list(self.axes), "dims": list(self.dims)}
        return {**vars(self), "where": str(self.where), "mesh": dict(self.mesh), **lists}


def collectives(closed: Any, machine: Machine | None = None, names: Mapping[Any, Any] | None = None) -> list[Sent]:
    """Every collective of a traced program, one for each operand, in order; those within one device are left out.

    `names` has the dims of variables of the program.
    """
    found = [(one, v) for one, v in _inside(jax_functions.opened(closed)[0], {}, 1, False, None)]
    named = [replace(one, dims=(names or {}).get(v, ())) for one, v in found]
    return named if machine is None else [_timed(one, machine) for one in named]


def _inside(
    jaxpr: Any, mesh: Mapping[str, int], trips: int, unbounded: bool, caller: Any
) -> Iterator[tuple[Sent, Any]]:
    library = caller is not None and is_library(jaxpr)
    for eqn in jaxpr.eqns:
        name, source = eqn.primitive.name, caller if library else eqn
        axes = tuple(a for a in axes_of(eqn) if mesh.get(a, 1) > 1) if name in KINDS else ()
        for v, out in zip(eqn.invars, eqn.outvars, strict=True) if axes else ():
            size = max(math.prod(x.aval.shape) for x in (v, out)) * np.dtype(v.aval.dtype).itemsize
            where = next(iter(lines_of(source)), NOWHERE)
            if size:
                kind = KINDS[name]
                yield Sent(where, name, kind, axes, mesh, v.aval.dtype.name, size, trips, unbounded), v
        own, times, loop = mesh, trips, unbounded
        if name == "shard_map":
            own = dict(eqn.params["mesh"].shape)
        elif name == "scan":
            times = trips * eqn.params["length"]
        elif name == "while":
            loop = True
        for body in jax_functions.inner(eqn):
            yield from _inside(jax_functions.opened(body)[0], own, times, loop, source)


def _timed(one: Sent, machine: Machine) -> Sent:
    placed = place(machine.network, Mesh(dict(one.mesh)))
    size = one.bytes * math.prod(one.mesh[a] for a in one.axes) if one.kind == "all_to_all" else one.bytes
    return replace(one, seconds=one.trips * placed.seconds(one.kind, one.axes, size))
