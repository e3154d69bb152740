"""Call a kernel inside a mesh as if there were none: kernels of JAX do not say over which axes their results vary."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# (jax is only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..jaxprs import call_on_blocks
from ..varying import varying_axes


def call_outside(f: Callable[..., Any], xs: Sequence[Any]) -> list[Any]:
    """The results of f(*xs), traced outside the mesh; they vary over every axis that an operand varies over."""
    axes = varying_axes(*xs)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
    return call_on_blocks(jaxpr, xs, (axes,) * len(jaxpr.out_avals))
