"""Where restored tensors go: to each device its part, by dim name, whatever the mesh and layout at saving were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ..dims import Shape, show
from ..errors import LayoutError, ShapeError, nearest
from ..ir import Type
from ..layouts import Extents, Layout, Mesh, Sharding
from ..lowering import Program
from ..lowering.emit import partition_spec
from ..values import Tensor, spec_of
from .grid import Box
from .manifest import Entry
from .read import Part, StepReader

__all__ = ["Target", "place", "targets"]


@dataclass(frozen=True)
class Target:
    """What one restored tensor is to be."""

    type: Type
    sizes: tuple[int, ...]  # stored, padding included
    sharding: jax.sharding.Sharding


def targets(
    like: Mapping[str, Any], mesh: Mesh | None, layout: Layout | None, program: Program | None
) -> dict[str, Target]:
    """The target of each path: as the program's input of that path, else as the layout says, else as the tensor given
    lies, else whole on one device.

    Raises `ShapeError` for a path that the program lacks, `LayoutError` for a layout that cannot be.
    """
    if program is not None:
        return _of_program({path: spec_of(x) for path, x in like.items()}, program)
    if layout is not None or mesh is not None:
        if mesh is None:
            raise LayoutError(f"the layout '{layout}' needs a mesh; pass mesh= too")
        return _of_layout({path: spec_of(x) for path, x in like.items()}, mesh, layout or Layout())
    return {path: _as_it_lies(x) for path, x in like.items()}


def _of_program(types: Mapping[str, Type], program: Program) -> dict[str, Target]:
    mesh, inputs = program.mesh.bind(), {v.name: v for v in program.ins}
    problems = [f"  {path}: {nearest(path, inputs)}" for path in types if path not in inputs]
    problems += [
        f"  {path}: is {inputs[path].type} there, and like= says {kind}"
        for path, kind in types.items()
        if path in inputs and not _takes(inputs[path].type, kind)
    ]
    if problems:
        listed = "\n".join(problems)
        raise ShapeError(
            f"the program does not take what is restored\n{listed}\n"
            "  the tree has the paths of the program's arguments: {'params': ..., 'state': ...} for f(params, state)"
        )
    return {
        path: Target(
            kind,
            program.extents.global_shape(inputs[path].shape),
            NamedSharding(mesh, partition_spec(inputs[path].shape, inputs[path].sharding)),
        )
        for path, kind in types.items()
    }


def _takes(there: Type, kind: Type) -> bool:
    """Whether an input of this type takes the tensor. A sharded update may call a dim `io` of its own `io__rows`."""
    names = all(
        a.name == b.name or a.name.startswith(f"{b.name}__") for a, b in zip(there.shape, kind.shape, strict=False)
    )
    return names and there.dtype == kind.dtype and [d.size for d in there.shape] == [d.size for d in kind.shape]


def _of_layout(types: Mapping[str, Type], mesh: Mesh, layout: Layout) -> dict[str, Target]:
    for rules in (layout.rules, *layout.overrides.values()):
        for axes in rules.values():
            for axis in axes:
                mesh.check_axis(axis)
    layout, bound = layout.on(mesh), mesh.bind()
    cut: dict[str, set[str]] = {}  # every dim is stored as in programs of this layout: see `lowering.partition`
    for rules in (layout.rules, *layout.overrides.values()):
        for dim, axes in rules.items():
            cut.setdefault(dim, set()).update(axes)
    extents = Extents({dim: mesh.count(tuple(axes)) for dim, axes in cut.items()})
    return {
        path: Target(
            kind,
            extents.global_shape(kind.shape),
            NamedSharding(bound, partition_spec(kind.shape, _sharding(path, kind.shape, layout))),
        )
        for path, kind in types.items()
    }


def _sharding(path: str, shape: Shape, layout: Layout) -> Sharding:
    rules = layout.for_path(path)
    split = {d.name: rules.get(d.name, ()) for d in shape}
    axes = [axis for found in split.values() for axis in found]
    if len(axes) != len(set(axes)):
        twice = next(axis for axis in axes if axes.count(axis) > 1)
        dims = " and ".join(name for name, found in split.items() if twice in found)
        raise LayoutError(
            f"the layout '{layout}' cuts {path}, {show(shape)}, twice over the axis {twice!r}: {dims}\n"
            "  give one of them another axis, or pass program= of the step that takes it"
        )
    return Sharding.of(split)


def _as_it_lies(x: Any) -> Target:
    kind = spec_of(x)
    if isinstance(x, Tensor) and isinstance(x.stored, jax.Array):
        return Target(kind, tuple(x.stored.shape), x.stored.sharding)
    return Target(kind, tuple(d.size for d in kind.shape), SingleDeviceSharding(jax.local_devices()[0]))


def place(reader: StepReader, entry: Entry, target: Target) -> Tensor:
    """Read what this process's devices need of one tensor, and put it there. Padding is zero."""
    stored_as = [[d.name for d in target.type.shape].index(d.name) for d in entry.type.shape]
    blocks: dict[Box, np.ndarray] = {}
    parts: list[Part] = []
    devices = target.sharding.addressable_devices_indices_map(target.sizes)
    for index in devices.values():
        box = _box(index, target.sizes)
        if box not in blocks:
            blocks[box] = np.zeros(box.size, entry.type.dtype)
            real = [max(0, min(a + n, d.size) - a) for a, n, d in zip(*box, target.type.shape, strict=True)]
            stored = Box(tuple(box.start[i] for i in stored_as), tuple(real[i] for i in stored_as))
            parts.append(Part(stored, blocks[box].transpose(stored_as)))
    reader.read(entry, parts)
    arrays = [jax.device_put(blocks[_box(index, target.sizes)], device) for device, index in devices.items()]
    array = jax.make_array_from_single_device_arrays(target.sizes, target.sharding, arrays)
    return Tensor(target.type.shape, target.type.dtype, array=array)


def _box(index: Sequence[slice] | None, sizes: Sequence[int]) -> Box:
    index = index or (slice(None),) * len(sizes)
    ranges = [s.indices(n) for s, n in zip(index, sizes, strict=True)]
    return Box(tuple(a for a, _, _ in ranges), tuple(b - a for a, b, _ in ranges))
