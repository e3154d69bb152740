"""Dropout. The mask depends only on the key and the element's index, so it is the same under every layout."""

from __future__ import annotations

import meshdsl as md

from .precision import DimsLike, dims_of


def dropout(x: md.Tensor, rate: float, key: md.Tensor | None, *, shared: DimsLike = "") -> md.Tensor:
    """Sets elements to zero with probability `rate` and divides the others by 1 - rate (Srivastava et al., 2014).

    >>> import meshdsl as md
    >>> md.nn.dropout(md.tensor([1.0, 1.0], "a"), 0.5, None)
    tensor(float32[a=2], [1. 1.])

    Returns x unchanged if `key` is None, as in evaluation. Elements along the dims `shared` are dropped together.
    Raises `ShapeError` for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise md.ShapeError(f"the dropout rate must be at least 0 and less than 1, got {rate}")
    if key is None or rate == 0:
        return x
    together = dims_of(x, shared)
    keep = md.random.bernoulli(key, 1 - rate, [d for d in x.dims if d not in together])
    return md.where(keep, x / (1 - rate), 0)
