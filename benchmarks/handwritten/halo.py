"""A convolution of images sharded over rows and columns of the mesh, with a hand-written halo exchange.

    y = conv(x, w), 3 x 3, stride 1, "same"     x [batch, height, width, in]     w [kh, kw, in, out]

batch is sharded over `rows`, height over `cols`; a device sends its first and last image line to its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = Sequence[jax.Device] | None  # None: those of this machine

BATCH, HEIGHT, WIDTH, IN, OUT, KERNEL = 8, 64, 64, 32, 32, 3
SPECS = {"x": P("rows", "cols"), "w": P()}


def arrays() -> dict[str, np.ndarray]:
    """x and w, equal for every candidate."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, HEIGHT, WIDTH, IN)).astype(np.float32)
    return {"x": x, "w": 0.1 * rng.standard_normal((KERNEL, KERNEL, IN, OUT)).astype(np.float32)}


def device(x: Any, w: Any) -> Any:
    """The convolution of one device of the 2 x 4 mesh."""
    down = [(i, i + 1) for i in range(3)]
    above = lax.ppermute(x[:, -1:], "cols", down)
    below = lax.ppermute(x[:, :1], "cols", [(b, a) for a, b in down])
    return _conv(jnp.concatenate([above, x, below], 1), w, [(0, 0), (1, 1)])


def whole(x: Any, w: Any) -> Any:
    """The convolution of unsharded images, for GSPMD to partition."""
    return _conv(x, w, [(1, 1), (1, 1)])


def _conv(x: Any, w: Any, padding: list[tuple[int, int]]) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def handwritten(devices: Devices = None) -> tuple[jax.stages.Compiled, dict[str, NamedSharding]]:
    """The executable, and the shardings of its operands."""
    mesh = _mesh(devices)
    step = jax.shard_map(device, mesh=mesh, in_specs=tuple(SPECS.values()), out_specs=SPECS["x"])
    return _compile(step, mesh)


def gspmd(devices: Devices = None) -> tuple[jax.stages.Compiled, dict[str, NamedSharding]]:
    """The same, partitioned by GSPMD."""
    return _compile(whole, _mesh(devices))


def _mesh(devices: Devices) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def _compile(step: Callable, mesh: jax.sharding.Mesh) -> tuple[jax.stages.Compiled, dict[str, NamedSharding]]:
    at = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at[name]) for name, a in arrays().items()]
    return jax.jit(step, out_shardings=at["x"]).lower(*shapes).compile(), at
