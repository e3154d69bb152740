"""Memory in use on one device at every step of a program, and the values that make up its peak; rules in `liveness`."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np

from ..errors import Where, expect
from ..errors.units import show_bytes
from ..ir import Var
from ..lowering import Program
from ..lowering.unroll import unroll
from .liveness import CATEGORIES, Lives, LiveTensor
from .machine import Machine
from .machine import machine as machine_named


@dataclass(frozen=True)
class Moment:
    """One step of a program and the bytes in use while it runs. The steps of a loop body occur once."""

    index: int
    op: str
    where: Where
    backward: bool
    bytes: int
    by_category: tuple[int, ...]  # in the order of CATEGORIES

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        by_category = {name: n for name, n in zip(CATEGORIES, self.by_category, strict=True) if n}
        where = str(self.where)
        return {**vars(self), "where": where, "by_category": by_category}


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes in use on one device over time, as `md.memory` returns them. `print(memory)` shows the peak.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.sum(md.tanh(md.dot(x, w, "io"))), "rows:4", "batch:rows")
    >>> found = md.memory(step.program(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")))
    >>> sum(found.by_category.values()) == sum(held.bytes for held in found.by_tensor) == found.peak
    True
    >>> [(moment.op, moment.bytes) for moment in found.profile]
    [('arguments', 2180), ('tanh', 2436), ('sum', 2440), ('all_reduce', 2184), ('results', 2180)]
    """

    peak: int
    at: Moment  # the first moment of the peak
    by_category: Mapping[str, int]  # at the peak; sums to it
    by_tensor: tuple[LiveTensor, ...]  # at the peak, largest first; sums to it
    profile: tuple[Moment, ...]  # every moment in program order
    host: int = 0  # bytes in the host's memory, of values that are offloaded until the backward pass; not in `peak`

    def __str__(self) -> str:
        lines = [f"peak {show_bytes(self.peak)} at {self.at.op}  # {self.at.where}"]
        lines += [f"{show_bytes(n):>10}  {name}" for name, n in self.by_category.items() if n]
        lines += [f"{show_bytes(self.host):>10}  in the host's memory, beside the peak"] if self.host else []
        largest = self.by_tensor[:10]
        return "\n".join([*lines, f"the largest {len(largest)} of {len(self.by_tensor)} values:", *map(str, largest)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "peak": self.peak,
            "host": self.host,
            "at": self.at.to_dict(),
            "by_category": dict(self.by_category),
            "by_tensor": [tensor.to_dict() for tensor in self.by_tensor],
            "profile": [moment.to_dict() for moment in self.profile],
        }


def memory(
    program: Program,
    *,
    donated: Collection[Var] = (),
    categories: Mapping[Var, str] | None = None,
    machine: Machine | str | os.PathLike[str] = "tpu-v5e",
) -> Memory:
    """Memory that one device of a machine uses while it runs a program, by the rules of the machine's compiler.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.sum(md.tanh(md.dot(x, w, "io"))), "rows:4", "batch:rows")
    >>> usage = memory(step.program(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")))
    >>> usage.peak, {name: n for name, n in usage.by_category.items() if n}
    (2440, {'inputs': 2176, 'results': 4, 'temporaries': 256, 'collective buffers': 4})

    `donated`: inputs whose buffers results may reuse. `categories`: category of inputs; by default it follows from the
    path: `params/...`, `state/...`, or an input. Raises `MachineError` for an unknown machine.
    """
    target = (machine if isinstance(machine, Machine) else machine_named(machine)).target
    expect("program", program, Program)
    program = unroll(target.prepare(program), math.inf, most=1)  # compilers inline loops of one trip
    lives = Lives(program, frozenset(donated), categories or {}, target.memory)
    change = np.zeros((len(CATEGORIES), len(lives.moments) + 1), object)
    for tensor in lives.tensors:
        row = change[CATEGORIES.index(tensor.category)]
        row[tensor.first] += tensor.bytes
        row[tensor.last + 1] -= tensor.bytes
    over_time = zip(*(accumulate(row[:-1]) for row in change), strict=True)
    profile = tuple(
        Moment(i, *lives.moments[i], sum(by_category), by_category) for i, by_category in enumerate(over_time)
    )
    peak = max(profile, key=lambda moment: moment.bytes)
    tensors = sorted(
        (tensor for tensor in lives.tensors if tensor.first <= peak.index <= tensor.last),
        key=lambda tensor: -tensor.bytes,
    )
    by_category: dict[str, int] = dict(zip(CATEGORIES, peak.by_category, strict=True))
    return Memory(peak.bytes, peak, by_category, tuple(tensors), profile, _offloaded(program, lives.offloaded))


def _offloaded(program: Program, offloaded: Set[Var]) -> int:
    """Bytes of all offloaded values of a program: all are in the host's memory when the backward pass begins."""
    total = sum(program.local_bytes(v) for eqn in program.eqns for v in eqn.outs if v in offloaded)
    bodies = [
        body for eqn in program.eqns if offloaded.isdisjoint((*eqn.ins, *eqn.outs)) for body in eqn.graphs().values()
    ]
    return total + max((_offloaded(cast(Program, body), offloaded) for body in bodies), default=0)
