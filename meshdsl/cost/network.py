"""Map a mesh onto a network, and compute how long its collectives take.

A `Network` is a list of levels, inner to outer: a torus of chips, or a switch. A member of a level is one complete
copy of the level inside it: a GPU, a node, a slice. `place` assigns hardware axes to each mesh axis.
`Placement.seconds` is the time of a collective over some mesh axes while every other group of the mesh does the same.
Its formulas are in `transfer`. Measured points override formulas: between two points of a table, time is linear;
outside them, the formula is scaled to match the nearest point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import LayoutError
from ..layouts import Mesh
from ..lowering import CollectiveRecord
from .placing import Parts, assigned, by_default
from .transfer import KINDS, Group, NetworkTier, TimeTable, read, table_of


@dataclass(frozen=True)
class Network:
    """Levels, inner to outer; measured tables; `launch`: seconds of a collective before data moves.

    An all_to_all of n devices takes `message` seconds more for each of the n - 1 messages that a device sends.

    The device's compiler combines independent collectives of the kinds in `combine`, up to so many bytes.
    """

    levels: tuple[NetworkTier, ...]
    launch: float = 0.0
    tables: tuple[TimeTable, ...] = ()
    combine: Mapping[str, float] = field(default_factory=dict[str, float])
    message: float = 0.0

    @property
    def size(self) -> int:
        """Maximum number of devices."""
        return math.prod(level.size for level in self.levels)

    def __str__(self) -> str:
        shown = [f"{level.kind} {' '.join(f'{a}:{n}' for a, n in level.axes.items())}" for level in self.levels]
        return ", in ".join(shown)


def full_bytes(record: CollectiveRecord, n: int) -> int:
    """V of the formulas: bytes of the whole array over a group of `n` devices; for a permute, bytes one device sends.

    For a ragged exchange, only the share of slots that is expected to be filled counts, equal on all devices.
    """
    match record.op.timed_as:
        case "permute":
            return record.wire_bytes
        case "all_to_all":
            return round(record.bytes * n * record.op.share)
        case _:
            return record.bytes


@dataclass(frozen=True)
class Placement:
    """Hardware axes of each mesh axis; `print` shows them. `used` counts members in use along hardware axes."""

    network: Network
    mesh: Mesh
    parts: Parts  # mesh axis -> its factors of hardware axes, major to minor
    used: tuple[dict[str, int], ...]  # one dict per level
    notes: tuple[str, ...] = ()  # where the figures are approximate, and why
    _known: dict[tuple[str, frozenset[str], float], float] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        lines = [f"{axis}:{n} on {self.where((axis,))}" for axis, n in self.mesh.axes.items() if n > 1]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) or "one device"

    def where(self, axes: Sequence[str]) -> str:
        """The hardware of a group over these mesh axes, for people."""
        parts = [part for axis in axes for part in self.parts.get(axis, ())]
        return " x ".join(str(part) for part in parts) or "one device"

    @property
    def levels(self) -> dict[str, int]:
        """The outermost level of the network that each mesh axis of several devices extends over."""
        return {axis: max(part.level for part in parts) for axis, parts in self.parts.items() if parts}

    def seconds_of(self, record: CollectiveRecord) -> float:
        """Seconds for a collective of a program."""
        size = full_bytes(record, self.mesh.count(record.axes))
        return self.seconds(record.op.timed_as, record.axes, size)

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
        parts = [part for axis in sorted(set(axes)) for part in self.parts.get(axis, ())]
        group = Group.of(self.network.levels, self.used, parts)
        if group.n == 1:
            return 0.0
        launch = self.network.launch
        if kind == "all_to_all":
            launch += (group.n - 1) * self.network.message
        table = table_of(self.network.tables, kind, group.counts)
        if table is None:
            return launch + group.moving(kind, size)
        seconds = read(table.points, lambda v: launch + group.moving(table.kind, v), size)
        if table.kind == kind:
            return seconds
        gathers = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return launch + max(0.0, seconds - launch) * gathers[kind] / gathers[table.kind]


def place(network: Network, mesh: Mesh, assignment: Mapping[str, str | Sequence[str]] | None = None) -> Placement:
    """Map a mesh onto a network.

    By default devices are numbered row-major, as in the mesh: the minor mesh axis is innermost. Levels are filled from
    the inside; a torus uses the most nearly square slice, with its axes in the order that splits the fewest.
    `assignment` names hardware axes for every mesh axis of more than one device, major to minor; `axis:size` names a
    part of one. If two mesh axes use parts of the same hardware axis, the first one mentioned is the major one.

    >>> network = Network((NetworkTier("switch", {"gpu": 8}, 200e9), NetworkTier("switch", {"node": 4}, 25e9, share=8)))
    >>> print(place(network, Mesh("data:4 model:4")))
    data:4 on node:2 x gpu:2 step 4
    model:4 on gpu:4
    >>> print(place(network, Mesh("data:2 model:8"), {"data": "gpu:2", "model": ["node:2", "gpu:4"]}))
    data:2 on gpu:2 step 4
    model:8 on node:2 x gpu:4

    Raises `LayoutError` for a mesh larger than the machine, and for an assignment that does not fit, with every
    problem.
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


def has_slow_axis(network: Network, mesh: Mesh) -> bool:
    """True if mesh axes are on several levels of the network; False if the mesh does not fit it."""
    return mesh.size <= network.size and len(set(place(network, mesh).levels.values())) > 1
