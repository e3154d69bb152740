"""How long a collective takes, from where its devices lie.

A `Network` is levels, inner to outer: a torus of chips, or a switch. A member of a level is one whole copy of what
lies inside it: a GPU, a node, a slice. `place` says on which hardware axes each mesh axis lies, and
`Placement.seconds` is the time of a collective over some mesh axes, every other group of the mesh doing the same.

V is the bytes of the whole array over the group (`full_bytes`), n the devices of the group, W the one-way bandwidth of
a link, a the latency of a hop. An all_reduce is two all_gathers, and a reduce_scatter is one.

    torus axis that wraps       (n-1)/n V/(2W) + ceil(n/2) a
    torus axis that does not    (n-1)/n V/W + (n-1) a
    k wrapped axes              max(a sum(n_i)/2, V/(2kW))
    switch                      (n-1)/n V/W + (n-1) a
    several axes, not all wrap  (n-1)/n V/(sum of W, twice that of an axis that wraps) + the sum of their latencies
    several levels              the slowest level (pipelined), or the sum of the levels (phased), whichever is less

A measured point beats a formula: between the points of a table time is interpolated, in the logarithm of both; outside
them the formula is scaled to meet the nearest point.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import LayoutError
from ..layouts import Mesh
from ..lowering import CollectiveRecord
from .placing import Parts, assigned, by_default

__all__ = ["KINDS", "Level", "Network", "Placement", "Table", "full_bytes", "monotone", "place"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
RINGS = ("all_reduce", "all_gather", "reduce_scatter")  # each is all_gathers: two, one and one

Point = tuple[float, float]  # bytes V, seconds


@dataclass(frozen=True)
class Level:
    """One tier of a network. `axes` are its hardware axes with their greatest sizes, major to minor.

    `bandwidth` is bytes/s one way: of one link in one direction on a torus, of one port of a switch. `share` devices
    use one link or port together. `device_bandwidth` bounds what one device draws even when its neighbours are silent.
    """

    kind: str  # "torus" or "switch"
    axes: Mapping[str, int]
    bandwidth: float
    latency: float = 0.0  # seconds for each hop
    wrap: int = 0  # a torus axis closes into a ring where its size is a multiple of this; 0: never
    share: int = 1
    device_bandwidth: float = math.inf

    @property
    def size(self) -> int:
        """The greatest number of members."""
        return math.prod(self.axes.values())

    def wraps(self, size: int) -> bool:
        """Whether a slice with so many members along an axis has the link that closes the ring."""
        return self.wrap > 0 and size > 2 and size % self.wrap == 0


@dataclass(frozen=True)
class Table:
    """What one collective took. `group` is its devices in each level, inner to outer: (4, 2) is 4 in each of 2."""

    kind: str
    group: tuple[int, ...]
    points: tuple[Point, ...]  # increasing bytes V, never decreasing seconds


@dataclass(frozen=True)
class Network:
    """Levels, inner to outer; measured tables; `launch` is the seconds before anything moves."""

    levels: tuple[Level, ...]
    launch: float = 0.0
    tables: tuple[Table, ...] = ()

    @property
    def size(self) -> int:
        """The greatest number of devices."""
        return math.prod(level.size for level in self.levels)

    def __str__(self) -> str:
        shown = [f"{level.kind} {' '.join(f'{a}:{n}' for a, n in level.axes.items())}" for level in self.levels]
        return ", in ".join(shown)


def full_bytes(record: CollectiveRecord, n: int) -> int:
    """V of the formulas: bytes of the whole array over a group of `n` devices; of a permute, what one device sends."""
    if record.kind == "permute":
        return record.wire_bytes
    return record.bytes * n if record.kind == "all_to_all" else record.bytes


def monotone(points: Sequence[Point]) -> tuple[Point, ...]:
    """Measured points as a table wants them: sorted by bytes, and more bytes never take less time.

    >>> monotone([(4.0, 2e-6), (1.0, 1e-6), (2.0, 3e-6)])
    ((1.0, 1e-06), (2.0, 3e-06), (4.0, 3e-06))
    """
    longest, kept = 0.0, []
    for size, seconds in sorted(points):
        longest = max(longest, seconds)
        kept.append((size, longest))
    return tuple(kept)


@dataclass(frozen=True)
class Placement:
    """Where the axes of a mesh lie; `print` shows it. `used` is the members in use along each hardware axis."""

    network: Network
    mesh: Mesh
    parts: Parts  # mesh axis -> its parts of hardware axes, major to minor
    used: tuple[dict[str, int], ...]  # for each level
    notes: tuple[str, ...] = ()  # where the figures are a best effort, and why
    _known: dict[tuple[str, frozenset[str], float], float] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        lines = [f"{axis}:{n} on {self.where((axis,))}" for axis, n in self.mesh.axes.items() if n > 1]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) or "one device"

    def where(self, axes: Sequence[str]) -> str:
        """The hardware that a group over these mesh axes lies on, for people."""
        parts = [part for axis in axes for part in self.parts.get(axis, ())]
        return " x ".join(str(part) for part in parts) or "one device"

    def seconds(self, kind: str, axes: Sequence[str], size: float) -> float:
        """Seconds for a collective of `size` bytes (V, see `full_bytes`) over these mesh axes, in any order.

        Raises `LayoutError` for an axis that the mesh lacks, `ValueError` for an unknown kind or a negative size.
        """
        key = (kind, frozenset(axes), size)
        if key not in self._known:
            self._known[key] = self._seconds(kind, axes, size)
        return self._known[key]

    def _seconds(self, kind: str, axes: Sequence[str], size: float) -> float:
        if kind not in KINDS:
            raise ValueError(f"no collective is called {kind!r}; there are: {', '.join(KINDS)}")
        if not size >= 0:
            raise ValueError(f"a collective has at least 0 bytes, got {size}")
        for axis in axes:
            self.mesh.check_axis(axis)
        group = _Group.of(self, axes)
        if group.n == 1:
            return 0.0
        launch = self.network.launch
        table = _table(self.network.tables, kind, group.counts)
        if table is None:
            return launch + group.moving(kind, size)
        seconds = _read(table.points, lambda v: launch + group.moving(table.kind, v), size)
        if table.kind == kind:
            return seconds
        gathers = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return launch + max(0.0, seconds - launch) * gathers[kind] / gathers[table.kind]


def place(network: Network, mesh: Mesh, assignment: Mapping[str, str | Sequence[str]] | None = None) -> Placement:
    """Lay a mesh on a network.

    By default devices are numbered row-major, as the mesh numbers them: the minor mesh axis lies innermost. Levels fill
    from inside, a torus by the most nearly square slice; its axes are taken in the order that cuts the fewest.
    `assignment` names hardware axes for every mesh axis of more than one device, major to minor, a part of one as
    `axis:size`; of two parts of one hardware axis the one mentioned first is the major one.

    >>> network = Network((Level("switch", {"gpu": 8}, 200e9), Level("switch", {"node": 4}, 25e9, share=8)))
    >>> print(place(network, Mesh("data:4 model:4")))
    data:4 on node:2 x gpu:2 step 4
    model:4 on gpu:4
    >>> print(place(network, Mesh("data:2 model:8"), {"data": "gpu:2", "model": ["node:2", "gpu:4"]}))
    data:2 on gpu:2 step 4
    model:8 on node:2 x gpu:4

    Raises `LayoutError` for a mesh that is larger than the machine and for an assignment that does not fit, naming
    every problem.
    """
    if mesh.size > network.size:
        raise LayoutError(
            f"the mesh '{mesh}' has {mesh.size} devices, and the machine has at most {network.size} ({network})\n"
            f"  make the mesh smaller, or describe a larger machine in a file of your own"
        )
    sizes = {axis: n for axis, n in mesh.axes.items() if n > 1}
    levels = tuple(dict(level.axes) for level in network.levels)
    if assignment is None:
        parts, used, notes = by_default(levels, sizes)
    else:
        parts, used, notes = assigned(levels, sizes, assignment)
    if mesh.device_order is not None:
        notes += ("device_order is not read: the mesh is placed as if its devices were numbered in order",)
    return Placement(network, mesh, parts, used, notes)


@dataclass(frozen=True)
class _Along:
    """The devices of a group along one hardware axis: `n` of them, `apart` groups interleaved there."""

    n: int
    apart: float
    wraps: bool


@dataclass(frozen=True)
class _Tier:
    """The members of a group in one level, and the one-way bandwidth of a link for all its devices in a member."""

    level: Level
    along: tuple[_Along, ...]
    bandwidth: float

    @property
    def n(self) -> int:
        return math.prod(x.n for x in self.along)

    def gather(self, v: float) -> tuple[float, float]:
        """Seconds of an all_gather of V bytes: those that bandwidth takes, and those that latency takes."""
        a = self.level.latency
        if self.level.kind == "switch":
            return (self.n - 1) / self.n * v / self.bandwidth, (self.n - 1) * a
        each_way = sum((2 if x.wraps else 1) / x.apart for x in self.along) * self.bandwidth
        if len(self.along) > 1 and all(x.wraps for x in self.along):
            moving, hops = v / each_way, a * sum(x.n for x in self.along) / 2
            return max(moving, hops), 0.0
        hops = sum(math.ceil(x.n / 2) if x.wraps else x.n - 1 for x in self.along)
        return (self.n - 1) / self.n * v / each_way, hops * a

    def exchange(self, v: float) -> float:
        """Seconds of an all_to_all whose operands are V bytes together."""
        if self.level.kind == "switch":
            return (self.n - 1) / self.n**2 * v / self.bandwidth
        return max(x.n * v * x.apart / ((8 if x.wraps else 4) * self.n * self.bandwidth) for x in self.along)

    def shift(self, sent: float) -> float:
        """Seconds until every device has sent so many bytes to a neighbour."""
        apart = max(x.apart for x in self.along) if self.level.kind == "torus" else 1
        return sent * apart / self.bandwidth + apart * self.level.latency


@dataclass(frozen=True)
class _Group:
    """The devices that one collective joins, by level."""

    counts: tuple[int, ...]  # in each level, inner to outer
    tiers: tuple[_Tier, ...]  # of the levels with more than one member

    @staticmethod
    def of(placement: Placement, axes: Sequence[str]) -> _Group:
        parts = [part for axis in sorted(set(axes)) for part in placement.parts.get(axis, ())]
        counts: list[int] = []
        tiers: list[_Tier] = []
        mine, there = 1, 1  # devices in one member: of this group, and in use
        for number, (level, used) in enumerate(zip(placement.network.levels, placement.used, strict=True)):
            along: list[_Along] = []
            for axis, size in used.items():
                here = [part for part in parts if part.level == number and part.axis == axis]
                n = math.prod(part.size for part in here)
                if n > 1:
                    span = max(part.size * part.stride for part in here)
                    along.append(_Along(n, span / n, n == size and level.wraps(size)))
            each = min(level.device_bandwidth, level.bandwidth * math.ceil(there / level.share) / there)
            if along:
                tiers.append(_Tier(level, tuple(along), mine * each))
            counts.append(math.prod(x.n for x in along))
            mine, there = mine * counts[-1], there * math.prod(used.values())
        return _Group(tuple(counts), tuple(tiers))

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
        # A pipeline over several levels keeps all of them busy, and pays their latencies to fill and again to drain
        fills = 2 if len(self.tiers) > 1 else 1
        gather = min(max(moving) + fills * sum(latency), sum(moving) + sum(latency))
        return 2 * gather if kind == "all_reduce" else gather


def _table(tables: Sequence[Table], kind: str, counts: tuple[int, ...]) -> Table | None:
    """The table of this kind and group; for want of one, that of another ring collective of the group."""
    group = _trimmed(counts)
    there = {table.kind: table for table in tables if _trimmed(table.group) == group}
    others = RINGS if kind in RINGS else ()
    return next((there[name] for name in (kind, *reversed(others)) if name in there), None)


def _trimmed(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Without the outer levels in which the group has one member."""
    last = max((i for i, n in enumerate(counts) if n > 1), default=-1)
    return counts[: last + 1]


def _read(points: Sequence[Point], formula: Callable[[float], float], v: float) -> float:
    """Seconds at V bytes: between two points a power law through both; outside, the formula scaled to meet the last."""
    at = bisect_right([size for size, _ in points], v)
    if 0 < at < len(points):
        (v0, t0), (v1, t1) = points[at - 1], points[at]
        return t0 * (t1 / t0) ** (math.log(v / v0) / math.log(v1 / v0))
    size, seconds = points[0] if at == 0 else points[-1]
    return seconds * formula(v) / formula(size)
