"""Communication time of a group of devices: formulas for each level of a network, and measured tables.

V is the bytes of the whole array over the group (`network.full_bytes`), n the devices of the group, W the one-way
bandwidth of a link, a the latency of a hop. An all_reduce counts as two all_gathers, a reduce_scatter as one.

    all_gather
      torus axis that wraps       (n-1)/n V/(2W) + ceil(n/2) a
      torus axis that does not    (n-1)/n V/W + (n-1) a
      k wrapped axes              max(a sum(n_i)/2, V/(2kW))
      several axes, not all wrap  (n-1)/n V/(sum of W, twice that of an axis that wraps) + the sum of their latencies
      switch                      (n-1)/n V/W + (n-1) a
      mesh (a link a pair)        V/(n W) + a
      several levels              the slowest level, and the latencies of all levels twice (a pipeline)
    all_to_all, N devices in all
      torus axes                  the greatest of n_i V/(8NW) where an axis wraps, of n_i V/(4NW) where it does not
      switch, or between nodes    (n-1)/n^2 V/W
      mesh                        V/(n^2 W)
      and the network's seconds of a message, N - 1 times
    permute                       the bytes that one device sends / W + hops a

One phase for each level is several collectives, which a program states (`lowering.collective_steps`).

If g groups of a mesh are interleaved along an axis, they share its links: W/g. For an outer level, W is the combined
bandwidth of all the group's devices inside one of its members.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from ..errors.values import AboveZero, Bounds, Count, FromZero, increasing, one_of
from .placing import AxisFactor

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
Kind = Annotated[str, one_of(KINDS)]
RINGS = ("all_reduce", "all_gather", "reduce_scatter")  # timed as all_gathers: two, one and one

LEVEL_KINDS = ("torus", "ring", "switch", "mesh")  # mesh: a link for every pair; ring: one direction only

Point = tuple[AboveZero, AboveZero]  # bytes V, seconds


@dataclass(frozen=True)
class NetworkTier:
    """One tier of a network. `axes` are its hardware axes with their maximum sizes, major to minor.

    `bandwidth` is bytes/s one way: on a torus or mesh, of one link in one direction; on a switch, of one port. `share`
    devices use one link or port together. `device_bandwidth` limits one device, even when its neighbours send nothing.
    """

    kind: Annotated[str, one_of(LEVEL_KINDS)]
    axes: Mapping[str, Count]
    bandwidth: AboveZero
    latency: FromZero = 0.0  # seconds per hop
    wrap: Annotated[int, Bounds(0)] = 0  # a torus axis is a closed ring if its size is a multiple of this; 0: never
    share: Count = 1
    device_bandwidth: AboveZero = math.inf

    @property
    def size(self) -> int:
        """Maximum number of members."""
        return math.prod(self.axes.values())

    def wraps(self, size: int) -> bool:
        """True if a slice with `size` members along an axis has the link that closes the ring."""
        return self.wrap > 0 and size > 2 and size % self.wrap == 0


@dataclass(frozen=True)
class TimeTable:
    """Measured times of one collective. `group`: its devices per level, inner to outer; (4, 2) is 4 in each of 2."""

    kind: Kind
    group: tuple[Count, ...]
    points: Annotated[tuple[Point, ...], increasing]  # bytes V increase; seconds never decrease


@dataclass(frozen=True)
class Along:
    """A group's devices along one hardware axis: `n` of them, every `distance`-th device."""

    n: int
    distance: float
    wraps: bool


@dataclass(frozen=True)
class Tier:
    """A group of devices in one network level: its members there, and the one-way bandwidth of one member's devices."""

    level: NetworkTier
    along: tuple[Along, ...]
    bandwidth: float

    @property
    def n(self) -> int:
        return math.prod(x.n for x in self.along)

    def gather(self, v: float) -> tuple[float, float]:
        """Seconds of an all_gather of V bytes, as (bandwidth, latency)."""
        a = self.level.latency
        if self.level.kind == "mesh":  # each member sends its part to all others at once, over a link to each
            return v / self.n / self.bandwidth, a
        if self.level.kind != "torus":
            return (self.n - 1) / self.n * v / self.bandwidth, (self.n - 1) * a
        each_way = sum((2 if x.wraps else 1) / x.distance for x in self.along) * self.bandwidth
        if len(self.along) > 1 and all(x.wraps for x in self.along):
            moving, hops = v / each_way, a * sum(x.n for x in self.along) / 2
            return max(moving, hops), 0.0
        hops = sum(math.ceil(x.n / 2) if x.wraps else x.n - 1 for x in self.along)
        return (self.n - 1) / self.n * v / each_way, hops * a

    def exchange(self, v: float) -> float:
        """Seconds of an all_to_all; V is the bytes of the operands of all its devices together."""
        if self.level.kind == "mesh":
            return v / self.n**2 / self.bandwidth
        if self.level.kind == "switch":
            return (self.n - 1) / self.n**2 * v / self.bandwidth
        if self.level.kind == "ring":
            return (self.n - 1) / (2 * self.n) * v / self.bandwidth
        return max(x.n * v * x.distance / ((8 if x.wraps else 4) * self.n * self.bandwidth) for x in self.along)

    def shift(self, size: float) -> float:
        """Seconds until every device has sent `size` bytes to a neighbour."""
        distance = max(x.distance for x in self.along) if self.level.kind == "torus" else 1
        return size * distance / self.bandwidth + distance * self.level.latency


@dataclass(frozen=True)
class Group:
    """The devices of one collective, by level."""

    counts: tuple[int, ...]  # per level, inner to outer
    tiers: tuple[Tier, ...]  # levels with more than one member

    @staticmethod
    def of(levels: Sequence[NetworkTier], used: Sequence[Mapping[str, int]], parts: Sequence[AxisFactor]) -> Group:
        """The group whose devices differ along these `parts` of hardware axes.

        `used` has, for each level and hardware axis, how many members of the level (GPUs of a node, nodes of a cluster)
        the whole mesh occupies; devices in use share a member's links.
        """
        counts: list[int] = []
        tiers: list[Tier] = []
        in_group, in_use = 1, 1  # devices in one member: of this group, and in use
        for number, (level, sizes) in enumerate(zip(levels, used, strict=True)):
            along: list[Along] = []
            for axis, size in sizes.items():
                factors = [part for part in parts if part.level == number and part.axis == axis]
                n = math.prod(part.size for part in factors)
                if n > 1:
                    span = max(part.size * part.stride for part in factors)
                    along.append(Along(n, span / n, n == size and level.wraps(size)))
            each = min(level.device_bandwidth, level.bandwidth * math.ceil(in_use / level.share) / in_use)
            if along:
                tiers.append(Tier(level, tuple(along), in_group * each))
            counts.append(math.prod(x.n for x in along))
            in_group, in_use = in_group * counts[-1], in_use * math.prod(sizes.values())
        return Group(tuple(counts), tuple(tiers))

    @property
    def n(self) -> int:
        return math.prod(self.counts)

    def moving(self, kind: str, v: float) -> float:
        """Seconds by the formulas, without the launch."""
        if kind == "permute":
            return max(tier.shift(v) for tier in self.tiers)
        if kind == "all_to_all":
            outside = [math.prod(tier.n for tier in self.tiers[i + 1 :]) for i in range(len(self.tiers))]
            return max(tier.exchange(v / n) for tier, n in zip(self.tiers, outside, strict=True))
        moving, latency = zip(*(tier.gather(v) for tier in self.tiers), strict=True)
        # a pipeline over several levels keeps all of them busy; it pays their latencies to fill and to drain
        gather = max(moving) + (2 if len(self.tiers) > 1 else 1) * sum(latency)
        return 2 * gather if kind == "all_reduce" else gather


def table_of(tables: Sequence[TimeTable], kind: str, counts: tuple[int, ...]) -> TimeTable | None:
    """The table of this kind and group; otherwise that of another ring collective over the group; otherwise None."""
    group = _trimmed(counts)
    by_kind = {table.kind: table for table in tables if _trimmed(table.group) == group}
    others = RINGS if kind in RINGS else ()
    return next((by_kind[name] for name in (kind, *reversed(others)) if name in by_kind), None)


def _trimmed(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Drop outer network levels in which the group has only one member."""
    last = max((i for i, n in enumerate(counts) if n > 1), default=-1)
    return counts[: last + 1]


def read(points: Sequence[Point], formula: Callable[[float], float], v: float) -> float:
    """Seconds at V bytes: linear between two points; outside them, the formula scaled to match the nearest point.

    A line is a latency and a bandwidth. On points left out of published tables, it is twice as accurate as
    interpolating logarithms (benchmarks.ground).
    """
    i = bisect_right([size for size, _ in points], v)
    if 0 < i < len(points):
        (v0, t0), (v1, t1) = points[i - 1], points[i]
        return t0 + (t1 - t0) * (v - v0) / (v1 - v0)
    size, seconds = points[0] if i == 0 else points[-1]
    return seconds * formula(v) / formula(size)
