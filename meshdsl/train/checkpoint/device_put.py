"""Puts restored tensors on devices with any sharding, whatever the mesh and layout at saving were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ...dims import Shape, show
from ...errors import CheckpointError, LayoutError, ShapeError, nearest
from ...ir import Type
from ...layouts import PARAMS, Layout, Mesh, Sharding
from ...lowering import Program
from ...lowering.emit import partition_spec
from ...lowering.partition.partition import extents_of
from ...trace import Tensor, spec_of
from .grid import Box, unpadded
from .manifest import StoredTensor
from .read import ReadRequest, StepReader


@dataclass(frozen=True)
class Destination:
    """The type, padded global shape and sharding of a tensor to restore."""

    type: Type
    sizes: tuple[int, ...]  # with padding
    sharding: jax.sharding.Sharding


def targets(
    like: Mapping[str, Any], mesh: Mesh | None, layout: Layout | None, program: Program | None
) -> dict[str, Destination]:
    """The target of each path.

    Its sharding is that of the program's input of this path; without a program, that of the layout; without a layout,
    that of the tensor in `like`; for a spec in `like`, the tensor is stored unsharded on one device. Raises
    `ShapeError` for a path that the program lacks, and `LayoutError` for an illegal layout.
    """
    if program is not None:
        return _of_program({path: spec_of(x) for path, x in like.items()}, program)
    if layout is not None or mesh is not None:
        if mesh is None:
            raise LayoutError(f"the layout '{layout}' needs a mesh; pass mesh=")
        return _of_layout({path: spec_of(x) for path, x in like.items()}, mesh, layout or Layout())
    return {path: _same_sharding(x) for path, x in like.items()}


def _of_program(types: Mapping[str, Type], program: Program) -> dict[str, Destination]:
    mesh, inputs = program.mesh.bind(), {v.name: v for v in program.ins}
    problems = [f"  {path}: {nearest(path, inputs)}" for path in types if path not in inputs]
    problems += [
        f"  {path}: is {inputs[path].type} in the program and {spec} in like="
        for path, spec in types.items()
        if path in inputs and not _accepts(inputs[path].type, spec)
    ]
    if problems:
        listed = "\n".join(problems)
        raise ShapeError(
            f"the program's inputs do not match the tensors to restore\n{listed}\n"
            "  use the paths of the program's arguments: like={'params': ..., 'state': ...} for f(params, state)"
        )
    return {
        path: Destination(
            spec,
            program.stored_shape(inputs[path]),
            NamedSharding(mesh, partition_spec(inputs[path].dims, inputs[path].sharding)),
        )
        for path, spec in types.items()
    }


def _accepts(input_type: Type, spec: Type) -> bool:
    """True if a program input of this type accepts the tensor. Sharded updates rename a dim `io` to `io__rows`."""
    names = all(
        a.name == b.name or a.name.startswith(f"{b.name}__") for a, b in zip(input_type.dims, spec.dims, strict=False)
    )
    return names and input_type.dtype == spec.dtype and [d.size for d in input_type.dims] == [d.size for d in spec.dims]


def _of_layout(types: Mapping[str, Type], mesh: Mesh, layout: Layout) -> dict[str, Destination]:
    for rules in (layout.rules, *layout.overrides.values()):
        for axes in rules.values():
            for axis in axes:
                mesh.check_axis(axis)
    if PARAMS in layout.rules and not any(d.name == PARAMS for spec in types.values() for d in spec.dims):
        raise LayoutError(
            f"the layout '{layout}' shards each parameter along the dims that its step chooses\n"
            "  pass program= of the step that takes these tensors, instead of layout="
        )
    layout, bound = layout.on(mesh), mesh.bind()
    extents = extents_of(mesh, layout, ())  # dims are padded as in programs of this layout
    return {
        path: Destination(
            spec,
            extents.global_shape(spec.dims, _sharding(path, spec.dims, layout), mesh),
            NamedSharding(bound, partition_spec(spec.dims, _sharding(path, spec.dims, layout))),
        )
        for path, spec in types.items()
    }


def _sharding(path: str, shape: Shape, layout: Layout) -> Sharding:
    rules = layout.for_path(path)
    axes_of_dim = {d.name: rules.get(d.name, ()) for d in shape}
    axes = [axis for dim_axes in axes_of_dim.values() for axis in dim_axes]
    if len(axes) != len(set(axes)):
        repeated = next(axis for axis in axes if axes.count(axis) > 1)
        dims = " and ".join(name for name, dim_axes in axes_of_dim.items() if repeated in dim_axes)
        raise LayoutError(
            f"the layout '{layout}' shards two dims of {path}, {show(shape)}, over the axis {repeated!r}: {dims}\n"
            "  map one of them to another axis, or pass program= of a step that takes this tensor"
        )
    return Sharding.of(axes_of_dim)


def _same_sharding(x: Any) -> Destination:
    spec = spec_of(x)
    if isinstance(x, Tensor) and isinstance(x.stored, jax.Array):
        return Destination(spec, tuple(x.stored.shape), x.stored.sharding)
    return Destination(spec, tuple(d.size for d in spec.dims), SingleDeviceSharding(jax.local_devices()[0]))


def device_put(reader: StepReader, entry: StoredTensor, target: Destination) -> Tensor:
    """Read the shards of one tensor that this process's devices store, and put them there. Padding is zero."""
    stored_order = [[d.name for d in target.type.dims].index(d.name) for d in entry.type.dims]
    requests: list[ReadRequest] = []

    def request(box: Box, block: np.ndarray) -> None:
        stored = Box(tuple(box.start[i] for i in stored_order), tuple(box.size[i] for i in stored_order))
        requests.append(ReadRequest(stored, block.transpose(stored_order)))

    return assembled(target, request, lambda: reader.read(entry, requests))


def assembled(
    target: Destination, fill: Callable[[Box, np.ndarray], None], finish: Callable[[], object] = lambda: None
) -> Tensor:
    """A tensor of the blocks that this process's devices store; replicas share one.

    `fill(box, block)` is called once for each block, with its place in the tensor and an array of zeros to write to,
    both without padding. `finish` is called after all of them.
    """
    blocks: dict[Box, np.ndarray] = {}
    everything, sizes = (slice(None),) * len(target.sizes), [d.size for d in target.type.dims]
    indices = target.sharding.addressable_devices_indices_map(target.sizes)
    devices = {device: index or everything for device, index in indices.items()}
    for index in devices.values():
        box = unpadded(index, target.sizes)
        if box not in blocks:
            blocks[box] = _zeros(target, box.size)
            part = unpadded(index, sizes)
            fill(part, blocks[box][(*map(slice, part.size), ...)])
    finish()
    arrays = [jax.device_put(blocks[unpadded(index, target.sizes)], device) for device, index in devices.items()]
    array = jax.make_array_from_single_device_arrays(target.sizes, target.sharding, arrays)
    return Tensor(target.type.dims, target.type.dtype, array=array)


def _zeros(target: Destination, sizes: tuple[int, ...]) -> np.ndarray:
    try:
        return np.zeros(sizes, target.type.dtype)
    except MemoryError as error:
        raise CheckpointError(f"a block of {target.type} does not fit into memory: {error}") from None
