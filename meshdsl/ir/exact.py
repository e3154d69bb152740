"""Constants are compared by type and bits: 0.0 is not -0.0, True and 1 and 1.0 are three values, and NaN equals itself.

Every cache and every pass that compares constants compares `exact` of them. Python and NumPy compare them by value.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, cast

import numpy as np

from ..dims import Dim, Dims

PLAIN = (int, str, Dim, type(None))  # equal to themselves alone, because other types have keys of another form


def exact(value: Any) -> Hashable:
    """A key that is equal for values of one type with the same bits, also inside containers and records.

    >>> exact(0.0) == exact(-0.0), exact((True, 2)) == exact((1, 2)), exact(float("nan")) == exact(float("nan"))
    (False, False, True)

    The key of any other value is the value with its type; it has no hash if the value has none.
    """
    kind = cast(Any, type(value))
    if kind in PLAIN:
        return value
    if kind is Dims:  # a tensor's dims are the tuple of the same
        return tuple, *value
    if kind in (tuple, list) or hasattr(kind, "_fields"):
        return kind, *map(exact, value)
    if {np.ndarray, np.generic}.intersection(kind.__mro__) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    if kind in (float, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (set, frozenset, dict):
        return kind, frozenset(map(exact, value.items() if kind is dict else value))
    names = _compared(kind)
    return (kind, value) if names is None else (kind, *(exact(getattr(value, name)) for name in names))


@lru_cache(maxsize=1024)
def _compared(kind: Any) -> tuple[str, ...] | None:
    """The fields that decide whether two records are equal; None for other types, and for records with identity."""
    if not dataclasses.is_dataclass(kind) or kind.__eq__ is object.__eq__:
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.compare)
