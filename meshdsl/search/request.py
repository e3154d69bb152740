"""The options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..layouts import Layout
from .result import SearchProgress

EVERY = 0.5  # seconds between two progress reports
ROUNDING = 1e-9  # relative tolerance: a bound sums the same numbers in another order


@dataclass(frozen=True)
class SearchRequest:
    """The objective of a search, its candidates, and its limits."""

    objective: str = "seconds"
    limit: float = math.inf  # bytes per device
    fixed: Layout = field(default_factory=Layout)
    dims: Collection[str] | None = None
    axes: Collection[str] | None = None
    several: bool | None = None
    orders: bool = False
    runners_up: int = 4
    front: bool = False
    time_limit: float | None = 60.0  # seconds
    patience: float | None = None  # stop after this many processor seconds without improvement
    progress: Callable[[SearchProgress], None] | None = None
    started: float | None = None  # by `time.perf_counter`; default: when the search begins
