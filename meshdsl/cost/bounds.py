"""Bounds on what every layout of a space costs, for a search to exclude most of them unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Graph
from .machine import Machine
from .network import Placement
from .space import Space

__all__ = ["Bounds", "bounds"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """No program of the layout in a row takes less than this; rows of illegal layouts are left out."""

    rows: tuple[np.ndarray, ...]  # of each space: int16 [layouts, dims]
    seconds: np.ndarray  # float64 [layouts], as the others
    peak_bytes: np.ndarray
    wire_bytes: np.ndarray
    illegal: int  # layouts left out

    def __len__(self) -> int:
        return len(self.seconds)

    @staticmethod
    def none(found: Space) -> Bounds:
        """That nothing costs less than nothing."""
        zero = np.zeros(len(found.rows))
        return Bounds((found.rows,), zero, zero, zero, 0)

    @staticmethod
    def together(parts: Sequence[Bounds]) -> Bounds:
        """The bounds of several spaces, one after another."""
        return Bounds(
            tuple(rows for part in parts for rows in part.rows),
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.peak_bytes for part in parts]),
            np.concatenate([part.wire_bytes for part in parts]),
            sum(part.illegal for part in parts),
        )


def bounds(
    graph: Graph, found: Space, machine: Machine, placement: Placement, *, donated: Sequence[int] = ()
) -> Bounds:
    """The bounds of every layout of a space on a machine."""
    return Bounds.none(found)
