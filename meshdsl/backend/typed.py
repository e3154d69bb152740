"""Arrays of JAX whose types say how they are sharded: those over meshes with Explicit axes.

An operation of JAX refuses such operands if it cannot tell how its result is sharded. Kernels and programs compute
without these types, over the same mesh with Auto axes; results of programs have them again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (jax is only partly typed)

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding


def is_typed(x: Any) -> bool:
    """True if the type of an array says how it is sharded."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def untyped(x: Any) -> Any:
    """The array over the same mesh with Auto axes, without a copy; a traced array stays as it is."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, Tracer) or not isinstance(sharding, NamedSharding) or not is_typed(x):
        return x
    return jax.device_put(x, NamedSharding(_auto(sharding.mesh), sharding.spec))


@functools.lru_cache(maxsize=64)
def _auto(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names)
