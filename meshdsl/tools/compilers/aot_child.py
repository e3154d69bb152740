"""The process that compiles for a topology: a script that `aot.compile_for` runs, never imported.

`python aot_child.py DIRECTORY` reads request.json and program.bin there, and writes result.json and compiled.txt. The
caller sets the environment, because libtpu reads it when jax is imported; an unknown topology aborts the process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh


def map_mesh(devices: list[Any], sizes: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """The devices as a grid of `sizes`, mesh neighbours adjacent in the torus if possible; and the method used."""
    cores = any(device.core_on_chip for device in devices)
    slices = {getattr(device, "slice_index", 0) or 0 for device in devices}
    if not cores and len(slices) == 1:
        try:
            grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
            return grid, "mesh axes on torus axes (jax.experimental.mesh_utils)"
        except (NotImplementedError, AssertionError, ValueError):
            pass  # mesh_utils does not support these sizes: use coordinates; the result names the method
    ordered = sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.coords[::-1], d.core_on_chip))
    return np.array(ordered, object).reshape(sizes), "row-major by slice, coordinates and core"


def run(directory: Path) -> dict[str, Any]:
    request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
    jax.config.update("jax_enable_x64", request["x64"])
    extra = {"num_slices": request["slices"]} if request["slices"] > 1 else {}
    topology = topologies.get_topology_desc(platform=request["platform"], topology_name=request["topology"], **extra)
    devices, sizes = list(topology.devices), tuple(request["mesh"].values())
    if len(devices) != np.prod(sizes, dtype=int):
        return {"devices": len(devices)}
    grid, order = map_mesh(devices, sizes)
    mesh = Mesh(grid, tuple(request["mesh"]))
    program = jax.export.deserialize(bytearray((directory / "program.bin").read_bytes()))
    ins, outs = tuple(program.in_shardings_jax(mesh)), list(program.out_shardings_jax(mesh))
    function = jax.jit(program.call, in_shardings=ins, out_shardings=outs, donate_argnums=tuple(request["donated"]))
    lowered = function.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.in_avals))
    start = time.perf_counter()
    record: dict[str, Any] = {"devices": len(devices), "order": order}
    try:
        compiled = lowered.compile(compiler_options=request["options"])
    except jax.errors.JaxRuntimeError as error:
        return {**record, "error": str(error)}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        return {**record, "error": "the compiler reports neither memory nor text"}
    (directory / "compiled.txt").write_text(text, encoding="utf-8")
    sizes_of = {"argument", "output", "temp", "alias", "generated_code"}
    return {
        **record,
        "seconds": time.perf_counter() - start,
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in sizes_of}
        | {"peak": memory.peak_memory_in_bytes, "host": memory.host_temp_size_in_bytes},
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "result.json").write_text(json.dumps(run(directory)), encoding="utf-8")
