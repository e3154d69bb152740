"""An all-to-all that sends only filled slots.

Each run of slots (for example an expert's slots for one group) is contiguous in both the sender's and the receiver's
block, so nothing is packed or unpacked. Sender and receiver both know the number of filled slots in advance.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (NumPy and the signatures of jax.lax are only partly typed)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..backend import varying
from ..dims import Shape, names
from ..errors import InternalError
from ..ir import BlockEffect, Blocks, CollectiveDefaults
from ..layouts import Mesh, Sharding
from ..layouts.sharding import Axes
from .collectives import AllToAll
from .permute import coordinates, index_along

Array = Any  # a JAX value inside shard_map
Index = Callable[[Axes], Any]  # a device's index along axes


@dataclass(frozen=True)
class RaggedAllToAll(CollectiveDefaults):
    """An `AllToAll` that sends only the first slots along `slots`, as many as are filled; the others arrive as zeros.

    It takes the counts in the shardings before and after the exchange: on each device [cells] and a last dim of size 1.
    If that has size 2, a cell sends a run instead: the first slot, and the number of slots from there on.
    `cells` are the dims that have separate counts; they include `dim` and `to`. No plan contains a ragged exchange; the
    pass `ragged_exchange` puts it in place of an `AllToAll`. `share` is the expected fraction of filled slots; it
    scales the estimated time only.

    >>> op = RaggedAllToAll("expert", "batch", ("rows",), ("batch", "expert"), "slot")
    >>> print(op, op.step(Sharding.of({"expert": ("rows",)}), Mesh("rows:2")))
    ragged_all_to_all expert -> batch over rows {batch:rows}
    """

    name = "ragged_all_to_all"
    at_most = True
    sends = True
    dim: str
    to: str
    axes: Axes
    cells: tuple[str, ...]
    slots: str
    share: float = 1.0

    def __str__(self) -> str:
        return f"ragged_{self.padded}"

    @property
    def timed_as(self) -> str:
        """An all_to_all, of fewer bytes."""
        return self.padded.timed_as

    @property
    def padded(self) -> AllToAll:
        """The exchange that sends every slot."""
        return AllToAll(self.dim, self.to, self.axes)

    @property
    def effect(self) -> BlockEffect:
        """As `AllToAll`, which has no further dims; this one sends runs of slots, so other cells and slots move too."""
        others = tuple(cell for cell in self.cells if cell not in (self.dim, self.to))
        return BlockEffect(self.dim, self.to, moves=(*others, self.slots))

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        """The sharding changes as by `AllToAll`."""
        return self.padded.step(before, mesh)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        """An upper bound: the bytes that `AllToAll` sends. They are sent if every slot is filled."""
        return self.padded.bytes_sent(local_bytes, mesh)

    def emit(
        self, x: Array, shape: Shape, before: Sharding, mesh: Mesh, send_counts: Array, recv_counts: Array
    ) -> Array:
        """Call `lax.ragged_all_to_all` on rows, one for each slot, with one run per cell that a peer receives."""
        order = self._order(shape)
        x = jnp.transpose(varying(x, self.axes), order)
        n, k = mesh.count(self.axes), len(self.cells)
        cells, size, rest = x.shape[:k], x.shape[k], x.shape[k + 1 :]
        grow_axis, cut_axis = self.cells.index(self.dim), self.cells.index(self.to)
        after = tuple(m * n if i == grow_axis else m // n if i == cut_axis else m for i, m in enumerate(cells))
        send_counts = self._of_cells(jnp, send_counts, cells, shape, before, mesh, _index)
        recv_counts = self._of_cells(jnp, recv_counts, after, shape, self.step(before, mesh), mesh, _index)

        def by_peer(a: Array, axis: int) -> Array:
            """Flatten an array with the peers' parts one after another along an axis to [peer, its cells]."""
            parts = jnp.reshape(a, (*a.shape[:axis], n, a.shape[axis] // n, *a.shape[axis + 1 :]))
            return varying(jnp.ravel(jnp.moveaxis(parts, axis, 0)).astype(np.int32), self.axes)

        def starts(sizes: tuple[int, ...]) -> Array:
            """The row of each cell's first slot."""
            return jnp.reshape(jnp.arange(math.prod(sizes), dtype=np.int32) * size, sizes)

        offsets = lax.dynamic_slice_in_dim(
            starts(after), lax.axis_index(self.axes) * cells[grow_axis], cells[grow_axis], grow_axis
        )
        first, count = _run(send_counts)
        zeros = jnp.zeros((math.prod(cells) * size, *rest), x.dtype)
        y = lax.ragged_all_to_all(
            jnp.reshape(x, zeros.shape),
            varying(zeros, tuple(jax.typeof(x).mat.varying)),
            by_peer(starts(cells) + first, cut_axis),
            by_peer(count, cut_axis),
            jnp.tile(jnp.ravel(offsets), n) + by_peer(first, cut_axis),  # in the receiver's rows
            by_peer(_run(recv_counts)[1], grow_axis),
            axis_name=self.axes,
        )
        return jnp.transpose(jnp.reshape(y, (*after, size, *rest)), _inverse(order))

    def emit_padded(
        self, x: Array, shape: Shape, before: Sharding, mesh: Mesh, send_counts: Array, recv_counts: Array
    ) -> Array:
        """The same result by an exchange of every slot, for devices without a ragged one."""
        cells = tuple(x.shape[i] for i in self._order(shape)[: len(self.cells)])
        send_counts = self._of_cells(jnp, send_counts, cells, shape, before, mesh, _index)
        return self.padded.emit(self._filled(jnp, x, shape, send_counts), shape, before, mesh)

    def simulate(
        self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh, send_counts: Blocks, recv_counts: Blocks
    ) -> Blocks:
        """The padded exchange of blocks whose slots outside the run are zero.

        Raises `InternalError` when a device expects other counts than its peers send.
        """
        order = self._order(shape)[: len(self.cells)]
        cells, after = tuple(shape[i] for i in order), self.step(before, mesh)
        sizes = tuple(blocks[0].shape[i] for i in order)
        indices = [partial(index_along, mesh, coords) for coords in coordinates(mesh)]
        send_counts = [
            self._of_cells(np, count, sizes, shape, before, mesh, index)
            for count, index in zip(send_counts, indices, strict=True)
        ]
        for k in range(send_counts[0].shape[-1]):
            expected = self.padded.simulate([count[..., k] for count in send_counts], cells, before, mesh)
            for count, received, index in zip(expected, recv_counts, indices, strict=True):
                if (self._of_cells(np, received, count.shape, shape, after, mesh, index)[..., k] != count).any():
                    raise InternalError(f"'{self}' expects other counts than are sent")
        filled = [self._filled(np, x, shape, count) for x, count in zip(blocks, send_counts, strict=True)]
        return self.padded.simulate(filled, shape, before, mesh)

    def _of_cells(
        self, xp: Any, counts: Array, sizes: Sequence[int], shape: Shape, sharding: Sharding, mesh: Mesh, index: Index
    ) -> Array:
        """The counts of a device's cells in blocks of these sizes; 0 for a cell of padding, which sends nothing."""
        stored = counts.shape[:-1]
        if stored != tuple(sizes):
            counts = xp.pad(counts, [*((0, n - m) for n, m in zip(sizes, stored, strict=True)), (0, 0)])
        for axis, (at, n, m) in enumerate(zip(self._order(shape), sizes, stored, strict=False)):
            axes = sharding.axes(shape[at])
            if mesh.count(axes) * m != shape[at].size or n != m:
                real = index(axes) * m + xp.arange(n) < shape[at].size
                counts = xp.where(xp.reshape(real, (n,) + (1,) * (len(stored) - axis)), counts, 0)
        return counts

    def _filled(self, xp: Any, x: Array, shape: Shape, counts: Array) -> Array:
        """The block, with zeros in the slots that the counts leave empty."""
        order = self._order(shape)
        first, count = _run(counts)
        slots = xp.arange(x.shape[order[len(self.cells)]], dtype=np.int32)
        mask = (slots >= first[..., None]) & (slots < (first + count)[..., None])
        mask = xp.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim))
        return xp.where(xp.transpose(mask, _inverse(order)), x, xp.zeros((), x.dtype))

    def _order(self, shape: Shape) -> tuple[int, ...]:
        """The permutation of the dims to [cells, slots, the others]."""
        dims = names(shape)
        first = (*self.cells, self.slots)
        return tuple(dims.index(d) for d in (*first, *(d for d in dims if d not in first)))


def _index(axes: Axes) -> Any:
    return lax.axis_index(axes) if axes else 0


def _run(counts: Array) -> tuple[Array, Array]:
    """The first filled slot of each cell, and how many there are."""
    first = counts[..., 0] if counts.shape[-1] == 2 else 0 * counts[..., 0]
    return first, counts[..., -1]


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The inverse of a permutation."""
    return tuple(order.index(i) for i in range(len(order)))
