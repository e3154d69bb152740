"""A plan is the cheapest sequence of collectives from one sharding to another.

The cheapest plan sends the fewest bytes per device; ties are broken by the fewest collectives that send, the fewest
steps, and the fewest bytes over the first axes of the mesh, which are often the slowest: of two reduce_scatters the one
over the last axis comes first, and of two all_gathers it comes last. Every intermediate sharding divides the stored
extents and uses only axes that the source or the target names: a detour over an idle axis can be cheaper, but surprises
users. A plan can reduce a pending sum, never create one.

With `seconds`, the times of a machine's network, the cheapest plan needs the least time, one collective after the
other, and may use idle axes too: what a slow axis carries can be divided over an idle fast one.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count, takewhile
from operator import add
from typing import Any, NamedTuple, cast

from ...dims import Shape
from ...errors import LayoutError, nearest
from ...layouts.mesh import Mesh
from ...layouts.sharding import Axes, Extents, Sharding
from ..collectives import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step
from .reshard_steps import all_moves, apart, gathered, home, joined, together, toward

Sizes = tuple[tuple[str, int, int], ...]  # dim name, size, padded size; sorted
Steps = tuple[Step, ...]
Seconds = Callable[[str, Axes, float], float]  # of a collective: its kind, axes, and V (`cost.network.full_bytes`)
Price = tuple[int, ...]  # picoseconds, bytes, collectives, steps, outer bytes; by bytes, the first is 0

# The number of shardings grows faster than exponentially with the axes. With more than `EXACT_AXES`, axes that lead the
# same dim in source and target stay fixed; with more than `HELD_AXES`, only collectives that bring axes nearer to their
# places are tried (`toward`). The cheaper of this plan and one in which axes that stay together are one is taken.
EXACT_AXES = 3
HELD_AXES = 4
MOST_ENTERED = 24  # shardings, of those that a number of steps reaches
NEVER = (math.inf,)  # above every price
FREE = (0, 0, 0, 0, 0)


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
        sizes = tuple(sorted((dim.name, dim.size, self.extents.padded(dim)) for dim in self.shape))
        search = _Search(self.source, self.target, sizes, self.mesh.anywhere, self.itemsize)
        if self.seconds is None:
            return _plan(search)
        # stored with the object whose times they are: a cache of this module would keep it alive
        owner: Any = getattr(self.seconds, "__self__", self.seconds)
        plans = cast("dict[str, dict[_Search, tuple[Steps, int]]]", vars(owner)).setdefault("_plans", {})
        if search not in plans:
            plans[search] = _new_plan(search._replace(seconds=self.seconds))
        return plans[search]


def picoseconds(step: Step, local_bytes: int, mesh: Mesh, seconds: Seconds) -> int:
    """The time of a step whose operand has so many bytes; an integer, so that sums are exact."""
    n = mesh.count(step.axes) if step.effect.joins else 1
    return round(1e12 * seconds(step.timed_as, step.axes, n * local_bytes)) if step.sends else 0


class _Search(NamedTuple):
    """A reshard to plan: its ends, the stored sizes of the dims, the mesh, and how its collectives are priced."""

    source: Sharding
    target: Sharding
    sizes: Sizes
    mesh: Mesh
    itemsize: int
    seconds: Seconds | None = None

    def fits(self, sharding: Sharding) -> bool:
        """True if every stored size divides."""
        return all(padded % self.mesh.count(sharding.axes(dim)) == 0 for dim, _, padded in self.sizes)

    def local(self, sharding: Sharding) -> dict[str, int]:
        """The stored size of each dim on one device; see `Extents.local`."""
        return {d: min(size, padded // self.mesh.count(sharding.axes(d))) for d, size, padded in self.sizes}

    def stored_bytes(self, sharding: Sharding) -> int:
        """The bytes that one device stores."""
        return self.itemsize * math.prod(self.local(sharding).values())

    def operand_bytes(self, step: Step, before: Sharding, after: Sharding) -> int:
        """The bytes of one device's operand, with the padding that equal chunks of a cut dim need."""
        sent = self.local(before)
        if step.effect.cuts is not None:
            sent[step.effect.cuts] = self.mesh.count(step.axes) * self.local(after)[step.effect.cuts]
        return self.itemsize * math.prod(sent.values())

    def pads(self, step: Step, before: Sharding, after: Sharding) -> bool:
        """True if a collective that sends needs padding in the dim it cuts, or makes some in the one that it joins."""
        effect, n = step.effect, self.mesh.count(step.axes)
        larger, smaller = self.local(before), self.local(after)
        cuts = effect.cuts is not None and n * smaller[effect.cuts] != larger[effect.cuts]
        joins = effect.joins is not None and n * larger[effect.joins] != smaller[effect.joins]
        return step.sends and (cuts or joins)

    def price(self, step: Step, before: Sharding, after: Sharding) -> Price:
        """The price of one step."""
        size = self.operand_bytes(step, before, after)
        time = picoseconds(step, size, self.mesh, self.seconds) if self.seconds is not None else 0
        sent, order = step.bytes_sent(size, self.mesh), list(self.mesh.axes)
        return time, sent, step.sends, 1, sent * (len(order) - min(map(order.index, step.axes)))

    def total(self, steps: Steps) -> Price:
        """The price of a plan."""
        here, total = self.source, FREE
        for step in steps:
            after = step.step(here, self.mesh)
            total, here = _sum(total, self.price(step, here, after)), after
        return total

    def missing(self, sharding: Sharding) -> Price:
        """A bound: a device receives at least what its target block has more than its block here, and sends as much."""
        if self.seconds is not None:
            return FREE
        wanted, here = self.local(self.target), self.local(sharding)
        common = math.prod(min(n, here[dim]) for dim, n in wanted.items())
        return 0, self.itemsize * (math.prod(wanted.values()) - common), 0, 0, 0

    def remaining(self, sharding: Sharding) -> Price:
        """A lower bound of the price that is left; with many axes, an estimate from the axes that are not in place."""
        if len(self.mesh.axes) <= EXACT_AXES:
            return FREE
        if len(self.mesh.axes) <= HELD_AXES:
            return self.missing(sharding)
        stored = min(self.stored_bytes(self.target), self.stored_bytes(sharding))
        size = 2 * stored * sum(home(sharding, axis) != home(self.target, axis) for axis in self.mesh.axes)
        axes = tuple(self.mesh.axes)
        return round(1e12 * self.seconds("all_to_all", axes, size)) if self.seconds else 0, size, 0, 0, 0


def _sum(one: Price, other: Price) -> Price:
    return tuple(map(add, one, other))


@lru_cache(maxsize=65536)
def _plan(search: _Search) -> tuple[Steps, int]:
    return _new_plan(search)


def _new_plan(search: _Search) -> tuple[Steps, int]:
    """The steps, and their bytes or picoseconds."""
    source, target, mesh, seconds = search.source, search.target, search.mesh, search.seconds
    _check(source, target, search.sizes, mesh)
    steps = _direct(source, target)
    if steps is not None and any(search.pads(step, source, step.step(source, mesh)) for step in steps):
        steps = None  # another dim may carry less than blocks that hold padding
    if seconds is not None and (steps is None or any(step.sends for step in steps)):
        steps = _cheapest(search._replace(mesh=_searched(search, seconds)))
    elif steps is None:
        steps = _named(search)
    return steps, search.total(steps)[1 if seconds is None else 0]


def _searched(search: _Search, seconds: Seconds) -> Mesh:
    """The axes that a plan by time may use: those of the source and the target, and up to `EXACT_AXES` the fastest."""
    named, mesh = search.source.varying | search.target.varying, search.mesh
    size = math.prod(n for _, n, _ in search.sizes)
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


def _named(search: _Search) -> Steps:
    """The plan under canonical names, so that reshards that differ only in names share one search.

    The canonical names keep the order of dims and axes, so ties are broken the same way.
    """
    used = search.source.varying | search.target.varying
    axis = {a: f"a{i:03}" for i, a in enumerate(sorted(used))}
    dim = {d: f"d{i:03}" for i, (d, *_) in enumerate(search.sizes)}
    source, target = (
        Sharding(
            tuple((dim[d], tuple(axis[a] for a in axes)) for d, axes in s.split),
            tuple(axis[a] for a in s.partial),
            s.kind,
        )
        for s in (search.source, search.target)
    )
    sizes = tuple((dim[d], n, padded) for d, n, padded in search.sizes)
    small = Mesh({axis[a]: n for a, n in search.mesh.axes.items() if a in used})
    steps = _found(_Search(source, target, sizes, small, search.itemsize))
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
def _found(search: _Search) -> Steps:
    """The plan that sends the fewest bytes, under canonical names; of many axes, also with those together as one."""
    source, target, mesh = search.source, search.target, search.mesh
    steps = _cheapest(search)
    if len(mesh.axes) > EXACT_AXES and (runs := together(source, target, mesh)):
        one = {run[0]: run for run in runs}
        others = {axis for run in runs for axis in run[1:]}
        fewer = Mesh({axis: mesh.count(one.get(axis, (axis,))) for axis in mesh.axes if axis not in others})
        coarse = _found(search._replace(source=joined(source, one), target=joined(target, one), mesh=fewer))
        steps = min(tuple(apart(step, one) for step in coarse), steps, key=search.total)
    return steps


def _cheapest(search: _Search) -> Steps:
    """Dijkstra's algorithm over all shardings by the mesh's axes; ties are broken by the order of `_moves`.

    With many axes, shardings with fewer axes away from their places are tried first, and of each number of steps only
    the first `MOST_ENTERED`.
    """
    source, target = search.source, search.target
    exact = len(search.mesh.axes) <= HELD_AXES
    held = _held(source, target, len(search.mesh.axes) > EXACT_AXES)
    best: dict[Sharding, Price] = {source: FREE}
    plans: dict[Sharding, Steps] = {source: ()}
    number = count(1)
    queue: list[tuple[Price, int, Price, Sharding]] = [(search.remaining(source), 0, FREE, source)]
    entered = Counter[int]()  # with many axes: the shardings that so many steps reach
    while queue:
        _, _, so_far, reached = heapq.heappop(queue)
        if reached == target and exact:
            break
        steps = plans[reached]
        stale = so_far > best[reached] or _sum(so_far, search.missing(reached)) >= best.get(target, NEVER)
        if stale or (not exact and entered[len(steps)] >= MOST_ENTERED):
            continue
        entered[len(steps)] += 1
        for step, after, own in _moves(search, reached, held):
            price = _sum(so_far, own)
            if price < min(best.get(after, NEVER), best.get(target, NEVER)):
                best[after], plans[after] = price, (*steps, step)
                heapq.heappush(queue, (_sum(price, search.remaining(after)), next(number), price, after))
    return plans[target] if target in plans else gathered(source, target)


def _held(source: Sharding, target: Sharding, leading: bool) -> Sharding:
    """The axes that no step may change: those that stay pending and, if `leading`, those that lead a dim on both
    sides.
    """
    split: dict[str, Axes] = {}
    for dim, axes in source.split if leading else ():
        same = takewhile(lambda pair: pair[0] == pair[1], zip(axes, target.axes(dim), strict=False))
        split[dim] = tuple(axis for axis, _ in same)
    return Sharding.of(split, target.partial, target.kind)


def _moves(search: _Search, reached: Sharding, held: Sharding) -> Iterable[tuple[Step, Sharding, Price]]:
    """The collectives to try here, with the resulting sharding and the price; with many axes, only some."""
    if search.seconds is None and len(search.mesh.axes) <= HELD_AXES:
        return _by_bytes(search.sizes, search.mesh, search.itemsize, reached, held)
    return _priced(search, reached, held)


def _priced(search: _Search, reached: Sharding, held: Sharding) -> Iterator[tuple[Step, Sharding, Price]]:
    """All collectives to shardings whose sizes divide, or with many axes those that bring axes nearer."""
    dims = tuple(dim for dim, *_ in search.sizes)
    if len(search.mesh.axes) > HELD_AXES:
        moves = toward(reached, search.target, dims, search.mesh)
    else:
        moves = all_moves(reached, held, dims, search.mesh)
    return ((step, after, search.price(step, reached, after)) for step, after in moves if search.fits(after))


@lru_cache(maxsize=4096)
def _by_bytes(
    sizes: Sizes, mesh: Mesh, itemsize: int, reached: Sharding, held: Sharding
) -> tuple[tuple[Step, Sharding, Price], ...]:
    """`_priced` of all searches with these sizes, whatever their ends."""
    return tuple(_priced(_Search(reached, held, sizes, mesh, itemsize), reached, held))


def _tail(shorter: Axes, longer: Axes) -> Axes:
    """The axes that `longer` appends to `shorter`; empty if `shorter` is not a prefix of `longer`."""
    return longer[len(shorter) :] if longer[: len(shorter)] == shorter else ()
