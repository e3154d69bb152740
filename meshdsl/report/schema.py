"""What is written as JSON carries a version, and holds nothing but what JSON has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["SCHEMA_VERSION", "plain"]

SCHEMA_VERSION = 1  # of everything that is written as JSON; raised when a field changes its meaning or goes


def plain(value: Any) -> Any:
    """The value as JSON has it: names are text, sequences lists, and NaN and infinities null.

    >>> plain({"loss": float("nan"), "axes": ("rows", "cols")})
    {'loss': None, 'axes': ['rows', 'cols']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
