"""The blocks of an attention's operands on one device, in the order of dims of `arrays`, computed, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...backend import Block, Local, NumPy
from ...dims import Dim, Shape, fresh_dim, names
from . import blockwise, in_numpy
from .arrays import Arrays, Span
from .kernels import BLOCKWISE, AttentionKernel
from .spec import AttentionSpec, value_dim

QUERY = Dim("query__position", 1)  # the dim of positions of queries that have none


@dataclass(frozen=True)
class Canonical:
    """The operands of one device by role, with their blocks."""

    c: Local
    how: AttentionSpec
    arrays: Mapping[str, Any]
    blocks: Mapping[str, Block]
    kernel: AttentionKernel = BLOCKWISE

    @staticmethod
    def of(c: Local, how: AttentionSpec, ins: Sequence[Any], kernel: AttentionKernel | None = None) -> Canonical:
        """The operands of an attention or of its gradient."""
        return Canonical(c, how, how.roles(ins), how.roles(c.ins[: len(ins)]), kernel or BLOCKWISE)

    @property
    def batch(self) -> Shape:
        return self.how.batch(self.blocks["k"].dims)

    @property
    def rest(self) -> Shape:
        """Batch and group dims."""
        return (*self.batch, *self.how.group(self.blocks["q"].dims, self.blocks["k"].dims))

    @property
    def length(self) -> Dim:
        q, k = (self.blocks[role].dims for role in "qk")
        return next((d for d in q if d.name == self.how.length), fresh_dim(QUERY, q, k))

    @property
    def keys(self) -> Dim:
        return next(d for d in self.blocks["k"].dims if d.name == self.how.keys)

    @property
    def head(self) -> Dim:
        return next(d for d in self.blocks["q"].dims if d.name == self.how.over)

    @property
    def value(self) -> Dim:
        return value_dim(self.blocks["k"].dims, self.blocks["v"].dims, self.how)

    @property
    def memory(self) -> Dim:
        """The keys' positions in bias and mask."""
        return Dim(self.how.memory, self.keys.size)

    @property
    def queries(self) -> Span:
        """The positions of the device's queries."""
        block = self.blocks["q"]
        if not self.how.length:
            return Span(0, 1)
        return Span(self.c.start(block, self.length), block.size(self.length))

    def arranged(self, role: str, *last: Dim) -> Any:
        """An operand as [*batch, *group, *last], of size 1 where it lacks a dim; None if there is no such operand."""
        if role not in self.arrays:
            return None
        return self.c.align(self.arrays[role], self.blocks[role], Block((*self.rest, *last), (), ()))

    def shared(self, role: str, last: Dim) -> Any:
        """Keys or values as [*batch, keys, last]."""
        return self.c.align(self.arrays[role], self.blocks[role], Block((*self.batch, self.keys, last), (), ()))

    def restored(self, x: Any, dims: Shape, block: Block) -> Any:
        """Undo `arranged`: x has an axis for each of `dims`; the result has only the block's, in its order."""
        stored = names(block.dims)
        kept = [d.name for d in dims if d.name in stored]
        x = x.reshape([block.size(name) for name in kept])
        order = [kept.index(name) for name in stored]
        return x if order == sorted(order) else self.c.xp.transpose(x, order)

    @property
    def evaluator(self) -> Any:
        """What computes it: `forward` and `backward` of `Arrays`."""
        return in_numpy if self.c.xp is NumPy else self.kernel.by or blockwise

    def operands(self, queries: tuple[Span, ...] = (), keys: tuple[Span, ...] = ()) -> Arrays:
        """The operands of the computation; with the positions of blocks that are not the device's own."""
        block = self.blocks["k"]
        keys = keys or (Span(self.c.start(block, self.keys), block.size(self.keys)),)
        bias, mask = (
            None if x is None else self.at_keys(x, keys)
            for x in (self.arranged(role, self.length, self.memory) for role in ("bias", "mask"))
        )
        segments = None
        if "segments" in self.arrays:
            ids, other = self.arranged("segments", self.length), self.arranged("memory_segments", self.keys)
            segments = ids[..., None], other[..., None, :]
        return Arrays(
            q=self.arranged("q", self.length, self.head),
            k=self.shared("k", self.head),
            v=self.shared("v", self.value),
            queries=queries or (self.queries,),
            keys=keys,
            how=self.how,
            count=self.keys.size,
            batch=len(self.batch),
            offset=self.arrays.get("offset"),
            bias=bias,
            mask=mask,
            segments=segments,
            kernel=self.kernel,
            padded=self.stored_keys > self.keys.size,
        )

    def at_keys(self, x: Any, keys: tuple[Span, ...]) -> Any:
        """The columns of an array of scores at these keys; the array has those of all keys, maybe padded otherwise."""
        if x.shape[-1] == 1:
            return x
        x = self.with_columns(x, self.stored_keys)
        if len(keys) == 1 and keys[0].size == self.stored_keys:
            return x
        axis = x.ndim - 1
        parts = [self.c.xp.dynamic_slice(x, span.start, span.size, axis) for span in keys]
        return parts[0] if len(parts) == 1 else self.c.xp.concatenate(parts, axis)

    def spread(self, x: Any, keys: tuple[Span, ...]) -> Any:
        """An array of scores with these columns in their places among all keys."""
        if len(keys) == 1 and keys[0].size == self.stored_keys:
            return x
        axis, done = x.ndim - 1, 0
        full = self.c.xp.zeros((*x.shape[:axis], self.stored_keys), x.dtype)
        for span in keys:
            full = self.c.xp.dynamic_update(full, x[..., done : done + span.size], span.start, axis)
            done += span.size
        return full

    @property
    def stored_keys(self) -> int:
        """The number of keys of all devices along the axes that split them, padding included."""
        block = self.blocks["k"]
        axes = block.axes[block.position(self.keys)]
        return block.size(self.keys) * (self.c.count(axes) if axes else 1)

    def with_columns(self, x: Any, n: int) -> Any:
        """The array cut, or padded with zeros, to n elements along its last axis."""
        missing = n - x.shape[-1]
        return x[..., :n] if missing <= 0 else self.c.xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    def results(self, arrays: Arrays, outs: Sequence[Block]) -> tuple[Any, Any]:
        """The results of an attention as the device stores them, and the logarithm of each query's sum."""
        out, lse = self.evaluator.forward(arrays)
        result = self.restored(out, (*self.rest, self.length, self.value), outs[0])
        return result, self.restored(lse, (*self.rest, self.length), outs[1])

    def cotangents(self, arrays: Arrays) -> list[Any]:
        """The cotangents of q, k, v and the bias as the device stores them, in the wide dtype; that of the bias is zero
        at keys that `arrays` lacks."""
        out, ct = (self.arranged(role, self.length, self.value) for role in ("out", "ct"))
        lse, lse_ct = (self.arranged(role, self.length) for role in ("lse", "lse_ct"))
        dq, dk, dv, db = self.evaluator.backward(arrays, out, lse, ct, lse_ct)
        cotangents = [
            self.restored(dq, (*self.rest, self.length, self.head), self.blocks["q"]),
            self.restored(dk, (*self.batch, self.keys, self.head), self.blocks["k"]),
            self.restored(dv, (*self.batch, self.keys, self.value), self.blocks["v"]),
        ]
        if db is None:
            return cotangents
        block = self.blocks["bias"]
        if self.memory in block.dims:
            db = self.with_columns(self.spread(db, arrays.keys), block.size(self.memory))
        return [*cotangents, self.restored(db, (*self.rest, self.length, self.memory), block)]
