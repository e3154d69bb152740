"""A time by which long computations give up: a search sets it, and compiler passes check it between their steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LATEST: ContextVar[float] = ContextVar("deadline", default=math.inf)


class OutOfTimeError(Exception):
    """The deadline has passed. Who set the deadline handles it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within the block, `check_deadline` raises `OutOfTimeError` once so many seconds have passed.

    >>> with deadline(60.0):
    ...     check_deadline()
    """
    token = _LATEST.set(min(_LATEST.get(), time.perf_counter() + seconds))
    try:
        yield
    finally:
        _LATEST.reset(token)


def check_deadline() -> None:
    """Raise `OutOfTimeError` if the deadline has passed."""
    if time.perf_counter() > _LATEST.get():
        raise OutOfTimeError
