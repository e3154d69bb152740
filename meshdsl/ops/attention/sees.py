"""The masks of attention that compare positions: who sees whom, and the number of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any


@dataclass(frozen=True)
class Sees:
    """The keys that a query sees by their positions: `causal`, none after it; `window`, only the nearest ones."""

    causal: bool = False
    window: int | None = None

    @property
    def compares(self) -> bool:
        """True if the positions of queries and keys decide who sees whom."""
        return self.causal or self.window is not None

    def limits(self, first_q: Any, last_q: Any, first_k: Any, last_k: Any) -> list[Any]:
        """The conditions under which a query at one of these positions may see a key at one of these."""
        limits = [first_k <= last_q] if self.causal else []
        limits += [last_k > first_q - self.window] if self.window is not None else []
        return limits + ([first_k < last_q + self.window] if self.window is not None and not self.causal else [])

    def pairs(self, xp: Any, q: Any, k: Any, count: int) -> Any:
        """[queries, keys]: whether the query at position q sees the key at position k, of the first `count` keys."""
        q, k = q[:, None], k[None, :]
        return reduce(and_, [k < count, *self.limits(q, q, k, k)]) | xp.zeros(q.shape, bool)

    def any(self, q: Any, k: Any, count: int) -> Any:
        """True if a query at one of the positions q may see a key at one of the positions k, below `count`."""
        first_k = k.min()
        return reduce(and_, [first_k < count, *self.limits(q.min(), q.max(), first_k, k.max())])

    def number(self, first: int, queries: int, keys: int, blocks: tuple[int, int] | None = None) -> float:
        """The pairs of a key and one of the queries at positions first ... first + queries - 1 that sees it.

        With the sizes of blocks of queries and of keys: the pairs in blocks in which some query sees some key.

        >>> Sees(causal=True).number(0, 4, 4), Sees(True, window=2).number(0, 4, 4), Sees(True).number(2, 2, 4)
        (10.0, 7.0, 7.0)
        >>> Sees(causal=True).number(0, 4, 4, blocks=(2, 2)), Sees().number(0, 4, 4, blocks=(2, 2))
        (12.0, 16.0)
        """
        if blocks is not None:
            return self._in_blocks(first, queries, keys, *blocks)
        if not self.causal:
            return float(queries * (keys if self.window is None else min(keys, 2 * self.window - 1)))
        most = keys if self.window is None else min(keys, self.window)
        full = max(0, min(queries, first + queries - most + 1))  # queries that see that many keys
        rest = queries - full  # the first of them sees first + 1 keys, the next one more, ...
        return float(full * most + rest * (first + 1) + rest * (rest - 1) / 2)

    def _in_blocks(self, first: int, queries: int, keys: int, bq: int, bk: int) -> float:
        pairs, window = 0, self.window
        for start in range(first, first + queries, bq):
            rows = min(bq, first + queries - start)
            end = keys if not self.causal else min(keys, start + rows)
            end = end if window is None or self.causal else min(keys, start + rows + window - 1)
            begin = 0 if window is None else max(0, start - window + 1)
            pairs += rows * (min(keys, -(-end // bk) * bk) - begin // bk * bk) if end > begin else 0
        return float(pairs)


EVERY_KEY = Sees()
