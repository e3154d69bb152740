"""A collective changes the `Sharding` of a value and never the global value.

Each class has five methods: `effect` (what happens to the blocks), `step` (the sharding rule), `bytes_sent` (bytes that
one device sends around a ring), `emit` (the JAX call) and `simulate` (the definition in NumPy, on the list of all
devices' blocks: the oracle for `emit`). Blocks are listed row-major over the mesh. A collective takes a tuple of axes,
major to minor. The planner's edges are these rules. Only collectives send data.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (the signatures of jax.lax are only partly typed)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..backend import varying
from ..dims import Shape, names
from ..errors import InternalError
from ..ir import BlockEffect, Blocks, CollectiveDefaults
from ..layouts.mesh import Mesh
from ..layouts.sharding import Axes, Sharding
from .casts import invariant, ordered, restored
from .permute import Permute

Array = Any  # a JAX tracer inside shard_map
DType = np.dtype[Any]

_COUNTS = np.dtype(np.uint16)  # a sum of booleans tells whether any is true; JAX would send int32, or refuse


@dataclass(frozen=True)
class Slice(CollectiveDefaults):
    """Split `dim` further: each device keeps its chunk of its block. Sends nothing.

    >>> print(Slice("batch", ("rows",)), Slice("batch", ("rows",)).step(Sharding(), Mesh("rows:2")))
    slice batch over rows {batch:rows}
    """

    name = "slice"
    sends = False
    dim: str
    axes: Axes

    def __str__(self) -> str:
        return f"slice {self.dim} over {_show(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(cuts=self.dim)

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        _check(self, before, not before.varying.intersection(self.axes))
        return before.with_split(self.dim, before.axes(self.dim) + self.axes)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return 0

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        axis = _at(shape, self.dim)
        size = x.shape[axis] // mesh.count(self.axes)
        return lax.dynamic_slice_in_dim(varying(x, self.axes), lax.axis_index(self.axes) * size, size, axis)

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        axis = _at(shape, self.dim)
        return [_chunk(blocks[me], axis, peers, me) for me, peers in _peers(mesh, self.axes)]


@dataclass(frozen=True)
class AllGather(CollectiveDefaults):
    """Gather `dim` over its minor axes: every device gets its peers' blocks, in order.

    >>> print(AllGather("batch", ("rows",)).step(Sharding.of({"batch": ("rows",)}), Mesh("rows:2")))
    {}
    """

    name = "all_gather"
    sends = True
    dim: str
    axes: Axes

    def __str__(self) -> str:
        return f"all_gather {self.dim} over {_show(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(joins=self.dim)

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        _check(self, before, _ends(before.axes(self.dim), self.axes))
        return before.with_split(self.dim, before.axes(self.dim)[: -len(self.axes)])

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return (mesh.count(self.axes) - 1) * local_bytes

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        axis = _at(shape, self.dim)
        if not x.shape[axis]:  # StableHLO knows no empty all_gather
            return invariant(x, self.axes)
        return lax.all_gather(varying(x, self.axes), self.axes, axis=axis, tiled=True, to="invarying")

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        axis = _at(shape, self.dim)
        return _for_peers(mesh, self.axes, lambda peers: np.concatenate([blocks[p] for p in peers], axis))


@dataclass(frozen=True)
class AllToAll(CollectiveDefaults):
    """Move the minor axes of `dim` to the minor end of `to`: blocks grow along `dim` and shrink along `to`.

    >>> before = Sharding.of({"expert": ("rows",)})
    >>> print(AllToAll("expert", "batch", ("rows",)).step(before, Mesh("rows:2")))
    {batch:rows}
    """

    name = "all_to_all"
    sends = True
    dim: str
    to: str
    axes: Axes

    def __str__(self) -> str:
        return f"all_to_all {self.dim} -> {self.to} over {_show(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(joins=self.dim, cuts=self.to)

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        _check(self, before, self.dim != self.to and _ends(before.axes(self.dim), self.axes))
        gathered = before.with_split(self.dim, before.axes(self.dim)[: -len(self.axes)])
        return gathered.with_split(self.to, before.axes(self.to) + self.axes)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return _ring(local_bytes, mesh.count(self.axes))

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        grow_axis, cut_axis = _at(shape, self.dim), _at(shape, self.to)
        return lax.all_to_all(varying(x, self.axes), self.axes, split_axis=cut_axis, concat_axis=grow_axis, tiled=True)

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        grow_axis, cut_axis = _at(shape, self.dim), _at(shape, self.to)
        return [
            np.concatenate([_chunk(blocks[p], cut_axis, peers, me) for p in peers], grow_axis)
            for me, peers in _peers(mesh, self.axes)
        ]


@dataclass(frozen=True)
class AllReduce(CollectiveDefaults):
    """Reduce a pending sum, max or min over some of its axes.

    NaN is preserved. `lax.pmax` and `lax.pmin` lose it on CPU, so floats are sent as integers of the same width and
    order, in which NaN is the largest (for max) or the smallest (for min); -0.0 is below +0.0.

    >>> print(AllReduce(("cols",), "max"), AllReduce(("cols",), "max").wire_dtype(np.dtype("float32")))
    all_reduce(max) over cols int32
    """

    name = "all_reduce"
    sends = True
    axes: Axes
    kind: str = "sum"

    def __str__(self) -> str:
        return f"all_reduce({self.kind}) over {_show(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(reduces=True)

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        _check(self, before, before.kind == self.kind and set(self.axes) <= set(before.partial))
        return _finish(before, self.axes)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return _ring(2 * local_bytes, mesh.count(self.axes))

    def wire_dtype(self, dtype: DType) -> DType:
        """The dtype that is sent: for max and min, the integer as wide as a float, and uint8 for bool."""
        dtype = np.dtype(dtype)
        if self.kind == "sum" and dtype == np.bool_:
            return _COUNTS
        if self.kind != "sum" and dtype == np.bool_:
            return np.dtype(np.uint8)
        if self.kind != "sum" and jnp.issubdtype(dtype, np.floating):
            return np.dtype(f"int{8 * dtype.itemsize}")
        return dtype

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        x = varying(x, self.axes)
        if self.kind == "sum":
            return lax.psum(x.astype(self.wire_dtype(x.dtype)), self.axes).astype(x.dtype)
        combine = lax.pmax if self.kind == "max" else lax.pmin
        bits = ordered(x, self.wire_dtype(x.dtype), nan_is_largest=self.kind == "max")
        return restored(combine(bits, self.axes), x.dtype)

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[self.kind]
        with np.errstate(all="ignore"):  # NaN, infinities and overflow are data here
            return _for_peers(mesh, self.axes, lambda peers: np.asarray(reduce(combine, [blocks[p] for p in peers])))


@dataclass(frozen=True)
class ReduceScatter(CollectiveDefaults):
    """Reduce a pending sum over `axes`; each device keeps its chunk of `dim`.

    >>> print(ReduceScatter("hidden", ("cols",)).step(Sharding.of({}, ("cols",)), Mesh("cols:4")))
    {hidden:cols}
    """

    name = "reduce_scatter"
    sends = True
    kind: ClassVar[str] = "sum"
    dim: str
    axes: Axes

    def __str__(self) -> str:
        return f"reduce_scatter {self.dim} over {_show(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(cuts=self.dim, reduces=True)

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        _check(self, before, before.kind == "sum" and set(self.axes) <= set(before.partial))
        return _finish(before, self.axes).with_split(self.dim, before.axes(self.dim) + self.axes)

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        return _ring(local_bytes, mesh.count(self.axes))

    def emit(self, x: Array, shape: Shape, before: Sharding, mesh: Mesh) -> Array:
        axis = _at(shape, self.dim)
        if not x.shape[axis]:  # StableHLO has no empty reduce_scatter either
            return varying(x, self.axes)
        wire = varying(x, self.axes).astype(self.wire_dtype(x.dtype))
        return lax.psum_scatter(wire, self.axes, scatter_dimension=axis, tiled=True).astype(x.dtype)

    def wire_dtype(self, dtype: DType) -> DType:
        """The dtype that is sent: the value's own, or a count for bool."""
        return _COUNTS if np.dtype(dtype) == np.bool_ else np.dtype(dtype)

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        axis = _at(shape, self.dim)
        reduced = AllReduce(self.axes).simulate(blocks, shape, before, mesh)
        return [_chunk(reduced[me], axis, peers, me) for me, peers in _peers(mesh, self.axes)]


Step = Slice | AllGather | AllToAll | AllReduce | ReduceScatter | Permute  # a step of a plan


def _at(shape: Shape, dim: str) -> int:
    return names(shape).index(dim)


def _show(axes: Axes) -> str:
    return ",".join(axes)


def _check(collective: Step, before: Sharding, fits: bool) -> None:
    if not fits or len(set(collective.axes)) != len(collective.axes) or not collective.axes:
        raise InternalError(f"'{collective}' does not apply to a value laid out as {before}")


def _ends(axes: Axes, minor: Axes) -> bool:
    return axes[len(axes) - len(minor) :] == minor


def _finish(before: Sharding, axes: Axes) -> Sharding:
    return Sharding.of(dict(before.split), set(before.partial) - set(axes), before.kind)


def _ring(local_bytes: int, n: int) -> int:
    """(n-1)/n of the bytes, rounded up: a device sends n-1 of n equal chunks around a ring."""
    return -(-(n - 1) * local_bytes // n)


@lru_cache(maxsize=256)
def _peers(mesh: Mesh, axes: Axes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For every device, the devices that differ from it only along `axes`, in order, including itself."""
    grid = np.arange(mesh.size).reshape(tuple(mesh.axes.values()))
    positions = [list(mesh.axes).index(axis) for axis in axes]
    groups = np.moveaxis(grid, positions, range(len(positions))).reshape(mesh.count(axes), -1).T.tolist()
    return tuple(sorted((me, tuple(group)) for group in groups for me in group))


def _for_peers(mesh: Mesh, axes: Axes, result: Callable[[tuple[int, ...]], Any]) -> Blocks:
    """A result for every device, which is the same array for all peers."""
    devices = _peers(mesh, axes)
    results = {peers: result(peers) for peers in dict.fromkeys(peers for _, peers in devices)}
    return [results[peers] for _, peers in devices]


def _chunk(block: Any, axis: int, peers: tuple[int, ...], me: int) -> Any:
    """This device's chunk of a block that is cut into as many chunks as there are peers."""
    size, rest = divmod(block.shape[axis], len(peers))
    if rest:
        raise InternalError(f"{len(peers)} devices cannot cut a block of {block.shape} along axis {axis}")
    first = peers.index(me) * size
    return block[(slice(None),) * axis + (slice(first, first + size),)]
