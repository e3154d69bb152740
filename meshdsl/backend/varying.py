"""The mesh axes that a block varies along, which JAX has in its type inside `jax.shard_map`.

Operands of a gradient, and the carry of a loop, must vary along the same axes. No value changes; nothing is sent.
"""

# pyright: reportUnknownMemberType=false
# (jax is only partly typed)

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax


def varying_axes(*xs: Any) -> tuple[str, ...]:
    """The axes that at least one of these varies along, sorted; NumPy arrays and numbers vary along none."""
    return tuple(sorted({axis for x in xs if isinstance(x, jax.Array) for axis in jax.typeof(x).mat.varying}))


def varying(x: Any, axes: Collection[str]) -> Any:
    """Cast the block to varying along all the axes: a psum of an invariant block multiplies it without an error."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(xs: Sequence[Any]) -> list[Any]:
    """The blocks cast to vary along the same axes; what is no JAX array stays."""
    axes = varying_axes(*xs)
    return [varying(x, axes) if isinstance(x, jax.Array) else x for x in xs]
