"""A plan is the cheapest sequence of collectives from one sharding to another.

The cheapest plan sends the fewest bytes per device; ties are broken by the fewest collectives that send, then by the
fewest steps. Every intermediate sharding divides the stored extents and uses only axes that the source or the target
names: a detour over an idle axis can be cheaper, but surprises users. A plan can reduce a pending sum, never create
one.

With `seconds`, the times of a machine's network, the cheapest plan needs the least time, one collective after the
other, and may use idle axes too: what a slow axis carries can be divided over an idle fast one.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from itertools import count, permutations, takewhile
from operator import add
from typing import Any, NamedTuple, cast

from ...dims import Shape
from ...errors import LayoutError, nearest
from ...layouts.mesh import Mesh
from ...layouts.sharding import Axes, Extents, Sharding
from ..collectives import AllGather, AllReduce, AllToAll, Permute, ReduceScatter, Slice, Step
from .many_axes import apart, gathered, home, joined, together, toward

Sizes = tuple[tuple[str, int, int], ...]  # dim name, size, padded size; sorted
Split = tuple[tuple[str, Axes], ...]  # dim name, the axes that split it
Steps = tuple[Step, ...]
Seconds = Callable[[str, Axes, float], float]  # of a collective: its kind, axes, and V (`cost.network.full_bytes`)
Price = tuple[int, ...]  # picoseconds, bytes, collectives, steps; by bytes, the first is 0

# The number of shardings grows faster than exponentially with the axes. With more than `EXACT_AXES`, axes that stay
# together are one, and axes that lead the same dim in source and target stay fixed; with more than `HELD_AXES` left,
# only collectives that bring axes nearer to their places are tried (`toward`). The plan is still correct.
EXACT_AXES = 3
HELD_AXES = 4
MOST_ENTERED = 24  # shardings, of those that a number of steps reaches
NEVER = (math.inf,)  # above every price


class Reshard(NamedTuple):
    """A value of this shape that is to be taken from `source` to `target`.

    Requires that axes of size 1 have been dropped. Both properties raise `LayoutError` if an extent does not divide, or
    if the target is pending over axes over which the source is not.

    >>> from meshdsl.dims import dims
    >>> source = Sharding.of({"batch": ("rows",)}, partial=("cols",))
    >>> target = Sharding.of({"batch": ("rows", "cols")})
    >>> move = Reshard(source, target, dims("batch:8 hidden:4"), Mesh("rows:2 cols:4"), Extents(), 4)
    >>> print(*move.steps, move.cost)
    reduce_scatter batch over cols 48
    """

    source: Sharding
    target: Sharding
    shape: Shape
    mesh: Mesh
    extents: Extents
    itemsize: int
    seconds: Seconds | None = None  # to choose by time instead of bytes

    def among(self, dims: Collection[str]) -> Reshard:
        """The same reshard by steps that leave all other dims as they are; itself if one of these has to change."""
        others = [d for d in self.shape if d.name not in dims]
        if any(self.source.axes(d) != self.target.axes(d) for d in others):
            return self
        cut = [self.source.axes(d) for d in others]
        source, target = (
            Sharding.of({d: axes for d, axes in s.split if d in dims}, s.partial, s.kind)
            for s in (self.source, self.target)
        )
        sizes = [self.extents.local(d, self.mesh.count(axes)) for d, axes in zip(others, cut, strict=True)]
        mesh = Mesh({axis: n for axis, n in self.mesh.axes.items() if all(axis not in axes for axes in cut)})
        shape = tuple(d for d in self.shape if d.name in dims)
        return self._replace(
            source=source, target=target, shape=shape, mesh=mesh, itemsize=self.itemsize * math.prod(sizes)
        )

    @property
    def steps(self) -> Steps:
        """The collectives, in order."""
        return self._planned()[0]

    @property
    def cost(self) -> int:
        """The bytes that one device sends; with `seconds`, the picoseconds of the collectives."""
        return self._planned()[1]

    def _planned(self) -> tuple[Steps, int]:
        sizes = _sizes(self.shape, self.extents)
        key = self.source, self.target, sizes, Mesh(self.mesh.axes), self.itemsize
        if self.seconds is None:
            return _plan(*key)
        # stored with the object whose times they are: a cache of this module would keep it alive
        owner: Any = getattr(self.seconds, "__self__", self.seconds)
        plans = cast("dict[str, dict[Any, tuple[Steps, int]]]", vars(owner)).setdefault("_plans", {})
        if key not in plans:
            plans[key] = _new_plan(*key, self.seconds)
        return plans[key]


def picoseconds(step: Step, local_bytes: int, mesh: Mesh, seconds: Seconds) -> int:
    """The time of a step whose operand has so many bytes; an integer, so that sums are exact."""
    n = mesh.count(step.axes) if step.effect.joins else 1
    return round(1e12 * seconds(step.timed_as, step.axes, n * local_bytes)) if step.sends else 0


def _sizes(shape: Shape, extents: Extents) -> Sizes:
    return tuple(sorted((dim.name, dim.size, extents.padded(dim)) for dim in shape))


@lru_cache(maxsize=65536)
def _plan(source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int) -> tuple[Steps, int]:
    return _new_plan(source, target, sizes, mesh, itemsize, None)


def _new_plan(
    source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int, seconds: Seconds | None
) -> tuple[Steps, int]:
    _check(source, target, sizes, mesh)
    steps = _direct(source, target)
    if steps is not None and any(_pads(step, source, step.step(source, mesh), sizes, mesh) for step in steps):
        steps = None  # another dim may carry less than blocks that hold padding
    if seconds is not None and (steps is None or any(step.sends for step in steps)):
        steps = _cheapest(source, target, sizes, _searched(source, target, sizes, mesh, seconds), itemsize, seconds)
    elif steps is None:
        steps = _named(source, target, sizes, mesh, itemsize)
    total = 0
    for step in steps:
        after = step.step(source, mesh)
        local_bytes = _sent_bytes(step, source, after, sizes, mesh, itemsize)
        total += picoseconds(step, local_bytes, mesh, seconds) if seconds else step.bytes_sent(local_bytes, mesh)
        source = after
    return steps, total


def _searched(source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, seconds: Seconds) -> Mesh:
    """The axes that a plan by time may use: those of the source and the target, and up to `EXACT_AXES` the fastest."""
    named = source.varying | target.varying
    size = math.prod(n for _, n, _ in sizes)
    idle = sorted(
        (a for a, n in mesh.axes.items() if n > 1 and a not in named), key=lambda a: seconds("all_gather", (a,), size)
    )
    used = named.union(idle[: max(0, EXACT_AXES - len(named))])
    return Mesh({axis: n for axis, n in mesh.axes.items() if axis in used})


def _direct(source: Sharding, target: Sharding) -> Steps | None:
    """The plan in simple cases: slices only, or one collective that sends only bytes that the target needs; else None.

    Such a plan is minimal: a device must receive every part of its target block that it does not store, and a ring
    sends as many bytes as it receives.
    """
    done = tuple(axis for axis in source.partial if axis not in target.partial)
    dims = {dim for dim, _ in source.split + target.split if source.axes(dim) != target.axes(dim)}
    grown = {dim: axes for dim in sorted(dims) if (axes := _tail(source.axes(dim), target.axes(dim)))}
    shrunk = {dim: axes for dim in dims if (axes := _tail(target.axes(dim), source.axes(dim)))}
    if dims != grown.keys() | shrunk.keys():
        return None
    match (done, list(grown.items()), list(shrunk.items())):
        case (), slices, []:
            return tuple(Slice(dim, axes) for dim, axes in slices)
        case (), [], [(dim, axes)]:
            return (AllGather(dim, axes),)
        case (), [(to, axes)], [(dim, moved)] if axes == moved:
            return (AllToAll(dim, to, axes),)
        case _, [], []:
            return (AllReduce(done, source.kind),)
        case _, [(dim, axes)], [] if source.kind == "sum" and sorted(axes) == sorted(done):
            return (ReduceScatter(dim, axes),)
        case _:
            return None


def _check(source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh) -> None:
    known = {dim: padded for dim, _, padded in sizes}
    for sharding in (source, target):
        for axis in sharding.split_axes + sharding.partial:
            mesh.check_axis(axis)
        for dim, axes in sharding.split:
            if dim not in known:
                raise LayoutError(f"no dim {dim!r} to split over {','.join(axes)}; {nearest(dim, known)}")
            if known[dim] % mesh.count(axes):
                raise LayoutError(
                    f"cannot split dim {dim!r} over {','.join(axes)}: its stored size {known[dim]} does not "
                    f"divide by {mesh.count(axes)}\n  store it padded to a multiple: Extents({{{dim!r}: "
                    f"{mesh.count(axes)}}})"
                )
    created = [axis for axis in target.partial if axis not in source.partial]
    if created or (target.partial and target.kind != source.kind):
        raise LayoutError(
            f"cannot take a value from {source} to {target}\n"
            f"  a plan can reduce a pending sum, max or min, but not create or change one"
        )


def _named(source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int) -> Steps:
    """The plan under canonical names, so that reshards that differ only in names share one search.

    The canonical names keep the order of dims and axes, so ties are broken the same way.
    """
    used = source.varying | target.varying
    axis = {a: f"a{i:03}" for i, a in enumerate(sorted(used))}
    dim = {d: f"d{i:03}" for i, (d, *_) in enumerate(sizes)}
    small = Mesh({axis[a]: n for a, n in mesh.axes.items() if a in used})
    ends = [
        Sharding(
            tuple((dim[d], tuple(axis[a] for a in axes)) for d, axes in s.split),
            tuple(axis[a] for a in s.partial),
            s.kind,
        )
        for s in (source, target)
    ]
    steps = _search(*ends, tuple((dim[d], n, padded) for d, n, padded in sizes), small, itemsize)
    return _renamed(steps, {new: old for old, new in (*dim.items(), *axis.items())})


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A step, or a value of one of its fields, with other names for dims and axes; the kind of a sum has none."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(each, names) for each in cast(tuple[Any, ...], value))
    fields = {field.name: _renamed(getattr(value, field.name), names) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


@lru_cache(maxsize=65536)
def _search(source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int) -> Steps:
    """The plan that sends the fewest bytes, under canonical names."""
    if len(mesh.axes) > EXACT_AXES and (runs := together(source, target, mesh)):
        one = {run[0]: run for run in runs}
        others = {axis for run in runs for axis in run[1:]}
        fewer = Mesh({axis: mesh.count(one.get(axis, (axis,))) for axis in mesh.axes if axis not in others})
        steps = _search(joined(source, one), joined(target, one), sizes, fewer, itemsize)
        return tuple(apart(step, one) for step in steps)
    return _cheapest(source, target, sizes, mesh, itemsize, None)


def _cheapest(
    source: Sharding, target: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int, seconds: Seconds | None
) -> Steps:
    """Dijkstra's algorithm over all shardings by the mesh's axes; ties are broken by the order of `_moves`.

    With many axes, shardings with fewer axes away from their places are tried first, so the first plan is taken.
    """
    axes = tuple(mesh.axes)
    dims = tuple(dim for dim, *_ in sizes)
    exact = len(axes) <= HELD_AXES
    held = _held(source, target, len(axes) > EXACT_AXES)
    needed = itemsize * math.prod(_local(target, sizes, mesh).values())

    def left(sharding: Sharding) -> Price:
        if exact:
            return 0, 0, 0, 0
        stored = min(needed, itemsize * math.prod(_local(sharding, sizes, mesh).values()))
        size = 2 * stored * sum(home(sharding, axis) != home(target, axis) for axis in axes)
        return round(1e12 * seconds("all_to_all", axes, size)) if seconds else 0, size, 0, 0

    best: dict[Sharding, Price] = {source: (0, 0, 0, 0)}
    number = count(1)
    queue: list[tuple[Price, int, Price, Sharding, Steps]] = [(left(source), 0, best[source], source, ())]
    entered = Counter[int]()  # with many axes: the shardings that so many steps reach
    while queue:
        _, _, so_far, reached, steps = heapq.heappop(queue)
        if reached == target:
            return steps
        if so_far > best[reached] or (not exact and entered[len(steps)] >= MOST_ENTERED):
            continue
        entered[len(steps)] += 1
        for step, after in _moves(reached, held, dims, axes, mesh) if exact else toward(reached, target, dims, mesh):
            if after not in best and not _fits(after, sizes, mesh):
                best[after] = (-1,)  # no price is lower, so it is never entered
            local_bytes = _sent_bytes(step, reached, after, sizes, mesh, itemsize)
            time = picoseconds(step, local_bytes, mesh, seconds) if seconds is not None else 0
            own = (time, step.bytes_sent(local_bytes, mesh), step.sends, 1)
            price = tuple(map(add, so_far, own))
            if (after not in best or price < best[after]) and price < best.get(target, NEVER):
                best[after] = price
                expected = tuple(map(add, price, left(after)))
                heapq.heappush(queue, (expected, next(number), price, after, (*steps, step)))
    return gathered(source, target)


def _held(source: Sharding, target: Sharding, leading: bool) -> Sharding:
    """The axes that no step may change: those that stay pending and, if `leading`, those that lead a dim on both
    sides.
    """
    split: dict[str, Axes] = {}
    for dim, axes in source.split if leading else ():
        same = takewhile(lambda pair: pair[0] == pair[1], zip(axes, target.axes(dim), strict=False))
        split[dim] = tuple(axis for axis, _ in same)
    return Sharding.of(split, target.partial, target.kind)


@lru_cache(maxsize=16384)
def _moves(
    reached: Sharding, held: Sharding, dims: tuple[str, ...], axes: Axes, mesh: Mesh
) -> tuple[tuple[Step, Sharding], ...]:
    """Every collective that applies here and keeps the `held` axes, with the resulting sharding."""
    return tuple((step, step.step(reached, mesh)) for step in _steps(reached, held, dims, axes, mesh))


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


def _tail(shorter: Axes, longer: Axes) -> Axes:
    """The axes that `longer` appends to `shorter`; empty if `shorter` is not a prefix of `longer`."""
    return longer[len(shorter) :] if longer[: len(shorter)] == shorter else ()


def _fits(sharding: Sharding, sizes: Sizes, mesh: Mesh) -> bool:
    return all(padded % mesh.count(sharding.axes(dim)) == 0 for dim, _, padded in sizes)


def _local(sharding: Sharding, sizes: Sizes, mesh: Mesh) -> dict[str, int]:
    """The stored size of each dim on one device; see `Extents.local`."""
    return {dim: min(size, padded // mesh.count(sharding.axes(dim))) for dim, size, padded in sizes}


def _sent_bytes(step: Step, before: Sharding, after: Sharding, sizes: Sizes, mesh: Mesh, itemsize: int) -> int:
    """The bytes of one device's operand, with the padding that equal chunks of a cut dim need."""
    sent = _local(before, sizes, mesh)
    if step.effect.cuts is not None:
        sent[step.effect.cuts] = mesh.count(step.axes) * _local(after, sizes, mesh)[step.effect.cuts]
    return itemsize * math.prod(sent.values())


def _pads(step: Step, before: Sharding, after: Sharding, sizes: Sizes, mesh: Mesh) -> bool:
    """True if a collective that sends needs padding in the dim that it cuts, or makes some in the one that it joins."""
    effect, n = step.effect, mesh.count(step.axes)
    larger, smaller = _local(before, sizes, mesh), _local(after, sizes, mesh)
    cuts = effect.cuts is not None and n * smaller[effect.cuts] != larger[effect.cuts]
    joins = effect.joins is not None and n * larger[effect.joins] != smaller[effect.joins]
    return step.sends and (cuts or joins)
