"""The collectives that the planner tries from a sharding: all of them, or those that bring axes nearer to their places.

Over many axes, axes that stay together are one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations, product, takewhile
from typing import Any, cast

from ...errors import InternalError
from ...layouts.mesh import Mesh
from ...layouts.sharding import Axes, Sharding
from ..collectives import AllGather, AllReduce, AllToAll, Permute, ReduceScatter, Slice, Step

Split = tuple[tuple[str, Axes], ...]  # dim name, the axes that split it


def together(source: Sharding, target: Sharding, mesh: Mesh) -> list[Axes]:
    """Runs of axes that follow one another on the same dim, or are pending or idle, in the source and in the target."""

    def after(sharding: Sharding, axis: str) -> set[str]:
        for _, axes in sharding.split:
            if axis in axes:
                return set(axes[axes.index(axis) + 1 :][:1])
        alike = sharding.partial if axis in sharding.partial else set(mesh.axes) - sharding.varying
        return {other for other in alike if other > axis}

    runs: list[Axes] = []
    for axis in sorted(source.varying | target.varying):
        run, placed = (axis,), {each for axes in runs for each in axes}
        while axis not in placed:
            following = after(source, run[-1]) & after(target, run[-1]) - placed - set(run)
            if not following:
                break
            run = (*run, min(following))
        runs.append(run)
    return [run for run in runs if len(run) > 1]


def joined(sharding: Sharding, runs: Mapping[str, Axes]) -> Sharding:
    """The sharding in which the first axis of each run stands for all of them."""
    left_out = {axis for axes in runs.values() for axis in axes[1:]}
    split = {dim: tuple(axis for axis in axes if axis not in left_out) for dim, axes in sharding.split}
    return Sharding.of(split, set(sharding.partial) - left_out, sharding.kind)


def apart(value: Any, runs: Mapping[str, Axes]) -> Any:
    """A step, or a value of one of its fields, with all axes of each run instead of the first."""
    if isinstance(value, tuple):
        parts = cast(tuple[Any, ...], value)
        return tuple(
            x for part in parts for x in (runs.get(part, (part,)) if isinstance(part, str) else (apart(part, runs),))
        )
    if isinstance(value, str):
        return value
    fields = {field.name: apart(getattr(value, field.name), runs) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


@lru_cache(maxsize=16384)
def all_moves(
    reached: Sharding, held: Sharding, dims: tuple[str, ...], mesh: Mesh
) -> tuple[tuple[Step, Sharding], ...]:
    """Every collective that applies here and keeps the `held` axes, with the resulting sharding."""
    steps = _steps(reached, held, dims, tuple(mesh.axes), mesh)
    return tuple((step, step.step(reached, mesh)) for step in steps)


def _reductions(reached: Sharding, pending: Axes, dims: tuple[str, ...]) -> Iterator[Step]:
    for done in _ordered(pending):
        if tuple(sorted(done)) == done:
            yield AllReduce(done, reached.kind)
        if reached.kind == "sum":
            yield from (ReduceScatter(dim, done) for dim in dims)


def _steps(reached: Sharding, held: Sharding, dims: tuple[str, ...], axes: Axes, mesh: Mesh) -> Iterator[Step]:
    for idle in _ordered(tuple(axis for axis in axes if axis not in reached.varying)):
        yield from (Slice(dim, idle) for dim in dims)
    yield from _reductions(reached, tuple(axis for axis in reached.partial if axis not in held.partial), dims)
    loose = tuple((dim, cut[len(held.axes(dim)) :]) for dim, cut in reached.split if cut != held.axes(dim))
    for dim, cut in loose:
        for minor in (cut[i:] for i in range(len(cut))):
            yield AllGather(dim, minor)
            yield from (AllToAll(dim, to, minor) for to in dims if to != dim)
    usable = tuple(axis for axis in axes if axis not in reached.partial + held.split_axes)
    for split in _relabelled(loose, usable, mesh):
        if split != loose:
            moved = {dim: held.axes(dim) + new for dim, new in split}
            yield Permute.between(reached, Sharding.of({**dict(reached.split), **moved}, reached.partial, reached.kind))


def _relabelled(split: Split, usable: Axes, mesh: Mesh) -> Iterator[Split]:
    """All ways to split the same dims into the same numbers of blocks with these axes."""
    if not split:
        yield ()
        return
    (dim, cut), *others = split
    for axes in _ordered(usable):
        if mesh.count(axes) == mesh.count(cut):
            left = tuple(axis for axis in usable if axis not in axes)
            yield from (((dim, axes), *rest) for rest in _relabelled(tuple(others), left, mesh))


def _ordered(axes: Axes) -> Iterator[Axes]:
    """All non-empty tuples of some of the axes, in all orders."""
    for n in range(1, len(axes) + 1):
        yield from permutations(axes, n)


def toward(reached: Sharding, target: Sharding, dims: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[Step, Sharding]]:
    """Collectives that bring axes nearer to their places in the target, with the resulting sharding."""
    for step in dict.fromkeys(_nearer(reached, target, dims, mesh)):
        with contextlib.suppress(InternalError):
            yield step, step.step(reached, mesh)


def _nearer(reached: Sharding, target: Sharding, dims: tuple[str, ...], mesh: Mesh) -> Iterator[Step]:
    done = tuple(axis for axis in reached.partial if axis not in target.partial)
    idle = tuple(axis for axis in mesh.axes if axis not in reached.varying)
    if done:
        yield AllReduce(done, reached.kind)
    for dim in dims:
        yield from (Slice(dim, axes) for axes in _some(idle, target.axes(dim)))
        if reached.kind == "sum":
            yield from (
                ReduceScatter(dim, axes) for axes in (*((done,) if done else ()), *_some(done, target.axes(dim)))
            )
    for dim, cut in reached.split:
        for minor in (cut[i:] for i in range(len(cut))):
            yield AllGather(dim, minor)
            yield from (AllToAll(dim, to, minor) for to in dims if to != dim)
    yield from _permutes(reached, target, mesh)


def _some(axes: Axes, wanted: Axes) -> Iterator[Axes]:
    """Of these axes, the wanted ones in their order, then each alone."""
    own = tuple(axis for axis in wanted if axis in axes)
    return (some for some in (own, *((axis,) for axis in axes)) if some)


def _permutes(reached: Sharding, target: Sharding, mesh: Mesh) -> Iterator[Step]:
    usable = tuple(axis for axis in mesh.axes if axis not in reached.partial)
    for split in product(*(_leading(dim, cut, target.axes(dim), usable, mesh) for dim, cut in reached.split)):
        axes = [axis for _, cut in split for axis in cut]
        if split != reached.split and len(set(axes)) == len(axes):
            yield Permute.between(reached, Sharding.of(dict(split), reached.partial, reached.kind))


def _leading(dim: str, cut: Axes, wanted: Axes, usable: Axes, mesh: Mesh) -> list[tuple[str, Axes]]:
    """Axes for as many blocks of a dim as now: those it has, or the first ones of the target and up to one more."""
    wanted = tuple(takewhile(lambda axis: axis in usable, wanted))
    others = [axis for axis in usable if axis not in wanted]
    options = [cut, *(wanted[:k] + more for k in range(len(wanted), -1, -1) for more in ((), *((a,) for a in others)))]
    ordered = tuple(sorted(cut, key=lambda axis: wanted.index(axis) if axis in wanted else len(wanted)))
    return [(dim, axes) for axes in dict.fromkeys((*options, ordered)) if mesh.count(axes) == mesh.count(cut)]


def home(sharding: Sharding, axis: str) -> tuple[str, int]:
    """The dim that an axis splits and its place there, or the name of another state."""
    for dim, axes in sharding.split:
        if axis in axes:
            return dim, axes.index(axis)
    return ("pending" if axis in sharding.partial else "idle"), -1


def gathered(source: Sharding, target: Sharding) -> tuple[Step, ...]:
    """The plan that completes the sum and gathers every dim first."""
    done = tuple(axis for axis in source.partial if axis not in target.partial)
    gathers = [AllGather(dim, axes) for dim, axes in source.split]
    return (
        *([AllReduce(done, source.kind)] if done else []),
        *gathers,
        *(Slice(dim, axes) for dim, axes in target.split),
    )
