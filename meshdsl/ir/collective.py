"""The interface of a collective in a program; `lowering` defines each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..layouts import Mesh, Sharding
from ..layouts.sharding import Axes

Blocks = list[np.ndarray[Any, Any]]  # one per device, row-major over the mesh
Pairs = list[tuple[int, int]]  # (sender, receiver), numbered row-major over the axes in mesh order


@dataclass(frozen=True)
class BlockEffect:
    """How a collective changes the blocks of a value. It treats rows along dims that are not in `dims` independently.

    >>> BlockEffect(joins="expert", cuts="batch").dims
    ('expert', 'batch')
    """

    joins: str | None = None  # the dim along which blocks become larger
    cuts: str | None = None  # the dim along which blocks become smaller
    moves: tuple[str, ...] = ()  # the dims whose blocks devices exchange for others of the same size
    reduces: bool = False  # True if a pending reduction is completed

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims whose blocks change."""
        return (*(dim for dim in (self.joins, self.cuts) if dim is not None), *self.moves)

    @property
    def exchanges(self) -> bool:
        """True for an all_to_all."""
        return self.joins is not None and self.cuts is not None


class Collective(Protocol):
    """An instruction that reshards a value and never changes the global value.

    `emit(x, shape, before, mesh, *counts)` makes the JAX call on one device's block of a value of global `shape`.
    `simulate(blocks, shape, before, mesh, *counts)` computes the blocks of all devices in NumPy; it is the definition.
    `counts` are the further operands of a ragged exchange; the other kinds have none.

    A new kind is one class, which inherits `CollectiveDefaults`, and the pass or the planner that inserts it.
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
        """True if devices send data; a local slice of a device's own block sends nothing."""
        ...

    @property
    def effect(self) -> BlockEffect:
        """How it changes the blocks of a value."""
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
    def timed_as(self) -> str:
        """The kind whose time formulas and tables apply."""
        ...

    @property
    def share(self) -> float:
        """The expected fraction of the bytes that are sent; it scales the estimated time only."""
        ...

    @property
    def at_most(self) -> bool:
        """True if `bytes_sent` is an upper bound."""
        ...

    def pairs(self, mesh: Mesh) -> Pairs | None:
        """The senders and receivers of a permutation; None if every device of a group sends to all others."""
        ...

    @property
    def emit(self) -> Callable[..., Any]:
        """The function that makes the JAX call; see the class."""
        ...

    @property
    def simulate(self) -> Callable[..., Blocks]:
        """The definition on the blocks of all devices, in NumPy; see the class."""
        ...


class CollectiveDefaults:
    """The properties of most kinds: the value's own dtype is sent, and every byte of it, within groups of devices."""

    name: str
    share = 1.0
    at_most = False

    @property
    def timed_as(self) -> str:
        """The kind itself."""
        return self.name

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The value's own dtype."""
        return np.dtype(dtype)

    def pairs(self, mesh: Mesh) -> Pairs | None:
        """None: not a permutation."""
        return None


@dataclass(frozen=True)
class Start:
    """The start of a collective, whose result is available at its wait; see `lowering.asynchrony`.

    >>> from meshdsl.lowering.collectives import AllReduce
    >>> print(Start(AllReduce(("cols",))))
    start all_reduce(sum) over cols
    """

    collective: Collective

    def __str__(self) -> str:
        return f"start {self.collective}"

    @property
    def name(self) -> str:
        """The kind of collective."""
        return self.collective.name

    @property
    def sends(self) -> bool:
        """True if devices send data."""
        return self.collective.sends
