"""A `Mesh` is a set of named axes with sizes. It needs devices only for execution.

Axes of size 1 are legal and free: lowering removes them before it applies a layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import LayoutError, expect, nearest
from ..errors.markup import page_part

if TYPE_CHECKING:
    import jax

MOST_AXES = 32  # what NumPy iterates over, and JAX with it
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")  # parts of a split axis have names with a dot


@runtime_checkable
class JaxMesh(Protocol):
    """A `jax.sharding.Mesh` or `AbstractMesh`, which has no devices; recognised without an import of JAX."""

    @property
    def shape(self) -> Any: ...
    @property
    def axis_types(self) -> Any: ...


class Mesh:
    """A grid of devices with named axes.

    >>> Mesh("rows:2 cols:4")
    Mesh('rows:2 cols:4')
    >>> Mesh(rows=2, cols=4).size
    8

    `device_order` is an array of device ids in row-major mesh order (GShard section 3.2, device assignment).
    `devices` are the JAX devices in the same order (default: `jax.devices()`).

    A `jax.sharding.Mesh` is a mesh on its devices. If some of its axes are Explicit, results have its shardings in
    their types (`jax.typeof`). Wherever a mesh is taken, everything that `Mesh` takes is one.

    >>> import jax
    >>> Mesh(jax.make_mesh((2, 4), ("rows", "cols")))
    Mesh('rows:2 cols:4')

    Raises `LayoutError` for malformed axes, and, on execution, for too few devices.
    """

    axes: dict[str, int]

    def __init__(
        self,
        axes: MeshLike | None = None,
        *,
        device_order: Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        **named: int,
    ):
        positional = _parse(axes)
        own_devices, own_order, self.axis_types = _placed(axes)
        devices, device_order = devices or own_devices, device_order or own_order
        if twice := [name for name in named if name in positional]:
            sizes = f"{positional[twice[0]]} and {named[twice[0]]}"
            raise LayoutError(f"the mesh axis {twice[0]!r} is given twice, as {sizes}")
        self.axes = {**positional, **named}
        _check_axes(self.axes)
        self.device_order = None if device_order is None else _flat(device_order)
        self.devices: Sequence[Any] | None = None if devices is None else tuple(devices)
        self._check_devices()

    def _check_devices(self) -> None:
        for device in self.devices or ():
            if not hasattr(device, "platform"):
                raise LayoutError(f"the devices of a mesh are devices of JAX, such as jax.devices(); got {device!r}")
        if self.device_order is not None and sorted(self.device_order) != sorted(set(self.device_order)):
            raise LayoutError(
                f"device_order names a device twice: {list(self.device_order)}\n"
                f"  it is the ids of the {self.size} devices of the mesh in row-major order, each once"
            )
        for argument, entries in (("device_order", self.device_order), ("devices", self.devices)):
            if entries is not None and len(entries) != self.size:
                raise LayoutError(
                    f"{argument} has {len(entries)} entries, and the mesh '{self}' has {self.size} places\n"
                    f"  give one for each place, in row-major order"
                )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"

    def _repr_html_(self) -> str:
        devices = f"{self.size} devices" if self.size > 1 else "one device"
        title = f"mesh of {devices}{': ' if self.axes else ''}{self}"
        return page_part(title, axes=self.axes)

    def __str__(self) -> str:
        return " ".join(f"{name}:{size}" for name, size in self.axes.items())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (tuple(self.axes.items()), self.device_order, self.devices, self.axis_types)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def anywhere(self) -> Mesh:
        """The mesh of the same axes, whatever its devices."""
        return Mesh(self.axes)

    def count(self, axes: Sequence[str]) -> int:
        """The product of the sizes of these axes.

        >>> Mesh("rows:2 cols:4").count(("rows", "cols"))
        8
        """
        n = 1
        for axis in axes:
            n *= self.axes[axis]
        return n

    def check_axis(self, axis: str) -> None:
        """Raise `LayoutError` if the mesh has no such axis."""
        if axis not in self.axes:
            raise LayoutError(f"the mesh has no axis {axis!r}; {nearest(axis, self.axes)}")

    def on(self, devices: Sequence[Any]) -> Mesh:
        """The same mesh on these JAX devices, in row-major order."""
        import numpy as np

        return Mesh(self.axes, devices=tuple(np.asarray(devices, dtype=object).ravel()))

    def bind(self) -> jax.sharding.Mesh:
        """The JAX mesh on real devices (all axes Auto). Raises `LayoutError` if there are too few devices."""
        import jax
        import numpy as np

        devices: list[Any] = [*(jax.devices() if self.devices is None else self.devices)]  # pyright: ignore[reportUnknownMemberType]
        if self.device_order is not None:
            by_id = {device.id: device for device in devices}
            missing = [i for i in self.device_order if i not in by_id]
            if missing:
                raise LayoutError(f"device_order names devices that do not exist: {missing}; there are {sorted(by_id)}")
            devices = [by_id[i] for i in self.device_order]
        if len(devices) < self.size:
            raise LayoutError(
                f"the mesh '{self}' needs {self.size} devices, and there are {len(devices)} ({devices[0].platform})\n"
                f"  to try things out on a CPU, call md.host_devices({self.size}) before anything runs;\n"
                f"  .program(), .cost() and .lower() need no devices"
            )
        if len(self.axes) > MOST_AXES:
            raise LayoutError(
                f"a mesh that runs has at most {MOST_AXES} axes, got {len(self.axes)}\n"
                "  leave out axes of size 1, or merge axes that are used together"
            )
        grid = np.array(devices[: self.size], dtype=object).reshape(tuple(self.axes.values()))
        return jax.sharding.Mesh(grid, tuple(self.axes), axis_types=(jax.sharding.AxisType.Auto,) * len(self.axes))

    def typed(self) -> jax.sharding.Mesh | None:
        """The JAX mesh of results: the one that `Mesh` was given, if some of its axes are Explicit."""
        import jax

        if self.axis_types is None:
            return None
        return jax.sharding.Mesh(self.bind().devices, tuple(self.axes), axis_types=self.axis_types)

    def abstract(self) -> jax.sharding.AbstractMesh:
        """The JAX mesh without devices, for lowering only."""
        import jax

        types = (jax.sharding.AxisType.Auto,) * len(self.axes)
        return jax.sharding.AbstractMesh(tuple(self.axes.values()), tuple(self.axes), axis_types=types)


def _flat(ids: Any) -> tuple[int, ...]:
    if hasattr(ids, "ravel"):
        ids = ids.ravel().tolist()
    return tuple(i for item in ids for i in (_flat(item) if isinstance(item, list | tuple) else (int(item),)))


def _placed(given: MeshLike | None) -> tuple[Sequence[Any] | None, Sequence[int] | None, tuple[Any, ...] | None]:
    """The devices of a mesh and their order, and the types of its axes if it is JAX's and some are Explicit."""
    if isinstance(given, Mesh):
        return given.devices, given.device_order, given.axis_types
    if given is None or isinstance(given, str | Mapping):
        return None, None, None
    import jax

    kinds = jax.sharding.AxisType
    if kinds.Manual in given.axis_types:
        raise LayoutError(
            f"axes of this mesh are Manual, as inside jax.shard_map: {given}\n"
            "  a program has its own shard_map; call it outside, with the mesh that jax.shard_map was given"
        )
    types = given.axis_types if kinds.Explicit in given.axis_types else None
    return tuple(given.devices.ravel()) if isinstance(given, jax.sharding.Mesh) else None, None, types


def _check_axes(axes: Mapping[str, int]) -> None:
    for name, size in axes.items():
        if not _NAME.fullmatch(str(name)):
            raise LayoutError(
                f"a mesh axis is named like a Python variable, in ASCII letters, got {name!a}\n"
                "  XLA cannot compile other names"
            )
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise LayoutError(
                f"mesh axis {name!r} needs a size of at least 1, got {size!r}\n"
                f"  leave an axis that is not needed out, or give it the size 1"
            )


def _parse(axes: MeshLike | None) -> dict[str, int]:
    if axes is None:
        return {}
    if isinstance(axes, Mesh):
        return axes.axes
    if isinstance(axes, Mapping):
        return dict(axes)
    if not isinstance(axes, str):
        return dict(axes.shape if hasattr(axes, "axis_types") else expect("a mesh", axes, str, dict))
    parsed: dict[str, int] = {}
    for word in re.findall(r"[^\s,;]+", axes):
        name, _, size = word.partition(":")
        if not name.isidentifier() or not (size.isascii() and size.isdigit()) or len(size) > 18:
            rule = ", which is a rule of a layout" if name.isidentifier() and size.isidentifier() else ""
            raise LayoutError(f"a mesh axis is written name:size, for example 'rows:2 cols:4'; got {word[:60]!r}{rule}")
        if name in parsed:
            raise LayoutError(f"the mesh axis {name!r} is given twice, in {axes!r}; give the axes different names")
        parsed[name] = int(size)
    return parsed


MeshLike = Mesh | JaxMesh | str | Mapping[str, int]  # what is taken where a mesh is wanted
