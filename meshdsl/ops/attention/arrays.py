"""The operands of one attention on one device, in one order of dims.

Queries are [*batch, *group, queries, head], keys [*batch, keys, head], values [*batch, keys, value]. The group dims
share keys and values. Arrays of scores (bias, mask, segments) have the dims [*batch, *group, queries, keys], of size 1
where they lack a dim.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kernels import BLOCKWISE, AttentionKernel
from .spec import AttentionSpec, wide_dtype


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one block: the first, which may be known only on the device, and their number."""

    start: Any
    size: int

    @property
    def known(self) -> bool:
        """True if the first position is a Python number."""
        return isinstance(self.start, int)


@dataclass(frozen=True)
class Arrays:
    """The operands, and how they are read; see the module's first sentences for the dims."""

    q: Any
    k: Any
    v: Any
    queries: tuple[Span, ...]  # positions of the queries, block after block
    keys: tuple[Span, ...]
    count: int  # keys at positions from this on are padding, which no query sees
    how: AttentionSpec
    batch: int  # number of batch dims
    offset: Any = None  # an int32 number to add to the positions of the queries
    bias: Any = None
    mask: Any = None  # an array of scores, true where a query may see a key
    segments: tuple[Any, Any] | None = None  # of queries [..., queries, 1] and keys [..., 1, keys]; equal ones see
    kernel: AttentionKernel = BLOCKWISE
    padded: bool = True  # False if no key is padding

    @property
    def wide(self) -> np.dtype[Any]:
        """The dtype of scores, sums and logarithms."""
        return wide_dtype(self.v.dtype)

    @property
    def letters(self) -> dict[str, str]:
        """The einsum letters of each kind of array, as in {"q": "Aqd", "k": "Akd"} with one batch dim."""
        batch = string.ascii_uppercase[: self.batch]
        group = string.ascii_uppercase[self.batch : self.q.ndim - 2]
        dims = {"q": "qd", "out": "qe", "scores": "qk", "rows": "q"}
        return {name: batch + group + own for name, own in dims.items()} | {"k": f"{batch}kd", "v": f"{batch}ke"}

    def scores(self, xp: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """The scaled and capped products of queries and keys, and the derivative of the cap (None without one)."""
        s, cap = self.einsum(xp, "q k -> scores", q, k) * self.how.scale, self.how.soft_cap
        if cap is None:
            return s, None
        share = xp.tanh(s / cap)
        return share * cap, 1 - share * share

    def einsum(self, xp: Any, formula: str, *xs: Any, dtype: Any = None) -> Any:
        """Such as einsum("q k -> scores", q, k), with the names of `letters`, summed in the wide dtype."""
        operands, out = formula.split(" -> ")
        table = self.letters
        letters = f"{','.join(table[name] for name in operands.split())}->{table[out]}"
        return xp.einsum(letters, *xs, dtype=dtype or self.wide)
