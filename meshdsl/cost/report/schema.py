"""JSON output: a schema version, and conversion to values that JSON supports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 2  # of all JSON output; increased when a field changes its meaning or is removed


def plain(value: Any) -> Any:
    """Convert a value for JSON: keys become text, sequences lists, NaN and infinities null.

    >>> plain({"loss": float("nan"), "axes": ("rows", "cols")})
    {'loss': None, 'axes': ['rows', 'cols']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
