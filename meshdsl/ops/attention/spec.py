"""The roles of an attention's dims and operands, and its options: what every form of it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dims import Dim, Shape, names
from .sees import EVERY_KEY, Sees

RESIDUALS = ("out", "lse", "ct", "lse_ct")  # operands of the gradient, after those of the attention


@dataclass(frozen=True)
class AttentionSpec:
    """The roles of an attention's dims and operands, and its options.

    `length` is the dim of the queries' positions ("" if they have none), `keys` that of keys and values (it equals
    `length` where both have one name), and `memory` the name of the keys' positions in bias and mask.
    """

    over: str
    length: str
    keys: str
    memory: str
    extras: tuple[str, ...] = ()  # the operands after v: bias, mask, segments, memory_segments, offset
    scale: float = 1.0
    block: int = 512  # queries, and keys, whose scores are stored at once
    method: str = "auto"
    soft_cap: float | None = None  # scores s become soft_cap * tanh(s / soft_cap)
    sees: Sees = EVERY_KEY
    wide: bool = False  # results in at least float32, because others are added to them

    @property
    def shown(self) -> dict[str, Any]:
        """The options that a printed program and the name of a kernel show."""
        return vars(self.sees)

    def roles(self, ins: Sequence[Any]) -> dict[str, Any]:
        """The operands by name: q, k, v, the extras, and those of the gradient."""
        n = 3 + len(self.extras)
        more = RESIDUALS[: len(ins) - n]
        return dict(zip(("q", "k", "v", *self.extras, *more), ins, strict=True))

    def batch(self, k: Shape) -> Shape:
        """The dims that queries, keys and values share."""
        return tuple(d for d in k if d.name not in (self.keys, self.over))

    def group(self, q: Shape, k: Shape) -> Shape:
        """The dims that share keys and values."""
        shared = names(self.batch(k))
        return tuple(d for d in q if d.name not in (*shared, self.length, self.over))

    def dtype(self, dtype: Any) -> np.dtype:
        """The dtype of a result for an operand of this dtype."""
        return wide_dtype(dtype) if self.wide else np.dtype(dtype)


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype of scores, and of sums over keys."""
    wide = np.dtype(np.float32)  # JAX promotes no 8-bit floats
    return np.dtype(dtype) if np.dtype(dtype).itemsize > wide.itemsize else wide


def value_dim(k: Shape, v: Shape, how: AttentionSpec) -> Dim:
    """The dim of the values that is neither their position nor shared with keys; it may be the contracted dim."""
    batch = how.batch(k)
    return next(d for d in v if d.name != how.keys and d not in batch)
