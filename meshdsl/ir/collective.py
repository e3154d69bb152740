"""The interface of a collective in a program; `lowering` defines each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..layouts import Mesh, Sharding
from ..layouts.sharding import Axes

__all__ = ["Blocks", "Collective"]

Blocks = list[np.ndarray[Any, Any]]  # one per device, row-major over the mesh


class Collective(Protocol):
    """An instruction that reshards a value and never changes the global value.

    `emit(x, shape, before, mesh, *counts)` makes the JAX call on one device's block of a value of global `shape`.
    `simulate(blocks, shape, before, mesh, *counts)` computes the blocks of all devices in NumPy; it is the definition.
    `counts` are the further operands of a ragged exchange; the other kinds have none.
    """

    @property
    def name(self) -> str:
        """The kind of collective, such as `all_reduce`."""
        ...

    @property
    def axes(self) -> Axes:
        """The mesh axes along which devices exchange."""
        ...

    @property
    def sends(self) -> bool:
        """Whether devices send data; a local slice of a device's own block sends nothing."""
        ...

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        """The sharding of the result; raises `InternalError` if the collective does not apply to `before`."""
        ...

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        """The bytes that one device sends when its block has `local_bytes` bytes."""
        ...

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype that is sent for a value of `dtype`."""
        ...

    @property
    def emit(self) -> Callable[..., Any]:
        """The function that makes the JAX call; see the class."""
        ...

    @property
    def simulate(self) -> Callable[..., Blocks]:
        """The definition on the blocks of all devices, in NumPy; see the class."""
        ...
