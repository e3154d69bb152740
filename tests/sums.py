"""An einsum whose results do not depend on BLAS, for laws that compare bits of products of different sizes.

BLAS adds the terms of an element in an order that depends on the sizes of the product and on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["einsum_in_order"]


def einsum_in_order(formula: str, *xs: np.ndarray, dtype: Any) -> np.ndarray:
    """An einsum that adds the terms of each element in index order, whatever the sizes of the result."""
    ins, out = formula.split("->")
    letters = ins.split(",")
    gone = sorted(set("".join(letters)) - set(out))
    sizes = {c: n for names, x in zip(letters, xs, strict=True) for c, n in zip(names, x.shape, strict=True)}
    terms: Any = 1
    for names, x in zip(letters, xs, strict=True):
        order = [names.index(c) for c in (*gone, *out) if c in names]
        terms = terms * x.transpose(order).reshape([sizes[c] if c in names else 1 for c in (*gone, *out)])
    total = np.zeros([sizes[c] for c in out], dtype)
    for one in terms.reshape(math.prod(sizes[c] for c in gone), *total.shape):
        total += one
    return total
