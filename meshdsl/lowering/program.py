"""A `Program` is the computation of one device: every value has a sharding, and collectives are explicit equations.

It is the only description of a device's work. Execution, simulation, costing and printing all use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..backend import Block
from ..dims import Dim
from ..errors import Where
from ..errors.markup import page_part
from ..errors.units import show_bytes
from ..ir import Because, Cause, Collective, Eqn, Graph, Start, Var, While, format_graph, walk
from ..ir.graph import SHORT
from ..layouts import Extents, Mesh
from ..ops.attention.kernels import AttentionKernel
from ..passes.pipelines import Schedule


@dataclass(frozen=True, eq=False, repr=False)
class Program(Graph):
    """Equations for one device of `mesh`. `print(program)` shows local sizes, shardings, collectives and their causes.

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

    `mesh` and `extents` (padding of uneven dims) say what local sizes mean, `schedules` are those of its pipelines,
    and `mentions` are the dims that the function used, also those that simplification removed.
    """

    mesh: Mesh = field(default_factory=Mesh)
    extents: Extents = field(default_factory=Extents)
    schedules: tuple[Schedule, ...] = ()  # of its pipelines

    def __str__(self) -> str:
        return format_graph(self, self.show, f"program on {self.mesh or 'one device'}", self.note)

    def _heading(self) -> str:
        records = self.collectives
        words = [f"{len(records)} collective{'' if len(records) == 1 else 's'}"]
        words += [f"{show_bytes(sum(r.wire_bytes * r.count for r in records))} sent by each device"] if records else []
        return f"program on {self.mesh or 'one device'}: {self.instructions} operations, {', '.join(words)}"

    def _repr_html_(self) -> str:
        return page_part(self._heading(), str(self), self.mesh.axes, opened=self.instructions <= SHORT)

    @cached_property
    def _blocks(self) -> dict[Var, Block]:
        return {}  # the cost model and the simulator ask for every value's block several times

    @cached_property
    def _bytes(self) -> dict[Var, int]:
        return {}  # the cost model asks for them hundreds of times

    def show(self, var: Var) -> str:
        """A value's dtype, local sizes, and the axes that split each dim."""
        sizes = self.local_shape(var)
        dims: list[str] = []
        for dim, n in zip(var.dims, sizes, strict=True):
            axes = var.sharding.axes(dim)
            dims.append(f"{dim.name}={n}{'/' + '/'.join(axes) if axes else ''}")
        pending = f" partial {var.sharding.kind} over {','.join(var.sharding.partial)}" if var.sharding.partial else ""
        return f"{var.dtype.name}[{' '.join(dims)}]{pending}"

    def note(self, eqn: Eqn) -> str:
        """The text printed beside an equation.

        Beside a collective: its bytes and its cause; beside an attention: why it is not fused; beside an operation
        whose sharding an `md.shard` decided: that annotation; beside a loop of a pipeline: its ticks.
        """
        if ticks := self.ticks(eqn):
            return ticks
        if not eqn.sends:
            kernel = eqn.params.get("kernel")  # of an attention; a convolution's is its kernel dims
            reason = kernel.reason if isinstance(kernel, AttentionKernel) else ""
            return str(eqn.cause) if eqn.cause.kind is Because.ANNOTATED else reason
        record = self.record(eqn, 1)
        return f"{record.size}  {record.cause}"

    def ticks(self, eqn: Eqn) -> str:
        """The ticks that an equation runs, if it is a loop of a pipeline; "" otherwise.

        >>> import meshdsl as md
        >>> from meshdsl.models.llama import llama
        >>> small = llama.replace(batch=4, length=8, vocab=32, layers=2, d_model=16, d_ff=32, query_heads=2, heads=1)
        >>> step = md.compile(small.train_step(), "stages:2", "layer:stages", microbatches=2)
        >>> program = step.program(*small.specs())
        >>> [program.ticks(eqn) for eqn in program.eqns if program.ticks(eqn)]
        ['tick 0: forward', 'ticks 1 to 2: forward and backward', 'tick 3: backward']
        """
        if eqn.scan is None:
            return ""
        return next(filter(None, (each.ticks_of(eqn.scan.dim.name) for each in self.schedules)), "")

    def local_shape(self, var: Var) -> tuple[int, ...]:
        """The stored sizes of a value on one device."""
        return self.block(var).sizes

    def block(self, var: Var) -> Block:
        """The part of a value that one device stores."""
        block = self._blocks.get(var)
        if block is None:
            sizes, split = self.extents.local_shape(var.dims, var.sharding, self.mesh), dict(var.sharding.split)
            block = self._blocks[var] = Block(var.dims, sizes, tuple([split.get(d.name, ()) for d in var.dims]))
        return block

    def stored_shape(self, var: Var) -> tuple[int, ...]:
        """The stored sizes of a value on all devices together."""
        return self.extents.global_shape(var.dims, var.sharding, self.mesh)

    def is_padded(self, var: Var, dim: Dim) -> bool:
        """True if some stored elements of a value along this dim are padding."""
        return self.extents.is_padded(dim, self.mesh.count(var.sharding.axes(dim)))

    def sent_shape(self, eqn: Eqn) -> tuple[int, ...]:
        """The sizes of one device's operand as a collective sends it: padded along the dim that it cuts."""
        return self._exchanged(eqn, 0)

    def received_shape(self, eqn: Eqn) -> tuple[int, ...]:
        """The sizes of one device's result as a collective makes it: with the padding of the blocks that it joins."""
        return self._exchanged(eqn, 1)

    def padded_bytes(self, eqn: Eqn) -> list[int]:
        """The bytes of one device's operand and result as a collective sends them, if they are longer than stored."""
        (x, *_), (y,) = eqn.ins, eqn.outs
        buffers = ((x, self.sent_shape(eqn)), (y, self.received_shape(eqn)))
        return [math.prod(n) * v.dtype.itemsize for v, n in buffers if n != self.local_shape(v)]

    def chunk(self, eqn: Eqn) -> tuple[str, int] | None:
        """The dim that a collective cuts or joins, and the stored size of one of the chunks; None for a reduction."""
        op = eqn.collective
        assert op is not None
        dim = op.effect.cuts or op.effect.joins
        v = eqn.outs[0] if op.effect.cuts else eqn.ins[0]
        return None if dim is None else (dim, self.block(v).size(dim))

    def _exchanged(self, eqn: Eqn, at: int) -> tuple[int, ...]:
        (x, *_), (y,), op = eqn.ins, eqn.outs, eqn.collective
        assert op is not None
        n, grown = self.mesh.count(op.axes), (op.effect.cuts, op.effect.joins)[at]
        value, smaller = ((x, y), (y, x))[at]
        if grown is None:
            return self.local_shape(value)
        each = zip(value.dims, self.local_shape(value), self.local_shape(smaller), strict=True)
        return tuple([n * chunk if d.name == grown else size for d, size, chunk in each])

    def local_bytes(self, var: Var) -> int:
        """The stored bytes of a value on one device."""
        if var not in self._bytes:
            self._bytes[var] = math.prod(self.local_shape(var)) * var.dtype.itemsize
        return self._bytes[var]

    @property
    def collectives(self) -> tuple[CollectiveRecord, ...]:
        """Every collective that sends something, in program order, with how often it runs; see `ir.walk`."""
        return tuple(self.records())

    def records(self, every_branch: bool = False) -> Iterator[CollectiveRecord]:
        """The collectives; with `every_branch`, those in branches count as if each ran, as in a compiled text."""
        loops = [sub for eqn, _ in walk(self) if isinstance(eqn.control, While) for sub in eqn.graphs().values()]
        unbounded = {eqn for sub in loops for eqn, _ in walk(sub)}
        for eqn, trips in walk(self, 1, every_branch):
            if eqn.sends:
                yield self.record(eqn, trips, eqn in unbounded)

    def record(self, eqn: Eqn, trips: float, unbounded: bool = False) -> CollectiveRecord:
        """The record of one collective that runs `trips` times."""
        (x, *_), (y,) = eqn.ins, eqn.outs  # a ragged exchange has its counts as further operands
        op = eqn.collective
        assert op is not None
        wire = op.wire_dtype(x.dtype)
        sent, received = (wire.itemsize * math.prod(of(eqn)) for of in (self.sent_shape, self.received_shape))
        return CollectiveRecord(
            kind=op.name,
            axes=op.axes,
            dtype=wire,
            bytes=max(sent, received),
            wire_bytes=op.bytes_sent(sent, self.mesh),
            count=trips,
            shape=self.local_shape(x),
            name=x.name or y.name,
            where=eqn.where,
            cause=eqn.cause,
            backward=eqn.backward,
            op=op,
            unbounded=unbounded,
            asynchronous=isinstance(eqn.op, Start),
        )


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of a program. Sizes are per device and per trip."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, ragged_all_to_all, permute
    axes: tuple[str, ...]
    dtype: np.dtype  # as sent
    bytes: int  # the larger of operand and result
    wire_bytes: int  # sent by one device around a ring; an upper bound for a ragged exchange
    count: float  # how often it runs, by the scans and the branches of known frequency around it; see `walk`
    shape: tuple[int, ...]  # of the operand
    name: str  # the tensor's name, or empty
    where: Where
    cause: Cause
    backward: bool
    op: Collective
    unbounded: bool = False  # in a while loop: runs `count` times per trip (once more in the predicate)
    asynchronous: bool = False  # has a separate wait

    @property
    def size(self) -> str:
        """The bytes as text; "at most" if only filled slots are sent."""
        return f"{'at most ' if self.op.at_most else ''}{show_bytes(self.bytes)}"

    def __str__(self) -> str:
        times = (f" x{round(self.count, 4)}" if self.count != 1 else "") + (" each trip" if self.unbounded else "")
        what = f"{self.op} {self.dtype.name}{list(self.shape)}"
        return f"{what} {self.size}{times}  # {self.where.with_scope()} {self.cause}"
