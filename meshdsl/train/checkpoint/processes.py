"""Small collectives between the processes of a program.

All processes must call the same functions in the same order, from their main threads. With one process nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...errors import CheckpointError, SaveError


def gathered(data: bytes) -> list[bytes]:
    """The bytes that each process passes, by the number of the process."""
    sizes = _all(np.array([len(data)], np.int32))[:, 0]
    padded = data.ljust(1 << int(sizes.max()).bit_length(), b"\0")  # few sizes, because each is compiled
    rows = _all(np.frombuffer(padded, np.uint8))
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def all_processes(condition: bool) -> bool:
    """True if the condition is true in every process."""
    return bool(np.all(_all(np.array([condition], np.uint8))))


def _all(values: np.ndarray) -> np.ndarray:
    """The values of each process, as rows."""
    return values[None] if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(values))


def on_first(failure: str, work: Callable[[], None]) -> None:
    """Run `work` on process 0; if it fails, every process raises an error, a `SaveError` with the text `failure`."""
    problem: Exception | None = None
    if jax.process_index() == 0:
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = error
    if all_processes(problem is None):
        return
    if isinstance(problem, CheckpointError):
        raise problem
    raise SaveError(f"{failure}: {problem or 'see the error of process 0'}") from problem
