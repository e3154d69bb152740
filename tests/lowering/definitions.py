"""The definition of shardings in NumPy, without meshdsl.lowering: the oracle of its tests.

A device holds, of every dim, the block whose number its coordinates along the dim's axes spell, major to minor.
Devices that differ along pending axes hold parts which together make the value. Other devices hold the same.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from meshdsl.dims import Shape, dims, names
from meshdsl.ir import Collective
from meshdsl.layouts import Extents, Mesh, Sharding

Axes = tuple[str, ...]
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Case(NamedTuple):
    """All shardings of one shape on one mesh; `pairs` is how many pairs (source, target) there must be."""

    mesh: Mesh
    shape: Shape
    extents: Extents
    kind: str
    itemsize: int
    pairs: int

    def __str__(self) -> str:
        sizes = "x".join(str(self.extents.padded(dim)) for dim in self.shape)
        return f"{self.mesh} {' '.join(map(repr, self.shape))} as {sizes} {self.kind}"


def case(mesh: str, shape: str, kind: str, pairs: int, *, padded: bool = True, itemsize: int = 4) -> Case:
    """A case whose dims are stored padded to a multiple of the mesh's size, or else as they are."""
    grid = Mesh(mesh)
    return Case(grid, dims(shape), extents_of(shape, grid.size if padded else 1), kind, itemsize, pairs)


def extents_of(shape: str, multiple: int) -> Extents:
    return Extents({dim.name: multiple for dim in dims(shape)})


def states(c: Case) -> list[Sharding]:
    """Every sharding: each axis idle, pending, or at some place of some dim's axes."""
    found: list[Sharding] = []
    for order in itertools.permutations(c.mesh.axes):
        for homes in itertools.product((None, "pending", *names(c.shape)), repeat=len(order)):
            split = {d: [a for a, h in zip(order, homes, strict=True) if h == d] for d in names(c.shape)}
            pending = [a for a, h in zip(order, homes, strict=True) if h == "pending"]
            found.append(Sharding.of(split, pending, c.kind))
    legal = (s for s in dict.fromkeys(found) if all(length(c, s, i) is not None for i in range(len(c.shape))))
    return sorted(legal, key=repr)


def length(c: Case, s: Sharding, i: int) -> int | None:
    """The local size of the i-th dim, at most the dim's; None when it does not divide."""
    size, count = c.extents.padded(c.shape[i]), math.prod(c.mesh.axes[a] for a in s.axes(c.shape[i]))
    return min(size // count, c.shape[i].size) if size % count == 0 else None


def local_shape(c: Case, s: Sharding) -> list[int]:
    """The local sizes of all dims, which divide."""
    return [length(c, s, i) or 0 for i in range(len(c.shape))]


def sent_elements(c: Case, step: Collective, before: Sharding) -> int:
    """The elements of a device's operand, padded along the dim that the collective cuts into equal chunks."""
    after, n = step.step(before, c.mesh), math.prod(c.mesh.axes[a] for a in step.axes)
    each = zip(names(c.shape), local_shape(c, before), local_shape(c, after), strict=True)
    return math.prod(n * chunk if name == step.effect.cuts else size for name, size, chunk in each)


def run(c: Case, step: Collective, before: Sharding, blocks: list[np.ndarray]) -> list[np.ndarray]:
    """The blocks after a collective, with operands padded and results trimmed."""
    after, n = step.step(before, c.mesh), math.prod(c.mesh.axes[a] for a in step.axes)
    if step.effect.cuts is not None:
        i = names(c.shape).index(step.effect.cuts)
        pads = [(0, 0)] * len(c.shape)
        pads[i] = (0, n * (length(c, after, i) or 0) - blocks[0].shape[i])
        blocks = [np.pad(block, pads, constant_values=np.nan) for block in blocks]
    kept = tuple(map(slice, local_shape(c, after)))
    return [block[kept] for block in step.simulate(blocks, c.shape, before, c.mesh)]


def places(mesh: Mesh) -> list[dict[str, int]]:
    """Every device's coordinates, row-major."""
    ranges = [range(n) for n in mesh.axes.values()]
    return [dict(zip(mesh.axes, at, strict=True)) for at in itertools.product(*ranges)]


def linear(at: dict[str, int], axes: Axes, mesh: Mesh) -> int:
    index = 0
    for axis in axes:
        index = index * mesh.axes[axis] + at[axis]
    return index


def blocks_of(c: Case, s: Sharding, parts: list[np.ndarray]) -> list[np.ndarray]:
    """The block of every device; parts[k] is the pending part of the devices at place k along the pending axes."""
    found: list[np.ndarray] = []
    for at in places(c.mesh):
        block = parts[linear(at, s.partial, c.mesh)]
        for i, dim in enumerate(c.shape):
            size, index = length(c, s, i), linear(at, s.axes(dim), c.mesh)
            assert size is not None
            block = block.take(range(index * size, (index + 1) * size), axis=i)
        found.append(block)
    return found


def value_of(c: Case) -> np.ndarray:
    """Random small integers, as floats, with NaN in the padding."""
    stored = np.full([c.extents.padded(dim) for dim in c.shape], np.nan)
    real = tuple(slice(dim.size) for dim in c.shape)
    stored[real] = np.random.default_rng(0).integers(0, 1000, [dim.size for dim in c.shape])
    return stored


def parts_of(value: np.ndarray, count: int, kind: str) -> list[np.ndarray]:
    """Random integers which together make the value."""
    random = np.random.default_rng(count)
    if kind == "sum":
        parts = [random.integers(-500, 500, value.shape).astype(float) for _ in range(count - 1)]
        return [*parts, value - sum(parts)]
    worse = -1 if kind == "max" else 1
    owner = random.integers(0, count, value.shape)
    return [value + worse * random.integers(1, 500, value.shape) * (owner != k) for k in range(count)]


def holds(c: Case, target: Sharding, blocks: list[np.ndarray], wanted: np.ndarray) -> bool:
    """True if the blocks are the value's under the target, padding aside, and replicas are equal."""
    if len({block.shape for block in blocks}) > 1:
        return False
    grid = np.stack(blocks).reshape(*c.mesh.axes.values(), *blocks[0].shape)
    axes = list(c.mesh.axes)
    for axis in set(axes) - target.varying:
        first = grid.take([0], axis=axes.index(axis))
        if not ((grid == first) | np.isnan(first)).all():
            return False
    for axis in target.partial:
        grid = COMBINE[c.kind].reduce(grid, axis=axes.index(axis), keepdims=True) + np.zeros_like(grid)
    got = grid.reshape(len(blocks), *blocks[0].shape)
    return got.shape == wanted.shape and bool(((got == wanted) | np.isnan(wanted)).all())
