"""The planner is right and minimal on every pair of shardings of small tensors over up to three axes.

Right: the plan, run by `simulate` on a value laid out by definition, gives the target's blocks by definition.
Minimal: no plan by the same rules sends fewer bytes, then uses fewer collectives, then fewer steps; the reference
is Floyd-Warshall over the graph of all shardings, with every collective tried on every one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from meshdsl.dims import Shape, dims, names
from meshdsl.errors import InternalError, LayoutError
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Permute,
    ReduceScatter,
    Slice,
)
from meshdsl.lowering.planner import cost, plan

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


CASES = [
    case("a:2 b:2 c:2", "x:8 y:8", "sum", 0),
    case("a:2 b:2 c:2", "x:5 y:11", "sum", 0),
    case("a:2 b:2 c:2", "x:4 y:8", "sum", 0, padded=False, itemsize=1),
    case("a:2 b:2 c:2", "x:8 y:5", "max", 0),
    case("a:2 b:4", "x:8 y:8", "sum", 0),
    case("a:4 b:2", "x:13 y:8", "sum", 0),
    case("a:2 b:3", "x:6 y:6", "sum", 0),
    case("a:2 b:3", "x:5 y:7", "sum", 0, itemsize=2),
    case("a:2 b:3", "x:4 y:9", "min", 0, padded=False),
    case("a:2 b:3", "x:6 y:6 z:6", "sum", 0),
    case("a:2 b:4", "x:8 y:8 z:2", "max", 0, padded=False),
]


# --- shardings, layouts and values by definition -----------------------------------------------------------------


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
    """The local size of the i-th dim; None when it does not divide."""
    size, count = c.extents.padded(c.shape[i]), math.prod(c.mesh.axes[a] for a in s.axes(c.shape[i]))
    return size // count if size % count == 0 else None


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
    """What every device holds, when parts[k] is the pending part of the devices at place k along the pending axes."""
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


def simulated(
    c: Case, blocks: list[np.ndarray], s: Sharding, steps: tuple[Collective, ...]
) -> list[np.ndarray]:
    for step in steps:
        blocks = step.simulate(blocks, c.shape, s, c.mesh)
        s = step.step(s, c.mesh)
    return blocks


def holds(c: Case, target: Sharding, blocks: list[np.ndarray], wanted: np.ndarray) -> bool:
    """Whether the blocks are the value's under the target, padding aside, and equal wherever they must be."""
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


# --- the reference -----------------------------------------------------------------------------------------------


def candidates(c: Case, all_states: list[Sharding]) -> Iterator[Collective]:
    """Every collective there is, applicable or not; relabellings are those between the states."""
    axes = tuple(c.mesh.axes)
    tuples = [t for n in range(1, len(axes) + 1) for t in itertools.permutations(axes, n)]
    for t in tuples:
        yield from (AllReduce(t, kind) for kind in COMBINE if t == tuple(sorted(t)))
        for dim in names(c.shape):
            yield from (Slice(dim, t), AllGather(dim, t), ReduceScatter(dim, t))
            yield from (AllToAll(dim, to, t) for to in names(c.shape) if to != dim)
    yield from {Permute.between(s, t) for s in all_states for t in all_states if s.partial == t.partial}


def ring_bytes(name: str, n: int, local: int) -> int:
    """What one device sends, from the textbook, rounded up to whole bytes."""
    return {
        "slice": 0,
        "all_gather": (n - 1) * local,
        "all_to_all": math.ceil((n - 1) * local / n),
        "reduce_scatter": math.ceil((n - 1) * local / n),
        "all_reduce": math.ceil(2 * (n - 1) * local / n),
        "permute": local,
    }[name]


def priced(sent: int, collectives: int, steps: int) -> int:
    return sent * 10_000 + collectives * 100 + steps


@cache
def reference(index: int) -> tuple[list[Sharding], dict[frozenset[str], np.ndarray]]:
    """All shardings, and the least price from each to each by the axes that may be used on the way."""
    c = CASES[index]
    all_states = states(c)
    number = {s: i for i, s in enumerate(all_states)}
    unreachable = 1 << 60
    edges = np.full((len(all_states),) * 2, unreachable)
    np.fill_diagonal(edges, 0)
    for step in candidates(c, all_states):
        for i, s in enumerate(all_states):
            try:
                j = number.get(step.step(s, c.mesh))
            except InternalError:
                continue
            if j is not None:
                local = c.itemsize * math.prod(length(c, s, k) or 0 for k in range(len(c.shape)))
                n = math.prod(c.mesh.axes[a] for a in step.axes)
                price = priced(ring_bytes(step.name, n, local), step.name != "slice", 1)
                edges[i, j] = min(edges[i, j], price)
    found: dict[frozenset[str], np.ndarray] = {}
    for n in range(len(c.mesh.axes) + 1):
        for usable in map(frozenset, itertools.combinations(c.mesh.axes, n)):
            closed = np.array([s.varying <= usable for s in all_states])
            best = np.where(closed[:, None] & closed[None, :], edges, unreachable)
            for k in range(len(all_states)):
                best = np.minimum(best, best[:, k, None] + best[None, k, :])
            found[usable] = best
    return all_states, found


# --- the law -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(c) for c in CASES])
def test_every_pair(index: int):
    c = CASES[index]
    all_states, least = reference(index)
    value = value_of(c)
    laid_out = {s: blocks_of(c, s, parts_of(value, c.mesh.count(s.partial), c.kind)) for s in all_states}
    wanted = {s: np.stack(blocks_of(c, s.whole(), [value])) for s in all_states}
    pairs = 0
    for i, source in enumerate(all_states):
        for j, target in enumerate(all_states):
            if not set(target.partial) <= set(source.partial):
                continue
            pairs += 1
            steps = plan(source, target, c.shape, c.mesh, c.extents, c.itemsize)
            blocks, here, sent = laid_out[source], source, 0
            for step in steps:
                sent += step.bytes_sent(blocks[0].size * c.itemsize, c.mesh)
                blocks = step.simulate(blocks, c.shape, here, c.mesh)
                here = step.step(here, c.mesh)
            said = f"{source} to {target}: {'; '.join(map(str, steps))}"
            assert here == target, said
            assert holds(c, target, blocks, wanted[target]), said
            price = priced(sent, sum(step.name != "slice" for step in steps), len(steps))
            assert price == least[source.varying | target.varying][i, j], said
            assert sent == cost(source, target, c.shape, c.mesh, c.extents, c.itemsize), said
    print(f"{c}: {pairs} pairs of {len(all_states)} shardings")
    assert pairs == c.pairs
