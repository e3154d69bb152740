"""Dropout whose mask is a function of the key and the element's place, so no layout changes it."""

from __future__ import annotations

import meshdsl as md

from .precision import dims_of

__all__ = ["dropout"]


def dropout(x: md.Tensor, rate: float, key: md.Tensor | None, *, shared: str | md.Dim = "") -> md.Tensor:
    """Elements set to zero with probability `rate`, and the others divided by 1 - rate (Srivastava et al., 2014).

    >>> import meshdsl as md
    >>> md.nn.dropout(md.tensor([1.0, 1.0], "a"), 0.5, None)
    tensor(float32[a=2], [1. 1.])

    Without a key (evaluation), x itself. Along the dims `shared` all elements are dropped together.
    Raises `ShapeError` for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise md.ShapeError(f"a dropout rate is at least 0 and less than 1, got {rate}")
    if key is None or rate == 0:
        return x
    together = dims_of(x, shared)
    keep = md.random.bernoulli(key, 1 - rate, [d for d in x.dims if d not in together])
    return md.where(keep, x / (1 - rate), 0)
