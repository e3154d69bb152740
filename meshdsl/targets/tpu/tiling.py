"""The static part of one fused attention: sizes of blocks, who sees whom, and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from ...ops.attention.spec import AttentionSpec

LANES = 128  # of a register of a TPU


@dataclass(frozen=True)
class Tiling:
    """The blocks of queries and keys on one device, and the pairs of blocks that see each other.

    Block i of the queries starts at a position that may be known only on the device, and so does block j of the keys.
    """

    queries: int  # queries of a block
    keys: int  # keys of a block
    count: int  # keys at positions from this on are padding
    padded: bool  # False if no key is padding
    how: AttentionSpec
    wide: np.dtype[Any]  # of scores and sums
    out: np.dtype[Any]  # of results
    interpret: bool = False

    @property
    def masks(self) -> bool:
        """True if positions decide who sees whom."""
        return self.how.sees.compares or self.padded

    def some(self, q: Any, k: Any) -> Any:
        """True if a query of the block that starts at position q may see a key of the block that starts at k."""
        return self._may_see(q, q + (self.queries - 1), k, k + (self.keys - 1))

    def every(self, q: Any, k: Any) -> Any:
        """True if every query of the block sees every key of the block, segments apart."""
        return self._may_see(q + (self.queries - 1), q, k + (self.keys - 1), k)

    def _may_see(self, first_q: Any, last_q: Any, first_k: Any, last_k: Any) -> Any:
        seen = self.how.sees.limits(first_q, last_q, first_k, last_k)
        return reduce(and_, [first_k < self.count, *seen] if self.padded else seen)

    def pairs(self, q: Any, k: Any, key: Any, query: Any) -> Any:
        """The mask of a pair of blocks; `key` and `query` are the places inside the blocks, of the result's shape."""
        shift, sees = q - k, self.how.sees  # scalars first: the arrays are then compared with one number each
        ahead = key - query
        limits = [key < self.count - k] if self.padded else []
        limits += [ahead <= shift] if sees.causal else []
        limits += [] if sees.window is None else [ahead > shift - sees.window]
        limits += [ahead < shift + sees.window] if sees.window is not None and not sees.causal else []
        return reduce(and_, limits)
