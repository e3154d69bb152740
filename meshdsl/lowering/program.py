"""A `Program` is one device's view: every value has a sharding, and collectives are equations among the others.

It is the only description of what a device does. Running it, simulating it, costing it and printing it are readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import Where
from ..ir import Cause, Collective, Eqn, Graph, Var, While, format_graph, walk
from ..layouts import Extents, Mesh
from ..units import show_bytes
from .asynchrony import Start
from .ragged import RaggedAllToAll

__all__ = ["CollectiveRecord", "Program"]


@dataclass(frozen=True, eq=False)
class Program(Graph):
    """Equations for one device of `mesh`. `print(program)` shows local sizes, shardings, collectives and causes.

    >>> import meshdsl as md
    >>> def dot(x, w):
    ...     return md.dot(x, w, "i")
    >>> program = md.compile(dot, "rows:4", "i:rows").program(md.spec("b:8 i:16"), md.spec("i:16 h:32"))
    >>> print(program)
    program on rows:4(
      x: float32[b=8 i=4/rows]
      w: float32[i=4/rows h=32]
    ):
      %2 = einsum x w : float32[b=8 h=32] partial sum over rows  # <doctest ...>:2
      %3 = all_reduce(sum) over rows %2 : float32[b=8 h=32]      # <doctest ...>:2  1.02 kB  sum over 'i' of einsum
      return %3
    >>> (sent,) = program.collectives
    >>> sent.kind, sent.axes, sent.bytes, sent.wire_bytes, sent.count, str(sent.cause)
    ('all_reduce', ('rows',), 1024, 1536, 1, "sum over 'i' of einsum")
    """

    mesh: Mesh = field(default_factory=Mesh)
    extents: Extents = field(default_factory=Extents)

    def __str__(self) -> str:
        return format_graph(self, self.show, f"program on {self.mesh or 'one device'}", self.note)

    def show(self, var: Var) -> str:
        """A value's dtype, local sizes, and the axes that split each dim."""
        sizes = self.local_shape(var)
        dims: list[str] = []
        for dim, n in zip(var.shape, sizes, strict=True):
            axes = var.sharding.axes(dim)
            dims.append(f"{dim.name}={n}{'/' + '/'.join(axes) if axes else ''}")
        pending = f" partial {var.sharding.kind} over {','.join(var.sharding.partial)}" if var.sharding.partial else ""
        return f"{var.dtype.name}[{' '.join(dims)}]{pending}"

    def note(self, eqn: Eqn) -> str:
        """What is printed beside a collective: its bytes and its cause."""
        if not eqn.sends:
            return ""
        record = self.record(eqn, 1)
        return f"{record.size}  {record.cause}"

    def local_shape(self, var: Var) -> tuple[int, ...]:
        """The stored sizes of a value on one device."""
        return self.extents.local_shape(var.shape, var.sharding, self.mesh)

    def local_bytes(self, var: Var) -> int:
        """The stored bytes of a value on one device."""
        return math.prod(self.local_shape(var)) * var.dtype.itemsize

    @property
    def collectives(self) -> tuple[CollectiveRecord, ...]:
        """Every collective that sends something, in program order, those in loop bodies with their trips."""
        return tuple(self._records())

    def _records(self) -> Iterator[CollectiveRecord]:
        loops = [sub for eqn, _ in walk(self) if isinstance(eqn.control, While) for sub in eqn.graphs().values()]
        unbounded = {eqn for sub in loops for eqn, _ in walk(sub)}
        for eqn, trips in walk(self):
            if eqn.sends:
                yield self.record(eqn, trips, eqn in unbounded)

    def record(self, eqn: Eqn, trips: int, unbounded: bool = False) -> CollectiveRecord:
        """What one collective costs."""
        (x, *_), (y,) = eqn.ins, eqn.outs  # a ragged exchange takes its counts too
        op = eqn.collective
        assert op is not None
        wire = op.wire_dtype(x.dtype)
        scale = wire.itemsize / x.dtype.itemsize
        return CollectiveRecord(
            kind=op.name,
            axes=op.axes,
            dtype=wire,
            bytes=int(max(self.local_bytes(x), self.local_bytes(y)) * scale),
            wire_bytes=op.bytes_sent(int(self.local_bytes(x) * scale), self.mesh),
            count=trips,
            shape=self.local_shape(x),
            name=x.name or y.name,
            where=eqn.where,
            cause=eqn.cause,
            backward=eqn.backward,
            op=op.collective if isinstance(op, Start) else op,
            unbounded=unbounded,
            asynchronous=isinstance(op, Start),
        )


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of a program; sizes are of one device and one trip."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, ragged_all_to_all, permute
    axes: tuple[str, ...]
    dtype: np.dtype  # on the wire
    bytes: int  # the larger of one device's operand and result
    wire_bytes: int  # sent by one device around a ring; of a ragged exchange, at most
    count: int  # trips of the scans around it; of a while loop, whose trips nobody knows, one trip
    shape: tuple[int, ...]  # of the operand
    name: str  # the tensor, where it has a name
    where: Where
    cause: Cause
    backward: bool
    op: Collective
    unbounded: bool = False  # in a while loop: it runs `count` times a trip (once more, in the predicate)
    asynchronous: bool = False  # started here, and waited for later

    @property
    def at_most(self) -> bool:
        """Whether the bytes are an upper bound, as only filled slots are sent."""
        return isinstance(self.op, RaggedAllToAll)

    @property
    def size(self) -> str:
        """The bytes for people; a ragged exchange sends what is filled, at most all of it."""
        return f"{'at most ' if self.at_most else ''}{show_bytes(self.bytes)}"

    def __str__(self) -> str:
        times = (f" x{self.count}" if self.count != 1 else "") + (" each trip" if self.unbounded else "")
        what = f"{self.op} {self.dtype.name}{list(self.shape)}"
        return f"{what} {self.size}{times}  # {self.where} {self.cause}"
