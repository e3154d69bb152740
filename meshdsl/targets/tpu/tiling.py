"""The static part of one fused attention: sizes of blocks, who sees whom, and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

LANES = 128  # of a register of a TPU


@dataclass(frozen=True)
class Tiling:
    """The blocks of queries and keys on one device, and the pairs of blocks that see each other.

    Block i of the queries starts at a position that may be known only on the device, and so does block j of the keys.
    """

    queries: int  # queries of a block
    keys: int  # keys of a block
    causal: bool
    window: int | None
    count: int | None  # keys at positions from here on are padding; None if there is none
    scale: float
    soft_cap: float | None
    wide: np.dtype[Any]  # of scores and sums
    out: np.dtype[Any]  # of results
    segments: bool
    interpret: bool = False

    @property
    def masks(self) -> bool:
        """True if positions decide who sees whom."""
        return self.causal or self.window is not None or self.count is not None

    def some(self, q: Any, k: Any) -> Any:
        """True if a query of the block that starts at position q may see a key of the block that starts at k."""
        last_q, last_k = q + (self.queries - 1), k + (self.keys - 1)
        return reduce(and_, self._limits(k, last_k, q, last_q))

    def every(self, q: Any, k: Any) -> Any:
        """True if every query of the block sees every key of the block, segments apart."""
        last_q, last_k = q + (self.queries - 1), k + (self.keys - 1)
        return reduce(and_, self._limits(last_k, k, last_q, q))

    def pairs(self, xp: Any, q: Any, k: Any, key: Any, query: Any) -> Any:
        """The mask of a pair of blocks; `key` and `query` are the places inside the blocks, of the result's shape."""
        shift = q - k  # scalars first: the arrays are then compared with one number each
        limits: list[Any] = [] if self.count is None else [key < self.count - k]
        ahead = key - query
        limits += [ahead <= shift] if self.causal else []
        limits += [] if self.window is None else [ahead > shift - self.window]
        limits += [ahead < shift + self.window] if self.window is not None and not self.causal else []
        return reduce(and_, limits)

    def _limits(self, first_k: Any, last_k: Any, first_q: Any, last_q: Any) -> Sequence[Any]:
        """The limits on positions: the first key is early enough for the last query, the last one late enough."""
        limits: list[Any] = [] if self.count is None else [first_k < self.count]
        limits += [first_k <= last_q] if self.causal else []
        limits += [] if self.window is None else [last_k > first_q - self.window]
        limits += [first_k < last_q + self.window] if self.window is not None and not self.causal else []
        return limits
